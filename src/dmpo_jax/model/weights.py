"""What may stand in the place of a matrix (plain, quantised, adapted), and the one product that takes them all."""

import jax
import jax.numpy as jnp

from dmpo_jax.model.lora import Adapted
from dmpo_jax.model.parameters import ModelConfig, ParamSpec
from dmpo_jax.model.quantize import NF4, Int8, dequantize, map_layered
from dmpo_jax.parallel import mesh as meshes

Weight = jax.Array | Int8 | NF4 | Adapted


def as_used(w: Weight, dtype, spec: ParamSpec) -> jax.Array | Adapted:
    """One layer's weight as the layer uses it: in `dtype`, whole along fsdp.

    `spec` describes the stacked parameter, `w` is one layer of it.
    """
    split = 1 + spec.inputs
    if isinstance(w, Adapted):
        a = meshes.gathered(w.a.astype(dtype), (*spec.axes[1:split], None))
        b = meshes.gathered(w.b.astype(dtype), (None, *spec.axes[split:]))
        return Adapted(as_used(w.base, dtype, spec), a, b, w.keys, w.scale, w.rate)
    if isinstance(w, (Int8, NF4)):  # codes travel, and become numbers one layer at a time
        int8 = isinstance(w, Int8)
        codes = spec.axes[1:] if int8 else (*spec.axes[1:split], None, *spec.axes[split:])
        scale = spec.axes[split:] if int8 else codes
        w = type(w)(meshes.gathered(w.codes, codes), meshes.gathered(w.scale, scale), w.outputs)
        return meshes.gathered(dequantize(w, dtype), spec.axes[1:])
    return meshes.gathered(w.astype(dtype), spec.axes[1:])


def cast(params: dict, dtype: str) -> dict:
    """The same parameters in the `dtype` in which layers use them; quantised codes and scales stay as they are."""
    quantised = lambda x: isinstance(x, (Int8, NF4))  # noqa: E731
    wide = lambda x: not quantised(x) and x.dtype == jnp.float32  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if wide(x) else x, params, is_leaf=quantised)


def contract(equation: str, x: jax.Array, w: jax.Array | Adapted, out_sharding=None) -> jax.Array:
    """`einsum(equation, x, w)` of a weight as used; x's first axis are rows, and w's input axes come before its outputs."""
    if not isinstance(w, Adapted):
        return jnp.einsum(equation, x, w, out_sharding=out_sharding)
    left, out = equation.split("->")
    inside, kernel = left.split(",")
    summed = [label for label in kernel if label not in out]
    low = [label for label in inside if label not in summed]
    shape = [size for label, size in zip(inside, x.shape, strict=True) if label in low]
    middle = meshes.activation(("rows", *(None,) * len(low)), (*shape, w.a.shape[-1]))
    a = f"{inside},{''.join(summed)}r->{''.join(low)}r"
    b = f"{''.join(low)}r,r{kernel[len(summed) :]}->{out}"
    base = jnp.einsum(equation, x, w.base, out_sharding=out_sharding)
    hidden = jnp.einsum(a, _drop(x, w), w.a, out_sharding=middle)
    return base + w.scale * jnp.einsum(b, hidden, w.b, out_sharding=out_sharding)


def plain(w: Weight, spec: ParamSpec) -> jax.Array:
    """The fp32 matrix `[layer, *in, *out]` that a stacked weight stands for, its adapter added in."""
    if isinstance(w, (Int8, NF4)):
        return dequantize(w, jnp.float32)
    if not isinstance(w, Adapted):
        return w.astype(jnp.float32)
    a, b = w.a.reshape(w.a.shape[0], -1, w.a.shape[-1]), w.b.reshape(*w.b.shape[:2], -1)
    product = jnp.einsum("lir,lro->lio", a, b, precision="highest")
    return plain(w.base, spec) + w.scale * product.reshape(-1, *spec.shape[1:])


def merge(params: dict, config: ModelConfig) -> dict:
    """fp32 parameters of a tree that may hold quantised and adapted matrices: the same function, all plain."""
    return map_layered(lambda w, spec, _: plain(w, spec), params, config)


def _drop(x: jax.Array, w: Adapted) -> jax.Array:
    if w.keys is None:
        return x
    where = jax.typeof(x).sharding if meshes.explicit_mesh() is not None else None
    kept = jax.random.bernoulli(w.keys, 1.0 - w.rate, x.shape, out_sharding=where)
    return jnp.where(kept, x / (1.0 - w.rate), 0)
