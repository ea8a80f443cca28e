"""Attention over a right-padded key axis: to all keys, or to those of the same and earlier blocks."""

import jax
import jax.numpy as jnp

from dmpo_jax.parallel import mesh as meshes


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    blocks: tuple[jax.Array, jax.Array] | None = None,
    visible: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention of every query over the first `lengths` keys of its row.

    q `[B, H, Q, E]`, k and v `[B, K, S, E]` with H a multiple of K (query head i reads key head i // (H / K)),
    lengths `int32[B]`. `blocks` holds the block numbers `int32[B, Q]` of queries and `int32[B, S]` of keys; a query
    then sees no later block. `visible bool[Q or 1, S]` hides more keys, alike in every row. Returns `[B, H, Q, E]`.
    Scores and softmax are fp32; probabilities are cast to v's dtype and the second product accumulates in fp32.
    """
    heads, size = q.shape[1], q.shape[3]
    kv_heads, keys = k.shape[1], k.shape[2]
    valid = jnp.arange(keys) < lengths[:, None, None, None]  # [B, 1, 1, S]
    if blocks is not None:
        valid &= blocks[1][:, None, None, :] <= blocks[0][:, None, :, None]
    if visible is not None:
        valid &= visible
    if kv_heads != heads:
        where = meshes.activation(("rows", "heads", None, None), (k.shape[0], heads, *k.shape[2:]))
        k, v = (jnp.repeat(x, heads // kv_heads, axis=1, out_sharding=where) for x in (k, v))
    # fp32: half of the scale on each side, in PyTorch's order; in bf16 that would be two roundings more.
    sides, after = (size**-0.25, 1.0) if q.dtype == jnp.float32 else (1.0, size**-0.5)
    scores = jnp.einsum("bhqe,bhse->bhqs", q * sides, k * sides, preferred_element_type=jnp.float32)
    scores = jnp.where(valid, scores * after, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bhqs,bhse->bhqe", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)
