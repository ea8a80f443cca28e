r"""The published 4x4 sudoku rules of the d1 family: its training reward, on host and device, and its evaluation.

Both compare the characters of an answer, cut or filled up with zeros to 16, with the stored solution in the blank cells alone:
overwritten clues and further characters cost nothing, and of several solutions one counts.

Training reward (diffu-GRPO, wd1 and DMPO share it): the share of the blanks that are right, from the digits of the last
answer; all other characters are dropped. Answers are found from left to right, so one reaches from the first `<answer>` after
the answer before it to the next `</answer>`.

Evaluation: right blanks over all blanks, pooled. What is graded are the characters, without whitespace, of the first of these
that is there and not blank:
- digits and blanks alone between fences of three backticks, after the first `<answer>`;
- what follows the first `<answer>`, up to the next `</answer>`, `<|eot_id|>` or `<|endoftext|>`;
- what follows the first `</answer>`, up to one of those end tokens or the end of the text;
- 16 digits before a `</answer>`; 16 digits that stand alone.
So commas, words and brackets take the places of cells, and a text without any tag can score.

Unlike the published code, training ends a text before the first end token written out in it, and its digits are ASCII ones. The
evaluation reads the text to its end.
"""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dmpo_jax.tasks.bytes import first, last, matches
from dmpo_jax.tasks.number_device import is_digit
from dmpo_jax.tasks.number_device import readable as readable_device
from dmpo_jax.tasks.task import Features
from dmpo_jax.tasks.text import CLOSE, OPEN, readable

CELLS = 16
PLACES = ("fence", "tag", "after the tag", "before the tag's end", "alone", "nowhere")

# An interface of published models: what the d1 family sends in training and in evaluation, to the letter.
PROMPT = """
Please solve the following 4x4 Sudoku puzzle. The puzzle is provided as a 16-character string reading left-to-right, \
top-to-bottom, where '0' represents empty cells.

Rules:
- Fill empty cells with digits 1-4
- Each row must contain digits 1-4 exactly once
- Each column must contain digits 1-4 exactly once
- Each 2x2 box must contain digits 1-4 exactly once

Important: Your solution must be a COMPLETE 16-character string with only the digits 1-4, representing your final solved grid.

Respond in this exact format:
<reasoning>
Your step-by-step solving process
</reasoning>
<answer>
[16-character solution string with no spaces or separators]
</answer>


Solve the following Sudoku puzzle: {puzzle}
"""

_TAG, _END_TAG = OPEN.decode(), CLOSE.decode()
_FENCED = re.compile(r"(?<=```)[\d\s]+(?=```)")
_STOP = re.compile(r"<\|eot_id\|>|<\|endoftext\|>|</answer>")
_END = re.compile(r"<\|eot_id\|>|<\|endoftext\|>")
_BEFORE_TAG = re.compile(r"(\d{16})\s*</answer>")
_ALONE = re.compile(r"\b\d{16}\b")


class Graded(NamedTuple):
    """What the published evaluation grades: where it is (one of `PLACES`) and its characters, without whitespace."""

    place: str
    cells: str


# ---- host


def training_reward(text: bytes, puzzle: np.ndarray, solution: np.ndarray) -> float:
    """Share of the blanks of puzzle int[16] that a `readable` text fills as the solution int[16] does. Linear time."""
    answer, stop = b"", 0
    while (start := text.find(OPEN, stop)) >= 0 and (close := text.find(CLOSE, start)) >= 0:
        answer, stop = text[start + len(OPEN) : close], close + len(CLOSE)
    digits = re.sub(rb"[^0-9]", b"", answer).decode()
    empty = max(int(np.sum(np.asarray(puzzle) == 0)), 1)
    return float(np.float32(right_blanks(digits, puzzle, solution)) / np.float32(empty))


def grade_text(completion: str, features: Features) -> dict[str, float]:
    """The training reward of one completion."""
    return {"reward": training_reward(readable(completion), features["puzzle"], features["solution"])}


def evaluate(completion: str, features: Features) -> int:
    """How many blanks the published evaluation counts as right. Linear time."""
    return right_blanks(graded(completion).cells, features["puzzle"], features["solution"])


def right_blanks(cells: str, puzzle: np.ndarray, solution: np.ndarray) -> int:
    """How many blanks of puzzle int[16] such characters fill as solution int[16] does, cut or filled up to 16."""
    cells = cells[:CELLS].ljust(CELLS, "0")
    rows = zip(cells, np.asarray(puzzle).tolist(), np.asarray(solution).tolist(), strict=True)
    return sum(given == 0 and cell == str(right) for cell, given, right in rows)


def graded(text: str) -> Graded:
    """What of a text the published evaluation grades. Linear time."""
    for place, find in zip(PLACES, (_fenced, _tagged, _after_tag, _before_tag, _alone), strict=False):
        cells = "".join(find(text).split())
        if cells:
            return Graded(place, cells)
    return Graded(PLACES[-1], "")


def _fenced(text: str) -> str:
    # Of whitespace alone nothing is left, so it counts as found and blank, as in the published code.
    start = text.find(_TAG)
    found = _FENCED.search(text[start + len(_TAG) :]) if start >= 0 else None
    return found[0] if found else ""


def _tagged(text: str) -> str:
    start = text.find(_TAG)
    stop = _STOP.search(text, start + len(_TAG)) if start >= 0 else None
    return text[start + len(_TAG) : stop.start()] if stop else ""


def _after_tag(text: str) -> str:
    start = text.find(_END_TAG)
    return _END.split(text[start + len(_END_TAG) :].lstrip(), maxsplit=1)[0] if start >= 0 else ""


def _before_tag(text: str) -> str:
    found = _BEFORE_TAG.search(text)
    return found[1] if found else ""


def _alone(text: str) -> str:
    found = _ALONE.search(text)
    return found[0] if found else ""


# ---- device


def grade_bytes(stream: jax.Array, length: jax.Array, features: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The training reward of uint8[B, W] texts of int32[B] bytes: float32[B]; features int32[B, 16]."""
    text, _ = readable_device(stream, length)
    position = jnp.arange(text.shape[1])
    opens, closes = matches(text, OPEN), matches(text, CLOSE)
    # The last answer ends where the last one opened closes, and begins with the first one opened after the close before.
    opened = last(opens & (position < last(closes)[:, None]))
    stop = first(closes & (position > opened[:, None]))
    before = last(closes & (position < opened[:, None]))
    start = first(opens & (position > before[:, None])) + len(OPEN)
    inside = (position >= start[:, None]) & (position < stop[:, None]) & (opened >= 0)[:, None]
    digit = is_digit(text) & inside
    here = digit[:, :, None] & (jnp.cumsum(digit, axis=1)[:, :, None] == 1 + jnp.arange(CELLS))
    cells = jnp.sum(jnp.where(here, text.astype(jnp.int32)[:, :, None] - ord("0"), 0), axis=1)
    empty = features["puzzle"] == 0
    right = jnp.sum(empty & (cells == features["solution"]), axis=1).astype(jnp.float32)
    return {"reward": right / jnp.maximum(jnp.sum(empty, axis=1), 1).astype(jnp.float32)}
