"""The denoiser: a pre-norm transformer that maps partly masked tokens to logits, for every family of models."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from dmpo_jax.model.attention import attend
from dmpo_jax.model.lora import Adapted
from dmpo_jax.model.parameters import ModelConfig, abstract_params
from dmpo_jax.model.weights import as_used, contract
from dmpo_jax.parallel import mesh as meshes


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm: fp32 statistics, cast to x's dtype, then the weight (the order matters in bf16)."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def rotary_tables(positions: jax.Array, head_size: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """fp32 cos and sin `[B, 1, S, E/2]` of positions `int32[B, S]`."""
    # On the host: compiled, the power is off by some ulp, which is 2e-4 in the sine of position 4095.
    power = theta ** (np.arange(0, head_size, 2) / head_size)
    angles = positions.astype(jnp.float32)[:, None, :, None] * (np.float32(1) / power.astype(np.float32))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Half-rotation of heads `[B, H, S, E]`: component j is paired with j + E/2; cos's dtype inside, x's dtype out."""
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


# What `model.remat` keeps for the backward pass.
_KEPT = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "outputs": jax.checkpoint_policies.save_only_these_names("attention", "mlp"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Cache(NamedTuple):
    """Keys (already rotated) and values `[layer, B, K, S, E]` of every slot of a canvas."""

    k: jax.Array
    v: jax.Array


def _project(x: jax.Array, weight: jax.Array | Adapted, bias: jax.Array | None) -> jax.Array:
    """`[B, S, D]` through `[D, H, E]` to head-major `[B, H, S, E]`."""
    out = contract("bsd,dhe->bhse", x, weight)
    return out if bias is None else out + bias[:, None, :]


def _block(
    h: jax.Array,
    layer: dict,
    cos,
    sin,
    lengths,
    blocks,
    visible,
    config: ModelConfig,
    cached: Cache | None = None,
    start=0,
) -> tuple[jax.Array, Cache]:
    """One layer on `[B, S, D]`, and the keys and values it attended to: the cached ones with its own from `start` on."""
    specs = abstract_params(config)["blocks"]
    layer = {name: as_used(w, h.dtype, specs[name]) for name, w in layer.items()}
    residual = meshes.activation(("rows", None, None), h.shape)
    with jax.named_scope("attention"):
        a = rms_norm(h, layer["ln1"], config.norm_eps)
        q = _project(a, layer["wq"], layer.get("bq"))
        k = _project(a, layer["wk"], layer.get("bk"))
        v = _project(a, layer["wv"], layer.get("bv"))
        if config.qk_norm:
            q = rms_norm(q, layer["q_norm"], config.norm_eps)
            k = rms_norm(k, layer["k_norm"], config.norm_eps)
        seen = Cache(rotate(k, cos, sin), v)
        if cached is not None:
            seen = jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, start, 2), cached, seen)
        out = attend(rotate(q, cos, sin), *seen, lengths, blocks, visible, config.attention)
        h = h + checkpoint_name(contract("bhse,hed->bsd", out, layer["wo"], out_sharding=residual), "attention")
    with jax.named_scope("mlp"):
        a = rms_norm(h, layer["ln2"], config.norm_eps)
        gate = jax.nn.silu(contract("bsd,df->bsf", a, layer["w_gate"]))
        up = contract("bsd,df->bsf", a, layer["w_up"])
        out = contract("bsf,fd->bsd", gate * up, layer["w_down"], out_sharding=residual)
        return h + checkpoint_name(out, "mlp"), seen


def hidden_states(
    params: dict,
    tokens: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    config: ModelConfig,
    visible: jax.Array | None = None,
) -> jax.Array:
    """Final-norm hidden states `[B, S, D]` in the model dtype.

    tokens and positions `int32[B, S]`; slots from `lengths int32[B]` on are padding that nothing attends to. Attention
    asks for positions only (for their block under `config.block_size`), so slots may stand in any order: `positions`
    carries the reading order. `visible bool[S or 1, S]` (query, key) hides more slots, alike in every row.
    """
    h, block = _begin(params, tokens, positions, positions, lengths, visible, config)
    without_cache = lambda h, layer: block(h, layer)[0]  # noqa: E731
    if config.remat != "none":
        without_cache = jax.checkpoint(without_cache, policy=_KEPT[config.remat])
    h, _ = jax.lax.scan(lambda h, layer: (without_cache(h, layer), None), h, params["blocks"])
    return rms_norm(h, params["ln_f"].astype(h.dtype), config.norm_eps)


