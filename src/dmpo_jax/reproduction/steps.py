"""From a list of runs to steps: commands in order, each with the file that says it is finished."""

import dataclasses
import fnmatch
from collections.abc import Sequence
from pathlib import Path

from dmpo_jax.errors import UserError, nearest
from dmpo_jax.reproduction.manifest import Manifest, Run, Settings
from dmpo_jax.reproduction.reading import as_options, filled
from dmpo_jax.reproduction.targets import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One command. Exit code 0 and the file `done` make it finished."""

    name: str
    run: Run
    kind: str  # train | eval | bench
    command: tuple[str, ...]
    done: Path
    seed: int | None = None
    needs: tuple[str, ...] = ()  # names of steps
    settings: Settings = ()  # of a training, over its recipe's
    marked: bool = False  # `done` is written here once the command has succeeded, as its own files are elsewhere
    files: tuple[str, ...] = ()  # that the command reads


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What was asked for on the command line."""

    out: Path
    seeds: tuple[int, ...]
    only: tuple[str, ...] = ()
    data: str = "data"
    settings: Settings = ()  # of the mesh, for every training and evaluation


def select(manifest: Manifest, only: Sequence[str]) -> list[Run]:
    """The runs whose names match one of the patterns (all where there is none), with what they need.

    Raises UserError for a pattern that matches nothing.
    """
    names = [run.name for run in manifest.runs]
    chosen: set[str] = set() if only else set(names)
    for pattern in only:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise UserError(f"--only {pattern}: matches no run of {manifest.path}{nearest(pattern, names)}")
        chosen.update(matched)
    for run in reversed(manifest.runs):  # what a run needs stands before it
        if run.name in chosen:
            chosen.update(run.needs)
    return [run for run in manifest.runs if run.name in chosen]


def steps_of(manifest: Manifest, wanted: Wanted, target: Target) -> list[Step]:
    """All steps in the order in which they begin, seed by seed."""
    chosen = select(manifest, wanted.only)
    steps: list[Step] = []
    for seed in wanted.seeds:
        for run in chosen:
            if run.kind == "train":
                steps.append(_training(manifest, run, seed, wanted, target))
            if run.kind != "bench" and target.evaluates:
                first = seed == wanted.seeds[0]
                steps += _evaluations(manifest, run, seed, wanted, target) if run.kind == "train" or first else []
    return steps + [_bench(run, wanted, target) for run in chosen if run.kind == "bench"]


def folder_of(out: Path, run: Run, seed: int) -> Path:
    """The run folder of one seed."""
    return out / f"{run.name}-{seed}"


def result_of(out: Path, run: Run, seed: int, protocol: str, length: int) -> Path:
    """The file with the result of one evaluation; of published weights, seed 0's."""
    return out / "eval" / f"{run.name}-{seed}-{protocol}-{length}.json"


def _training(manifest: Manifest, run: Run, seed: int, wanted: Wanted, target: Target) -> Step:
    settings = [(key, seed) for key in manifest.seeded]
    folders = {name: str(target.seen(folder_of(wanted.out, manifest.run(name), seed))) for name in run.needs}
    files: tuple[str, ...] = ()
    if run.model:
        settings.append(("model.pretrained", manifest.models[run.model].weights))
        data = filled(manifest.tasks[run.task].train, {"data": wanted.data})
        settings += data
        files = tuple(value for key, value in data if key.endswith("_file"))
    settings += [*filled(run.settings, folders), *wanted.settings]
    folder, name = folder_of(wanted.out, run, seed), f"{run.name}-{seed}"
    return Step(
        name=name,
        run=run,
        kind="train",
        command=tuple(target.train(name, run.config, target.seen(folder), as_options(settings))),
        done=wanted.out / "done" / name if target.marks else folder / "summary.json",
        seed=seed,
        needs=tuple(f"{need}-{seed}" for need in run.needs),
        settings=tuple(settings),
        marked=target.marks,
        files=files,
    )


def _evaluations(manifest: Manifest, run: Run, seed: int, wanted: Wanted, target: Target) -> list[Step]:
    steps = []
    folder = folder_of(wanted.out, run, seed)
    if run.kind == "weights":
        config, source = run.config, ["--model", manifest.models[run.model].weights]
    else:
        config, source = str(folder / "config.toml"), ["--run-dir", str(folder)]
    data = filled(manifest.tasks[run.task].evaluate, {"data": wanted.data}) if run.task else ()
    for protocol in run.protocols:
        how = manifest.protocols[protocol]
        for length in how.lengths:
            settings = dict((("evaluation.completion_length", length), *how.settings, *data))
            if run.kind == "weights":
                settings |= {"run.seed": seed, **dict(run.settings)}
            result = result_of(wanted.out, run, seed, protocol, length)
            name = f"{run.name}-{seed}@{protocol}-{length}"
            options = [*source, "--out", str(result), *as_options([*settings.items(), *wanted.settings])]
            steps.append(
                Step(
                    name=name,
                    run=run,
                    kind="eval",
                    command=tuple(target.evaluate(name, config, options)),
                    done=result,
                    seed=seed,
                    needs=() if run.kind == "weights" else (f"{run.name}-{seed}",),
                    files=tuple(value for key, value in data if key.endswith("_file")),
                )
            )
    return steps


def _bench(run: Run, wanted: Wanted, target: Target) -> Step:
    result = wanted.out / f"{run.name}.json"
    options = ["--repeats", "3", *as_options(run.settings), "--out", str(result)]
    return Step(
        name=run.name, run=run, kind="bench", command=(*target.dmpo, "bench", run.config, *options), done=result
    )
