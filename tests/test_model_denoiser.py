import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_model import forward

from dmpo_jax.diffusion.canvas import Prompts, make_canvas
from dmpo_jax.errors import UserError
from dmpo_jax.model.denoiser import head_logits, hidden_states, logits
from dmpo_jax.model.parameters import ModelConfig, abstract_params, count_params, init_params

VARIANTS = {
    "plain": {},
    "grouped kv": {"n_heads": 4, "n_kv_heads": 2},
    "bias": {"qkv_bias": True},
    "q/k norm": {"qk_norm": True},
    "tied": {"tied_head": True},
    "wide heads": {"head_dim": 12},
    "remat": {"remat": "full"},
}


def random_params(config, seed=0):
    """Like init_params, but with norms and biases away from ones and zeros."""
    params = init_params(jax.random.key(seed), config)
    return jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), params)


@pytest.mark.parametrize("name", VARIANTS)
def test_forward_equals_float64_reference(name):
    config = ModelConfig(vocab_size=11, d_model=16, n_layers=3, d_mlp=20, **{"n_heads": 2} | VARIANTS[name])
    params = random_params(config)
    tokens = np.random.default_rng(0).integers(0, 11, (3, 9))
    found = jax.jit(logits, static_argnums=2)(params, jnp.asarray(tokens, jnp.int32), config)
    wanted = np.stack([forward(params, row, config) for row in tokens])
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, atol=5e-5)


def test_gradient_equals_central_differences():
    config = ModelConfig(vocab_size=5, d_model=8, n_layers=2, n_heads=2, d_mlp=12, qk_norm=True, remat="full")
    params = random_params(config)
    tokens = jnp.array([[0, 3, 1, 4]], jnp.int32)
    grads = jax.grad(lambda p: jnp.mean(logits(p, tokens, config)[0, 2] * jnp.arange(5.0)))(params)
    for path, index in ((("blocks", "wq"), (0, 1, 0, 2)), (("blocks", "w_down"), (1, 3, 5)), (("embed",), (3, 2))):
        shifted = []
        for step in (1e-4, -1e-4):
            copy = jax.tree.map(lambda x: np.array(x, np.float64), params)
            leaf = copy[path[0]] if len(path) == 1 else copy[path[0]][path[1]]
            leaf[index] += step
            shifted.append(np.mean(forward(copy, tokens[0], config)[2] * np.arange(5)))
        leaf = grads[path[0]] if len(path) == 1 else grads[path[0]][path[1]]
        assert leaf[index] == pytest.approx((shifted[0] - shifted[1]) / 2e-4, rel=2e-3, abs=1e-5)


def test_completion_first_canvas_reads_like_prompt_then_completion(tiny_model):
    config, params = tiny_model
    rng = np.random.default_rng(1)
    prompts, completions = [[1, 2, 3, 4], [2], [4, 4]], rng.integers(0, 6, (3, 5))
    padded = np.full((3, 6), 4, np.int32)  # pads hold an ordinary token: validity comes from the length alone
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    canvas = make_canvas(jnp.asarray(completions, jnp.int32), Prompts(jnp.asarray(padded), jnp.array([4, 1, 2])))
    found = head_logits(params, hidden_states(params, *canvas, config), config)[:, :5]
    for row in range(3):
        wanted = forward(params, [*prompts[row], *completions[row]], config)[len(prompts[row]) :]
        np.testing.assert_allclose(found[row], wanted, atol=5e-5)


def test_pad_content_and_neighbours_have_exactly_no_effect(tiny_model):
    config, params = tiny_model
    run = jax.jit(hidden_states, static_argnums=4)
    positions = jnp.broadcast_to(jnp.arange(8), (4, 8))
    lengths = jnp.array([5, 8, 3, 6])
    tokens = jax.random.randint(jax.random.key(0), (4, 8), 0, 7)
    first = run(params, tokens, positions, lengths, config)
    pads = positions >= lengths[:, None]
    second = run(params, jnp.where(pads, 6 - tokens, tokens), positions, lengths, config)
    valid = ~np.asarray(pads)
    assert np.array_equal(np.asarray(first)[valid], np.asarray(second)[valid])
    others = tokens.at[1:].set(0)
    third = run(params, others, positions, lengths, config)
    assert np.array_equal(first[0, :5], third[0, :5])


def test_bf16_error_is_of_bf16_size(tiny_model):
    config, params = tiny_model
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, 7)
    exact = logits(params, tokens, config)
    rough = logits(params, tokens, dataclasses.replace(config, dtype="bfloat16"))
    assert rough.dtype == jnp.float32
    error = float(jnp.max(jnp.abs(rough - exact)) / jnp.max(jnp.abs(exact)))
    assert 1e-4 < error < 0.05


def test_parameter_count_and_axes():
    config = ModelConfig(vocab_size=126464, d_model=4096, n_layers=32, n_heads=32, d_mlp=12288)
    assert count_params(config) == 8_015_581_184  # LLaDA-8B's released weights
    for spec in jax.tree.leaves(abstract_params(config), is_leaf=lambda x: hasattr(x, "axes")):
        assert len(spec.axes) == len(spec.shape)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"d_model": 10, "n_heads": 4}, "model.d_model"),
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"head_dim": 5}, "odd"),
        ({"dtype": "float16"}, "model.dtype"),
        ({"n_layers": 0}, "model.n_layers"),
    ],
)
def test_bad_shapes_are_refused(change, word):
    with pytest.raises(UserError, match=word):
        ModelConfig(**change).validate()
