r"""The number that a text gives as its final answer, on the host; the device twin is `number_device.py`.

Where the answer is. The text ends before the first end token written out in it. Then, in this order:
- the last complete `<answer>...</answer>`, as `text.py` has it; inside it the last complete `\boxed{...}`, else all of it;
- where there is no such tag, the last complete `\boxed{...}` of the text (braces balance; a box cut off is none);
- where there is none either, the word after the last `####`;
- otherwise there is no answer: a number named in passing is none. Nor is an answer of more than `SPAN_BYTES` bytes.

How it is read. `REWRITES` bring LaTeX and Unicode forms to plain ones, braces vanish, a box without its end does too, and of
an equation the part after the last `=` counts. That part must hold exactly one number; round it may stand words, currency and
percent signs, units (`cm^2` as well) and punctuation. So `3/4`, `5 or 6` and `2:30` are no numbers, nor is anything with an
operator, an unknown LaTeX command or an unknown non-ASCII character. A sign stands before the number, with blanks or currency
between them at most.

    number  = digits [ "." digits ] | "." digits        digits may be grouped by commas, in threes: 1,234,567

Values are exact decimals of any length; no exponents, fractions, magnitudes in words ("5 million" is 5) or words as numbers.
"""

import re
from typing import NamedTuple

from dmpo_jax.tasks.text import BLANKS, SPAN_BYTES, tagged

BOX = rb"\boxed{"
HASHES = b"####"
CURRENCY = b"$"
SQUARE = b"^"  # what the exponent of a unit is rewritten to
UNKNOWN = b"\\"

_WRAPPERS = (
    r"\boxed",
    r"\text",
    r"\textbf",
    r"\textit",
    r"\textrm",
    r"\mathrm",
    r"\mathbf",
    r"\mathit",
    r"\mbox",
    r"\!",
)
_SPACES = (r"\;", r"\:", r"\ ", r"\quad", r"\qquad", r"\(", r"\)", r"\[", r"\]", "~", "*", "\xa0")
_GROUPING = (r"\,", "\u2009", "\u202f")  # thin spaces: these part thousands as commas do
_SQUARES = ("^2", "^3", "^{2}", "^{3}", "²", "³")
_OPERATORS = (r"\times", r"\cdot", r"\div", r"\approx", "×", "·", "÷", "≈", "√")

# Sorted by length, so that of several forms at one place the last is the one to take.
REWRITES = tuple(
    sorted(
        (
            *((form.encode(), b"") for form in (*_WRAPPERS, "{", "}")),
            *((form.encode(), b" ") for form in (*_SPACES, *(blank for blank in BLANKS.decode() if blank != " "))),
            *((form.encode(), b",") for form in _GROUPING),
            *((form.encode(), CURRENCY) for form in (r"\$", "€", "£", "¥", "₹")),
            *((form.encode(), SQUARE) for form in _SQUARES),
            *((form.encode(), UNKNOWN) for form in ("^", *_OPERATORS)),
            *((form.encode(), b"o") for form in ("°", r"^\circ", r"^{\circ}")),
            (rb"\%", b"%"),
            ("−".encode(), b"-"),
            ("’".encode(), b"'"),
        ),
        key=lambda pair: len(pair[0]),
    )
)
# What may stand round the number.
AROUND = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ $%^,.;:!?'\"`()[]/&#-")
LETTERS = frozenset(byte for byte in AROUND if chr(byte).isalpha())

_REWRITE = dict(REWRITES)
_FORMS = re.compile(b"|".join(re.escape(form) for form, _ in reversed(REWRITES)))
_BRACES = re.compile(re.escape(BOX) + rb"|[{}]")
_PARTS = re.compile(rb"([^0-9]*)([0-9](?:[0-9,.]*[0-9])?)([^0-9]*)")
_GROUPED = re.compile(rb"([0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.([0-9]+))?")


class Number(NamedTuple):
    """An exact decimal: +-digits * 10^exponent, no zero at either end of `digits`; zero is `(False, b"", 0)`."""

    negative: bool
    digits: bytes
    exponent: int


class Answer(NamedTuple):
    """The bytes of the final answer and whether an answer tag held them."""

    span: bytes
    tagged: bool


def decimal(negative: bool, whole: bytes, fraction: bytes, shift: int = 0) -> Number:
    """The number +-whole.fraction * 10^shift, of ASCII digits."""
    digits = (whole + fraction).lstrip(b"0")
    kept = digits.rstrip(b"0")
    return Number(negative, kept, shift - len(fraction) + len(digits) - len(kept)) if kept else Number(False, b"", 0)


def final_answer(text: bytes) -> Answer:
    """Find the final answer in `readable` text; an empty span where there is none. Linear time."""
    inside = tagged(text)
    if inside is not None:
        text = inside
    box = _last_box(text)
    if box is not None:
        text = box
    elif inside is None:
        text = b"".join(text[text.rfind(HASHES) + len(HASHES) :].split(None, 1)[:1]) if HASHES in text else b""
    return Answer(text if len(text) <= SPAN_BYTES else b"", inside is not None)


def _last_box(text: bytes) -> bytes | None:
    """The content of the complete box that opens last."""
    if BOX not in text:
        return None
    found, opened = (-1, -1), []
    for brace in _BRACES.finditer(text):
        if brace[0] != b"}":
            opened.append(brace.end() if len(brace[0]) > 1 else 0)
        elif opened:
            found = max(found, (opened.pop(), brace.start()))
    return text[slice(*found)] if found[0] > 0 else None


def read(answer: bytes) -> Number | None:
    """The number that an answer of bounded length states; None where it states none, or not exactly one."""
    text = _FORMS.sub(lambda form: _REWRITE[form[0]], answer)
    equation, _, value = text.rpartition(b"=")
    parts = _PARTS.fullmatch(value)
    if not parts or not text.isascii() or equation[-1:] in (b"<", b">", b"!"):
        return None
    before, number, after = parts.groups()
    if before.endswith(b"."):
        before, number = before[:-1], b"." + number
    grouped = _GROUPED.fullmatch(number)
    if not grouped or before.endswith(b"."):
        return None
    before = before.rstrip(b" " + CURRENCY)
    sign = before[-1:] if before.endswith((b"+", b"-")) else b""
    before = before.removesuffix(sign)
    if before.endswith((b"/", SQUARE)) and not sign:
        return None
    if sign and (before[-1:].isalpha() or before.endswith(b")") or before.rstrip(b" " + CURRENCY).endswith(b"-")):
        return None
    if not AROUND.issuperset(before + after) or re.search(rb"(?<![A-Za-z])\^", before + b" " + after):
        return None
    return decimal(sign == b"-", grouped[1].replace(b",", b""), grouped[2] or b"")
