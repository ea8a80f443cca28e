r"""The published GSM8K rewards of the d1 family and its evaluation's parser, on host and device.

Training reward (diffu-GRPO, wd1 and DMPO share it): the sum of
- `exact_match` 2: the text after the last `<answer>`, up to the next `</answer>` if there is one, is letter for letter the
  true answer as the data file has it (so 1,000 is not 1000, nor 18.0 or $18 18);
- `integer` 0.5: that text consists of digits only;
- `strict_format` 0.5: `<reasoning>`, one line, `</reasoning>`, `<answer>`, one line, `</answer>`, each on its own line, and
  nothing else; `soft_format` 0.5: the text begins with `<reasoning>`, and then, with blanks only between the two, come
  `</reasoning>` on the same line and an answer tag on one line. Reasoning of several lines has neither (as in d1 first and in
  DMPO; later versions of d1 let lines break);
- `tags`: 0.125 for each of `<reasoning>\n`, `\n</reasoning>\n`, `\n<answer>\n` and `\n</answer>` that occurs once; the
  third also takes 0.001 for every character after the last `\n</answer>\n` (all of them where it does not occur), the
  fourth for every character but one after `\n</answer>`.

`correct` is what the published evaluation counts: the number of the first `\boxed{...}` up to its first brace that holds a
digit, else that of the first answer tag. A content that is not a number as a whole gives the first number in it (box) or the
last one (tag). It reads \boxed{70,000} as 70, \frac{1}{2} as 1.

Unlike the published code: the text ends before the first end token written out in it; blanks and digits are ASCII ones;
numbers are compared exactly and not as floats, are of at most `NUMBER_BYTES` bytes, without underscores, inf or nan.
"""

import re
from collections import deque
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dmpo_jax.tasks import number_text
from dmpo_jax.tasks.bytes import blank, first, last, matches
from dmpo_jax.tasks.number_device import Located, ahead, cut, is_digit, take
from dmpo_jax.tasks.number_text import BOX
from dmpo_jax.tasks.text import BLANKS, CLOSE, OPEN

COMPONENTS = ("reward", "correct", "exact_match", "integer", "strict_format", "soft_format", "tags")
NUMBER_BYTES = 64
TRUTH_BYTES = 32

THINK, THOUGHT = b"<reasoning>", b"</reasoning>"
_STRICT = (THINK + b"\n", b"\n" + THOUGHT + b"\n" + OPEN + b"\n", b"\n" + CLOSE + b"\n")
_TAGS = (THINK + b"\n", b"\n" + THOUGHT + b"\n", b"\n" + OPEN + b"\n", b"\n" + CLOSE)
_CLOSED = b"\n" + CLOSE + b"\n"
# Rewards are counted in thousandths, so that host and device round once and alike.
_THOUSANDTH = np.float32(0.001)
_WORTH = {"exact_match": 2000, "integer": 500, "strict_format": 500, "soft_format": 500}

_LINES = re.compile(rb"[^\n]*".join(map(re.escape, _STRICT)) + rb"\n?")
_JOINT = re.compile(re.escape(THOUGHT) + rb"[ \t\n\r\v\f]*" + re.escape(OPEN))
_FLOAT = re.compile(rb"([-+]?)(?:([0-9]+)\.?([0-9]*)|\.([0-9]+))(?:[eE]([-+]?[0-9]+))?")
_NUMBER = re.compile(rb"(-?)([0-9]+)\.?([0-9]*)")


# ---- host


def rewards(text: bytes, truth: bytes) -> dict[str, float]:
    """The training reward and its components for `readable` text; `truth` as the data file has it. Linear time."""
    opened = text.rfind(OPEN)
    given = text[opened + len(OPEN) if opened >= 0 else 0 :].partition(CLOSE)[0].strip(BLANKS)
    hit = {
        "exact_match": given == truth,
        "integer": given.isdigit(),
        "strict_format": _LINES.fullmatch(text) is not None,
        "soft_format": _soft(text),
    }
    worth = {name: _WORTH[name] * value for name, value in hit.items()} | {"tags": _tags(text)}
    return {"reward": _points(sum(worth.values()))} | {name: _points(value) for name, value in worth.items()}


def _points(thousandths: int) -> float:
    return float(np.float32(thousandths) * _THOUSANDTH)


