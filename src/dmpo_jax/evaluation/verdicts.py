"""What the published and the strict rules say of one completion, and why they differ.

Strict: the task's own grader with the reward "exact". Published: the evaluation of the d1 family, faults included
(`countdown_published`, `gsm8k_evaluation` and `sudoku_published` under `tasks/`, `grading/math_published.py`). Both count in
the same units: right items, or for sudoku right blanks, of which a grid that obeys the rules has all.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmpo_jax.errors import UserError
from dmpo_jax.evaluation import reasons
from dmpo_jax.evaluation.intervals import wilson
from dmpo_jax.grading import math_published
from dmpo_jax.grading.math_answer import final_answer
from dmpo_jax.tasks import (
    countdown,
    countdown_published,
    gsm8k,
    gsm8k_evaluation,
    math,
    number_text,
    sudoku,
    sudoku_published,
)
from dmpo_jax.tasks.task import Features, Task
from dmpo_jax.tasks.text import BLANKS, END_TOKENS, answer_of, readable

END = END_TOKENS[0].decode()
MOST_SHOWN = 200  # characters of an answer that a verdict repeats


class Verdict(NamedTuple):
    """`right` of `of` units, and what was graded (cut short)."""

    right: int
    of: int
    read: str


class Verdicts(NamedTuple):
    """Both verdicts, the strict grader's components, and why they differ: one of `reasons.REASONS`, "" where they agree."""

    strict: Verdict
    published: Verdict
    components: dict[str, float]
    reason: str


class _Rules(NamedTuple):
    """A task's two rules on a completion, and the reason for different counts (completion, features, published, strict)."""

    task: Task
    published: Callable[[str, Features], tuple[int, str]]
    strict: Callable[[str, Features, dict[str, float]], tuple[int, str]]
    reason: Callable[[str, Features, int, int], str]


def judge(task: str, completion: str, features: Features, components: dict[str, float] | None = None) -> Verdicts:
    """Both verdicts on a completion of a task in `TASKS`, end tokens and all (see `with_end`). Raises UserError on others.

    `components` are the strict grader's where they are known, as of a task that is graded in worker processes.
    """
    rules, of = _rules(task), units(task, features)
    if components is None:
        components = rules.task.grade_text(completion, features)
    strict, published = rules.strict(completion, features, components), rules.published(completion, features)
    reason = ""
    if strict[0] != published[0]:
        reason = rules.reason(completion, features, published[0], strict[0])
        if reasons.after_end(rules.published, completion, features) == strict[0]:
            reason = reasons.AFTER_END
    return Verdicts(_verdict(*strict, of), _verdict(*published, of), components, reason)


def units(task: str, features: Features) -> int:
    """Of how many units an item is: the blanks of a sudoku, else 1."""
    return int(np.sum(np.asarray(features["puzzle"]) == 0)) if task == "sudoku" else 1


def with_end(text: str, ended: bool) -> str:
    """A decoded completion as the published rules saw it: with the end token that decoding takes off."""
    return text + END if ended else text


def columns(found: Verdicts) -> dict[str, Any]:
    """What a line of a file of graded answers says of both verdicts; the reason only where they differ."""
    counts = {"published": found.published.right, "strict": found.strict.right, "of": found.strict.of}
    shown = {"published_read": found.published.read, "strict_read": found.strict.read}
    return counts | shown | ({"reason": found.reason} if found.reason else {})


def judge_all(
    task: str,
    texts: Sequence[str],
    ended: Sequence[bool],
    features: Sequence[Features],
    components: Sequence[dict[str, float] | None],
) -> list[Verdicts | None]:
    """Verdicts on decoded completions, of which some `ended` with an end token; None each for a task without both rules.

    `components` as in `judge`.
    """
    if task not in TASKS:
        return [None] * len(texts)
    rows = zip(texts, ended, features, components, strict=True)
    return [judge(task, with_end(text, bool(end)), arrays, known) for text, end, arrays, known in rows]


