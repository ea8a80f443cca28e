"""Attention over a right-padded key axis, behind one signature: plain XLA, a TPU kernel (splash) or a GPU kernel (cuDNN)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from dmpo_jax.errors import UserError
from dmpo_jax.model import cudnn, splash
from dmpo_jax.parallel import mesh as meshes

# From these sizes on `auto` takes a kernel: with fewer keys the scores are 2 % of a large model's work and fit in memory.
MIN_KEYS, MIN_QUERIES = 2048, 128

Blocks = tuple[jax.Array, jax.Array] | None


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    blocks: Blocks = None,
    visible: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Softmax attention of every query over the first `lengths` keys of its row.

    q `[B, H, Q, E]`, k and v `[B, K, S, E]` with H a multiple of K (query head i reads key head i // (H / K)),
    lengths `int32[B]`, at least 1. `blocks` holds the block numbers `int32[B, Q]` of queries and `int32[B, S]` of keys;
    a query then sees no later block. `visible bool[Q or 1, S]` hides more keys, alike in every row. Returns
    `[B, H, Q, E]` in q's dtype; scores and softmax are fp32.

    `implementation` is model.attention:

    - `xla`: any shape, dtype, mask and platform. Holds scores `[B, H, Q, S]`.
    - `splash`: the Pallas kernel for TPU, without `blocks` and without a `visible` of several queries. On a CPU it is
      interpreted, which is slow and meant for tests. In bf16 its queries are scaled before the product: one rounding more.
    - `cudnn`: flash attention of an NVIDIA GPU, without `blocks` and `visible`, in bf16 or fp16 (see `model.cudnn`).
    - `auto`: the kernel of the platform that the program is made for (that of the mesh in context, else of the default
      device) where it serves, q is bf16, and there are at least MIN_KEYS keys and MIN_QUERIES queries; else `xla`.

    Under an explicit mesh the kernels run on every shard of rows and heads by itself; inside `shard_map`, as they are.
    Raises UserError where a kernel that was asked for by name cannot serve.
    """
    platform = _platform()
    match _choose(implementation, platform, q, k, blocks, visible):
        case "splash":
            hidden = jnp.arange(k.shape[2]) >= lengths[:, None]
            if visible is not None:
                hidden |= ~visible
            return _on_shards(splash.attention(interpret=platform == "cpu"), q, k, v, hidden)
        case "cudnn":
            return _on_shards(cudnn.attention, q, k, v, lengths)
        case _:
            return _xla(q, k, v, lengths, blocks, visible)


def _platform() -> str:
    """Platform that the program is made for: `cpu`, `gpu` or `tpu`. Compiling ahead of time, it is not this machine's."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.config.jax_default_device
    name = getattr(device, "platform", device) or jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def _choose(asked: str, platform: str, q: jax.Array, k: jax.Array, blocks: Blocks, visible: jax.Array | None) -> str:
    """The implementation that serves; raises UserError where the one asked for does not."""
    if asked == "xla":
        return asked
    if asked == "auto":
        name = {"tpu": "splash", "gpu": "cudnn"}.get(platform)
        large = k.shape[2] >= MIN_KEYS and q.shape[2] >= MIN_QUERIES and q.dtype == jnp.bfloat16
        return name if name and large and not _obstacle(name, platform, q, blocks, visible) else "xla"
    if obstacle := _obstacle(asked, platform, q, blocks, visible):
        raise UserError(f'model.attention = "{asked}": {obstacle}; use "auto" or "xla"')
    return asked


def _obstacle(name: str, platform: str, q: jax.Array, blocks: Blocks, visible: jax.Array | None) -> str:
    """Why a kernel cannot serve, or nothing."""
    if blocks is not None:
        return "the kernel attends to all keys, but under model.block_size later blocks are hidden"
    if visible is not None and (name == "cudnn" or visible.shape[0] > 1):
        return "the kernel attends to all keys, but this sampler or objective hides some from each query"
    if AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types:
        return (
            "the kernel needs to know its shards, but an axis of the mesh is Auto; make it with parallel.mesh.make_mesh"
        )
    return splash.obstacle(platform) if name == "splash" else cudnn.obstacle(platform, q.dtype, q.shape[3])


def _on_shards(kernel: Callable, q: jax.Array, k: jax.Array, v: jax.Array, of_rows: jax.Array) -> jax.Array:
    """`kernel(q, k, v, of_rows)` on every shard of rows and heads; `of_rows` has rows as its leading axis."""
    mesh = meshes.explicit_mesh()
    if mesh is None:
        return kernel(q, k, v, of_rows)
    whole = meshes.spec(("rows", "heads", None, None), q.shape, mesh)
    if meshes.spec(("rows", "kv_heads", None, None), k.shape, mesh) != whole:  # fewer key heads than shards of heads
        k, v = _repeated(k, v, q.shape[1])
    rows = meshes.spec(("rows", *(None,) * (of_rows.ndim - 1)), of_rows.shape, mesh)
    parts = (whole, whole, whole, rows)
    arrays = (jax.reshard(x, part) for x, part in zip((q, k, v, of_rows), parts, strict=True))
    return jax.shard_map(kernel, in_specs=parts, out_specs=whole, check_vma=False)(*arrays)


def _repeated(k: jax.Array, v: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values `[B, K, S, E]` once for every query head."""
    where = meshes.activation(("rows", "heads", None, None), (k.shape[0], heads, *k.shape[2:]))
    return tuple(jnp.repeat(x, heads // k.shape[1], axis=1, out_sharding=where) for x in (k, v))


def _xla(q, k, v, lengths, blocks, visible) -> jax.Array:
    """Probabilities are cast to v's dtype and the second product accumulates in fp32."""
    heads, size = q.shape[1], q.shape[3]
    valid = jnp.arange(k.shape[2]) < lengths[:, None, None, None]  # [B, 1, 1, S]
    if blocks is not None:
        valid &= blocks[1][:, None, None, :] <= blocks[0][:, None, :, None]
    if visible is not None:
        valid &= visible
    if k.shape[1] != heads:
        k, v = _repeated(k, v, heads)
    # fp32: half of the scale on each side, in PyTorch's order; in bf16 that would be two roundings more.
    sides, after = (size**-0.25, 1.0) if q.dtype == jnp.float32 else (1.0, size**-0.5)
    scores = jnp.einsum("bhqe,bhse->bhqs", q * sides, k * sides, preferred_element_type=jnp.float32)
    scores = jnp.where(valid, scores * after, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bhqs,bhse->bhqe", weights, v, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)