def _tags(text: bytes) -> int:
    once = [text.count(tag) == 1 for tag in _TAGS]
    worth = 125 * sum(once)
    if once[2]:
        worth -= len(text.split(_CLOSED)[-1].decode())
    if once[3]:
        worth -= len(text.split(_TAGS[3])[-1].decode()) - 1
    return worth


def _soft(text: bytes) -> bool:
    if not text.startswith(THINK):
        return False
    line, tried = _line_end(text, 0), False
    for joint in _JOINT.finditer(text, len(THINK)):
        if joint.start() > line:
            break
        # Where no closing tag follows the first of the answers within the first line, none follows the others.
        inside = joint.end() <= line
        if inside and tried:
            continue
        tried |= inside
        if text.find(CLOSE, joint.end(), line if inside else _line_end(text, joint.end())) >= 0:
            return True
    return False


def _line_end(text: bytes, start: int) -> int:
    at = text.find(b"\n", start)
    return at if at >= 0 else len(text)


def parse(text: bytes) -> number_text.Number | None:
    """The number that the published evaluation reads in `readable` text; None where it reads none. Linear time."""
    for line in text.split(b"\n") if BOX in text else ():
        for segment in line.split(b"}")[:-1]:
            content = segment.partition(BOX)[2]
            if re.search(rb"[0-9]", content):
                return _value(content.strip(BLANKS), True)
    start = text.find(OPEN)
    stop = text.find(CLOSE, start) if start >= 0 else -1
    return _value(text[start + len(OPEN) : stop].strip(BLANKS), False) if stop >= 0 else None


def _value(content: bytes, first_one: bool) -> number_text.Number | None:
    whole = _FLOAT.fullmatch(content) if len(content) <= NUMBER_BYTES else None
    if whole:
        sign, digits, fraction, bare, exponent = whole.groups()
        return number_text.decimal(sign == b"-", digits or b"", fraction or bare or b"", int(exponent or 0))
    found = deque(islice(_NUMBER.finditer(content), 1 if first_one else None), maxlen=1)
    if not found or len(found[0][0].removesuffix(b".")) > NUMBER_BYTES:
        return None
    sign, digits, fraction = found[0].groups()
    return number_text.decimal(sign == b"-", digits, fraction)


# ---- device


def rewards_device(text: jax.Array, end: jax.Array, truth: jax.Array) -> dict[str, jax.Array]:
    """The rewards of `readable` texts uint8[B, W] of int32[B] bytes: float32[B] each.

    `truth` int32[B, TRUTH_BYTES]: the bytes of the true answer, filled up with -1.
    """
    position = jnp.arange(text.shape[1])
    opened = last(matches(text, OPEN))
    low = jnp.where(opened >= 0, opened + len(OPEN), 0)
    high = jnp.minimum(first(matches(text, CLOSE) & (position >= low[:, None])), end)
    low, size = _strip(text, low, high)
    given = (position >= low[:, None]) & (position < (low + size)[:, None])
    digits = jnp.all(~given | is_digit(text), axis=1) & (size > 0)
    known = jnp.sum(truth >= 0, axis=1)
    start = cut(text, low, size, truth.shape[1]).astype(jnp.int32)
    same = jnp.all((truth < 0) | (start == truth), axis=1) & (size == known)
    hit = {
        "exact_match": same,
        "integer": digits,
        "strict_format": _strict_device(text, end),
        "soft_format": _soft_device(text),
    }
    worth = {name: _WORTH[name] * value for name, value in hit.items()} | {"tags": _tags_device(text, end)}
    worth = {"reward": sum(worth.values())} | worth
    return {name: value.astype(jnp.float32) * _THOUSANDTH for name, value in worth.items()}


