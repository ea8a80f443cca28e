"""4x4 sudoku: puzzles, prompts and graders.

Grading. Spaces, `|` and `,` are dropped from the answer (see `text.py` for where it is); what is left must be
digits, at most 16 of them, and every digit that stands on a clue must repeat it: otherwise all components are
0. `cells` is the share of the blanks filled as in the stored solution, missing digits being wrong; `exact` is
1 where all 16 digits obey the rules, whether or not they are the stored solution; `reward` is the larger of
the two.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmpo_jax.tasks import sudoku_published
from dmpo_jax.tasks.bytes import answer_span, blank, unwrap
from dmpo_jax.tasks.sudoku_baselines import ambiguous, baselines
from dmpo_jax.tasks.sudoku_files import read_puzzles
from dmpo_jax.tasks.sudoku_grids import BOX, COLUMN, ROW, careless_fill, draw_puzzles, is_grid
from dmpo_jax.tasks.task import SPLITS, Example, Features, Task, TaskConfig, check_graded, check_split
from dmpo_jax.tasks.text import BLANKS, answer_of

COMPONENTS = ("reward", "cells", "exact")
_SEPARATORS = b"|,"
_UNITS = np.stack([unit == index for unit in (ROW, COLUMN, BOX) for index in range(4)])

_INSTRUCTIONS = """Solve this 4x4 sudoku, given row by row as 16 digits, where 0 stands for an empty cell:
{puzzle}
Each row, each column and each 2x2 box of the solved grid holds the digits 1, 2, 3 and 4 exactly once. Reason
first, in words. Then give all 16 digits of the solved grid, row by row, like this:
<answer>the 16 digits</answer>"""


def features(truth: dict[str, Any]) -> Features:
    """Arrays for the graders from `{"puzzle": 16 digits with 0 for blanks, "solution": 16 digits}`."""
    return {key: np.array([int(digit) for digit in truth[key]], np.int32) for key in ("puzzle", "solution")}


def examples(config: TaskConfig, split: str) -> list[Example]:
    """The examples of a split: those of its file where one is named, else puzzles with one solution.

    Generated splits share no complete grid, whatever the seeds.
    """
    check_split(split)
    path = getattr(config, f"{split}_file")
    if path:
        return read(path, config)
    rng = np.random.default_rng([config.seed, SPLITS.index(split)])
    return _examples(*draw_puzzles(split, getattr(config, f"{split}_size"), rng), config)


def read(path: str, config: TaskConfig) -> list[Example]:
    """Read a `Puzzle,Solution` CSV; puzzles with several solutions are allowed. Raises `UserError`."""
    return _examples(*read_puzzles(path), config)


def _examples(puzzles: np.ndarray, solutions: np.ndarray, config: TaskConfig) -> list[Example]:
    careless = np.random.default_rng([config.seed, len(SPLITS)]).random(len(puzzles)) < config.careless
    result = []
    for puzzle, solution, is_careless in zip(puzzles, solutions, careless, strict=True):
        digits, truth = _text(puzzle), _text(solution)
        shown = _text(careless_fill(puzzle)) if is_careless else truth
        asked = {"instruct": _INSTRUCTIONS, "published": sudoku_published.PROMPT}
        prompt = asked.get(config.prompt, "{puzzle}=").format(puzzle=digits)
        if config.prompt == "rows":
            prompt, shown = f"{_rows(digits)}=", _rows(shown)
        result.append(Example(prompt, f"<answer>{shown}</answer>", truth, {"puzzle": puzzle, "solution": solution}))
    return result


def _text(cells: np.ndarray) -> str:
    return "".join(map(str, cells.tolist()))


def _rows(digits: str) -> str:
    return " ".join(digits[start : start + 4] for start in range(0, 16, 4))


def grade_text(completion: str, features: Features) -> dict[str, float]:
    """Grade one completion on the host."""
    answer = answer_of(completion).translate(None, BLANKS + _SEPARATORS)
    puzzle, solution = np.asarray(features["puzzle"]), np.asarray(features["solution"])
    score = dict.fromkeys(COMPONENTS, 0.0)
    if len(answer) > 16 or not all(byte in b"0123456789" for byte in answer):
        return score
    filled = np.array([*(byte - ord("0") for byte in answer), *[-1] * (16 - len(answer))])
    empty = puzzle == 0
    if np.any(~empty & (filled >= 0) & (filled != puzzle)):
        return score
    score["cells"] = int(np.sum(empty & (filled == solution))) / max(int(empty.sum()), 1)
    score["exact"] = float(is_grid(filled))
    score["reward"] = max(score["cells"], score["exact"])
    return score


def grade_bytes(stream: jax.Array, length: jax.Array, features: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Grade uint8[B, W] texts of int32[B] bytes on the device: features int32[B, 16] -> float32[B] each."""
    text, inside = unwrap(*answer_span(stream, length))
    dropped = blank(text) | ~inside
    for separator in _SEPARATORS:
        dropped |= text == separator
    digit = (text >= ord("0")) & (text <= ord("9"))
    rank = jnp.cumsum(digit, axis=1) - 1
    here = digit[:, :, None] & (rank[:, :, None] == jnp.arange(16))
    value = text.astype(jnp.int32)[:, :, None] - ord("0")
    count = jnp.sum(digit, axis=1)
    given = jnp.arange(16) < count[:, None]
    filled = jnp.where(given, jnp.sum(jnp.where(here, value, 0), axis=1), -1)

    puzzle, empty = features["puzzle"], features["puzzle"] == 0
    legal = jnp.all(digit | dropped, axis=1) & (count <= 16) & jnp.all(empty | ~given | (filled == puzzle), axis=1)
    right = jnp.sum(empty & (filled == features["solution"]), axis=1)
    cells = jnp.where(legal, right / jnp.maximum(jnp.sum(empty, axis=1), 1), 0.0).astype(jnp.float32)
    # A cell's bit is its digit; a unit is right where its four bits are those of 1, 2, 3 and 4.
    bits = jnp.where((filled >= 1) & (filled <= 4), 1 << jnp.maximum(filled, 0), 0)
    solved = jnp.all(jnp.sum(jnp.where(_UNITS, bits[:, None], 0), axis=2) == 0b11110, axis=1)
    exact = (legal & solved).astype(jnp.float32)
    return {"reward": jnp.maximum(cells, exact), "cells": cells, "exact": exact}


