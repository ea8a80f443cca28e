"""The states that decoding passed through, rebuilt from the final completion and the steps that committed its tokens.

When a step began, the decoder saw what earlier steps had committed and a mask everywhere else. A *row* of a completion is
such a state with the tokens which its step committed, the ones it scores: every committed token is scored by exactly one
row. With shrinkage s, s steps in a row are merged into the state of the first (TraceRL, arXiv 2509.06949).

For a model that attends to all, row k is the completion's k-th step. For one with `block_size` (SDAR), row k advances
every block by that block's own k-th step, in the doubled form of `diffusion.forward.doubled_hidden`; so a completion has
no more rows than a block has steps. A last block that reaches beyond the completion is not scored there: what was
decoded past the end is not kept, so its states cannot be rebuilt.

States are those that were decoded for a sampler without an approximate cache that revises nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import Prompts, repeat
from dmpo_jax.diffusion.forward import completion_hidden, doubled_hidden, rows_at
from dmpo_jax.diffusion.masking import row_keys
from dmpo_jax.diffusion.proposal import forbid
from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.model.denoiser import head_logits
from dmpo_jax.model.parameters import ModelConfig
from dmpo_jax.objectives.objective import Context, Rollout
from dmpo_jax.parallel import mesh as meshes
from dmpo_jax.parallel.mesh import by_group, by_row, per_shard

COUNTED = ("all", "live", "text")


class Traced(NamedTuple):
    """Of every completion token, `[P, N, L]`: `row int32` that scores it (-1: never committed), `block int32` it stands in
    (0 for a model that attends to all), and whether it is `counted`."""

    row: jax.Array
    block: jax.Array
    counted: jax.Array


class Rows(NamedTuple):
    """R rows of every completion, leaves `[..., R]` or `[..., R, W]` with room for W scored tokens.

    `number int32` of the row, `weight f32` (0: an empty one); `position int32` of the scored tokens, `token int32`, and
    `scored bool`, where there is one. Leading axes are `[P, N]` or `[B]`, B = P * N.
    """

    number: jax.Array
    weight: jax.Array
    position: jax.Array
    token: jax.Array
    scored: jax.Array


def check_counted(counted: str) -> None:
    """Raises UserError unless `objective.tokens` names a rule of `trace`."""
    if counted not in COUNTED:
        raise UserError(f'objective.tokens = "{counted}": expected one of {", ".join(COUNTED)}')


def check_rows(shrink: int, rows: int) -> None:
    """Raises UserError on a shrinkage or a number of rows out of range."""
    if not 1 <= shrink <= 100_000:
        raise UserError(f"objective.shrink = {shrink}: expected 1 (every step by itself) to 100,000 steps")
    if not 0 <= rows <= 100_000:
        raise UserError(f"objective.rows = {rows}: expected 0 (all) to 100,000 rows a completion")


def limits(length: int, sampler: SamplerConfig, model: ModelConfig, shrink: int) -> tuple[int, int]:
    """(K, W): the most rows a completion can have, and the most tokens that one row can score."""
    block = model.block_size or sampler.block_length or length
    scheduled = sampler.commit in ("schedule", "dynamic") and sampler.algorithm != "wino"
    schedule = sampler.schedule_of(length) if scheduled else [1] * block
    fixed = scheduled and sampler.commit == "schedule" and sampler.algorithm != "origin"
    steps, tokens = min(len(schedule), block), max(schedule) if fixed else block
    blocks = length // block
    if model.block_size:
        return -(-steps // shrink), min(tokens * shrink, block) * blocks
    return -(-steps * blocks // shrink), min(tokens * shrink, length)


def row_numbers(step: jax.Array, block: jax.Array, blocks: int, shrink: int) -> jax.Array:
    """`int32[B, L]`: the row that scores each token, from `step int32[B, L]` (-1: none) and its `block`, below `blocks`.

    The rank of the token's step among the distinct steps of its block, in merged runs of `shrink`.
    """
    order = jnp.argsort(step, axis=1, stable=True)
    ordered = jnp.take_along_axis(step, order, axis=1)
    new = jnp.concatenate([ordered[:, :1] >= 0, ordered[:, 1:] != ordered[:, :-1]], axis=1)
    rank = jnp.take_along_axis(jnp.cumsum(new, axis=1) - 1, jnp.argsort(order, axis=1), axis=1)
    batch = jnp.arange(step.shape[0])[:, None]
    last = jnp.full((step.shape[0], blocks), step.shape[1], rank.dtype)
    first = last.at[batch, block].min(jnp.where(step >= 0, rank, step.shape[1]))
    return jnp.where(step >= 0, (rank - first[batch, block]) // shrink, -1).astype(jnp.int32)


def trace(rollout: Rollout, counted: str, shrink: int, context: Context) -> Traced:
    """The rows of a rollout's completions.

    counted, of the tokens that some step committed: `all`; `live`, up to the first end-of-sequence token; `text`, those
    of steps up to the one of the last token that is not the end of the sequence (as AGRPO's code counts).
    """
    groups, size, length = rollout.completion.shape
    block_size = context.model.block_size

    def on_shard(_, rows):
        prompt_length, completion, step, live = rows
        block, inside = jnp.zeros_like(step), step >= 0
        if block_size:
            after = prompt_length % block_size
            block = (after[:, None] + jnp.arange(length, dtype=jnp.int32)) // block_size
            inside &= (block + 1) * block_size <= after[:, None] + length
        if counted == "live":
            inside &= live
        if counted == "text":
            inside &= step <= jnp.max(jnp.where(completion != context.eos_id, step, -1), axis=1, keepdims=True)
        blocks = length // block_size + 1 if block_size else 1
        return Traced(row_numbers(step, block, blocks, shrink), block, inside)

    rows = (
        repeat(rollout.prompts.length, size),
        by_row(rollout.completion),
        by_row(rollout.step),
        by_row(rollout.live),
    )
    return jax.tree.map(lambda x: by_group(x, groups), per_shard(on_shard, (), rows))


def occupied(traced: Traced, rows: int) -> jax.Array:
    """bool `[..., K]`: which of a completion's `rows` K rows score a counted token."""
    of_row = traced.row[..., None, :] == jnp.arange(rows, dtype=jnp.int32)[:, None]
    return jnp.any(of_row & traced.counted[..., None, :], axis=-1)


def pick(traced: Traced, rollout: Rollout, number: jax.Array, weight: jax.Array, width: int) -> Rows:
    """Rows `[P, N, R]` of given number and weight, with what they score."""
    groups = traced.row.shape[0]

    def on_shard(_, rows):
        row, counted, completion, number, weight = rows
        wanted = (row[:, None] == number[..., None]) & counted[:, None]
        scored, position = jax.lax.top_k(wanted.astype(jnp.int32), width)
        token = jnp.take_along_axis(completion[:, None], position, axis=2)
        return Rows(number, weight, position, token, scored > 0)

    rows = tuple(map(by_row, (traced.row, traced.counted, rollout.completion, number, weight)))
    return jax.tree.map(lambda x: by_group(x, groups), per_shard(on_shard, (), rows))


def select(traced: Traced, rollout: Rollout, key: jax.Array, rows: int, most: int, width: int) -> Rows:
    """`rows` of each completion's rows that score something (0: all of up to `most`), weighted to stand for all of them.

    Of K rows, R are drawn systematically, the floor of (u + j) K / R for j < R with one u ~ U(0, 1): each has probability
    R / K and weight K / R, so a weighted sum is unbiased for that over all rows. Fewer than R are all taken.
    """
    size = min(rows or most, most)

    def on_shard(key, local):
        numbers, held = local
        count = jnp.sum(held, axis=1, keepdims=True)
        place = jnp.arange(size, dtype=jnp.int32)
        uniform = jax.vmap(lambda k: jax.random.uniform(k, (1,)))(row_keys(key, numbers))
        stride = count / size
        drawn = jnp.clip(jnp.floor((uniform + place) * stride).astype(jnp.int32), 0, count - 1)
        chosen = jnp.where(count > size, drawn, jnp.minimum(place, most - 1))
        order = jnp.argsort(~held, axis=1, stable=True)
        number = jnp.take_along_axis(order.astype(jnp.int32), chosen, axis=1)
        return number, jnp.where(place < count, jnp.maximum(stride, 1.0), 0.0)

    groups = traced.row.shape[0]
    held = occupied(traced, most)
    number, weight = per_shard(on_shard, key, (by_row(rollout.row), by_row(held)))
    return pick(traced, rollout, by_group(number, groups), by_group(weight, groups), width)


class Texts(NamedTuple):
    """What rows are rebuilt from, B = P * N: prompts, `completion` and its tokens' `row`, `int32[B, L]`."""

    prompts: Prompts
    completion: jax.Array
    row: jax.Array


def texts_of(rollout: Rollout, traced: Traced) -> Texts:
    """The completions of a rollout, one after another."""
    size = rollout.completion.shape[1]
    return Texts(repeat(rollout.prompts, size), by_row(rollout.completion), by_row(traced.row))


def row_hidden(params: dict, texts: Texts, rows: Rows, mask_id: int, config: ModelConfig) -> jax.Array:
    """Hidden states `[B, W, D]` that score the tokens of one row (leaves `[B]` and `[B, W]`) of every completion."""
    hidden = (texts.row >= rows.number[:, None]) | (texts.row < 0)
    shown = jnp.where(hidden, mask_id, texts.completion)
    if config.block_size:
        states = doubled_hidden(params, shown, texts.completion, texts.prompts, mask_id, config)
    else:
        states = completion_hidden(params, shown, texts.prompts, config)
    return rows_at(states, rows.position)


def over_rows(function: Callable[[Rows], jax.Array], rows: Rows):
    """`function` of one row (leaves `[B]`, `[B, W]`) for every one of `[P, N, R]`; results stacked as `[P, N, R, ...]`.

    One row's activations are alive at a time, in the backward pass too.
    """
    groups, _, count = rows.number.shape
    split = lambda x: jnp.moveaxis(by_row(x), 1, 0)  # noqa: E731
    step = jax.checkpoint(function) if count > 1 else function
    _, out = jax.lax.scan(lambda _, row: (None, step(row)), None, jax.tree.map(split, rows))
    return jax.tree.map(lambda x: by_group(jnp.moveaxis(x, 0, 1), groups), out)


def over_positions(function: Callable, arrays, chunk: int):
    """`function` of arrays `[B, W, ...]`, at most `chunk` positions at a time; its leaves `[B, c]` put together again.

    With the vocabulary reached inside `function`, and again in the backward pass, no `[B, W, V]` array exists.
    """
    width = jax.tree.leaves(arrays)[0].shape[1]
    parts = -(-width // chunk)
    size = -(-width // parts)

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, parts * size - width), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], parts, size, *x.shape[2:]), 1, 0)

    out = jax.lax.map(jax.checkpoint(function), jax.tree.map(split, arrays))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :width], out)


def proposable(params: dict, hidden: jax.Array, context: Context, config: ModelConfig) -> jax.Array:
    """fp32 logits `[B, c, V]` with what the sampler never proposes at minus infinity."""
    logits = forbid(head_logits(params, hidden, config), context.mask_id)
    return forbid(logits, context.eos_id) if context.sampler.eos == "forbid" else logits


def whole_vocabulary(logits: jax.Array) -> jax.Array:
    """Logits `[B, c, V]` whose vocabulary is on one device, as sorting needs it."""
    where = meshes.activation(("rows", None, None), logits.shape)
    return logits if where is None else jax.reshard(logits, where)


def chosen(values: jax.Array, token: jax.Array) -> jax.Array:
    """Of `[..., V]`, the value at `token int32[...]`."""
    return jnp.sum(jnp.where(is_token(values, token), values, 0.0), axis=-1)


def is_token(values: jax.Array, token: jax.Array) -> jax.Array:
    """bool `[..., V]`: True at `token`."""
    return jax.lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1) == token[..., None]
