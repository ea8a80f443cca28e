"""Lists of runs as data: `configs/reproduce/*.toml`, read strictly.

A list has `[[run]]` entries, each of one configuration, or `[[row]]` entries, each of one method on one model and several
tasks: a line of a published table, whose configurations are `configs/MODEL/METHOD_TASK.toml`. `needs` names the runs of the
same seed that come first; `{name}` in a setting stands for the folder of one of them.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dmpo_jax.errors import UserError, shown
from dmpo_jax.reproduction.reading import NAME, Fields, check_known, places_of, settings_of
from dmpo_jax.toml_files import read_tables

KINDS = ("train", "bench", "weights")  # weights: nothing is trained, what was published is evaluated
CLAIMS = ("baseline", "reuse", "cache")
BASE = "base"  # the method of rows of kind weights
Settings = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One entry of a list; every seed makes a run of it (of a bench, one for all)."""

    name: str
    config: str
    kind: str = "train"
    settings: Settings = ()
    needs: tuple[str, ...] = ()
    minutes: float = 0.0  # measured on the hardware that the list names; 0: not measured
    model: str = ""
    method: str = ""
    task: str = ""
    protocols: tuple[str, ...] = ()  # by which it is evaluated


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of the paper and the runs that show it or do not; what `kind` compares is in `claims.py`."""

    kind: str
    text: str
    source: str
    runs: tuple[str, ...]
    bench: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Model:
    """A published model: its name in tables, and its hub id."""

    title: str
    weights: str


@dataclasses.dataclass(frozen=True)
class Task:
    """A task: its name in tables, its files (below the data folder) with where they come from, and evaluation settings."""

    title: str
    source: str
    train: Settings
    evaluate: Settings


@dataclasses.dataclass(frozen=True)
class Protocol:
    """A way to evaluate, at several lengths of completions in tokens."""

    title: str
    lengths: tuple[int, ...]
    settings: Settings


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Devices to run on: the name `dmpo plan` has for them, the mesh, and what launchers call them."""

    title: str
    topology: str
    mesh: Settings
    tpu_type: str = ""
    gke: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A list of runs with all that it refers to."""

    path: Path
    out: str
    seeds: tuple[int, ...]
    seeded: tuple[str, ...]  # settings that take the seed
    hardware_note: str
    runs: tuple[Run, ...]
    claims: tuple[Claim, ...]
    models: dict[str, Model]
    tasks: dict[str, Task]
    protocols: dict[str, Protocol]
    hardware: dict[str, Hardware]
    share_of_peak: float

    def run(self, name: str) -> Run:
        """The entry of that name."""
        return next(run for run in self.runs if run.name == name)


def read_manifest(path: Path) -> Manifest:
    """Raises UserError naming the file, the entry and the key that is wrong."""
    fields = Fields(read_tables(path), str(path))
    out, seeds = fields.take("out", str), fields.take("seeds", list)
    for seed in seeds:
        check_seed(f"{path}: seeds", seed)
    seeded = fields.names("seeded")
    note, share = fields.take("hardware_note", str, ""), fields.take("share_of_peak", float, 1.0)
    if not 0 < share <= 1:
        raise UserError(f"{path}: share_of_peak = {share}: expected above 0 and at most 1")
    models = {name: _model(value, f"{path}: model.{name}") for name, value in fields.tables("model").items()}
    tasks = {name: _task(value, f"{path}: task.{name}") for name, value in fields.tables("task").items()}
    protocols = {
        name: _protocol(value, f"{path}: protocol.{name}") for name, value in fields.tables("protocol").items()
    }
    hardware = {name: _hardware(value, f"{path}: hardware.{name}") for name, value in fields.tables("hardware").items()}
    runs = [_run(entry, f"{path}: run {i}") for i, entry in enumerate(fields.take("run", list, []), 1)]
    for i, entry in enumerate(fields.take("row", list, []), 1):
        runs += _row(entry, f"{path}: row {i}", models, tasks, protocols)
    claims = tuple(
        _claim(entry, f"{path}: claim {i}", runs) for i, entry in enumerate(fields.take("claim", list, []), 1)
    )
    fields.end()
    _check_runs(path, runs)
    return Manifest(
        path, out, tuple(seeds), seeded, note, tuple(runs), claims, models, tasks, protocols, hardware, share
    )  # fmt: skip


def check_seed(where: str, seed: Any) -> None:
    """Raises UserError unless it is one that runs accept."""
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise UserError(f"{where}: {shown(seed)}: expected whole numbers from 0 to 4294967295")


def _run(table: Any, where: str) -> Run:
    fields = Fields(table, where)
    name = fields.take("name", str)
    fields.where = where = f"{where} ({name[:60]})"
    kind = fields.take("kind", str, "train")
    check_known(f"{where}: kind", kind, KINDS)
    run = Run(
        name=name,
        config=fields.take("config", str),
        kind=kind,
        settings=settings_of(fields.take("set", dict, {}), f"{where}: set"),
        needs=fields.names("needs", None, []),
        minutes=fields.take("minutes", float, 0.0),
    )
    fields.end()
    return run


def _row(table: Any, where: str, models: dict, tasks: dict, protocols: dict) -> list[Run]:
    fields = Fields(table, where)
    model, method = fields.take("model", str), fields.take("method", str)
    check_known(f"{where}: model", model, models)
    fields.where = where = f"{where} ({model}, {method})"
    kind = "weights" if method == BASE else "train"
    recipe, chosen = fields.take("recipe", str, method), fields.names("tasks", tasks)
    by = fields.names("protocols", protocols)
    settings = settings_of(fields.take("set", dict, {}), f"{where}: set")
    needs = fields.names("needs", None, [])
    fields.end()
    place = lambda text, task: text.replace("{task}", task)  # noqa: E731
    return [
        Run(
            name=f"{model}-{method}-{task}",
            config=f"configs/{model}/{recipe}_{task}.toml",
            kind=kind,
            settings=tuple((key, place(v, task) if isinstance(v, str) else v) for key, v in settings),
            needs=tuple(place(name, task) for name in needs),
            model=model,
            method=method,
            task=task,
            protocols=by,
        )
        for task in chosen
    ]


def _check_runs(path: Path, runs: list[Run]) -> None:
    if not runs:
        raise UserError(f"{path}: names no runs; add [[run]] or [[row]]")
    seen: list[str] = []
    for run in runs:
        where = f"{path}: run {run.name[:60]}"
        if not NAME.fullmatch(run.name):
            raise UserError(f"{where}: name: expected letters, digits, _ . + -")
        if run.name in seen:
            raise UserError(f"{where}: there are two of that name; rename one")
        for name in run.needs:
            check_known(f"{where}: needs (of those before it)", name, seen)
        for name in places_of(run.settings):
            check_known(f"{where}: {{{name}}} in a setting (of its needs)", name, run.needs)
        if run.kind == "bench" and run.needs:
            raise UserError(f"{where}: a bench needs no run; leave needs out")
        seen.append(run.name)


def _claim(table: Any, where: str, runs: Iterable[Run]) -> Claim:
    fields = Fields(table, where)
    kind = fields.take("kind", str)
    check_known(f"{where}: kind", kind, CLAIMS)
    trained = [run.name for run in runs if run.kind == "train"]
    measured = [run.name for run in runs if run.kind == "bench"]
    claim = Claim(
        kind,
        fields.take("text", str),
        fields.take("source", str),
        fields.names("runs", trained),
        fields.names("bench", measured, []),
    )
    fields.end()
    if len(claim.runs) < 2 or (kind == "cache" and len(claim.bench) != 2):
        raise UserError(f"{where}: expected two runs to compare (and two bench of a cache)")
    return claim


def _model(table: Any, where: str) -> Model:
    fields = Fields(table, where)
    model = Model(fields.take("title", str), fields.take("weights", str))
    fields.end()
    return model


def _task(table: Any, where: str) -> Task:
    fields = Fields(table, where)
    train, evaluate = (settings_of(fields.take(key, dict, {}), f"{where}: {key}") for key in ("train", "evaluate"))
    task = Task(fields.take("title", str), fields.take("source", str, ""), train, evaluate)
    fields.end()
    for name in places_of((*train, *evaluate)):
        check_known(f"{where}: {{{name}}} in a setting", name, ("data",))
    return task


def _protocol(table: Any, where: str) -> Protocol:
    fields = Fields(table, where)
    title, lengths = fields.take("title", str), fields.take("lengths", list)
    if not lengths or any(type(n) is not int or n < 2 for n in lengths):
        raise UserError(f"{where}: lengths = {shown(lengths)}: expected whole numbers of tokens, 2 or more")
    settings = settings_of(fields.take("set", dict, {}), f"{where}: set")
    fields.end()
    return Protocol(title, tuple(lengths), settings)


def _hardware(table: Any, where: str) -> Hardware:
    fields = Fields(table, where)
    hardware = Hardware(
        fields.take("title", str),
        fields.take("topology", str),
        settings_of({"mesh": fields.take("mesh", dict, {})}, where),
        fields.take("tpu_type", str, ""),
        fields.names("gke", None, []),
    )
    fields.end()
    return hardware
