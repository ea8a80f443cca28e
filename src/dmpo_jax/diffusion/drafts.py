"""Draft and verify: several scheduled steps for one forward, with the text that one step at a time gives (FreeDave)."""

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.selection import ranks


def draft(score: jax.Array, allowed: jax.Array, counts: jax.Array) -> jax.Array:
    """What D drafts add to a block, `bool[B, D, W]`: draft d the best-scored positions of steps 0..d.

    score `f32[B, W]`, allowed `bool[B, W]`, counts `int32[B, D]` of each step. Draft 0 is the true next state.
    """
    rank = ranks(score, allowed)[:, None]
    return (rank < jnp.cumsum(counts, axis=1)[..., None]) & allowed[:, None]


def verified(
    added: jax.Array, token: jax.Array, allowed: jax.Array, counts: jax.Array, scores: jax.Array, tokens: jax.Array
) -> jax.Array:
    """How many drafts are what the sampler would have reached step by step, `int32[B]`, at least 1.

    added `bool[B, D, W]` and counts `int32[B, D]` as in `draft`, token `int32[B, W]` what drafts add; scores
    `f32[B, D, W]` and tokens `int32[B, D, W]` what a forward says about each draft. Draft d + 1 stands if d does and it
    adds the positions and tokens which d's own forward asks for.
    """
    batch, depth, width = added.shape
    left = allowed[:, None] & ~added
    flat = lambda x: x.reshape(batch * depth, width)  # noqa: E731
    rank = ranks(flat(scores), flat(left)).reshape(added.shape)
    wanted = (rank[:, :-1] < counts[:, 1:, None]) & left[:, :-1]
    gained = added[:, 1:] & ~added[:, :-1]
    same = (wanted == gained) & (~gained | (tokens[:, :-1] == token[:, None]))
    stands = jnp.all(same, axis=-1) & jnp.any(gained, axis=-1)
    return 1 + jnp.sum(jnp.cumprod(stands, axis=1), axis=1)
