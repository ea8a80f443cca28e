"""Cached forwards: exact while nothing has changed, the official approximation once something has."""

from pathlib import Path

import hf_checkpoints as hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmpo_jax import load_pretrained
from dmpo_jax.diffusion.canvas import Prompts, make_canvas
from dmpo_jax.model.denoiser import (
    Cache,
    cached_hidden_states,
    fill_cache,
    head_logits,
    hidden_states,
    rotary_tables,
    rotate,
)  # fmt: skip

FIXTURES = Path(__file__).resolve().parents[2] / "shared" / "fixtures"
fill = jax.jit(fill_cache, static_argnames="config")
step = jax.jit(cached_hidden_states, static_argnames="config")
full = jax.jit(hidden_states, static_argnames="config")


def setting(tmp_path, family="llada", length=12, lengths=(8, 5)):
    content = hf.CONFIGS[family]
    tensors = hf.random_tensors(content, seed=5)
    config, params = load_pretrained(hf.write_checkpoint(tmp_path / "m", content, tensors))
    rng = np.random.default_rng(1)
    prompts = Prompts(jnp.asarray(rng.integers(0, 240, (2, 8))), jnp.array(lengths))
    canvas = make_canvas(jnp.asarray(rng.integers(0, 240, (2, length))), prompts)
    return content, tensors, config, params, canvas


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_prefix_and_dual_forwards_equal_the_full_one_at_the_same_tokens(tmp_path, family):
    _, _, config, params, canvas = setting(tmp_path, family)
    hidden, cache = fill(params, *canvas, config=config)
    np.testing.assert_array_equal(hidden, full(params, *canvas, config=config))
    for start, size in ((0, 12), (4, 8), (8, 4), (4, 4), (0, 4)):
        part = canvas.tokens[:, start : start + size]
        found, after = step(params, part, start, canvas.positions, canvas.lengths, cache, config=config)
        np.testing.assert_allclose(found, hidden[:, start : start + size], atol=1e-5)
        for old, new in zip(cache, after, strict=True):
            np.testing.assert_allclose(new, old, atol=1e-5)


def test_stale_neighbours(tmp_path):
    """After a change, what stands outside the block is seen as it was: a forward with its old keys and values."""
    _, _, config, params, canvas = setting(tmp_path, lengths=(8, 8))
    _, cache = fill(params, *canvas, config=config)
    block = jnp.full((2, 4), 77)
    found, after = step(params, block, 4, canvas.positions, canvas.lengths, cache, config=config)
    changed = canvas._replace(tokens=canvas.tokens.at[:, 4:8].set(block))
    assert np.abs(found - full(params, *changed, config=config)[:, 4:8]).max() > 1e-3

    # Block outputs by hand: every layer's keys and values outside come from the first forward.
    h = params["embed"][block[0]]
    cos, sin = rotary_tables(canvas.positions[:1, 4:8], config.head_size, config.rope_theta)
    for layer in range(config.n_layers):
        w = {name: np.asarray(x[layer], np.float64) for name, x in params["blocks"].items()}
        unit = lambda x, weight: x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * weight  # noqa: E731
        a = unit(np.asarray(h, np.float64), w["ln1"])
        q, k, v = (np.einsum("sd,dhe->hse", a, w[name]) for name in ("wq", "wk", "wv"))
        q, k = (np.asarray(rotate(jnp.asarray(x, jnp.float32)[None], cos, sin))[0] for x in (q, k))
        keys, values = np.array(cache.k[layer, 0], np.float64), np.array(cache.v[layer, 0], np.float64)
        keys[:, 4:8], values[:, 4:8] = k, v
        s = np.einsum("hqe,hse->hqs", q, keys) / np.sqrt(config.head_size)
        p = np.exp(s - s.max(-1, keepdims=True))
        h = h + np.einsum("hqs,hse,hed->qd", p / p.sum(-1, keepdims=True), values, w["wo"])
        a = unit(h, w["ln2"])
        gate = a @ w["w_gate"]
        h = h + (gate / (1 + np.exp(-gate)) * (a @ w["w_up"])) @ w["w_down"]
    np.testing.assert_allclose(found[0], unit(h, np.asarray(params["ln_f"])), atol=5e-5)

    for old, new in zip(cache, after, strict=True):
        outside = np.r_[0:4, 8:20]
        assert np.array_equal(old[:, :, :, outside], new[:, :, :, outside])
        assert np.abs(old[:, :, :, 4:8] - new[:, :, :, 4:8]).max() > 1e-2


