"""The array a denoiser reads: the completion first, then the right-padded prompt.

Attention is not causal, so slots may stand in any order as long as positions say how to read them. With the completion
in front, padding is a length instead of a mask and every slice of the completion is static.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dmpo_jax.parallel.mesh import by_row


class Prompts(NamedTuple):
    """Rows to complete: `tokens int32[B, T]` right-padded, `length int32[B]`."""

    tokens: jax.Array
    length: jax.Array


class Canvas(NamedTuple):
    """`tokens`, `positions` `int32[B, L + T]` and `lengths int32[B]` (completion plus prompt, without padding)."""

    tokens: jax.Array
    positions: jax.Array
    lengths: jax.Array


def make_canvas(completion: jax.Array, prompts: Prompts, attend_to_padding: bool = False) -> Canvas:
    """Canvas of completions `int32[B, L]` and their prompts; the completion reads right after its prompt.

    With `attend_to_padding`, pads are text that reads before the prompt, as in a batch padded on the left.
    """
    length, width = completion.shape[1], prompts.tokens.shape[1]
    after_prompt = prompts.length[:, None] + jnp.arange(length, dtype=jnp.int32)
    prompt_positions = jnp.zeros_like(prompts.tokens) + jnp.arange(width, dtype=jnp.int32)
    lengths = prompts.length + length
    if attend_to_padding:
        pads = (width - prompts.length)[:, None]
        after_prompt, prompt_positions = after_prompt + pads, (prompt_positions + pads) % width
        lengths = jnp.zeros_like(lengths) + (length + width)
    return Canvas(
        jnp.concatenate([completion, prompts.tokens], axis=1),
        jnp.concatenate([after_prompt, prompt_positions], axis=1),
        lengths,
    )


def repeat(tree, count: int):
    """Every row of every leaf `count` times, prompt-major: a group stays together, so a shard holds whole groups."""
    return jax.tree.map(lambda x: by_row(jnp.broadcast_to(x[:, None], (x.shape[0], count, *x.shape[1:]))), tree)


def live_positions(completion: jax.Array, eos_id: int) -> jax.Array:
    """bool `[B, L]`: up to and including the first end-of-sequence token of completions `int32[B, L]`."""
    ended = jnp.cumsum(completion == eos_id, axis=1) > 0
    return ~jnp.pad(ended[:, :-1], ((0, 0), (1, 0)))
