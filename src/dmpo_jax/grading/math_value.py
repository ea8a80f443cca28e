r"""Values of expressions and whether they are the same: exact where they are rational, else to many digits.

A tree without variables has one value, with variables one at each of `POINTS` places. Rational values are fractions, so that
1/2006! and 1/2004! differ; others are computed to `DIGITS` digits (`DIGITS_AT_POINTS` where there are variables). Two trees
are equal where all their values agree but for the last `SLACK` digits, relative to their size. A place counts where both
values are real, unless that leaves fewer than two, or one of the trees holds `i`.

Nothing is simplified and no value grows without bounds: an exact one has at most `MAX_BITS` bits, another one at most
2^`MAX_EXPONENT`; a tree that would need more is refused.
"""

import functools
import math
import zlib
from fractions import Fraction
from typing import Any, NamedTuple

from dmpo_jax.grading.math_expression import Tree, symbols

MAX_BITS = 1 << 16
MAX_EXPONENT = 2600
MAX_FACTORIAL = 5000
DIGITS = 1000
DIGITS_AT_POINTS = 200
SLACK = 20
POINTS = 6

Number = Any  # Fraction, or a real or complex number of mpmath


class Refused(Exception):
    """An expression whose value is too large to compute, or is not of a kind that is computed."""


class Undefined(Exception):
    """An expression without a value at a place, such as 1/0."""


class Values(NamedTuple):
    """The values of an expression, None where it has none, whether it has variables, and whether it holds `i`."""

    values: tuple[Number | None, ...]
    varies: bool
    is_complex: bool


def values(tree: Tree) -> Values:
    """The values of a tree. Raises `Refused`."""
    names = symbols(tree)
    context = _context(DIGITS_AT_POINTS if names else DIGITS)
    found = []
    for point in range(POINTS if names else 1):
        where = {name: _place(name, point) for name in names}
        try:
            found.append(_value(tree, where, context))
        except (Undefined, ZeroDivisionError):
            found.append(None)
        except (OverflowError, ValueError, TypeError, MemoryError, ArithmeticError):
            raise Refused from None
    return Values(tuple(found), bool(names), _holds_i(tree))


def same(one: Values, other: Values) -> bool:
    """Whether two expressions have the same values."""
    digits = DIGITS_AT_POINTS if one.varies or other.varies else DIGITS
    pairs = _pairs(one, other)
    return bool(pairs) and all(_near(a, b, digits) for a, b in pairs)


def ratio(one: tuple[Values, Values], other: tuple[Values, Values]) -> int:
    """The sign of k if one pair's difference is k times the other's, with the same real k != 0 everywhere; 0 if not.

    Pairs without variables have no ratio, as 1 = 2 defines nothing.
    """
    if not any(value.varies for value in one) or not any(value.varies for value in other):
        return 0
    context = _context(DIGITS_AT_POINTS)
    found = []
    for a, b, c, d in zip(*(_spread(value) for value in (*one, *other)), strict=True):
        if None in (a, b, c, d):
            continue
        above, below = _add(a, _negative(b), context), _add(c, _negative(d), context)
        if not _is_zero(above) and not _is_zero(below):
            found.append(_divide(above, below, context))
        elif not (_is_zero(above) and _is_zero(below)):
            return 0
    if len(found) < 2 or not all(_near(found[0], value, DIGITS_AT_POINTS) and _is_real(value) for value in found):
        return 0
    first = found[0] if isinstance(found[0], Fraction) else context.re(found[0])
    return 1 if first > 0 else -1


def _pairs(one: Values, other: Values) -> list[tuple[Number, Number]]:
    size = max(len(one.values), len(other.values))
    both = [(a, b) for a, b in zip(_spread(one, size), _spread(other, size), strict=True) if None not in (a, b)]
    if size == 1:
        return both
    real = [(a, b) for a, b in both if _is_real(a) and _is_real(b)]
    chosen = both if one.is_complex or other.is_complex or len(real) < 2 else real
    return chosen if len(chosen) >= 2 else []


