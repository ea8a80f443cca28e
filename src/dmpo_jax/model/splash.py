"""Splash attention, JAX's Pallas kernel for TPU: it holds one tile of scores at a time, forward and backward."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

LANES = 128  # a tile's sides are multiples of this
TILES = (512, 256, LANES)


def obstacle(platform: str) -> str:
    """Why the kernel cannot run in a program for this platform, or nothing."""
    if platform in ("tpu", "cpu"):
        return ""
    return f"the kernel is for TPU (on a CPU it is interpreted), but this program is for {platform}"


def attention(interpret: bool) -> Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]:
    """The kernel as a function of q `[B, H, Q, E]`, k and v `[B, K, S, E]` and hidden keys `bool[B, S]`; no mesh.

    Queries and keys may be of any number: they are filled up to whole tiles, and what was added is hidden or cut off.
    """
    # Not needed elsewhere, and half a second to import.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    def run(q, k, v, hidden):
        queries, size = q.shape[2:]
        q, k, v = (_filled(x, 2) for x in (q * size**-0.5, k, v))
        shape = q.shape[2], k.shape[2]
        tile_q, tile_k = (next(tile for tile in TILES if n % tile == 0) for n in shape)
        tiles = kernels.BlockSizes(
            block_q=tile_q,
            block_kv=tile_k,
            block_q_dkv=tile_q,
            block_kv_dkv=tile_k,
            block_q_dq=tile_q,
            block_kv_dq=tile_k,
        )
        kernel = kernels.make_splash_mha(
            masks.MultiHeadMask([masks.FullMask(shape)] * q.shape[1]),
            block_sizes=tiles,
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )
        # Padding is a segment of its own that no query belongs to: queries see segment 0.
        segment = _filled(hidden.astype(jnp.int32), 1, 1)
        none_hidden = jnp.zeros(shape[0], jnp.int32)
        row = lambda q, k, v, segment: kernel(q, k, v, segment_ids=kernels.SegmentIds(q=none_hidden, kv=segment))  # noqa: E731
        return jax.vmap(row)(q, k, v, segment)[:, :, :queries]

    return run


def _filled(x: jax.Array, axis: int, value: int = 0) -> jax.Array:
    """`x` with `value` after its end along `axis`, up to a multiple of LANES."""
    missing = -x.shape[axis] % LANES
    widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value) if missing else x
