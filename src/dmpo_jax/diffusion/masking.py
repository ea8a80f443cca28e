"""Mask laws: which completion tokens are hidden from the denoiser, and the weight that makes an ELBO of it."""

import dataclasses

import jax
import jax.numpy as jnp

LAWS = ("exact", "published")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Masks:
    """`masked bool[B, R, L]` and `coefficient f32[B, R]`, the weight of each replicate's summed log-probability.

    Paired replicates are antithetic: number r + R/2 hides exactly the live positions that number r shows, so both share
    one evaluation of the head. Replicates that are not paired may hide anything.
    """

    masked: jax.Array
    coefficient: jax.Array
    paired: bool = dataclasses.field(default=True, metadata={"static": True})


def coefficients(masked: jax.Array, live: jax.Array, law: str) -> jax.Array:
    """Weight `f32[B, R]` of masks `bool[B, R, L]` over live positions `bool[B, L]`; 0 where nothing is masked.

    exact: (n + 1) / m, with which a Bernoulli mask averaged with its complement is unbiased for the ELBO.
    published: n / m, as the official DMPO code weighs it. n counts live positions, m masked ones.
    """
    count = jnp.sum(masked, axis=-1).astype(jnp.float32)
    live_count = jnp.sum(live, axis=-1, keepdims=True).astype(jnp.float32)
    total = live_count + 1.0 if law == "exact" else live_count
    return jnp.where(count > 0, total / jnp.maximum(count, 1.0), 0.0)


def masks_from_uniforms(level: jax.Array, position: jax.Array, live: jax.Array, law: str) -> Masks:
    """Antithetic masks from uniforms `level f32[B, R/2]` and `position f32[B, R/2, L]`.

    exact: a position is masked with probability lambda ~ U(0, 1). published: lambda = 0.1 + 0.9 u.
    """
    rate = level if law == "exact" else 0.1 + 0.9 * level
    first = (position < rate[..., None]) & live[:, None]
    masked = jnp.concatenate([first, ~first & live[:, None]], axis=1)
    return Masks(masked, coefficients(masked, live, law))


def draw_masks(keys: jax.Array, live: jax.Array, replicates: int, law: str) -> Masks:
    """Antithetic masks of rows with their own keys `[B]`; `replicates` R is even.

    A row's masks depend on its key alone, so they are the same on every mesh and in every batch.
    """
    half, length = replicates // 2, live.shape[-1]

    def row(key):
        level_key, position_key = jax.random.split(key)
        return jax.random.uniform(level_key, (half,)), jax.random.uniform(position_key, (half, length))

    level, position = jax.vmap(row)(keys)
    return masks_from_uniforms(level, position, live, law)


def draw_counted(keys: jax.Array, count: jax.Array, live: jax.Array) -> jax.Array:
    """`bool[B, R, L]`: exactly `count int32[B, R]` of a row's live positions `bool[B, L]`, uniformly at random."""

    def row(key, count, live):
        draws = jax.random.uniform(key, (count.shape[0], live.shape[0]))
        order = jnp.argsort(jnp.where(live, draws, 2.0), axis=-1)
        rank = jnp.argsort(order, axis=-1)
        return (rank < count[:, None]) & live

    return jax.vmap(row)(keys, count, live)


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    """One key per global row number `int32[B]`."""
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