def _spread(values: Values, size: int = POINTS) -> tuple[Number | None, ...]:
    return values.values if len(values.values) == size else values.values * size


def _near(a: Number, b: Number, digits: int) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    context = _context(digits)
    a, b = _inexact(a, context), _inexact(b, context)
    # Of a sum that is 0, rounding may leave something small.
    size = max(abs(a), abs(b)) if a != 0 and b != 0 else 1
    return abs(a - b) <= size * context.mpf(10) ** (SLACK - digits)


def _is_zero(value: Number) -> bool:
    return _near(value, Fraction(0), DIGITS_AT_POINTS)


def _is_real(value: Number) -> bool:
    if isinstance(value, Fraction) or not hasattr(value, "imag"):
        return True
    return abs(value.imag) <= abs(value.real) * _context(DIGITS_AT_POINTS).mpf(10) ** (SLACK - DIGITS_AT_POINTS)


@functools.cache
def _context(digits: int):
    import mpmath

    context = mpmath.mp.clone()
    context.dps = digits
    return context


def _place(name: str, point: int) -> Fraction:
    """Where a variable stands at a point: small and large, all above zero, all below, or mixed."""
    number = zlib.crc32(f"{point} {name}".encode())
    size = Fraction(200 + number % 701, 1009) if point % 2 == 0 else 1 + Fraction(number % 2003, 1009)
    is_negative = point in (2, 3) or (point > 3 and number >> 16 & 1)
    return -size if is_negative else size


def _holds_i(tree: Tree) -> bool:
    return tree == ("constant", "i") or any(_holds_i(part) for part in tree[1:] if isinstance(part, tuple))


def _value(tree: Tree, where: dict[str, Fraction], context) -> Number:
    kind = tree[0]
    if kind == "number":
        return tree[1]
    if kind == "symbol":
        return where[tree[1]]
    if kind == "constant":
        return {"e": context.e, r"\pi": context.pi, "i": context.j}[tree[1]] * 1
    if kind == "call":
        return _call(tree[1], [_value(part, where, context) for part in tree[2:]], context)
    return _OPERATIONS[kind](*(_value(part, where, context) for part in tree[1:]), context)


