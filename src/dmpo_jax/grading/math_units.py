"""Words that may stand after a number: units, percent, magnitudes; and names of functions.

A unit is dropped from an answer or a true answer that has none. Where both have units that are known here and differ (metres
for centimetres, metres for square metres), the answer is another quantity. Words not known here never part two quantities.
"""

import re
from typing import NamedTuple

GREEK = ("alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "phi", "omega")
_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt pi frac"
FUNCTIONS = frozenset(_FUNCTIONS.split())
_OF_ANGLES = ("sin", "cos", "tan", "cot", "sec", "csc")
PERCENT = ("percent", "percentage", "pct", "percents")
MAGNITUDES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

# \base 8 is that of the digits of 17_8.
SIGNS = {"%": "percent", r"\degree": "degree", r"\dollar": "dollar", r"\base": "base"}

# Words that say more than a unit does.
_OTHERWISE = (
    "not squared cubed factorial choose times plus minus over mod modulo to half halves third thirds quarter quarters fourth "
    "fourths fifth fifths sixth sixths eighth eighths tenth tenths hundredth hundredths thousandth thousandths"
)

_SAME = {
    name: names.split()[0]
    for names in (
        "meter m meters metre metres",
        "centimeter cm centimeters centimetre centimetres",
        "millimeter mm millimeters millimetre millimetres",
        "kilometer km kilometers kilometre kilometres",
        "inch in inches",
        "foot ft feet",
        "yard yd yards yds",
        "mile mi miles",
        "gram g grams",
        "kilogram kg kilograms",
        "pound lb lbs pounds",
        "ounce oz ounces",
        "ton tons",
        "liter l L liters litre litres",
        "milliliter ml mL milliliters",
        "gallon gal gallons",
        "second s sec secs seconds",
        "minute min mins minutes",
        "hour h hr hrs hours",
        "day days",
        "week weeks",
        "month months",
        "year yr yrs years",
        "dollar dollars USD",
        "cent cents",
        "degree degrees deg",
        "mph",
        "kph kmh",
        "am",
        "pm",
    )
    for name in names.lower().split()
}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_IN_UNITS = ("^", "{", "}", "/", ".", r"\cdot", "*", "(", ")", r"\degree")
_NEUTRAL = ("unit", "units", "per")
_BARE = frozenset(_SAME) - {"m", "g", "s", "h", "l", "in", "mi"}
_LETTERS = re.compile(r"(?:[mgslLhVWNJ]|cm|km|mm|kg|ft|in|am|pm)(?:\s*[/^.]\s*\{?(?:[mgslLhN]|cm|km|ft|[0-9])\}?)*")


def is_letters(text: str) -> bool:
    """Whether a text after a number is a unit of a letter or two, such as m or km/h."""
    return bool(_LETTERS.fullmatch(text))


def is_word(word: str) -> bool:
    """Whether a run of letters outside of a text is a word that may stand after a number."""
    word = word.lower() if len(word) > 2 else word
    return word in _BARE or word in (*PERCENT, *MAGNITUDES, *_POWERS, *_NEUTRAL)


class Quantity(NamedTuple):
    """The tokens of an expression, those of the unit after it (or `\\dollar` anywhere), and a sign % or `\\degree`."""

    value: tuple[str, ...]
    unit: tuple[str, ...]
    sign: str


def quantity(tokens: tuple[str, ...]) -> Quantity:
    """Part an expression from its unit; magnitudes such as million multiply it."""
    start = next((i for i, token in enumerate(tokens) if i and token.startswith("\\word")), len(tokens))
    while 1 < start < len(tokens) and tokens[start - 1] in ("{", "("):
        start -= 1
    if _word(tokens[start] if start < len(tokens) else "") in _OTHERWISE.split() or not _is_unit(tokens[start:]):
        start = len(tokens)
    value, unit, sign = tokens[:start], tokens[start:], ""
    factors = [MAGNITUDES[word] for word in map(_word, unit) if word in MAGNITUDES]
    if r"\dollar" in value:
        value, unit = tuple(token for token in value if token != r"\dollar"), (r"\dollar", *unit)
    if len(value) > 2 and value[0].isdecimal() and value[1] == "_" and all(map(_is_digits, value[2:])):
        value, unit = value[:1], (r"\base", *value[2:])
    is_angle = any(token[1:] in _OF_ANGLES for token in value)  # of which the sine is taken
    if len(value) > 1 and value[-1] in ("%", r"\degree") and not is_angle:
        value, sign = value[:-1], value[-1]
        unit = (sign, *unit)
    for factor in factors:
        value = ("(", *value, ")", "*", str(factor))
    return Quantity(value, unit, sign)


def _word(token: str) -> str:
    return token[6:-1].lower() if token.startswith("\\word") else ""


def _is_digits(token: str) -> bool:
    return token in ("{", "}") or token.isdecimal()


def _is_unit(tokens: tuple[str, ...]) -> bool:
    for before, token in zip(("", *tokens), tokens, strict=False):
        in_power = before in ("^", "{", "-") and (token == "-" or _is_digits(token))
        if not (token.startswith("\\word") or token in _IN_UNITS or in_power):
            return False
    return all(tokens.count(left) == tokens.count(right) for left, right in ("()", "{}"))


def differ(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether the tokens of two units name different known ones; dollars do not differ from dollars per hour."""
    one, other = _key(one), _key(other)
    size = min(len(one or ()), len(other or ()))
    return size > 0 and one[:size] != other[:size]


def _key(tokens: tuple[str, ...]) -> tuple[str, ...] | None:
    r"""The unit that tokens such as `\\word{cm} ^ 2` name, in one spelling; None where one of its words is not known."""
    found: list[str] = []
    power, divided = 1, False
    for token in tokens:
        if token.startswith("\\word"):
            word = _word(token)
            name = _SAME.get(word)
            divided |= word == "per"
            if word in _POWERS:
                power = _POWERS[word]
                if found and word.endswith("d"):
                    found[-1] += str(power)
                    power = 1
            elif name:
                found.append(("/" if divided else "") + name + (str(power) if power > 1 else ""))
                power = 1
            elif word not in (*_NEUTRAL, *MAGNITUDES):
                return None
        elif token in SIGNS:
            found.append(SIGNS[token])
        elif token == "/":
            divided = True
        elif token[0].isdigit() and found:
            found[-1] += token
    return tuple(found)
