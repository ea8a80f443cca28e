"""Weight-only quantisation of frozen matrices: int8 per output channel, and nf4 in blocks of 64 inputs."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp

from dmpo_jax.model.parameters import ModelConfig, ParamSpec, abstract_params, is_spec

BLOCK = 64  # nf4: weights that share a scale, along the last input axis (fewer where the axis has no such divisor)

# Quantiles of a standard normal scaled to [-1, 1], with an exact zero (QLoRA, arXiv 2305.14314, appendix E).
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["outputs"])
@dataclasses.dataclass(frozen=True)
class Int8:
    """A matrix `codes int8[..., *in, *out]` times `scale f32[..., *out]`; `outputs` counts the output axes."""

    codes: jax.Array
    scale: jax.Array
    outputs: int


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["outputs"])
@dataclasses.dataclass(frozen=True)
class NF4:
    """A matrix in blocks of B along its last input axis, two 4-bit codes a byte.

    codes `uint8[..., blocks, B/2, *out]` (the low half of a byte belongs to the block's first half), scale
    `f32[..., blocks, 1, *out]`; `outputs` counts the output axes.
    """

    codes: jax.Array
    scale: jax.Array
    outputs: int


def quantize_int8(w: jax.Array, outputs: int, inputs: int) -> Int8:
    """Nearest of 255 levels, symmetric about zero, of `w [..., *in, *out]`."""
    axes = tuple(range(w.ndim - outputs - inputs, w.ndim - outputs))
    wide = w.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=axes, keepdims=True) / 127.0
    codes = jnp.round(wide / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8)
    return Int8(codes, jnp.squeeze(scale, axes), outputs)


def block_size(inputs: int) -> int:
    """Largest even divisor of an input axis up to BLOCK."""
    return max(b for b in range(2, BLOCK + 1, 2) if inputs % b == 0)


def quantize_nf4(w: jax.Array, outputs: int) -> NF4:
    """Nearest of 16 levels, scaled by each block's largest magnitude, of `w [..., *in, *out]`."""
    axis = w.ndim - outputs - 1
    size = block_size(w.shape[axis])
    shape = (*w.shape[:axis], w.shape[axis] // size, size, *w.shape[axis + 1 :])
    blocks = w.astype(jnp.float32).reshape(shape)
    scale = jnp.max(jnp.abs(blocks), axis=axis + 1, keepdims=True)
    unit = blocks / jnp.where(scale > 0, scale, 1.0)
    codes = jnp.zeros(shape, jnp.uint8)
    for low, high in itertools.pairwise(NF4_LEVELS):
        codes += unit > (low + high) / 2
    first, second = jnp.split(codes, 2, axis=axis + 1)
    return NF4(first | (second << 4), scale, outputs)


def dequantize(w: Int8 | NF4, dtype) -> jax.Array:
    """The matrix `[..., *in, *out]` that the codes stand for."""
    if isinstance(w, Int8):
        split = w.scale.ndim - w.outputs
        inputs = w.codes.ndim - w.scale.ndim
        shape = (*w.scale.shape[:split], *(1,) * inputs, *w.scale.shape[split:])
        return (w.codes.astype(jnp.float32) * w.scale.reshape(shape)).astype(dtype)
    axis = w.codes.ndim - w.outputs - 1
    codes = jnp.concatenate([w.codes & 15, w.codes >> 4], axis=axis)
    # A chain of selects instead of a table look-up: elementwise, so it keeps the codes' sharding.
    level = jnp.full(codes.shape, NF4_LEVELS[0], jnp.float32)
    for code, value in enumerate(NF4_LEVELS[1:], 1):
        level = jnp.where(codes >= code, value, level)
    values = (level * w.scale).astype(dtype)
    return values.reshape(*values.shape[: axis - 1], -1, *values.shape[axis + 1 :])


def store(w: jax.Array, spec: ParamSpec, config: ModelConfig, layered: bool) -> jax.Array | Int8 | NF4:
    """A parameter as `config.base` keeps it. Only the blocks' matrices are quantised; the rest is then in `dtype`."""
    if config.base in ("float32", "bfloat16"):
        return w.astype(config.base)
    if not (layered and spec.inputs):
        return w.astype(config.dtype)
    outputs = len(spec.shape) - 1 - spec.inputs
    return quantize_int8(w, outputs, spec.inputs) if config.base == "int8" else quantize_nf4(w, outputs)


def store_tree(params: dict, config: ModelConfig) -> dict:
    """All parameters as `config.base` keeps them."""
    return map_layered(lambda w, spec, layered: store(w, spec, config, layered), params, config)


def map_layered(function, tree: dict, config: ModelConfig) -> dict:
    """`function(leaf, spec, layered)` of every parameter; layered: it is stacked over layers."""
    specs = abstract_params(config)
    out = {name: function(w, specs[name], False) for name, w in tree.items() if name != "blocks"}
    out["blocks"] = {name: function(w, specs["blocks"][name], True) for name, w in tree["blocks"].items()}
    return {name: out[name] for name in tree}


def stored_specs(config: ModelConfig) -> dict:
    """The abstract tree of `store_tree`'s result: a quantised matrix is a node with a ParamSpec for each array."""

    def stored(spec: ParamSpec, _, layered: bool):
        if config.base in ("float32", "bfloat16") or not (layered and spec.inputs):
            return spec
        outputs = len(spec.shape) - 1 - spec.inputs
        split = len(spec.shape) - outputs
        if config.base == "int8":
            scale = ParamSpec((spec.shape[0], *spec.shape[split:]), (None, *spec.axes[split:]), 0.0)
            return Int8(spec, scale, outputs)
        size = block_size(spec.shape[split - 1])
        blocks = spec.shape[split - 1] // size
        axes = (*spec.axes[:split], None, *spec.axes[split:])
        shape = lambda width: (*spec.shape[: split - 1], blocks, width, *spec.shape[split:])  # noqa: E731
        return NF4(ParamSpec(shape(size // 2), axes, 0.0), ParamSpec(shape(1), axes, 0.0), outputs)

    return map_layered(stored, abstract_params(config), config)


def stored_bytes(config: ModelConfig) -> int:
    """Bytes of all parameters as `config.base` keeps them, by shape evaluation."""
    fp32 = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), abstract_params(config), is_leaf=is_spec)
    stored = jax.eval_shape(lambda tree: store_tree(tree, config), fp32)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stored))
