"""Arithmetic expressions on the host: the language that countdown answers are graded in.

    answer     = sum [ "=" [ "-" ] number ]
    sum        = term { ( "+" | "-" ) term }
    term       = factor { ( "*" | "/" ) factor }
    factor     = [ "-" ] ( number | "(" sum ")" )
    number     = 1 to MAX_DIGITS digits (leading zeros allowed)

Blanks may stand between any two symbols; digits parted by a blank are two numbers. Brackets nest at most
`MAX_DEPTH` deep. The rewrites below bring LaTeX and Unicode forms to these symbols. Anything else is
malformed: other characters (decimals, commas, letters, stray braces), `**`, `//`, unary plus, a doubled sign,
products without an operator. Values are exact rationals. The device twin is `expression_device.py`.
"""

import re
from typing import NamedTuple

MAX_DEPTH = 16
MAX_DIGITS = 9

# Each rewritten form starts with a byte that occurs nowhere else in any of them, so forms never overlap.
REWRITES = (
    (rb"\times", b"*"),
    (rb"\cdot", b"*"),
    (rb"\div", b"/"),
    (rb"\left(", b"("),
    (rb"\right)", b")"),
    (rb"\,", b" "),
    (rb"\;", b" "),
    (rb"\:", b" "),
    (rb"\!", b" "),
    (b"\\ ", b" "),
    ("×".encode(), b"*"),
    ("·".encode(), b"*"),
    ("⋅".encode(), b"*"),
    ("∗".encode(), b"*"),
    ("÷".encode(), b"/"),
    ("∕".encode(), b"/"),
    ("−".encode(), b"-"),
)
_REWRITE = dict(REWRITES)
_FORMS = re.compile(b"|".join(re.escape(form) for form in _REWRITE))
_CLAIM = re.compile(rb"\s*(-?)\s*(\d+)\s*")
_SYMBOLS = re.compile(rb"\d+|\S")


class Expression(NamedTuple):
    """A parsed answer: its numbers in order, its value as a fraction, and the value claimed after `=`.

    `denominator` is 0 where the expression divides by zero, and may be negative. The fraction is not reduced.
    """

    numbers: list[int]
    numerator: int
    denominator: int
    claim: int | None


class _Level:
    """What is known inside one bracket: sum so far, current term, and whether the next factor divides it."""

    def __init__(self) -> None:
        self.sum = (0, 1)
        self.term = (1, 1)
        self.divide = False

    def total(self) -> tuple[int, int]:
        return self.sum[0] * self.term[1] + self.term[0] * self.sum[1], self.sum[1] * self.term[1]

    def take(self, factor: tuple[int, int]) -> None:
        numerator, denominator = factor[::-1] if self.divide else factor
        self.term = (self.term[0] * numerator, self.term[1] * denominator)
        self.divide = False


def parse(text: bytes) -> Expression | None:
    """Parse an answer of bounded length; None where it is malformed."""
    text = _FORMS.sub(lambda form: _REWRITE[form[0]], text)
    body, equals, tail = text.partition(b"=")
    claim = None
    if equals:
        claimed = _CLAIM.fullmatch(tail)
        if not claimed or len(claimed[2]) > MAX_DIGITS:
            return None
        claim = int(claimed[1] + claimed[2])

    numbers: list[int] = []
    levels = [_Level()]
    operand_next, signed, undefined = True, False, False
    for symbol in _SYMBOLS.findall(body):
        level = levels[-1]
        if symbol.isdigit() or symbol == b")":
            if symbol == b")":
                if operand_next or len(levels) == 1:
                    return None
                levels.pop()
                factor, level = level.total(), levels[-1]
            else:
                if not operand_next or len(symbol) > MAX_DIGITS:
                    return None
                numbers.append(int(symbol))
                factor = (numbers[-1], 1)
            undefined |= level.divide and factor[0] == 0
            level.take(factor)
            operand_next = False
        elif symbol == b"(" and operand_next and len(levels) <= MAX_DEPTH:
            levels.append(_Level())
            signed = False
        elif symbol == b"-" and operand_next and not signed:
            level.term = (-level.term[0], level.term[1])
            signed = True
        elif symbol in b"+-" and not operand_next:
            level.sum, level.term = level.total(), (1 if symbol == b"+" else -1, 1)
            operand_next, signed = True, False
        elif symbol in b"*/" and not operand_next:
            level.divide = symbol == b"/"
            operand_next, signed = True, False
        else:
            return None
    if operand_next or len(levels) > 1:
        return None
    numerator, denominator = levels[0].total()
    return Expression(numbers, numerator, 0 if undefined else denominator, claim)
