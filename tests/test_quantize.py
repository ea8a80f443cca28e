"""int8 and nf4 weights: exact where they can be, as far off as they should be, and as small."""

import dataclasses

import hf_checkpoints as hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmpo_jax import load_pretrained
from dmpo_jax.model.denoiser import logits
from dmpo_jax.model.families import read_config
from dmpo_jax.model.parameters import ModelConfig, abstract_params, count_params, init_params, is_spec
from dmpo_jax.model.quantize import (
    NF4_LEVELS,
    Int8,
    block_size,
    dequantize,
    quantize_int8,
    quantize_nf4,
    store_tree,
    stored_bytes,
    stored_specs,
)  # fmt: skip
from dmpo_jax.model.weights import merge


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_int8_is_exact_on_its_grid_and_off_by_half_a_step_elsewhere():
    codes = np.random.default_rng(0).integers(-127, 128, (2, 32, 4, 8))
    codes[:, 0] = 127
    step = 2.0 ** np.random.default_rng(1).integers(-9, 3, (2, 1, 4, 8))
    w = jnp.asarray(codes * step, jnp.float32)
    q = quantize_int8(w, outputs=2, inputs=1)
    assert q.codes.dtype == jnp.int8 and q.scale.shape == (2, 4, 8)
    np.testing.assert_allclose(dequantize(q, jnp.float32), w, rtol=1e-6)
    w = gaussian(3, 5, 16, 20)  # two input axes, one output axis
    q = quantize_int8(jnp.asarray(w), outputs=1, inputs=2)
    assert q.scale.shape == (3, 20)
    step = np.abs(w).max((1, 2), keepdims=True) / 127
    assert (np.abs(dequantize(q, jnp.float32) - w) <= 0.5001 * step).all()


def test_nf4_takes_the_nearest_level_of_each_block():
    w = gaussian(2, 3, 128, 5)
    q = quantize_nf4(jnp.asarray(w), outputs=1)
    assert q.codes.dtype == jnp.uint8 and q.codes.shape == (2, 3, 2, 32, 5) and q.scale.shape == (2, 3, 2, 1, 5)
    blocks = w.reshape(2, 3, 2, 64, 5)
    scale = np.abs(blocks).max(3, keepdims=True)
    levels = np.array(NF4_LEVELS)
    nearest = levels[np.abs((blocks / scale)[..., None] - levels).argmin(-1)] * scale
    np.testing.assert_allclose(dequantize(q, jnp.float32), nearest.reshape(w.shape), atol=1e-6)
    # Published levels are their own codes, both halves of a byte included.
    exact = jnp.asarray(np.resize(levels, 64)[None, :, None] * 3.0, jnp.float32)
    np.testing.assert_allclose(dequantize(quantize_nf4(exact, 1), jnp.float32), exact, rtol=1e-6)


def test_zero_weights_and_odd_sizes():
    zero = jnp.zeros((1, 64, 4))
    assert not dequantize(quantize_int8(zero, 1, 1), jnp.float32).any()
    assert not dequantize(quantize_nf4(zero, 1), jnp.float32).any()
    assert [block_size(n) for n in (4096, 128, 176, 18944, 6)] == [64, 64, 44, 64, 6]


def test_relative_error_on_gaussian_weights():
    w = gaussian(1, 4096, 64)
    relative = lambda q: float(np.linalg.norm(dequantize(q, jnp.float32) - w) / np.linalg.norm(w))  # noqa: E731
    assert relative(quantize_int8(jnp.asarray(w), 1, 1)) == pytest.approx(0.0086, abs=0.001)
    assert relative(quantize_nf4(jnp.asarray(w), 1)) == pytest.approx(0.093, abs=0.005)


BOUNDS = {"bfloat16": 0.03, "int8": 0.06, "nf4": 0.6}
CASES = [("llada", "bfloat16"), ("illada", "int8"), ("dream", "nf4"), ("sdar", "int8")]
REST = [(family, base) for family in hf.CONFIGS for base in BOUNDS if (family, base) not in CASES]


@pytest.mark.parametrize(("family", "base"), [*CASES, *(pytest.param(*c, marks=pytest.mark.slow) for c in REST)])
def test_logits_of_a_quantised_base(tmp_path, family, base):
    content = hf.CONFIGS[family]
    config, params = load_pretrained(hf.write_checkpoint(tmp_path / "m", content, hf.random_tensors(content, seed=7)))
    stored = dataclasses.replace(config, base=base)
    tokens = jnp.arange(20)[None] * 11 % 240
    found = jax.jit(lambda p: logits(store_tree(p, stored), tokens, stored))(params)
    exact = logits(params, tokens, config)
    error = float(jnp.sqrt(jnp.mean((found - exact) ** 2) / jnp.mean(exact**2)))
    assert BOUNDS[base] / 100 < error < BOUNDS[base]
    print(f"{family} {base}: relative error of the logits {error:.4f}")
    # Quantised matrices and what they stand for are the same function.
    plain = merge(store_tree(params, stored), stored)
    np.testing.assert_allclose(found, logits(plain, tokens, config), atol=1e-4)


def test_specs_describe_the_stored_tree():
    config = ModelConfig(vocab_size=11, d_model=32, n_layers=2, n_heads=4, d_mlp=48, qkv_bias=True)
    for base in ("float32", "bfloat16", "int8", "nf4"):
        stored = dataclasses.replace(config, base=base)
        shapes = jax.eval_shape(lambda c=stored: store_tree(init_params(jax.random.key(0), c), c))
        specs = stored_specs(stored)
        assert jax.tree.structure(shapes) == jax.tree.structure(specs, is_leaf=is_spec)
        for shape, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(specs, is_leaf=is_spec), strict=True):
            assert shape.shape == spec.shape and len(spec.axes) == len(spec.shape)
    assert isinstance(shapes, dict) and shapes["embed"].dtype == jnp.float32  # not quantised, kept in model.dtype


def test_bytes_of_llada_8b():
    content = {**hf.LLADA, "d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32, "mlp_hidden_size": 12288,
               "vocab_size": 126464, "embedding_size": 126464}  # fmt: skip
    config = dataclasses.replace(read_config(content, ""), dtype="bfloat16")
    size = {base: stored_bytes(dataclasses.replace(config, base=base)) for base in ("bfloat16", "int8", "nf4")}
    assert size["bfloat16"] == 2 * count_params(config) == 16_031_162_368
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 12288)
    outputs = 32 * (4 * 4096 + 2 * 12288 + 4096)
    rest = 2 * (count_params(config) - matrices)
    assert size["int8"] == rest + matrices + 4 * outputs
    assert size["nf4"] == rest + matrices // 2 + 4 * matrices // 64
    assert size["int8"] / 1e9 == pytest.approx(9.06, abs=0.01) and size["nf4"] / 1e9 == pytest.approx(6.00, abs=0.01)


def test_int8_is_a_pytree_that_scans():
    q = quantize_int8(jnp.asarray(gaussian(3, 8, 4)), 1, 1)
    out = jax.lax.scan(lambda x, w: (x @ dequantize(w, jnp.float32) @ jnp.ones((4, 8)), w.scale.sum()), jnp.ones(8), q)
    assert out[1].shape == (3,) and isinstance(jax.tree.map(lambda x: x[0], q), Int8)
    assert len(jax.tree.leaves(abstract_params(ModelConfig(vocab_size=5)), is_leaf=is_spec)) == 12
