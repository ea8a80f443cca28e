"""The numbers of `number_text.py` on the device: which final answer a text gives, and whether it is the true number."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dmpo_jax.tasks.bytes import blank, first, last, matches
from dmpo_jax.tasks.number_text import AROUND, BOX, CURRENCY, HASHES, LETTERS, REWRITES, SQUARE
from dmpo_jax.tasks.text import CLOSE, END_TOKENS, OPEN, SPAN_BYTES

_DROPPED = 0  # the symbol of bytes that vanish
_BAD = 1  # a byte that occurs in no number


class Located(NamedTuple):
    """Numbers within a window uint8[B, S]: the bytes from `start` to before `stop`, times 10^`shift`; all arrays [B].

    Where `valid` is false the other fields mean nothing.
    """

    window: jax.Array
    valid: jax.Array
    start: jax.Array
    stop: jax.Array
    negative: jax.Array
    shift: jax.Array


def readable(stream: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The text before its first end token: uint8[B, W] with zeros after it, and its length int32[B]."""
    position = jnp.arange(stream.shape[1])
    text = jnp.where(position < length[:, None], stream, 0)
    end = length
    for token in END_TOKENS:
        end = jnp.minimum(end, first(matches(text, token)))
    return jnp.where(position < end[:, None], text, 0), end


