"""Our own evaluations as cells of a table: seeds pooled, with intervals. A cell whose evaluation was not run does not exist."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dmpo_jax.evaluation.intervals import wilson
from dmpo_jax.evaluation.run_folder import number
from dmpo_jax.inputs import json_or_none
from dmpo_jax.reproduction.manifest import Manifest, Run
from dmpo_jax.reproduction.steps import result_of

# How answers are counted, and where an evaluation's result says it. Strict counts whole answers.
GRADINGS = {"published": ("published", "accuracy"), "strict": ("exact",)}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A share in [0, 1] of `items` over all seeds, with its interval of 95 %."""

    value: float
    interval: tuple[float, float]
    items: int
    seeds: tuple[int, ...]
    files: tuple[str, ...]


def cell_of(
    manifest: Manifest, out: Path, run: Run, seeds: Sequence[int], protocol: str, length: int, grading: str
) -> Cell | None:
    """The cell of a run at one length; None where no seed was evaluated.

    The interval is Wilson's; for Sudoku's share of cells, a mean of partial credit, it is cautious.
    """
    right, items, used, files = 0.0, 0, [], []
    for seed in seeds:
        path = result_of(out, run, seed, protocol, length)
        found = _result(path, length, GRADINGS[grading])
        if found:
            right, items = right + found[0] * found[1], items + found[1]
            used.append(seed)
            files.append(path.name)
    if not items:
        return None
    return Cell(right / items, wilson(min(right, items), items), items, tuple(used), tuple(files))


def _result(path: Path, length: int, figure: Sequence[str]) -> tuple[float, int] | None:
    """(share, items) of one evaluation's file; None where it is not there, not whole, or of another length."""
    value = json_or_none(path)
    if value is None or value.get("completion_length") != length:
        return None
    share, items = number(at(value, figure)), number(value.get("n"))
    if share is None or items is None or not 0 <= share <= 1 or items < 1 or items != int(items):
        return None
    return share, int(items)


def at(value: Any, keys: Sequence[str]) -> Any:
    """What stands in tables within tables under these keys; None where there is no such place."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