def test_block_causal_prefill_and_commits_equal_one_forward(tmp_path):
    """SDAR: a finished block never changes, so the prompt and then block after block give the whole sequence's cache."""
    _, _, config, params, canvas = setting(tmp_path, "sdar", lengths=(8, 4))
    hidden, whole = fill(params, *canvas, config=config)
    size = config.block_size
    cache = Cache(*(jnp.zeros_like(x) for x in whole))
    rest = (canvas.positions, canvas.lengths)
    _, cache = step(params, canvas.tokens[:, 12:], 12, *rest, cache, config=config)  # the prompt
    separate, fused = cache, cache
    for start in range(0, 12, size):
        clean = canvas.tokens[:, start : start + size]
        noisy = jnp.full((2, size), 255)
        out, separate = step(params, clean, start, *rest, separate, config=config)
        np.testing.assert_allclose(out, hidden[:, start : start + size], atol=1e-5)
        if start + size < 12:  # the pass that commits a block can be the next block's first
            both = jnp.concatenate([clean, noisy], axis=1)
            out, fused = step(params, both, start, *rest, fused, config=config)
            alone, _ = step(params, noisy, start + size, *rest, separate, config=config)
            np.testing.assert_allclose(out[:, size:], alone, atol=2e-5)
    valid = np.zeros((2, 20), bool)
    valid[0], valid[1, :16] = True, True
    for one, by_block in zip(whole, separate, strict=True):
        mask = valid[None, :, None, :, None]
        np.testing.assert_allclose(np.where(mask, one, 0), np.where(mask, by_block, 0), atol=1e-5)
    np.testing.assert_allclose(fused.k[:, :, :, :8], whole.k[:, :, :, :8], atol=1e-5)


@pytest.mark.skipif(not FIXTURES.exists(), reason="../shared/fixtures is absent")
def test_official_caches():
    """Fast-dLLM's LLaDA stores keys before the rotation; here they are stored after it. Logits have a deviation of 4.9."""
    config, params = load_pretrained(FIXTURES / "model")
    f = np.load(FIXTURES / "forward.npz")
    tokens = jnp.asarray(f["input_ids"], jnp.int32)
    positions, lengths = jnp.broadcast_to(jnp.arange(40), (2, 40)), jnp.array([40, 40])
    _, cache = fill(params, tokens, positions, lengths, config=config)
    tables = rotary_tables(positions, config.head_size, config.rope_theta)
    np.testing.assert_allclose(cache.k[0], rotate(jnp.asarray(f["cache_k_layer0"]), *tables), atol=2e-5)
    np.testing.assert_allclose(cache.v[3], f["cache_v_layer3"], atol=5e-5)

    changed, start = jnp.asarray(f["prefix_ids"], jnp.int32), int(f["prefix_start"])
    hidden, _ = step(params, changed[:, start:], start, positions, lengths, cache, config=config)
    np.testing.assert_allclose(head_logits(params, hidden, config), f["prefix_logits"], atol=8e-5)
    begin, end = (int(x) for x in f["dual_block"])
    hidden, _ = step(params, changed[:, begin:end], begin, positions, lengths, cache, config=config)
    np.testing.assert_allclose(head_logits(params, hidden, config), f["dual_logits"], atol=8e-5)
