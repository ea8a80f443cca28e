"""cuDNN's flash attention for NVIDIA GPUs, through `jax.nn.dot_product_attention`."""

import jax
import jax.extend
import jax.numpy as jnp


def obstacle(platform: str, dtype: jnp.dtype, size: int) -> str:
    """Why the kernel cannot run on heads of `size` in a program for this platform, or nothing.

    JAX asks the cuDNN of this process while it traces, so a program for a GPU that is elsewhere cannot have it either.
    """
    if platform != "gpu":
        return f"the kernel is for NVIDIA GPUs, but this program is for {platform}"
    if "cuda" not in jax.extend.backend.get_backend().platform_version:
        return "the kernel is for NVIDIA GPUs, but this process has none"
    capability = min(float(device.compute_capability) for device in jax.local_devices(backend="gpu"))
    if capability < 8:
        return f"the kernel needs compute capability 8.0 or later, found {capability}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f'the kernel needs model.dtype = "bfloat16", found {jnp.dtype(dtype).name}'
    most = 256 if capability >= 9 else 128
    if size % 8 or size > most:
        return f"the kernel needs a head size that is a multiple of 8 and at most {most} on this GPU, found {size}"
    return ""


def attention(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    """q `[B, H, Q, E]`, k and v `[B, K, S, E]`, lengths `int32[B]`; no mesh. Returns `[B, H, Q, E]`."""
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    out = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, implementation="cudnn")
    return jnp.swapaxes(out, 1, 2)
