"""What may stand in the place of a matrix (plain, quantised, adapted), and the one product that takes them all."""

import jax
import jax.numpy as jnp

from dmpo_jax.model.lora import Adapted
from dmpo_jax.model.parameters import ParamSpec
from dmpo_jax.model.quantize import NF4, Int8, dequantize
from dmpo_jax.parallel import mesh as meshes

Weight = jax.Array | Int8 | NF4 | Adapted


def as_used(w: Weight, dtype, spec: ParamSpec) -> Weight:
    """One layer's weight as the layer uses it: whole along fsdp, and in `dtype` unless its codes are needed as they are.

    `spec` describes the stacked parameter, `w` is one layer of it.
    """
    split = 1 + spec.inputs
    if isinstance(w, Adapted):
        a = meshes.gathered(w.a.astype(dtype), (*spec.axes[1:split], None))
        b = meshes.gathered(w.b.astype(dtype), (None, *spec.axes[split:]))
        return Adapted(as_used(w.base, dtype, spec), a, b, w.keys, w.scale, w.rate)
    if isinstance(w, Int8):
        codes = meshes.gathered(w.codes, spec.axes[1:])
        return Int8(codes, meshes.gathered(w.scale, spec.axes[split:]), w.outputs)
    if isinstance(w, NF4):
        axes = (*spec.axes[1:split], None, *spec.axes[split:])
        gathered = NF4(meshes.gathered(w.codes, axes), meshes.gathered(w.scale, axes), w.outputs)
        return meshes.gathered(dequantize(gathered, dtype), spec.axes[1:])
    return meshes.gathered(w.astype(dtype), spec.axes[1:])


def contract(equation: str, x: jax.Array, w: Weight, out_sharding=None) -> jax.Array:
    """`einsum(equation, x, w)` in x's dtype; x's first axis are rows, and w's output axes keep their order."""
    left, out = equation.split("->")
    inside, kernel = left.split(",")
    if isinstance(w, Int8):  # the scales belong to outputs, so they can wait until after the sum
        y = jnp.einsum(
            equation, x, w.codes.astype(x.dtype), preferred_element_type=jnp.float32, out_sharding=out_sharding
        )
        places = [size if label in kernel else 1 for label, size in zip(out, y.shape, strict=True)]
        return (y * w.scale.reshape(places)).astype(x.dtype)
    if not isinstance(w, Adapted):
        return jnp.einsum(equation, x, w, out_sharding=out_sharding)
    summed = [label for label in kernel if label not in out]
    low = [label for label in inside if label not in summed]
    shape = [size for label, size in zip(inside, x.shape, strict=True) if label in low]
    middle = meshes.activation(("rows", *(None,) * len(low)), (*shape, w.a.shape[-1]))
    a = f"{inside},{''.join(summed)}r->{''.join(low)}r"
    b = f"{''.join(low)}r,r{kernel[len(summed) :]}->{out}"
    base = contract(equation, x, w.base, out_sharding)
    hidden = jnp.einsum(a, _drop(x, w), w.a, out_sharding=middle)
    return base + w.scale * jnp.einsum(b, hidden, w.b, out_sharding=out_sharding)


def _drop(x: jax.Array, w: Adapted) -> jax.Array:
    if w.keys is None:
        return x
    kept = jax.random.bernoulli(w.keys, 1.0 - w.rate, x.shape)
    if meshes.explicit_mesh() is not None:
        kept = jax.reshard(kept, jax.typeof(x).sharding.spec)
    return jnp.where(kept, x / (1.0 - w.rate), 0)