def summarize(rows: list[dict[str, Any]], examples: list[Example]) -> dict[str, Any]:
    """Figures of one graded answer to each example: `accuracy`, `exact`, share of `ambiguous` puzzles, `baselines`.

    Accuracy is right blanks over all blanks, pooled, as published results have it. Raises `UserError` where the
    numbers of rows and examples differ or are zero.
    """
    check_graded(rows, examples)
    puzzles = np.stack([example.features["puzzle"] for example in examples])
    solutions = np.stack([example.features["solution"] for example in examples])
    blanks = (puzzles == 0).sum(axis=1)
    cells = np.array([row["cells"] for row in rows], float)
    return {
        "accuracy": float(cells @ blanks / max(blanks.sum(), 1)),
        "exact": float(np.mean([row["exact"] for row in rows])),
        "ambiguous": ambiguous(puzzles),
        "baselines": baselines(puzzles, solutions),
    }


def grade_text_published(completion: str, features: Features) -> dict[str, float]:
    """Grade one completion on the host, with the published reward."""
    return grade_text(completion, features) | sudoku_published.grade_text(completion, features)


def grade_bytes_published(stream: jax.Array, length: jax.Array, features: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Grade texts on the device, with the published reward; arrays as those of `grade_bytes`."""
    return grade_bytes(stream, length, features) | sudoku_published.grade_bytes(stream, length, features)


def configure(config: TaskConfig) -> Task:
    """The task with the reward that the settings name."""
    if config.reward == "published":
        return TASK._replace(grade_text=grade_text_published, grade_bytes=grade_bytes_published)
    return TASK


TASK = Task("sudoku", COMPONENTS, features, examples, read, grade_text, grade_bytes, summarize, configure)
