"""Texts as byte arrays on the device: tokens to bytes, answer spans, patterns; the rules are in `text.py`."""

import jax
import jax.numpy as jnp

from dmpo_jax.tasks.text import BLANKS, CLOSE, END_TOKENS, OPEN, SPAN_BYTES, WRAPPERS


def to_bytes(
    tokens: jax.Array, table: jax.Array, table_length: jax.Array, end_ids: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Join the byte pieces of each row's tokens before its first end token.

    `tokens` int32[B, L], `table` uint8[V, W] with the piece of each id, `table_length` int32[V] (at most W)
    -> stream uint8[B, L*W], zero after the text, and its length int32[B].
    """
    batch, count = tokens.shape
    width = table.shape[1]
    ended = jnp.zeros(tokens.shape, bool)
    for end in end_ids:
        ended |= tokens == end
    alive = jnp.cumsum(ended, axis=1) == 0
    sizes = jnp.where(alive, table_length[tokens], 0)
    ends = jnp.cumsum(sizes, axis=1)
    starts = ends - sizes
    # A position belongs to the last token that starts at or before it; tokens without bytes share a start.
    rows = jnp.arange(batch)[:, None]
    begun = jnp.zeros((batch, count * width), jnp.int32).at[rows, starts].add(1, mode="drop")
    owner = jnp.cumsum(begun, axis=1) - 1
    position = jnp.arange(count * width)
    offset = position - jnp.take_along_axis(starts, owner, axis=1)
    piece = table[jnp.take_along_axis(tokens, owner, axis=1), jnp.minimum(offset, width - 1)]
    length = ends[:, -1]
    return jnp.where(position < length[:, None], piece, 0).astype(jnp.uint8), length


def matches(text: jax.Array, pattern: bytes) -> jax.Array:
    """Whether the pattern starts at each position of `text` uint8[B, W] -> bool[B, W]."""
    width = text.shape[1]
    padded = jnp.pad(text, ((0, 0), (0, len(pattern))))
    hit = text == pattern[0]
    for index in range(1, len(pattern)):
        hit &= padded[:, index : index + width] == pattern[index]
    return hit


def first(hit: jax.Array) -> jax.Array:
    """Position of the first true entry of bool[B, W] -> int32[B]; W where there is none."""
    return jnp.min(jnp.where(hit, jnp.arange(hit.shape[1]), hit.shape[1]), axis=1)


def last(hit: jax.Array) -> jax.Array:
    """Position of the last true entry of bool[B, W] -> int32[B]; -1 where there is none."""
    return jnp.max(jnp.where(hit, jnp.arange(hit.shape[1]), -1), axis=1)


def blank(text: jax.Array) -> jax.Array:
    """Whether each byte is an ASCII blank."""
    hit = text == BLANKS[0]
    for byte in BLANKS[1:]:
        hit |= text == byte
    return hit


def answer_span(stream: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The last complete answer before the first written-out end token, moved to the front.

    `stream` uint8[B, W], `length` int32[B] -> span uint8[B, SPAN_BYTES] and its length int32[B]: 0 where
    there is no answer, the true length where it is longer than the span holds (such answers are not graded).
    """
    position = jnp.arange(stream.shape[1])
    text = jnp.where(position < length[:, None], stream, 0)
    end = length
    for token in END_TOKENS:
        end = jnp.minimum(end, first(matches(text, token)))
    text = jnp.where(position < end[:, None], text, 0)
    closes = matches(text, CLOSE)
    opened = last(matches(text, OPEN) & (position < last(closes)[:, None]))
    start = opened + len(OPEN)
    stop = first(closes & (position >= start[:, None]))
    size = jnp.where(opened >= 0, stop - start, 0)
    index = jnp.arange(SPAN_BYTES)
    source = jnp.minimum(start[:, None] + index, stream.shape[1] - 1)
    span = jnp.take_along_axis(text, source, axis=1)
    return jnp.where(index < size[:, None], span, 0), size


def unwrap(span: jax.Array, size: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Strip blanks and whole-answer wrappers: span uint8[B, S], size int32[B] -> (span, inside bool[B, S]).

    Bytes outside the answer become 0; an answer longer than the span has no inside.
    """
    width = span.shape[1]
    position = jnp.arange(width)
    filled = ~blank(span)
    size = jnp.where(size <= width, size, 0)

    def strip(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept = filled & (position >= low[:, None]) & (position < high[:, None])
        return first(kept), last(kept) + 1

    def stands_at(start: jax.Array, pattern: bytes) -> jax.Array:
        index = jnp.clip(start[:, None] + jnp.arange(len(pattern)), 0, width - 1)
        return jnp.all(jnp.take_along_axis(span, index, axis=1) == jnp.array(list(pattern), jnp.uint8), axis=1)

    low, high = strip(size * 0, size)
    for left, right in WRAPPERS:
        fits = high - low >= len(left) + len(right)
        wrapped = fits & stands_at(low, left) & stands_at(high - len(right), right)
        stripped = strip(low + len(left), high - len(right))
        low, high = jnp.where(wrapped, stripped[0], low), jnp.where(wrapped, stripped[1], high)
    inside = (position >= low[:, None]) & (position < high[:, None])
    return jnp.where(inside, span, 0), inside