def _strip(text: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Start and size, int32[B] each, of the bytes from `low` to before `high` without blanks round them."""
    position = jnp.arange(text.shape[1])
    filled = ~blank(text) & (position >= low[:, None]) & (position < high[:, None])
    start = first(filled)
    return start, jnp.maximum(last(filled) + 1 - start, 0)


def _tags_device(text: jax.Array, end: jax.Array) -> jax.Array:
    once = [_once(matches(text, tag), len(tag)) for tag in _TAGS]
    worth = 125 * sum(x.astype(jnp.int32) for x in once)
    closed = _last_of_split(matches(text, _CLOSED), len(_CLOSED))
    after_closed = jnp.where(closed >= 0, closed + len(_CLOSED), 0)
    after_tag = last(matches(text, _TAGS[3])) + len(_TAGS[3])
    begins = _characters(text)
    count = lambda start: jnp.sum(begins & _between(text, start, end), axis=1)  # noqa: E731
    return worth - jnp.where(once[2], count(after_closed), 0) - jnp.where(once[3], count(after_tag) - 1, 0)


def _between(text: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
    position = jnp.arange(text.shape[1])
    return (position >= start[:, None]) & (position < end[:, None])


def _once(hit: jax.Array, size: int) -> jax.Array:
    """Whether a pattern of `size` bytes occurs once, counted without overlaps."""
    again = hit & (jnp.arange(hit.shape[1]) >= (first(hit) + size)[:, None])
    return jnp.any(hit, axis=1) & ~jnp.any(again, axis=1)


def _last_of_split(hit: jax.Array, size: int) -> jax.Array:
    """Where the last of the occurrences begins that a search without overlaps finds, int32[B]; -1 without one.

    Occurrences overlap by their last byte only; of a chain of such every other one counts, from the first on.
    """
    final = last(hit)
    steps = final[:, None] - (size - 1) * jnp.arange(hit.shape[1] // (size - 1) + 1)
    linked = jnp.take_along_axis(hit, jnp.maximum(steps, 0), axis=1) & (steps >= 0)
    chain = jnp.sum(jnp.cumprod(linked, axis=1), axis=1)
    return jnp.where(chain % 2 == 1, final, jnp.where(chain > 0, final - (size - 1), -1))


def _characters(text: jax.Array) -> jax.Array:
    """Where a character begins, bool[B, W], in UTF-8 whose malformed parts are replaced as Python does it."""
    tail = (text >= 0x80) & (text < 0xC0)
    least = jnp.select([text == 0xE0, text == 0xF0], [0xA0, 0x90], 0x80)
    most = jnp.select([text == 0xED, text == 0xF4], [0x9F, 0x8F], 0xBF)
    following = ahead(text, 1)
    second = ahead(tail, 1) & (following >= least) & (following <= most)
    need = jnp.where(text >= 0xC2, 1, 0) + (text >= 0xE0) + (text >= 0xF0)
    need = jnp.where(text > 0xF4, 0, need)
    belongs = [
        second & (need >= 1),
        second & ahead(tail, 2) & (need >= 2),
        second & ahead(tail, 2) & ahead(tail, 3) & (need >= 3),
    ]
    inner = jnp.zeros_like(tail)
    for distance, owned in enumerate(belongs, 1):
        inner |= jnp.pad(owned, ((0, 0), (distance, 0)))[:, : text.shape[1]]
    return ~inner


def _strict_device(text: jax.Array, end: jax.Array) -> jax.Array:
    position = jnp.arange(text.shape[1])
    newline = text == ord("\n")
    head, middle, tail = _STRICT
    thought = first(newline & (position >= len(head)))
    answered = first(newline & (position >= (thought + len(middle))[:, None]))
    left = end - answered - len(tail)
    final = (left == 0) | ((left == 1) & (take(text, end - 1) == ord("\n")))
    at = lambda pattern, place: take(matches(text, pattern), place)  # noqa: E731
    return at(head, end * 0) & at(middle, thought) & at(tail, answered) & final


def _soft_device(text: jax.Array) -> jax.Array:
    width = text.shape[1]
    position = jnp.arange(width)
    later = lambda hit: lax.cummin(jnp.where(hit, position, width), axis=1, reverse=True)  # noqa: E731
    closes = matches(text, CLOSE)
    # A tag closes on its line where the next closing tag comes before the next newline.
    answered = matches(text, OPEN) & ahead(later(closes) < later(text == ord("\n")), len(OPEN))
    # The place of the next byte that is not blank; after the last one, the width.
    solid = jnp.pad(later(~blank(text)), ((0, 0), (0, len(THOUGHT))), constant_values=width)[:, len(THOUGHT) :]
    joined = jnp.take_along_axis(answered, jnp.minimum(solid, width - 1), axis=1) & (solid < width)
    first_line = (position >= len(THINK)) & (position < first(text == ord("\n"))[:, None])
    begins = matches(text, THINK)[:, 0]
    return begins & jnp.any(matches(text, THOUGHT) & first_line & joined, axis=1)


def parse_device(text: jax.Array, end: jax.Array) -> Located:
    """The number that the published evaluation reads in each `readable` text uint8[B, W] of int32[B] bytes."""
    width = text.shape[1]
    position = jnp.arange(width)
    later = lambda hit: lax.cummin(jnp.where(hit, position, width), axis=1, reverse=True)  # noqa: E731
    digit = is_digit(text)
    brace = later(text == ord("}"))
    held = (later(digit) < brace) & (brace < later(text == ord("\n")))
    box = first(matches(text, BOX) & held)
    boxed = box < width

    closes = matches(text, CLOSE)
    opened = first(matches(text, OPEN) & (position < last(closes)[:, None]))
    tag_low = opened + len(OPEN)
    tag_high = first(closes & (position >= tag_low[:, None]))

    low = jnp.where(boxed, box + len(BOX), tag_low)
    high = jnp.where(boxed, take(brace, box), tag_high)
    start, size = _strip(text, low, jnp.where(boxed | (opened < width), high, 0))
    whole = _whole(cut(text, start, size, NUMBER_BYTES), size)

    inside = _between(text, start, start + size)
    begin, stop = _token(text, digit & inside, boxed)
    negative = (take(text, begin - 1) == ord("-")) & (begin > start)
    part_size = stop - begin
    part_valid = jnp.any(digit & inside, axis=1) & (part_size + negative <= NUMBER_BYTES)
    part = Located(cut(text, begin, part_size, NUMBER_BYTES), part_valid, begin * 0, part_size, negative, begin * 0)
    return Located(
        *(jnp.where(whole.valid.reshape(-1, *[1] * (x.ndim - 1)), x, y) for x, y in zip(whole, part, strict=True))
    )


def _token(text: jax.Array, digit: jax.Array, boxed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """From where to before where the first number (boxed) or the last one stands among the digits, int32[B] each.

    Numbers are taken from left to right; digits after a dot belong to the number before it unless that has a dot already.
    """
    position = jnp.arange(text.shape[1])
    before = jnp.pad(digit, ((0, 0), (2, 0)))
    one_before, two_before = before[:, 1:-1], before[:, :-2]
    dot_before = jnp.pad(text == ord("."), ((0, 0), (1, 0)))[:, :-1]
    begins = digit & ~one_before
    linked = begins & dot_before & two_before
    runs = jnp.cumsum(begins, axis=1)
    # Of runs parted by single dots the second belongs to the first, the fourth to the third, and so on.
    second = linked & ((runs - lax.cummax(jnp.where(begins & ~linked, runs, 0), axis=1)) % 2 == 1)
    heads = begins & ~second
    begin = jnp.where(boxed, first(heads), last(heads))
    next_head = first(heads & (position > begin[:, None]))
    final = last(digit & (position >= begin[:, None]) & (position < next_head[:, None]))
    return begin, final + 1


def _whole(window: jax.Array, size: jax.Array) -> Located:
    """The contents uint8[B, S] of `size` bytes int32[B] that are one number, with sign and exponent at most."""
    width = window.shape[1]
    position = jnp.arange(width)
    inside = position < size[:, None]
    digit = is_digit(window) & inside
    minus = window[:, 0] == ord("-")
    start = (minus | (window[:, 0] == ord("+"))).astype(jnp.int32)
    mark = jnp.minimum(first((window == ord("e")) | (window == ord("E"))), size)
    mantissa = (position >= start[:, None]) & (position < mark[:, None])
    dot = mantissa & (window == ord("."))
    valid = jnp.all(~mantissa | digit | dot, axis=1) & (jnp.sum(dot, axis=1) <= 1) & jnp.any(mantissa & digit, axis=1)

    sign = take(window, mark + 1)
    low = mark + 1 + ((sign == ord("-")) | (sign == ord("+")))
    power = inside & (position >= low[:, None])
    valid &= (mark >= size) | (jnp.all(~power | digit, axis=1) & jnp.any(power, axis=1))
    # At most six digits of the exponent can matter: with more, no number but zero is ever the true one.
    place = size[:, None] - 1 - position
    value = jnp.where(power & digit, window.astype(jnp.int32) - ord("0"), 0)
    shift = jnp.sum(value * 10 ** jnp.clip(place, 0, 6), axis=1)
    shift = jnp.minimum(shift, 10**6)
    shift = jnp.where(sign == ord("-"), -shift, shift)
    return Located(window, valid & (size <= width), start, mark, minus, jnp.where(mark < size, shift, 0))