def final_answer(text: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Find the final answers in `readable` texts: span uint8[B, SPAN_BYTES], size int32[B], tagged bool[B].

    The size is 0 where there is no answer and the true one where it is longer than the span.
    """
    width = text.shape[1]
    position = jnp.arange(width)
    closes = matches(text, CLOSE)
    opened = last(matches(text, OPEN) & (position < last(closes)[:, None]))
    tagged = opened >= 0
    low = jnp.where(tagged, opened + len(OPEN), 0)
    high = jnp.where(tagged, first(closes & (position >= low[:, None])), end)
    region = (position >= low[:, None]) & (position < high[:, None])

    box_low, box_high = _last_box(text, region)
    boxed = box_low > 0
    # The word after the last hashes.
    hashes = last(matches(text, HASHES) & region)
    filled = region & ~blank(text) & (position >= (hashes + len(HASHES))[:, None]) & (hashes >= 0)[:, None]
    word_low = jnp.where(hashes >= 0, first(filled), end)
    word_high = jnp.minimum(first(blank(text) & (position >= word_low[:, None])), end)

    start = jnp.where(boxed, box_low, jnp.where(tagged, low, word_low))
    size = jnp.where(boxed, box_high, jnp.where(tagged, high, word_high)) - start
    return cut(text, start, size, SPAN_BYTES), jnp.maximum(size, 0), tagged


def _last_box(text: jax.Array, region: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the content of the complete box that opens last begins and ends, int32[B] each; 0 without one."""
    position = jnp.arange(text.shape[1])
    brace = (text == ord("{")).astype(jnp.int32) - (text == ord("}"))
    depth = jnp.cumsum(jnp.where(region, brace, 0), axis=1)
    # A box at depth d (after its brace) is complete where the depth falls below d further on.
    inside = len(BOX) - 1
    lowest = lax.cummin(depth, axis=1, reverse=True)
    complete = matches(text, BOX) & region & (ahead(lowest, inside) < ahead(depth, inside))
    opened = last(complete)
    level = take(depth, opened + inside)
    closed = first((depth < level[:, None]) & (position >= (opened + len(BOX))[:, None]))
    found = opened >= 0
    return jnp.where(found, opened + len(BOX), 0), jnp.where(found, closed, 0)


def read(span: jax.Array, size: jax.Array) -> Located:
    """The number that each answer states: span uint8[B, S], size int32[B] (longer ones state none)."""
    width = span.shape[1]
    position = jnp.arange(width)
    size = jnp.where(size <= width, size, 0)
    text, foreign = _rewrite(span, size)
    equals = last(text == ord("="))
    value = (position > equals[:, None]) & (text != 0)

    digit = value & is_digit(text)
    begin, final = first(digit), last(digit)
    lead = (take(text, begin - 1) == ord(".")) & (begin - 1 > equals)
    start, stop = begin - lead, final + 1
    number = (position >= start[:, None]) & (position < stop[:, None])
    dot, comma = number & (text == ord(".")), number & (text == ord(","))
    inner_digit = number & digit
    # Groups: three digits after each comma and no fourth, at most three and at least one before the first.
    triple = ahead(inner_digit, 1) & ahead(inner_digit, 2) & ahead(inner_digit, 3) & ~ahead(inner_digit, 4)
    grouped = jnp.all(~comma | (triple & (position < first(dot)[:, None])), axis=1)
    grouped &= ~jnp.any(comma, axis=1) | (first(comma) - start <= 3)
    formed = grouped & jnp.all(~number | inner_digit | dot | comma, axis=1) & (jnp.sum(dot, axis=1) <= 1)
    formed &= ~((take(text, start - 1) == ord(".")) & (start - 1 > equals) & lead)

    # The sign: the nearest byte before the number that is neither blank nor currency.
    solid = value & (text != ord(" ")) & (text != CURRENCY[0])
    before = last(solid & (position < start[:, None]))
    symbol = take(jnp.where(value, text, 0), before)
    minus, plus = symbol == ord("-"), symbol == ord("+")
    signed = minus | plus
    beside = take(jnp.where(value, text, 0), before - 1)
    further = take(jnp.where(value, text, 0), last(solid & (position < before[:, None])))
    attached = _among(LETTERS)[beside] | (beside == ord(")")) | (further == ord("-"))
    formed &= jnp.where(signed, ~attached, (symbol != ord("/")) & (symbol != SQUARE[0]))

    is_sign = signed[:, None] & (position == before[:, None])
    around = value & ~number & ~is_sign
    behind = jnp.pad(jnp.where(value, text, 0), ((0, 0), (1, 0)))[:, :width]
    allowed = _among(AROUND)[text] & ((text != SQUARE[0]) | _among(LETTERS)[behind])
    compared = take(text, equals - 1)
    unequal = (compared == ord("<")) | (compared == ord(">")) | (compared == ord("!"))
    valid = formed & (final >= 0) & jnp.all(~around | allowed, axis=1) & ~unequal & ~foreign
    return Located(text, valid, start, stop, minus, jnp.zeros_like(start))


def equal(number: Located, truth: dict[str, jax.Array]) -> jax.Array:
    """Whether each number is the true one, digit by digit: bool[B].

    Truth: `negative` int32[B] (0 or 1), `digits` int32[B, D] filled up with -1, `exponent` int32[B].
    """
    window, position = number.window, jnp.arange(number.window.shape[1])
    inside = (position >= number.start[:, None]) & (position < number.stop[:, None])
    digit = inside & is_digit(window)
    whole = jnp.sum(digit & (position < first(inside & (window == ord(".")))[:, None]), axis=1)
    rank = jnp.cumsum(digit, axis=1) - 1
    significant = digit & (window != ord("0"))
    begin, final = first(significant), last(significant)
    nonzero = final >= 0
    lead, trail = take(rank, begin), take(rank, final)
    kept = digit & (position >= begin[:, None]) & (position <= final[:, None])

    most = truth["digits"].shape[1]
    place = rank - lead[:, None]
    wanted = jnp.take_along_axis(truth["digits"], jnp.clip(place, 0, most - 1), axis=1)
    same = jnp.all(~kept | ((place < most) & (window.astype(jnp.int32) - ord("0") == wanted)), axis=1)
    count = jnp.where(nonzero, trail - lead + 1, 0)
    exponent = jnp.where(nonzero, whole - 1 - trail + number.shift, 0)
    return (
        number.valid
        & same
        & (count == jnp.sum(truth["digits"] >= 0, axis=1))
        & (exponent == truth["exponent"])
        & ((number.negative & nonzero) == (truth["negative"] > 0))
    )


def is_digit(text: jax.Array) -> jax.Array:
    """Whether each byte is an ASCII digit."""
    return (text >= ord("0")) & (text <= ord("9"))


def take(values: jax.Array, place: jax.Array) -> jax.Array:
    """The entry of [B, W] at each row's place int32[B]; 0 where the place is outside."""
    inside = (place >= 0) & (place < values.shape[1])
    entry = jnp.take_along_axis(values, jnp.where(inside, place, 0)[:, None], axis=1)[:, 0]
    return jnp.where(inside, entry, jnp.zeros_like(entry))


def ahead(values: jax.Array, count: int) -> jax.Array:
    """The entries of [B, W] `count` places further on; the last one of each row from its end on (false for bool)."""
    pad = ((0, 0), (0, count))
    padded = jnp.pad(values, pad) if values.dtype == bool else jnp.pad(values, pad, mode="edge")
    return padded[:, count : count + values.shape[1]]


def cut(text: jax.Array, start: jax.Array, size: jax.Array, width: int) -> jax.Array:
    """`size` int32[B] bytes of uint8[B, W] from `start` int32[B] on, as uint8[B, width] with zeros after them."""
    index = jnp.arange(width)
    source = jnp.clip(start[:, None] + index, 0, text.shape[1] - 1)
    return jnp.where(index < size[:, None], jnp.take_along_axis(text, source, axis=1), 0)


def _among(bytes_: frozenset[int]) -> jax.Array:
    """A table bool[256] of the bytes in a set."""
    return jnp.array(np.isin(np.arange(256), list(bytes_)))


def _rewrite(span: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Apply `REWRITES` and close the gaps: text uint8[B, S], zeros after it, and whether non-ASCII bytes are left.

    Bytes of the answer that would read as such zeros become others that no number holds.
    """
    width = span.shape[1]
    position = jnp.arange(width)
    plain = jnp.where(span == 0, _BAD, span)
    plain = jnp.where(position < size[:, None], plain, _DROPPED).astype(jnp.uint8)
    longest = max(len(form) for form, _ in REWRITES)
    columns = jnp.pad(plain.T, ((0, longest), (0, 0)))

    def step(index: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        symbols, covered = state
        window = lax.dynamic_slice_in_dim(columns, index, longest)
        symbol, length = window[0], jnp.ones_like(covered)
        for form, replacement in REWRITES:
            hit = jnp.all(window[: len(form)] == jnp.array(list(form), jnp.uint8)[:, None], axis=0)
            symbol = jnp.where(hit, replacement[0] if replacement else _DROPPED, symbol)
            length = jnp.where(hit, len(form), length)
        symbol = jnp.where(covered > 0, _DROPPED, symbol)
        return symbols.at[index].set(symbol), jnp.where(covered > 0, covered, length) - 1

    used = jnp.max(size)
    start = (plain.T, plain[:, 0].astype(jnp.int32) * 0)
    symbols = lax.fori_loop(0, used, step, start)[0].T
    kept = symbols != _DROPPED
    place = jnp.where(kept, jnp.cumsum(kept, axis=1) - 1, width)
    rows = jnp.arange(span.shape[0])[:, None]
    text = jnp.zeros_like(span).at[rows, place].set(symbols, mode="drop")
    return text, jnp.any(text >= 0x80, axis=1)
