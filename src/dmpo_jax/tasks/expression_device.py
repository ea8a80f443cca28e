"""The expression language of `expression.py` on the device, for all rows in one loop over the bytes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dmpo_jax.tasks.bytes import blank, first, last
from dmpo_jax.tasks.expression import MAX_DEPTH, MAX_DIGITS, REWRITES

_SPACE = ord(" ")
_NUMBER = ord("n")  # stands at the last digit of each number


class Parsed(NamedTuple):
    """Expressions of B rows; where `valid` is false the other fields mean nothing.

    `numerator`, `denominator`, `claim` int32[B]; `valid`, `undefined` (division by zero), `has_claim`
    bool[B]; `is_number` bool[B, S] marks where a number of the expression ends and `number` int32[B, S] holds
    it.
    """

    valid: jax.Array
    undefined: jax.Array
    numerator: jax.Array
    denominator: jax.Array
    has_claim: jax.Array
    claim: jax.Array
    is_number: jax.Array
    number: jax.Array


def parse(text: jax.Array, inside: jax.Array) -> Parsed:
    """Parse `text` uint8[B, S], of which the bytes marked by `inside` bool[B, S] count (the others are 0).

    The value is exact where 2^(m-1) times the product of the m numbers (zeros as ones) stays below 2^31.
    """
    symbols, number, overlong = _symbols(text, inside)
    position = jnp.arange(text.shape[1])
    is_equals = symbols == ord("=")
    equals = first(is_equals)[:, None]
    tail = jnp.where(position > equals, symbols, _SPACE)
    claim, claim_valid = _claim(tail, number)
    body = jnp.where(position < equals, symbols, _SPACE)
    valid, undefined, numerator, denominator = _evaluate(body, number)
    has_claim = jnp.any(is_equals, axis=1)
    return Parsed(
        valid & ~overlong & (claim_valid | ~has_claim),
        undefined,
        numerator,
        denominator,
        has_claim,
        claim,
        body == _NUMBER,
        number,
    )


def _symbols(text: jax.Array, inside: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rewrite to one symbol a byte, with each number at its last digit.

    -> symbols uint8[B, S], numbers int32[B, S], overlong bool[B] where a number has too many digits.
    """
    symbols = _rewrite(text, inside)
    digit = (text >= ord("0")) & (text <= ord("9"))
    padded = jnp.pad(
        jnp.where(digit, text.astype(jnp.int32) - ord("0"), -1), ((0, 0), (MAX_DIGITS, 0)), constant_values=-1
    )
    run, number = digit, jnp.zeros(text.shape, jnp.int32)
    for back in range(MAX_DIGITS + 1):
        earlier = padded[:, MAX_DIGITS - back : MAX_DIGITS - back + text.shape[1]]
        run &= earlier >= 0
        if back < MAX_DIGITS:
            number += jnp.where(run, earlier * 10**back, 0)
    overlong = jnp.any(run, axis=1)
    ends = digit & ~jnp.pad(digit, ((0, 0), (0, 1)))[:, 1:]
    symbols = jnp.where(ends, _NUMBER, jnp.where(digit, _SPACE, symbols))
    return symbols, number, overlong


