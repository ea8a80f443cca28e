"""Why the published rule and the strict one count a completion differently.

A reason is found by asking the strict rule about what the published one graded. Where it then agrees with the published count,
the rules looked in different places, and the reason is a place; else they read the same text differently, and it is a form.
"""

import re
from collections.abc import Callable

import numpy as np

from dmpo_jax.grading import math_published
from dmpo_jax.grading.math_answer import final_answer, last_box
from dmpo_jax.grading.math_equal import equal
from dmpo_jax.tasks import countdown as countdown_task
from dmpo_jax.tasks import countdown_published, expression, gsm8k_evaluation, number_text, sudoku_published
from dmpo_jax.tasks import gsm8k as gsm8k_task
from dmpo_jax.tasks import math as math_task
from dmpo_jax.tasks.task import Features
from dmpo_jax.tasks.text import BLANKS, END_TOKENS, OPEN, SPAN_BYTES, answer_of, readable, tagged

OTHER = "other"
NO_TRUTH = "no truth in the file"
AFTER_END = "text after the end token"
NO_TAG = "no answer tag"
NOT_CLOSED = "answer tag not closed"
TOO_LONG = "answer too long"
FIRST_ANSWER = "first of several answers"
BOX_OUTSIDE = "box outside the answer"

REASONS = {
    "countdown": (
        AFTER_END, NO_TAG, NOT_CLOSED, TOO_LONG, FIRST_ANSWER,
        BOX_OUTSIDE,  # the published rule takes the last box, wherever it is
        "equation in the working",  # without a box, the first equation of the text
        "answer without a box",  # without an equation either, the whole text, tags and all
        "text round the expression",
        "after the equals sign",  # of `3+4 = 8` it grades `3+4`; `=-7` it does not know
        "operator",  # ** and //
        "decimal number",
        "sign",  # a plus before a number, two signs in a row
        "rounding",  # near the target is enough for it
        "leading zero",  # Python has no 07
        "line break",  # which ends an expression of Python outside brackets
        "notation",  # LaTeX and Unicode spellings
        OTHER,
    ),
    "gsm8k": (
        NO_TRUTH, AFTER_END, TOO_LONG, FIRST_ANSWER,
        BOX_OUTSIDE,  # the published rule takes the first box, wherever it is
        "first of several boxes",
        "box not closed",  # it reads up to the first brace
        "braces in the box",
        "line break in the box",  # which hides the box from it
        "answer after ####",
        "empty box",  # with the number after it
        "thousands separator",  # it reads 14,000 as 14
        "fraction",  # and 2/3 as 2 or 3
        "several numbers",  # of which it takes the first (box) or the last (tag)
        "sign",
        "form of the number",
        OTHER,
    ),
    "math": (
        AFTER_END, TOO_LONG, FIRST_ANSWER,
        NO_TAG,  # nor a box: it takes the whole text
        BOX_OUTSIDE,  # it takes the last box, wherever it is
        "box not closed",
        "written otherwise",  # the same value in another spelling, which it does not know
        "cut to the same text",  # it takes away what makes the difference
        OTHER,
    ),
    "sudoku": (
        AFTER_END, NO_TAG, NOT_CLOSED, TOO_LONG, FIRST_ANSWER,
        "fenced block",
        "text after the answer",
        "separators",  # which the published rule takes for cells
        "wrapper",  # likewise
        "other characters",
        "more than 16 digits",
        "given clues overwritten",
        "several solutions",  # of which it knows the stored one
        OTHER,
    ),
}  # fmt: skip

