r"""Whether an answer is the true one: math-verify reads and compares both, with repairs where it is known to be wrong.

What is repaired: how answers are written (`math_spelling.py`), units (`math_units.py`), its absolute tolerance for
expressions (`math_values.py`), and equations of which it takes the right side alone: 2x + 5y = 0 is not 0 and 2 + 5 = 6 is
not 6, while x = 6, AB = 6 and 2 + 4 = 6 are. All else is its verdict: members in any order, a point in its own, the brackets
of intervals, the same line as another equation of it, `x > 3` as an interval.
"""

import functools
import re

from dmpo_jax.grading import math_library
from dmpo_jax.grading.math_spelling import readings, spelled
from dmpo_jax.grading.math_units import SIGNS, quantity

_BLANKS = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")


def equal(truth: str, answer: str) -> bool:
    """Whether an answer is right, for texts of bounded length. Never raises; a hostile answer may take a second."""
    given = readings(spelled(answer))
    return any(_same(true, one) for true in readings(spelled(truth)) for one in given)


def _same(truth: str, answer: str) -> bool:
    if _BLANKS.sub("", truth) == _BLANKS.sub("", answer):
        return answer != ""
    true, given = quantity(truth), quantity(answer)
    if true.unit and given.unit and true.unit != given.unit:
        return False
    if _same_values(true.value, given.value):
        return True
    # 35% is 35, and so is 0.35.
    if true.unit != given.unit and true.unit in SIGNS:
        return _same_values(rf"({true.value}) \cdot {SIGNS[true.unit]}", given.value)
    if true.unit != given.unit and given.unit in SIGNS:
        return _same_values(true.value, rf"({given.value}) \cdot {SIGNS[given.unit]}")
    return False


def _same_values(truth: str, answer: str) -> bool:
    try:
        expected, found = _read(truth), _read(answer)
        if not expected or not found:
            return False
        from dmpo_jax.grading import math_values  # needs sympy, which comes with math-verify alone

        verdict = math_values.compare(expected[0], found[0])
        return math_library.same(expected, found) if verdict is None else verdict
    except Exception:  # of what a malformed answer is read as, any operation may fail in any way
        return False


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> list:
    return math_library.read(text)