def compared(verdicts: Sequence[Verdicts | None], items: int = 0) -> dict[str, Any]:
    """Both counts, how many verdicts differ, and the reasons; nothing for a task without both rules.

    Where there are several answers to each of the `items`, these decide the width of the intervals.
    """
    if None in verdicts:
        return {}
    found = Counter(verdict.reason for verdict in verdicts if verdict.reason)
    return {
        "published": pooled([verdict.published for verdict in verdicts], items),
        "strict": pooled([verdict.strict for verdict in verdicts], items),
        "differences": sum(found.values()),
        "reasons": dict(found.most_common()),
    }


def pooled(verdicts: Sequence[Verdict], items: int = 0) -> dict[str, Any]:
    """Right units over all units, with an interval over the items, cautious for the cells of sudokus."""
    right, of = sum(verdict.right for verdict in verdicts), sum(verdict.of for verdict in verdicts)
    share, count = right / max(of, 1), items or len(verdicts)
    return {"accuracy": share, "accuracy_ci95": list(wilson(share * count, count)), "correct": right, "of": of}


def solved(components: dict[str, float]) -> bool:
    """Whether a task's components say that an answer is right as a whole."""
    return components.get("exact", components.get("correct", components["reward"])) >= 1


def answer_key(task: str, completion: str) -> str:
    """The final answer of a completion, to tell answers apart: a number, else its text without blanks; "" for none."""
    if task == "math":
        return "".join(final_answer(completion).split())
    if task != "gsm8k":
        return _text(answer_of(completion).translate(None, BLANKS + b"|,"))
    span = number_text.final_answer(readable(completion)).span
    number = number_text.read(span)
    return str(number) if number else _text(span.translate(None, BLANKS))


def _rules(task: str) -> _Rules:
    if task not in TASKS:
        raise UserError(f'task.name = "{task}": answers of {", ".join(TASKS)} can be graded anew; use one of these')
    return TASKS[task]


def _verdict(right: int, read: str, of: int) -> Verdict:
    return Verdict(right, of, read if len(read) <= MOST_SHOWN else read[:MOST_SHOWN] + "...")


def _text(answer: bytes) -> str:
    return answer.decode("utf-8", "replace")


# ---- the tasks


def _countdown_published(completion: str, features: Features) -> tuple[int, str]:
    return int(countdown_published.evaluate(completion, features)), countdown_published.graded(completion).expression


def _countdown_strict(completion: str, features: Features, components: dict[str, float]) -> tuple[int, str]:
    return int(components["reward"]), _text(answer_of(completion))


def _gsm8k_published(completion: str, features: Features) -> tuple[int, str]:
    return int(gsm8k_evaluation.evaluate(completion, features)), gsm8k_evaluation.read(completion).content


def _gsm8k_strict(completion: str, features: Features, components: dict[str, float]) -> tuple[int, str]:
    return int(components["correct"]), _text(number_text.final_answer(readable(completion)).span)


def _math_published(completion: str, features: Features) -> tuple[int, str]:
    right = math_published.correct(completion, math.truth_of(features))
    return int(right), math_published.read(completion) or ""


def _math_strict(completion: str, features: Features, components: dict[str, float]) -> tuple[int, str]:
    return int(components["correct"]), final_answer(completion)


def _sudoku_published(completion: str, features: Features) -> tuple[int, str]:
    return sudoku_published.evaluate(completion, features), sudoku_published.graded(completion).cells


def _sudoku_strict(completion: str, features: Features, components: dict[str, float]) -> tuple[int, str]:
    return round(components["reward"] * units("sudoku", features)), _text(answer_of(completion))


TASKS = {
    "countdown": _Rules(countdown.TASK, _countdown_published, _countdown_strict, reasons.countdown),
    "gsm8k": _Rules(gsm8k.TASK, _gsm8k_published, _gsm8k_strict, reasons.gsm8k),
    "math": _Rules(math.TASK, _math_published, _math_strict, reasons.math),
    "sudoku": _Rules(sudoku.TASK, _sudoku_published, _sudoku_strict, reasons.sudoku),
}