_SEPARATORS = b"|,"
_FRACTION = re.compile(r"\\[dt]?frac|\d\s*/\s*\d")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,|,?\\!)\s*(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")


def after_end(published: Callable[[str, Features], tuple[int, str]], completion: str, features: Features) -> int | None:
    """The published count of the text up to and with its first end token; None where nothing follows that."""
    ends = [completion.find(token) + len(token) for token in map(bytes.decode, END_TOKENS) if token in completion]
    return published(completion[: min(ends)], features)[0] if ends and min(ends) < len(completion) else None


def _missing(completion: str) -> str:
    """Why there is no answer tag that the strict rule could take; "" where there is one."""
    text = readable(completion)
    inside = tagged(text)
    if inside is None:
        return NOT_CLOSED if OPEN in text else NO_TAG
    return TOO_LONG if len(inside) > SPAN_BYTES else ""


def _inside(completion: str) -> str:
    return (tagged(readable(completion)) or b"").decode("utf-8", "replace")


def _bare(answer: str) -> bool:
    """Whether an answer tag may stand round it."""
    return OPEN.decode() not in answer and len(answer.encode("utf-8", "replace")) <= SPAN_BYTES


# ---- countdown


def countdown(completion: str, features: Features, published: int, strict: int) -> str:
    """The reason for different verdicts, 0 or 1 each, on a countdown answer."""
    found = countdown_published.graded(completion)
    theirs = found.expression if found.place == "text" else found.content
    if _solves(theirs, features) == published:
        return _missing(completion) or _countdown_place(theirs, found.place, _inside(completion), published)
    if strict:
        return _countdown_unread(answer_of(completion).decode("utf-8", "replace"), features)
    if _solves(found.expression, features):
        before = countdown_published.plain(theirs).partition(found.expression)[0]
        return "text round the expression" if before.strip() else "after the equals sign"
    return _countdown_form(found.expression)


def _solves(answer: str, features: Features) -> int:
    """The strict verdict on a bare answer."""
    return int(_bare(answer) and countdown_task.grade_text(f"<answer>{answer}</answer>", features)["reward"])


def _countdown_place(theirs: str, place: str, inside: str, published: int) -> str:
    if place == "text" and not published:
        return "answer without a box"
    if theirs and theirs in inside:
        return "text round the expression"
    return {"box": BOX_OUTSIDE, "tag": FIRST_ANSWER, "text": "equation in the working"}[place]


def _countdown_form(text: str) -> str:
    """What in an expression that Python takes is not of the strict language."""
    if "**" in text or "//" in text:
        return "operator"
    if "." in text:
        return "decimal number"
    return "sign" if expression.parse(text.encode("utf-8", "replace")) is None else "rounding"


def _countdown_unread(answer: str, features: Features) -> str:
    """What in an answer of the strict language the published rule does not read."""
    numbers = np.asarray(features["numbers"])[: int(features["count"])].tolist()
    solves = lambda text: countdown_published.solves(text, numbers, int(features["target"]))  # noqa: E731
    left = answer.partition("=")[0]
    if left != answer and solves(left):
        return "after the equals sign"
    if solves(_LEADING_ZEROS.sub("", left)):
        return "leading zero"
    if solves(" ".join(left.split())):
        return "line break"
    return "notation" if any(form.decode() in left for form, _ in expression.REWRITES) else OTHER


# ---- gsm8k


def gsm8k(completion: str, features: Features, published: int, strict: int) -> str:
    """The reason for different verdicts, 0 or 1 each, on a GSM8K answer."""
    found = gsm8k_evaluation.read(completion)
    theirs = _bare(found.content) and gsm8k_task.grade_text(f"<answer>{found.content}</answer>", features)["correct"]
    if theirs == published:
        return _gsm8k_place(readable(completion), found)
    return _gsm8k_form(found, gsm8k_evaluation.truth_of(features), strict)


def _gsm8k_place(text: bytes, found: gsm8k_evaluation.Read) -> str:
    inside, span = tagged(text), number_text.final_answer(text).span
    scope = text if inside is None else inside
    boxes = scope.count(number_text.BOX)
    if not span and inside is not None and len(inside) > SPAN_BYTES:
        return TOO_LONG
    if found.place == "box":
        if inside is not None and gsm8k_evaluation.read(inside.decode("utf-8", "replace")) != found:
            return BOX_OUTSIDE
        if boxes > 1:
            return "first of several boxes"
        return "braces in the box" if span else "box not closed"
    if boxes and span:
        return "line break in the box" if b"\n" in span else "braces in the box"
    if inside is None:
        return "answer after ####" if number_text.HASHES in text else OTHER
    return FIRST_ANSWER


def _gsm8k_form(found: gsm8k_evaluation.Read, truth: float, strict: int) -> str:
    joined = f"\\boxed{{{_THOUSANDS.sub('', found.content)}}}"
    if strict and gsm8k_evaluation.read(joined).number == truth:
        return "thousands separator"
    if strict and found.number == -truth:
        return "sign"
    if "\\boxed{}" in found.content:
        return "empty box"
    if _FRACTION.search(found.content):
        return "fraction"
    return "several numbers" if len(_NUMBER.findall(found.content)) > 1 else "form of the number"


# ---- math


def math(completion: str, features: Features, published: int, strict: int) -> str:
    """The reason for different verdicts, 0 or 1 each, on a MATH answer."""
    text, inside = readable(completion).decode("utf-8", "replace"), tagged(readable(completion))
    theirs, ours = math_published.read(completion) or "", final_answer(completion)
    if not ours and (inside or last_box(text)):
        return TOO_LONG
    if strict and last_box(theirs) is None and "\\boxed{" in theirs:
        return "box not closed"
    if theirs != ours and _bare(theirs) and equal(math_task.truth_of(features), theirs) == published:
        if last_box(text) is None:
            return NO_TAG if inside is None else FIRST_ANSWER
        return BOX_OUTSIDE
    return "written otherwise" if strict else "cut to the same text"


# ---- sudoku


def sudoku(completion: str, features: Features, published: int, strict: int) -> str:
    """The reason for different counts of right blanks of a sudoku."""
    found, inside = sudoku_published.graded(completion), _inside(completion)
    missing = _missing(completion)
    if missing:
        return missing
    if "".join(inside.split()) != found.cells:
        return {"fence": "fenced block", "tag": FIRST_ANSWER}.get(found.place, "text after the answer")
    answer = answer_of(completion).translate(None, BLANKS + _SEPARATORS).decode("utf-8", "replace")
    puzzle, solution = np.asarray(features["puzzle"]).tolist(), features["solution"]
    if sudoku_published.right_blanks(answer, puzzle, solution) == strict:
        return "separators" if any(chr(byte) in inside for byte in _SEPARATORS) else "wrapper"
    if not (answer.isascii() and answer.isdigit()):
        return "other characters"
    if len(answer) > len(puzzle):
        return "more than 16 digits"
    if any(clue and int(cell) != clue for cell, clue in zip(answer, puzzle, strict=False)):
        return "given clues overwritten"
    return "several solutions" if strict > published else OTHER
