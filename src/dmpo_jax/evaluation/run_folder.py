"""Read a run folder, whole or interrupted, into plain values."""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dmpo_jax.errors import UserError

MAX_LINE = 1 << 20
MAX_ITEMS = 20_000
MAX_SAMPLES = 64
MAX_TEXT_FILE = 1 << 18


@dataclass(frozen=True)
class Result:
    """One evaluation of the test split; fractions in [0, 1], None where the file gives no usable value."""

    task: str | None
    n: int | None
    accuracy: float | None
    accuracy_ci95: tuple[float, float] | None
    exact: float | None
    mean_nfe: float | None
    tokens_per_second: float | None
    baselines: dict[str, Any]
    settings: dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """What one run left on disk; `missing` says in words what it did not leave."""

    path: Path
    label: str
    config: str | None
    metrics: list[dict[str, float]]
    summary: dict[str, Any]
    first_samples: list[dict[str, Any]]
    last_samples: list[dict[str, Any]]
    before_items: list[dict[str, Any]]
    after_items: list[dict[str, Any]]
    before: Result | None
    after: Result | None
    missing: list[str] = field(default_factory=list)

    @property
    def pretraining(self) -> bool:
        """Whether the run minimised the denoising loss alone: it has cycles, none of them with a reward."""
        return bool(self.metrics) and not any("reward/mean" in record for record in self.metrics)

    @property
    def task(self) -> str | None:
        """The task named by the evaluation results, if any."""
        return next((r.task for r in (self.after, self.before) if r and r.task), None)