def fill_cache(
    params: dict,
    tokens: jax.Array,
    positions: jax.Array,
    lengths: jax.Array,
    config: ModelConfig,
    visible: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """`hidden_states`, and the keys and values of all S slots."""
    h, block = _begin(params, tokens, positions, positions, lengths, visible, config)
    h, cache = jax.lax.scan(block, h, params["blocks"])
    return rms_norm(h, params["ln_f"].astype(h.dtype), config.norm_eps), cache


def cached_hidden_states(
    params: dict,
    tokens: jax.Array,
    start: jax.Array | int,
    positions: jax.Array,
    lengths: jax.Array,
    cache: Cache,
    config: ModelConfig,
    visible: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Hidden states `[B, Q, D]` of `tokens int32[B, Q]` in the slots from `start` on, and the cache with theirs in it.

    positions `int32[B, S]` and lengths `int32[B]` are the whole canvas's, whose other slots are seen as the cache holds
    them. What slots hold after a layer depends on all they see, so without `config.block_size` this is an approximation
    as soon as any token has changed since the cache was filled. `visible bool[Q or 1, S]` as in `hidden_states`.
    """
    own = jax.lax.dynamic_slice_in_dim(positions, start, tokens.shape[1], axis=1)
    h, block = _begin(params, tokens, own, positions, lengths, visible, config)
    h, cache = jax.lax.scan(lambda h, xs: block(h, xs[0], cached=xs[1], start=start), h, (params["blocks"], cache))
    return rms_norm(h, params["ln_f"].astype(h.dtype), config.norm_eps), cache


def _begin(params: dict, tokens, positions, key_positions, lengths, visible, config: ModelConfig):
    """Embeddings `[B, Q, D]` and the layer function for queries at `positions [B, Q]` and keys at `key_positions [B, S]`."""
    dtype = jnp.dtype(config.dtype)
    with jax.named_scope("embed"):
        table = meshes.gathered(params["embed"].astype(dtype), ("vocab", "embed"))
        out = meshes.activation(("rows", None, None), (*tokens.shape, config.d_model))
        h = table.at[tokens].get(out_sharding=out) if out is not None else table[tokens]
    cos, sin = rotary_tables(positions, config.head_size, config.rope_theta)
    if not config.rope_full_precision:
        cos, sin = cos.astype(dtype), sin.astype(dtype)
    blocks = (positions // config.block_size, key_positions // config.block_size) if config.block_size else None
    return h, functools.partial(
        _block, cos=cos, sin=sin, lengths=lengths, blocks=blocks, visible=visible, config=config
    )


def head_logits(params: dict, hidden: jax.Array, config: ModelConfig) -> jax.Array:
    """fp32 logits `[..., V]` of hidden states `[..., D]`; call it on the few positions that are scored."""
    with jax.named_scope("head"):
        if config.tied_head:
            weight = meshes.gathered(params["embed"].astype(hidden.dtype), ("vocab", "embed"))
            return jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)
        weight = meshes.gathered(params["head"].astype(hidden.dtype), ("embed", "vocab"))
        return jnp.einsum("...d,dv->...v", hidden, weight, preferred_element_type=jnp.float32)


def with_whole_head(params: dict, config: ModelConfig) -> dict:
    """The parameters with their head gathered along fsdp, for loops that use it again and again."""
    name, axes = ("embed", ("vocab", "embed")) if config.tied_head else ("head", ("embed", "vocab"))
    return {**params, name: meshes.gathered(params[name], axes)}


def logits(params: dict, tokens: jax.Array, config: ModelConfig, lengths: jax.Array | None = None) -> jax.Array:
    """fp32 logits `[B, S, V]` of right-padded rows `int32[B, S]` in reading order. For inspection and tests.

    They stand as the released model returns them: under `config.logits_shift` row i scores token i + 1 (see `shifted`).
    """
    batch, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    if lengths is None:
        lengths = jnp.full((batch,), width, jnp.int32)
    return head_logits(params, hidden_states(params, tokens, positions, lengths, config), config)


def shifted(logits: jax.Array) -> jax.Array:
    """Logits `[B, S, V]` (or hidden states) of a model with `logits_shift`, moved so that row i scores token i.

    Row 0, before which there is nothing, keeps its own.
    """
    return jnp.concatenate([logits[:, :1], logits[:, :-1]], axis=1)
