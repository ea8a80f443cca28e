r"""The published GSM8K evaluation of the d1 family, to the letter. On the host only.

What is read is the first `\boxed{...}`, up to its first brace on the same line, that is a number or holds a digit; where there
is none, the first complete answer tag. Content that is not a number as a whole gives the first number in it (box) or the last
one (tag). So \boxed{70,000} is 70 and \boxed{\frac{1}{2}} is 1. Numbers are compared as floats, nan and inf among them.

`gsm8k_published.py` reads the same from the part before the first end token, on the device too, with exact decimals.
"""

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dmpo_jax.tasks.task import Features

_BOX, _OPEN, _CLOSE = "\\boxed{", "<answer>", "</answer>"
_NUMBER = re.compile(r"-?\d+\.?\d*")


class Read(NamedTuple):
    """What is read: where it is (box, tag, or nowhere), its content, and the number; None where it gives none."""

    place: str
    content: str
    number: float | None


def read(text: str) -> Read:
    """The number that the published evaluation reads in a text. Linear time."""
    for content in _boxes(text):
        if content.strip("."):
            number = _value(content, True)
            if number is not None:
                return Read("box", content, number)
    start = text.find(_OPEN)
    stop = text.find(_CLOSE, start) if start >= 0 else -1
    if stop < 0:
        return Read("nowhere", "", None)
    content = text[start + len(_OPEN) : stop].strip()
    return Read("tag", content, _value(content, False))


def evaluate(completion: str, features: Features) -> bool:
    """Whether the published evaluation counts a completion as right."""
    return read(completion).number == truth_of(features)


def truth_of(features: Features) -> float:
    """The true number as the published evaluation has it, a float."""
    digits = "".join(str(digit) for digit in np.asarray(features["digits"]).tolist() if digit >= 0)
    return float(f"{'-' if features['negative'] else ''}{digits or '0'}e{int(features['exponent'])}")


def _boxes(text: str) -> Iterator[str]:
    for line in text.split("\n") if _BOX in text else ():
        stop = 0
        while (start := line.find(_BOX, stop)) >= 0 and (brace := line.find("}", start)) >= 0:
            yield line[start + len(_BOX) : brace].strip()
            stop = brace + 1


def _value(content: str, first: bool) -> float | None:
    try:
        return float(content)
    except ValueError:
        numbers = _NUMBER.finditer(content)
        found = next(numbers, None) if first else next(iter(deque(numbers, maxlen=1)), None)
        return float(found[0]) if found else None
