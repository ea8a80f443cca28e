"""Whether two expressions of sympy have the same values: exactly where they are rational, else to many digits.

math-verify compares with an absolute tolerance, so that 1/2004! and 1/2006! are the same to it, and x and x + 1e-20. Here
rational values are equal only if they are the same number, others where they agree relative to their size. Expressions with
variables are compared at `POINTS` places; a place counts where both values are real, unless that leaves fewer than two.

Of an equation math-verify takes the right side where an expression is expected. Here the left one must be a name, as in x = 6
or AB = 6, or have the same value, as in 2 + 4 = 6.
"""

import zlib

import sympy

DIGITS = 500
DIGITS_AT_POINTS = 60
SLACK = 15
POINTS = 4


def compare(true: object, given: object) -> bool | None:
    """Whether two things that were read are equal; None where that is left to math-verify."""
    if isinstance(true, sympy.Eq) and _is_name(true.lhs):
        if isinstance(given, sympy.Eq) and true.lhs == given.lhs:
            given = given.rhs
        elif isinstance(given, sympy.Eq):
            return None
        true = true.rhs
    if not _is_expression(true):
        return None
    if isinstance(given, sympy.Eq):
        if not _is_name(given.lhs) and same(*given.args) is not True:
            return False
        given = given.rhs
    return same(true, given) if _is_expression(given) else None


def _is_expression(thing: object) -> bool:
    if isinstance(thing, sympy.Symbol) and len(thing.name) > 1:
        return False  # a word
    return isinstance(thing, sympy.Expr) and not isinstance(thing, sympy.MatrixBase | sympy.MatrixExpr)


def _is_name(side: sympy.Expr) -> bool:
    """Whether an equation with that left side defines something: x, f(x), AB."""
    return bool(side.free_symbols) and not (side.is_Add or side.is_Pow or side.atoms(sympy.Number))


def same(one: sympy.Expr, other: sympy.Expr) -> bool | None:
    """None where the values do not tell: an unknown function, no value at enough places."""
    one, other = _exact(one), _exact(other)
    names = sorted({symbol.name for symbol in one.free_symbols | other.free_symbols})
    if not names and one.is_Rational and other.is_Rational:
        return one == other
    digits = DIGITS_AT_POINTS if names else DIGITS
    places = [{name: _place(name, point) for name in names} for point in range(POINTS if names else 1)]
    pairs = [(_value(one, place, digits), _value(other, place, digits)) for place in places]
    pairs = [pair for pair in pairs if None not in pair]
    real = [pair for pair in pairs if all(value.is_real for value in pair)]
    pairs = real if len(real) > 1 else pairs
    if len(pairs) < min(2, len(places)):
        return None
    return all(_near(a, b, digits) for a, b in pairs)


def _exact(expression: sympy.Expr) -> sympy.Expr:
    """Evaluated, decimals as fractions, i and e as the numbers."""
    expression = expression.xreplace({number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)})
    numbers = {"i": sympy.I, "e": sympy.E}
    known = {symbol: numbers[symbol.name] for symbol in expression.free_symbols if symbol.name in numbers}
    return expression.xreplace(known).doit().replace(_is_odd_root, lambda power: -((-power.base) ** power.exp))


def _is_odd_root(power: sympy.Basic) -> bool:
    """Of a negative number, which is real here and complex to sympy."""
    exponent = power.exp if power.is_Pow else sympy.S.One
    return exponent.is_Rational and exponent.p % 2 == exponent.q % 2 == 1 < exponent.q and power.base.is_negative


def _place(name: str, point: int) -> sympy.Rational:
    number = zlib.crc32(f"{point} {name}".encode())
    size = sympy.Rational(200 + number % 701, 1009) if point % 2 == 0 else 1 + sympy.Rational(number % 2003, 1009)
    return -size if point > 1 else size


def _value(expression: sympy.Expr, place: dict[str, sympy.Rational], digits: int) -> sympy.Expr | None:
    where = {symbol: place[symbol.name] for symbol in expression.free_symbols}
    value = expression.evalf(digits, subs=where)  # not first an exact value: 40^(19/1018081) has none that is short
    return value if value.is_number and value.is_finite and not value.has(sympy.Function) else None


def _near(a: sympy.Expr, b: sympy.Expr, digits: int) -> bool:
    # Of a sum that is 0, rounding may leave something small.
    size = max(abs(a), abs(b)) if a != 0 and b != 0 else 1
    return bool(abs(a - b) <= size * sympy.Float(10, digits) ** (SLACK - digits))
