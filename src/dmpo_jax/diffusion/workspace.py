"""Where a completion is decoded: the slots that the block loop fills, in front of the prompt."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import Prompts, make_canvas
from dmpo_jax.model.parameters import ModelConfig


class Workspace(NamedTuple):
    """The canvas of a decoder; W working slots, then the prompt.

    The first `lead int32[B]` working slots hold the prompt's last tokens: the one whose output scores the first
    completion token (under `logits_shift`), or those that share their block with it (under `block_size`). So blocks are
    the same slots in every row.
    tokens `int32[B, W]`, masked `bool[B, W]`; the prompts without what leads; positions `int32[B, W + T]`, lengths
    `int32[B]` of the canvas.
    """

    lead: jax.Array
    tokens: jax.Array
    masked: jax.Array
    prompts: Prompts
    positions: jax.Array
    lengths: jax.Array


def lay_out(prompts: Prompts, length: int, block: int, mask_id: int, config: ModelConfig) -> Workspace:
    """An all-masked workspace for completions of `length` tokens in blocks of `block`.

    Under `block_size`, a last block that reaches beyond the completion is decoded whole (SDAR).
    """
    batch = prompts.tokens.shape[0]
    lead, width, end = jnp.zeros((batch,), jnp.int32), length, length
    if config.block_size:
        lead = prompts.length % block
        end = (lead[:, None] + length + block - 1) // block * block
        width = length + block
    elif config.logits_shift:
        lead, width, end = lead + 1, length + 1, length + 1
    kept = Prompts(prompts.tokens, jnp.maximum(prompts.length - lead, 0))
    slot = jnp.arange(width, dtype=jnp.int32)[None]
    masked = (slot >= lead[:, None]) & (slot < end)
    source = jnp.minimum(kept.length[:, None] + slot, prompts.tokens.shape[1] - 1)
    leading = jnp.take_along_axis(prompts.tokens, source, axis=1)
    tokens = jnp.where(slot < lead[:, None], leading, mask_id)
    canvas = make_canvas(tokens, kept, config.attend_to_padding)
    return Workspace(lead, tokens, masked, kept, canvas.positions, canvas.lengths)


def completion_of(space: Workspace, values: jax.Array, length: int) -> jax.Array:
    """The completion's part `[B, L]` of per-slot values `[B, W]`, in reading order."""
    if values.shape[1] == length:
        return values
    return jnp.take_along_axis(values, space.lead[:, None] + jnp.arange(length, dtype=jnp.int32), axis=1)


def doubled(space: Workspace, mask_id: int) -> Workspace:
    """The rows again below themselves with their prompt masked: what classifier-free guidance compares with."""
    lead = jnp.arange(space.tokens.shape[1]) < space.lead[:, None]
    other = space._replace(
        tokens=jnp.where(lead, mask_id, space.tokens),
        prompts=space.prompts._replace(tokens=jnp.full_like(space.prompts.tokens, mask_id)),
    )
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), space, other)