def number(value: object) -> float | None:
    """`value` as a finite float, or None; booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    # Values this large are divergence, and no plot axis holds them.
    return as_float if math.isfinite(as_float) and abs(as_float) < 1e30 else None


def read_runs(run_dirs: list[Path]) -> list[RunFolder]:
    """Read every folder, giving each a distinct label. Raises UserError for a folder that is no run."""
    if not run_dirs:
        raise UserError("no run folder given; expected at least one folder written by `dmpo train`")
    paths = [Path(os.path.abspath(path)) for path in run_dirs]
    names = [path.name for path in paths]
    labels: list[str] = []
    for path in paths:
        label = path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}"
        base, copy = label, 2
        while label in labels:
            label, copy = f"{base} ({copy})", copy + 1
        labels.append(label)
    return [_read_run(path, label) for path, label in zip(paths, labels, strict=True)]


def _read_run(path: Path, label: str) -> RunFolder:
    if not (path / "metrics.jsonl").is_file():
        what = "has no metrics.jsonl" if path.is_dir() else "is not a folder"
        raise UserError(f"{path} {what}; expected a run folder written by `dmpo train`: give its --run-dir")
    missing: list[str] = []
    by_cycle: dict[float, dict[str, float]] = {}
    for record in _lines(path / "metrics.jsonl", missing):
        cycle = number(record.get("cycle"))
        if cycle is not None:  # a resumed run may write a cycle twice: the later line holds
            by_cycle[cycle] = {k: v for k, v in ((k, number(x)) for k, x in record.items()) if v is not None}
    metrics = [by_cycle[cycle] for cycle in sorted(by_cycle)]
    if not metrics:
        missing.append("metrics.jsonl holds no finished cycle yet")

    summary = _json_object(path / "summary.json", missing)
    if not summary and metrics:
        missing.append(f"the run has not finished; its last recorded cycle is {metrics[-1]['cycle']:.0f}")
    elif summary and summary.get("status") != "done":
        missing.append(f"the run's status is {summary.get('status')!r}, not 'done'")
    rewarded = any("reward/mean" in record for record in metrics)
    # A run without rewards is pretraining, which needs neither tests nor answers.
    tests_missing = missing if rewarded else []
    results = {key: _result(summary, key, tests_missing) for key in ("test_before", "test_after")}
    first: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    if rewarded:
        first, last = _first_and_last_cycle(path / "samples.jsonl", missing)
    return RunFolder(
        path=path,
        label=label,
        config=_text(path / "config.toml", missing),
        metrics=metrics,
        summary=summary,
        first_samples=first,
        last_samples=last,
        before_items=_items(path / "eval" / "before.jsonl", results["test_before"], missing),
        after_items=_items(path / "eval" / "after.jsonl", results["test_after"], missing),
        before=results["test_before"],
        after=results["test_after"],
        missing=missing,
    )


def _shown(path: Path) -> str:
    return f"eval/{path.name}" if path.parent.name == "eval" else path.name


def _lines(path: Path, missing: list[str]) -> Iterator[dict[str, Any]]:
    """JSON objects of a line file; unreadable lines are counted in `missing`, not raised."""
    bad: list[int] = []
    try:
        with path.open("rb") as file:
            for index in range(1, 1 << 40):
                line = file.readline(MAX_LINE)
                if not line:
                    break
                whole = line.endswith(b"\n") or len(line) < MAX_LINE
                while not whole:
                    rest = file.readline(MAX_LINE)
                    whole = rest.endswith(b"\n") or not rest
                value = _parse(line) if line.strip() else {}
                if value is None:
                    bad.append(index)
                elif value:
                    yield value
    except OSError as error:
        missing.append(f"{_shown(path)} could not be read ({error.strerror})")
    if bad:
        which = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        lines = f"{len(bad)} line{'s' * (len(bad) > 1)}"
        missing.append(f"{_shown(path)}: {lines} cut short or not JSON, skipped (line {which})")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _text(path: Path, missing: list[str]) -> str | None:
    if not path.is_file():
        missing.append(f"no {_shown(path)}")
        return None
    try:
        with path.open("rb") as file:
            return file.read(MAX_TEXT_FILE).decode("utf-8", "replace")
    except OSError as error:
        missing.append(f"{_shown(path)} could not be read ({error.strerror})")
        return None


def _json_object(path: Path, missing: list[str]) -> dict[str, Any]:
    text = _text(path, missing)
    if text is None:
        return {}
    value = _parse(text.encode())
    if value is None:
        missing.append(f"{_shown(path)} is cut short or not a JSON object")
    return value or {}


def _items(path: Path, result: Result | None, missing: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
        if result is not None:
            missing.append(f"no {_shown(path)}: the test answers themselves cannot be shown")
        return []
    items: list[dict[str, Any]] = []
    for item in _lines(path, missing):
        if len(items) == MAX_ITEMS:
            missing.append(f"{_shown(path)}: only the first {MAX_ITEMS} items were read")
            break
        items.append(item)
    return items


def _first_and_last_cycle(path: Path, missing: list[str]) -> tuple[list[dict], list[dict]]:
    if not path.is_file():
        missing.append("no samples.jsonl: no training answers yet")
        return [], []
    first: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    for sample in _lines(path, missing):
        if not first or (sample.get("cycle") == first[0].get("cycle") and len(first) < MAX_SAMPLES):
            first.append(sample)
        if last and sample.get("cycle") != last[0].get("cycle"):
            last = []
        if len(last) < MAX_SAMPLES:
            last.append(sample)
    if not first:
        missing.append("samples.jsonl holds no answers yet")
    return first, last


def _result(summary: dict[str, Any], key: str, missing: list[str]) -> Result | None:
    values = summary.get(key)
    if not isinstance(values, dict):
        if summary:
            missing.append(f"summary.json has no {key}: the policy was not tested then")
        return None

    def checked(name: str, accept: Callable[[float], bool]) -> float | None:
        value = number(values.get(name))
        if value is not None and accept(value):
            return value
        missing.append(f"summary.json: {key}.{name} is {values.get(name)!r}, not a usable number")
        return None

    def fraction(value: float) -> bool:
        return 0 <= value <= 1

    n = checked("n", lambda value: value >= 1 and value == int(value))
    ci = values.get("accuracy_ci95")
    ends = [number(end) for end in ci] if isinstance(ci, list) and len(ci) == 2 else [None]
    baselines = values.get("baselines")
    known = {*Result.__dataclass_fields__, "exact_ci95"}
    task = values.get("task")
    return Result(
        task=task if isinstance(task, str) else None,
        n=None if n is None else int(n),
        accuracy=checked("accuracy", fraction),
        accuracy_ci95=None if None in ends else (ends[0], ends[1]),
        exact=checked("exact", fraction),
        mean_nfe=number(values.get("mean_nfe")),
        tokens_per_second=number(values.get("tokens_per_second")),
        baselines=baselines if isinstance(baselines, dict) else {},
        settings={name: value for name, value in values.items() if name not in known},
    )
