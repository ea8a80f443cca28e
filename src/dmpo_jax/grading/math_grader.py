r"""Grading answers to MATH, in a process without JAX (`worker.py`).

The reward "exact": `correct` is 1 where the answer that `math_answer.py` finds equals the true one (`math_equal.py`); `format`
is 1 where it finds one at all, so in a complete answer tag or a complete box; `reward` is (1 - s) correct + s format.
The reward "published" is that of `math_published.py`.
"""

from dmpo_jax.grading import math_library, math_published
from dmpo_jax.grading.math_answer import final_answer
from dmpo_jax.grading.math_equal import equal

COMPONENTS = ("reward", "correct", "format")


def grade(completion: str, truth: str, reward: str = "exact", format_share: float = 0.0) -> dict[str, float]:
    """The components of one completion; `truth` is the true answer, without a box.

    Takes some milliseconds, of hostile texts up to seconds, so bound it (`pool.py`). Raises `UserError` where
    math-verify is not installed.
    """
    if reward == "published":
        return math_published.grade(completion, truth)
    math_library.require()
    answer = final_answer(completion)
    correct = bool(answer) and equal(truth, answer)
    value = (1.0 if correct else format_share) if answer else 0.0
    return {"reward": value, "correct": float(correct), "format": float(bool(answer))}


def preload(reward: str = "exact") -> None:
    """Do what the first answer would wait for. Raises `UserError` where math-verify is not installed."""
    if reward == "exact":
        math_library.require()
        grade(r"\boxed{\sqrt{8}}", r"2\sqrt{2}")
        math_library.preload()