def _rewrite(text: jax.Array, inside: jax.Array) -> jax.Array:
    """Put the symbol of each form in `REWRITES` at its first byte, and spaces at its others and outside."""
    plain = jnp.where(blank(text) | ~inside, _SPACE, text)
    # A letter of the text must not be taken for the mark of a number's end.
    plain = jnp.where(plain == _NUMBER, 0, plain).T
    longest = max(len(form) for form, _ in REWRITES)
    columns = jnp.pad(text.T, ((0, longest - 1), (0, 0)))

    def step(index: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        symbols, covered = state
        window = lax.dynamic_slice_in_dim(columns, index, longest)
        symbol, size = symbols[index], jnp.ones_like(covered)
        for form, replacement in REWRITES:
            hit = jnp.all(window[: len(form)] == jnp.array(list(form), jnp.uint8)[:, None], axis=0)
            symbol = jnp.where(hit, replacement[0], symbol)
            size = jnp.where(hit, len(form), size)
        symbol = jnp.where(covered > 0, _SPACE, symbol)
        return symbols.at[index].set(symbol), jnp.maximum(covered, size) - 1

    # A loop, since XLA would fuse the same comparisons into each of their uses and repeat them there.
    used = jnp.max(last(inside)) + 1
    return lax.fori_loop(0, used, step, (plain, plain[0].astype(jnp.int32) * 0))[0].T


def _claim(tail: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The signed integer that is all of `tail` uint8[B, S]: claim int32[B], valid bool[B]."""
    is_number, is_minus = tail == _NUMBER, tail == ord("-")
    minus = jnp.any(is_minus, axis=1)
    value = jnp.sum(jnp.where(is_number, number, 0), axis=1)
    valid = (
        jnp.all(is_number | is_minus | (tail == _SPACE), axis=1)
        & (jnp.sum(is_number, axis=1) == 1)
        & (jnp.sum(is_minus, axis=1) <= 1)
        & (last(is_minus) < first(is_number))
    )
    return jnp.where(minus, -value, value), valid


def _evaluate(symbols: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Run over `symbols` uint8[B, S]: valid, undefined bool[B], numerator, denominator int32[B]."""
    zero = number[:, 0] * 0
    one = zero + 1
    no = zero > 0
    levels = jnp.arange(MAX_DEPTH)[:, None]

    # A level of brackets, int32[5, B]: numerator and denominator of the sum, those of the term, divide.
    fresh = jnp.stack([zero, one, one, one, zero])

    columns, values = symbols.T, number.T

    def step(index: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        level, stack, depth, operand_next, signed, bad, undefined = state
        symbol, value = columns[index], values[index]
        total_n = level[0] * level[3] + level[2] * level[1]
        total_d = level[1] * level[3]
        saved = jnp.sum(jnp.where(levels == depth - 1, stack, 0), axis=1)

        closes = (symbol == ord(")")) & ~operand_next & (depth > 0)
        factor = (symbol == _NUMBER) & operand_next | closes
        opens = (symbol == ord("(")) & operand_next & (depth < MAX_DEPTH)
        minus = symbol == ord("-")
        negates = minus & operand_next & ~signed
        adds = ((symbol == ord("+")) | minus) & ~operand_next
        multiplies = ((symbol == ord("*")) | (symbol == ord("/"))) & ~operand_next
        known = factor | opens | negates | adds | multiplies | (symbol == _SPACE)

        base = jnp.where(closes, saved, level)
        factor_n, factor_d = jnp.where(closes, total_n, value), jnp.where(closes, total_d, 1)
        divide = base[4] > 0
        taken = jnp.stack(
            [
                base[0],
                base[1],
                base[2] * jnp.where(divide, factor_d, factor_n),
                base[3] * jnp.where(divide, factor_n, factor_d),
                zero,
            ]
        )
        negated = jnp.stack([level[0], level[1], -level[2], level[3], level[4]])
        added = jnp.stack([total_n, total_d, jnp.where(minus, -1, 1), one, zero])
        multiplied = jnp.stack([level[0], level[1], level[2], level[3], (symbol == ord("/")).astype(jnp.int32)])

        stack = jnp.where(opens & (levels == depth), level[:, None], stack)
        undefined |= factor & divide & (factor_n == 0)
        for chosen, new in ((factor, taken), (opens, fresh), (negates, negated), (adds, added)):
            level = jnp.where(chosen, new, level)
        level = jnp.where(multiplies, multiplied, level)
        depth = depth + opens - closes
        operand_next = (operand_next & ~factor) | adds | multiplies
        signed = (signed & ~(opens | adds | multiplies)) | negates
        return level, stack, depth, operand_next, signed, bad | ~known, undefined

    stack = jnp.zeros((5, MAX_DEPTH, 1), jnp.int32) + zero
    state = (fresh, stack, zero, ~no, no, no, no)
    # Rows end in spaces, which change nothing: the loop stops after the longest expression of the batch.
    used = jnp.max(last(symbols != _SPACE)) + 1
    level, _, depth, operand_next, _, bad, undefined = lax.fori_loop(0, used, step, state)
    numerator = level[0] * level[3] + level[2] * level[1]
    return ~bad & ~operand_next & (depth == 0), undefined, numerator, level[1] * level[3]
