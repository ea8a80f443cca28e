r"""What stands beside a number: units, percent, degrees, money, the base of digits; and words such as million.

math-verify drops whatever stands behind a number, single letters too (5t is 5 to it). Here a unit is a text, or a known word:
it may be missing on one side, and two known ones that differ (metres for centimetres) make two quantities.
"""

import re
from typing import NamedTuple

MAGNITUDES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SIGNS = {"percent": r"\frac{1}{100}", "degree": r"\frac{\pi}{180}"}  # what a sign may multiply by

# Words that say more than a unit does.
_OTHERWISE = re.compile(
    r"\b(?:and|or|not|squared|cubed|factorial|choose|times|plus|minus|over|mod|modulo|to|hal(?:f|ves)|thirds?|quarters?|"
    r"fourths?|fifths?|sixths?|eighths?|tenths?|hundredths?|thousandths?)\b",
    re.IGNORECASE,
)
_SAME = {
    name: names.split()[0]
    for names in (
        "percent percents percentage pct",
        "degree degrees deg",
        "dollar dollars usd",
        "cent cents",
        "meter m meters metre metres",
        "centimeter cm centimeters centimetre centimetres",
        "millimeter mm millimeters millimetre millimetres",
        "kilometer km kilometers kilometre kilometres",
        "inch in inches",
        "foot ft feet",
        "yard yd yards",
        "mile mi miles",
        "gram g grams",
        "kilogram kg kilograms",
        "pound lb lbs pounds",
        "ounce oz ounces",
        "liter l liters litre litres",
        "milliliter ml milliliters",
        "gallon gal gallons",
        "second s sec secs seconds",
        "minute min mins minutes",
        "hour h hr hrs hours",
        "day days",
        "week weeks",
        "month months",
        "year yr yrs years",
        "mph",
        "am",
        "pm",
    )
    for name in names.split()
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SHORT = ("cm", "km", "mm", "kg", "ft", "lb", "am", "pm", "sq")  # other short names outside of a text are variables
_NAMES = "|".join(name for name in (*_SAME, *MAGNITUDES, *_POWERS) if len(name) > 2 or name in _SHORT)
_UNIT = re.compile(
    rf"""
    (?: \\text\s*\{{[^{{}}]*\}}
      | (?<![A-Za-z\\])(?:{_NAMES})(?![A-Za-z(])
      | (?<=[\s}})])[a-z]{{4,}}(?![A-Za-z(])
      | \\?%
      | \^\s*(?:\\circ|\{{\s*\\circ\s*\}})
    )
    (?: \s*\^\s*\{{?\s*(?P<power>[23])\s*\}}? )?
    \.?\s*$
    """,
    re.IGNORECASE | re.VERBOSE,
)
_BASE = re.compile(r"(?<![A-Za-z0-9])([0-9]+)_\{?([0-9]+)\}?$")
_WORD = re.compile(r"[A-Za-z]+")
_NUMBER = re.compile(r"[-+(]*(?:[0-9.]|\\\$|\\[a-z]*frac|\\sqrt|\\pi)")


class Quantity(NamedTuple):
    """What is left of an answer without its unit, magnitudes multiplied in, and the name of the unit: "" if it is not known."""

    value: str
    unit: str


def quantity(text: str) -> Quantity:
    """Part a spelled answer from what stands behind its number, and from a dollar sign before it."""
    units: list[str] = []
    is_known = True
    while found := _behind(text):
        text = text[: found.start()].rstrip()
        for word in reversed(_words(found[0])):
            if word in MAGNITUDES:
                text = rf"{MAGNITUDES[word]} \cdot ({text})"
            elif word in _SAME:
                units.insert(0, _SAME[word] + (found["power"] or ""))
            elif word in _POWERS and units:
                units[0] += str(_POWERS[word])
            else:
                is_known = False
    if r"\$" in text:
        text, units = text.replace(r"\$", "").strip(), ["dollar", *units]
    base = _BASE.search(text)
    if base:
        text, units = text[: base.end(1)], [f"base {base[2]}"]
    return Quantity(text, " ".join(units) if is_known else "")


def _behind(text: str) -> re.Match[str] | None:
    """A unit, or a part of one, at the end of a text; behind something that it may be the unit of."""
    found = _UNIT.search(text)
    rest = text[: found.start()].rstrip() if found else ""
    if not found or not rest or rest[-1] in "=+-*/^_({,<>" or _OTHERWISE.search(found[0]):
        return None
    return found if _NUMBER.match(text) or not found[0][0].isalpha() else None


def _words(unit: str) -> list[str]:
    if "%" in unit:
        return ["percent"]
    return ["degree"] if "circ" in unit else [word.lower() for word in _WORD.findall(unit.replace(r"\text", ""))]
