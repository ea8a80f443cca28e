"""Which masked positions of a block to commit at a denoising step: pure array rules."""

import jax
import jax.numpy as jnp


def transfer_schedule(masked: int, steps: int) -> list[int]:
    """Tokens to commit at each of `steps` steps: masked // steps each, one more in the first masked % steps."""
    return [masked // steps + (step < masked % steps) for step in range(steps)]


def top_ranked(score: jax.Array, allowed: jax.Array, count: jax.Array) -> jax.Array:
    """bool `[B, W]`: the `count` best-scored allowed positions of each row; ties go to the lowest index."""
    score = jnp.where(allowed, score, -jnp.inf)
    order = jnp.argsort(-score, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    return (rank < count) & allowed


def propose(logits: jax.Array, keys: jax.Array, temperature: float) -> jax.Array:
    """Tokens `int32[B, W]` drawn from softmax(logits / temperature), `logits f32[B, W, V]`, one key per row.

    Temperature 0 is argmax. The noise is Gumbel in its high-accuracy form: the default one clips near 16,
    which a vocabulary of 126,464 exceeds once in seventy draws.
    """
    if temperature > 0:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:], jnp.float32, mode="high"))(keys)
        logits = logits + temperature * noise
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
