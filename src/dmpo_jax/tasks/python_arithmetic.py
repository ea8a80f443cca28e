"""Arithmetic with Python's operators, numbers and precedence; nothing is ever run.

The published countdown rules hand the model's text to Python itself, so they take what Python takes: `2**3`, `7//2`, `1.5*4`,
`--3`, line breaks in brackets, but neither `07` nor `3(4)`. `evaluate` gives the value that Python would. It gives none where
Python raises an error, and where a bound below is passed: powers of powers would otherwise take any time and memory.
"""

import operator
import re

MAX_CHARACTERS = 4096
MAX_DEPTH = 200  # of brackets: Python's own bound
MAX_BITS = 2**15  # of a whole number

_SYMBOLS = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+|\*\*|//|.", re.DOTALL)
_BLANKS, _LINE_ENDS, _DIGITS = " \t\f", "\n\r", "0123456789"
_SIGNS = {"+": "sign +", "-": "sign -"}
_UNARY = {"sign +": operator.pos, "sign -": operator.neg}
_BINARY = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "**": operator.pow,
}
# How tightly an operator binds; a power binds its left side more tightly than a sign, and its right side less.
_LEVEL = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "sign +": 3, "sign -": 3, "**": 4}

Value = int | float | complex


def evaluate(text: str) -> Value | None:
    """The value of an expression; None where Python would raise an error or a bound is passed."""
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        return None
    try:
        return _evaluate(_SYMBOLS.findall(text))
    except (ArithmeticError, TypeError, ValueError):
        return None


def _evaluate(symbols: list[str]) -> Value | None:
    values: list[Value] = []
    pending: list[str] = []  # operators and brackets that wait for what follows
    depth, operand_next = 0, True
    for symbol in symbols:
        if symbol in _BLANKS or (symbol in _LINE_ENDS and depth):
            continue
        if symbol[0] in _DIGITS or (symbol[0] == "." and len(symbol) > 1):
            if not operand_next:
                return None
            values.append(_number(symbol))
            operand_next = False
        elif symbol == "(" and operand_next and depth < MAX_DEPTH:
            pending.append(symbol)
            depth += 1
        elif symbol == ")" and not operand_next and depth:
            _apply(values, pending, 1)
            pending.pop()
            depth -= 1
        elif operand_next and symbol in _SIGNS:
            pending.append(_SIGNS[symbol])
        elif not operand_next and symbol in _BINARY:
            _apply(values, pending, _LEVEL[symbol] + (symbol == "**"))
            pending.append(symbol)
            operand_next = True
        else:
            return None
    if operand_next or depth:
        return None
    _apply(values, pending, 1)
    return values[0]


def _number(symbol: str) -> Value:
    if "." in symbol:
        return float(symbol)
    if symbol[0] == "0" and symbol.strip("0"):
        raise ValueError("Python has no whole numbers with leading zeros")
    return int(symbol)


def _apply(values: list[Value], pending: list[str], least: int) -> None:
    """Apply the operators on top that bind at least so tightly."""
    while pending and _LEVEL[pending[-1]] >= least:
        name, right = pending.pop(), values.pop()
        result = _UNARY[name](right) if name in _UNARY else _binary(name, values.pop(), right)
        if isinstance(result, int) and result.bit_length() > MAX_BITS:
            raise OverflowError(f"more than {MAX_BITS} bits")
        values.append(result)


def _binary(name: str, left: Value, right: Value) -> Value:
    whole = isinstance(left, int) and isinstance(right, int)
    if name == "**" and whole and abs(left) > 1 and right * left.bit_length() > MAX_BITS:
        raise OverflowError(f"more than {MAX_BITS} bits")
    return _BINARY[name](left, right)