def _exact(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise Refused
    return value


def _inexact(value: Number, context) -> Number:
    if not isinstance(value, Fraction):
        return value
    if abs(value.numerator.bit_length() - value.denominator.bit_length()) > MAX_EXPONENT:
        raise Refused
    return context.mpf(value.numerator) / value.denominator


def _bounded(value: Number, context) -> Number:
    if not context.isfinite(value):
        raise Undefined
    if value != 0 and abs(context.mag(value)) > MAX_EXPONENT:
        raise Refused
    return value


def _add(a: Number, b: Number, context) -> Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _exact(a + b)
    return _inexact(a, context) + _inexact(b, context)


def _subtract(a: Number, b: Number, context) -> Number:
    return _add(a, _negative(b), context)


def _multiply(a: Number, b: Number, context) -> Number:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _exact(a * b)
    return _bounded(_inexact(a, context) * _inexact(b, context), context)


def _divide(a: Number, b: Number, context) -> Number:
    if b == 0:
        raise Undefined
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return _exact(a / b)
    return _bounded(_inexact(a, context) / _inexact(b, context), context)


def _negative(a: Number, context=None) -> Number:
    return -a


def _power(a: Number, b: Number, context) -> Number:
    if a == 0:
        if not (isinstance(b, Fraction) and b >= 0):
            raise Undefined
        return Fraction(int(b == 0))
    if isinstance(a, Fraction) and isinstance(b, Fraction) and b.denominator == 1:
        bits = max(a.numerator.bit_length(), a.denominator.bit_length())
        if abs(a) != 1 and bits * abs(b) > MAX_BITS:
            raise Refused
        return a ** (b.numerator % 2 if abs(a) == 1 else b.numerator)
    a, b = _inexact(a, context), _inexact(b, context)
    if abs(b) * max(1, abs(context.mag(a))) > MAX_EXPONENT:
        raise Refused
    return _bounded(context.power(a, b), context)


def _root(a: Number, degree: Number, context) -> Number:
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 2 <= degree <= 100:
        raise Refused
    n = degree.numerator
    if isinstance(a, Fraction) and a < 0 and n % 2:
        return -_root(-a, degree, context)
    if isinstance(a, Fraction) and a >= 0 and max(a.numerator, a.denominator).bit_length() <= MAX_EXPONENT:
        above, below = _whole_root(a.numerator, n), _whole_root(a.denominator, n)
        if above**n == a.numerator and below**n == a.denominator:
            return Fraction(above, below)
    a = _inexact(a, context)
    if n % 2 and _is_real(a) and context.re(a) < 0:
        return -context.root(-context.re(a), n)
    return context.root(a, n)


def _whole_root(a: int, n: int) -> int:
    """The largest whole number whose n-th power is at most `a`, by Newton's method."""
    if n == 2 or a < 2:
        return math.isqrt(a) if n == 2 else a
    x = 1 << -(-a.bit_length() // n)
    while True:
        y = ((n - 1) * x + a // x ** (n - 1)) // n
        if y >= x:
            return x
        x = y


def _factorial(a: Number, context) -> Number:
    if isinstance(a, Fraction) and a.denominator == 1:
        if not 0 <= a <= MAX_FACTORIAL:
            raise Refused
        return Fraction(math.factorial(a.numerator))
    if context.dps > DIGITS_AT_POINTS or abs(a) > MAX_EXPONENT:
        raise Refused
    return _bounded(context.gamma(_inexact(a, context) + 1), context)


def _binomial(n: Number, k: Number, context) -> Number:
    if all(isinstance(x, Fraction) and x.denominator == 1 and 0 <= x <= MAX_FACTORIAL for x in (n, k)):
        return Fraction(math.comb(n.numerator, k.numerator))
    above = _factorial(n, context)
    return _divide(
        above, _multiply(_factorial(k, context), _factorial(_subtract(n, k, context), context), context), context
    )


def _absolute(a: Number, context) -> Number:
    return abs(a)


def _rounded(name: str):
    def apply(a: Number, context) -> Number:
        if isinstance(a, Fraction):
            return Fraction(getattr(math, name)(a))
        if not _is_real(a):
            raise Undefined
        return Fraction(int(getattr(context, name)(context.re(a))))

    return apply


def _hundredth(a: Number, context) -> Number:
    return _divide(a, Fraction(100), context)


def _radians(a: Number, context) -> Number:
    return _multiply(a, context.pi / 180, context)


_OPERATIONS = {
    **{"+": _add, "-": _subtract, "*": _multiply, "/": _divide, "^": _power, "neg": _negative, "root": _root},
    **{"!": _factorial, "binom": _binomial, "abs": _absolute, "floor": _rounded("floor"), "ceil": _rounded("ceil")},
    **{"%": _hundredth, r"\degree": _radians},
}
_INVERSE = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}


def _call(name: str, operands: list[Number], context) -> Number:
    x, *base = operands
    if name in ("log", "ln", "lg"):
        base = base[0] if base else Fraction(10)
        if x == 0 or base in (0, 1):
            raise Undefined
        if x == 1:
            return Fraction(0)
        logarithm = context.log(_inexact(x, context))
        return logarithm if name == "ln" else _bounded(logarithm / context.log(_inexact(base, context)), context)
    if x == 0 and name in ("sin", "tan", "arcsin", "arctan", "sinh", "tanh"):
        return Fraction(0)
    if name == "exp" and abs(x) > MAX_EXPONENT // 2:
        raise Refused
    return _bounded(getattr(context, _INVERSE.get(name, name))(_inexact(x, context)), context)
