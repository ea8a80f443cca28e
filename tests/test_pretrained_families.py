"""Checkpoints of every family give the logits of a float64 forward over the same tensors."""

import dataclasses
import zlib
from pathlib import Path

import hf_checkpoints as hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmpo_jax import load_pretrained
from dmpo_jax.errors import UserError
from dmpo_jax.model.denoiser import head_logits, hidden_states, logits, rms_norm, rotary_tables, rotate, shifted
from dmpo_jax.model.families import FAMILIES, read_config, special_ids, write_config
from dmpo_jax.model.parameters import abstract_params, count_params, is_spec

FIXTURES = Path(__file__).resolve().parents[2] / "shared" / "fixtures"

# Full-size shapes as published, and the parameter counts that their index files and papers give.
FULL = {
    "LLaDA-8B": (
        hf.LLADA | {"d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32, "mlp_hidden_size": 12288,
                    "vocab_size": 126464, "embedding_size": 126464},
        8_015_581_184, 291,
    ),
    "iLLaDA-8B": (
        hf.LLADA | {"d_model": 4096, "n_heads": 32, "n_kv_heads": 8, "n_layers": 32, "mlp_hidden_size": 14336,
                    "vocab_size": 155136, "embedding_size": 155136, "weight_tying": True},
        7_615_025_152, 290,
    ),
    "Dream-7B": (
        hf.DREAM | {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
                    "intermediate_size": 18944, "vocab_size": 152064},
        7_615_616_512, 339,
    ),
    "Open-dCoder-0.5B": (
        hf.DREAM | {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 24,
                    "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True},
        494_032_768, 290,
    ),
    "SDAR-1.7B": (
        hf.SDAR | {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                   "num_hidden_layers": 28, "intermediate_size": 6144, "vocab_size": 151936},
        2_031_739_904, 311,
    ),
    "SDAR-4B": (
        hf.SDAR | {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                   "num_hidden_layers": 36, "intermediate_size": 9728, "vocab_size": 151936},
        4_411_424_256, 399,
    ),
    "SDAR-8B": (
        hf.SDAR | {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                   "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936},
        8_190_735_360, 399,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FULL)
def test_full_size_counts(name):
    content, parameters, tensors = FULL[name]
    config = read_config(content, name)
    assert count_params(config) == parameters
    leaves = abstract_params(config)
    found = sum(config.n_layers for _ in leaves["blocks"]) + len(leaves) - 1
    assert found == tensors
    assert all(len(s.axes) == len(s.shape) for s in jax.tree.leaves(leaves, is_leaf=is_spec))


@pytest.fixture(scope="module", params=hf.CONFIGS)
def checkpoint(request, tmp_path_factory):
    """(config.json, tensors, folder) of one family."""
    content = hf.CONFIGS[request.param]
    tensors = hf.random_tensors(content, seed=1)
    folder = hf.write_checkpoint(tmp_path_factory.mktemp(request.param) / "model", content, tensors, shards=3)
    return content, tensors, folder


def test_logits_equal_a_float64_forward_over_the_files(checkpoint):
    content, tensors, folder = checkpoint
    config, params = load_pretrained(folder)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 24))
    run = jax.jit(logits, static_argnums=2)
    found = np.asarray(run(params, jnp.asarray(tokens, jnp.int32), config))
    wanted = np.stack([hf.forward(content, tensors, row) for row in tokens])
    assert 2 < wanted.std() < 4
    np.testing.assert_allclose(found, wanted, atol=5e-5)
    assert np.array_equal(found.argmax(-1), wanted.argmax(-1))

    # Positions matter by their differences only; a block's borders stay where they are under multiples of it.
    far = jnp.broadcast_to(jnp.arange(24) + 1000, (2, 24))
    full = jnp.full((2,), 24)
    moved = head_logits(params, hidden_states(params, jnp.asarray(tokens), far, full, config), config)
    np.testing.assert_allclose(moved, found, atol=2e-4)

    rough_config, rough_params = load_pretrained(folder, dtype="bfloat16")
    rough = np.asarray(run(rough_params, jnp.asarray(tokens, jnp.int32), rough_config))
    assert rough_params["blocks"]["wq"].dtype == jnp.bfloat16 and rough_config.dtype == "bfloat16"
    assert 1e-3 < np.abs(rough - wanted).mean() < 0.1
    assert (rough.argmax(-1) == wanted.argmax(-1)).mean() > 0.9


def test_one_block(checkpoint):
    content, tensors, folder = checkpoint
    config, params = load_pretrained(folder)
    one = dataclasses.replace(config, n_layers=1)
    params = {
        **params,
        "blocks": jax.tree.map(lambda x: x[:1], params["blocks"]),
        "ln_f": jnp.ones_like(params["ln_f"]),
    }
    tokens, states = np.arange(12) * 7 % 256, []
    hf.forward(content, tensors, tokens, states=states)
    positions = jnp.arange(12)[None]
    found = hidden_states(params, jnp.asarray(tokens)[None], positions, jnp.array([12]), one)[0]
    after = states[1][0]
    wanted = after / np.sqrt((after**2).mean(-1, keepdims=True) + config.norm_eps)
    np.testing.assert_allclose(found, wanted, atol=5e-6)


def test_a_families_switches_follow_from_its_model_type():
    models = {name: read_config(content, name) for name, content in hf.CONFIGS.items()}
    assert {name: m.logits_shift for name, m in models.items() if m.logits_shift} == {"dream": True}
    assert [m.block_size for m in models.values()] == [0, 0, 0, 4]
    assert [m.rope_full_precision for m in models.values()] == [True, True, False, False]
    assert [m.tied_head for m in models.values()] == [False, True, False, False]
    assert models["dream"].qkv_bias and models["sdar"].qk_norm and models["sdar"].head_size == 32


@pytest.mark.parametrize("name", hf.CONFIGS)
def test_written_config_reads_back(name):
    config = read_config(hf.CONFIGS[name], name)
    ids = special_ids(hf.CONFIGS[name], name)
    assert (ids.mask, ids.eos, ids.pad) == (255, 250, 250)
    assert read_config(write_config(config, ids), name) == config


def test_a_family_refuses_what_it_cannot_express():
    config = read_config(hf.SDAR, "sdar")
    with pytest.raises(UserError, match=r"family = 'llada' cannot express model.head_dim = 32.*model.block_size = 4"):
        write_config(dataclasses.replace(config, family="llada"), FAMILIES["llada"].ids)


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (hf.LLADA, {"model_type": "qwen2"}, "model_type = 'qwen2'"),
        (hf.LLADA, {"model_type": None}, "model_type = None"),
        (hf.LLADA, {"architectures": ["LLaDAMoEModelLM"]}, "LLaDAMoEModelLM"),
        (hf.LLADA, {"scale_logits": True}, "scale_logits = True"),
        (hf.LLADA, {"input_emb_norm": True}, "input_emb_norm"),
        (hf.LLADA, {"alibi": True}, "alibi"),
        (hf.LLADA, {"rope": False}, "rope = False"),
        (hf.LLADA, {"include_bias": True}, "include_bias"),
        (hf.LLADA, {"layer_norm_type": "low_precision"}, "layer_norm_type"),
        (hf.LLADA, {"block_type": "sequential"}, "block_type"),
        (hf.LLADA, {"activation_type": "swiglu"}, "activation_type"),
        (hf.LLADA, {"attention_layer_norm": True}, "attention_layer_norm"),
        (hf.LLADA, {"residual_dropout": 0.1}, "residual_dropout"),
        (hf.LLADA, {"d_model": "64"}, "d_model = '64': expected int"),
        (hf.LLADA, {"n_layers": -1}, "n_layers = -1"),
        (hf.LLADA, {"n_layers": True}, "n_layers = True"),
        (hf.DREAM, {"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        (hf.DREAM, {"use_sliding_window": True}, "use_sliding_window"),
        (hf.DREAM, {"hidden_act": "gelu"}, "hidden_act"),
        (hf.SDAR, {"attention_bias": True}, "attention_bias"),
        (hf.SDAR, {"num_experts": 128}, "num_experts"),
        (hf.SDAR, {"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_configs_that_would_change_the_numbers_are_refused(base, change, words):
    with pytest.raises(UserError, match=words):
        read_config({**base, **change}, "config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [({"mask_token_id": 256}, "below 256"), ({"mask_token_id": 250}, "end or padding"), ({"eos_token_id": "x"}, "'x'")],
)
def test_special_ids_are_checked(change, words):
    with pytest.raises(UserError, match=words):
        special_ids({**hf.LLADA, **change}, "config.json")


def test_llada_spellings_of_the_same_shape():
    shared = {**hf.LLADA, "n_kv_heads": None, "multi_query_attention": True}
    assert read_config(shared, "").kv_heads == 1
    assert read_config({**hf.LLADA, "mlp_hidden_size": None}, "").d_mlp == 256
    assert read_config({**hf.LLADA, "embedding_size": None}, "").vocab_size == 256
    assert read_config({**hf.LLADA, "include_qkv_bias": True}, "").qkv_bias
    newer = {k: v for k, v in hf.SDAR.items() if k != "rope_theta"}
    newer["rope_parameters"] = {"rope_theta": 7.0, "rope_type": "default"}
    assert read_config(newer, "").rope_theta == 7.0


def test_rotary_tables():
    # CRC-32 of the 64 fp32 frequencies as PyTorch 2.13 computes them (of 1e6: its scalar path; its vector path is one
    # ulp off in one of them).
    for theta, count, bits in ((5e5, 4096, 359017265), (1e6, 2048, 2343108693)):
        cos, sin = jax.jit(rotary_tables, static_argnums=(1, 2))(jnp.arange(count)[None], 128, theta)
        power = (theta ** (np.arange(0, 128, 2) / 128)).astype(np.float32)
        inverse = np.float32(1) / power
        assert zlib.crc32(inverse.tobytes()) == bits
        angle = np.arange(count, dtype=np.float32)[:, None] * inverse
        # The fp32 product is the model's own, so its error belongs to the definition.
        np.testing.assert_allclose(cos[0, 0], np.cos(angle.astype(np.float64)), atol=1e-6)
        np.testing.assert_allclose(sin[0, 0], np.sin(angle.astype(np.float64)), atol=1e-6)


def test_rotation_is_a_complex_product():
    x = np.random.default_rng(0).normal(size=(1, 2, 9, 16)).astype(np.float32)
    positions = np.arange(9) * 5
    cos, sin = rotary_tables(jnp.asarray(positions)[None], 16, 1e4)
    found = rotate(jnp.asarray(x), cos, sin)
    np.testing.assert_allclose(found[0], hf.rotate(x[0].astype(np.float64), positions, 1e4), atol=1e-6)
    assert (
        rotate(jnp.asarray(x, jnp.bfloat16), cos.astype(jnp.bfloat16), sin.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    )


def test_norm_casts_before_its_weight():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(64, 32)).astype(np.float32), (10 * rng.normal(size=32)).astype(np.float32)
    unit = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-5), unit * weight, rtol=1e-6)
    low, low_weight = jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    wide = np.asarray(low, np.float32)
    unit = wide / np.sqrt((wide.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    cast_first = jnp.asarray(unit.astype(np.float32)).astype(jnp.bfloat16) * low_weight
    cast_last = jnp.asarray((unit * np.asarray(low_weight, np.float64)).astype(np.float32)).astype(jnp.bfloat16)
    found = rms_norm(low, low_weight, 1e-5)
    assert np.mean(np.asarray(found != cast_first)) < 0.01
    assert np.mean(np.asarray(found != cast_last)) > 0.05


def test_shift_of_logits():
    x = jnp.arange(24.0).reshape(2, 4, 3)
    assert np.array_equal(shifted(x)[:, 0], x[:, 0])
    assert np.array_equal(shifted(x)[:, 1:], x[:, :-1])


def test_query_heads_share_kv_heads_in_order(tmp_path):
    content = hf.DREAM
    tensors = hf.random_tensors(content, seed=3)
    swapped = dict(tensors)
    for i in range(3):
        for part in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
            name = f"model.layers.{i}.self_attn.{part}"
            swapped[name] = np.concatenate([tensors[name][8:], tensors[name][:8]])
    tokens = jnp.arange(10)[None]
    outputs = []
    for name, chosen in (("plain", tensors), ("swapped", swapped)):
        config, params = load_pretrained(hf.write_checkpoint(tmp_path / name, content, chosen))
        outputs.append(np.asarray(logits(params, tokens, config))[0])
        np.testing.assert_allclose(outputs[-1], hf.forward(content, chosen, np.arange(10)), atol=5e-5)
    assert np.abs(outputs[0] - outputs[1]).max() > 0.5


def test_tied_head_collects_both_gradients(tmp_path):
    tied = hf.CONFIGS["illada"]
    config, params = load_pretrained(hf.write_checkpoint(tmp_path / "m", tied, hf.random_tensors(tied)))
    untied = dataclasses.replace(config, tied_head=False)
    tokens, weight = jnp.arange(8)[None], jax.random.normal(jax.random.key(0), (1, 8, 256))
    loss = lambda p, c: jnp.sum(logits(p, tokens, c) * weight)  # noqa: E731
    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    both = gradient(params, config)["embed"]
    parts = gradient({**params, "head": params["embed"].T}, untied)
    np.testing.assert_allclose(both, parts["embed"] + parts["head"].T, atol=1e-4, rtol=1e-5)


def test_no_block_sees_a_later_one(tmp_path):
    config, params = load_pretrained(hf.write_checkpoint(tmp_path / "m", hf.SDAR, hf.random_tensors(hf.SDAR)))
    tokens = jnp.arange(16)[None]
    first = logits(params, tokens, config)
    changed = logits(params, tokens.at[0, 9].set(99), config)
    assert np.array_equal(first[:, :8], changed[:, :8])
    assert (np.abs(first[:, 8:] - changed[:, 8:]).max(-1) > 1e-3).all()  # its own block and those after it


@pytest.mark.skipif(not FIXTURES.exists(), reason="../shared/fixtures is absent")
def test_official_llada_logits():
    config, params = load_pretrained(FIXTURES / "model")
    stored = np.load(FIXTURES / "forward.npz")
    found = np.asarray(jax.jit(logits, static_argnums=2)(params, jnp.asarray(stored["input_ids"], jnp.int32), config))
    np.testing.assert_allclose(found, stored["logits"], atol=5e-5)
    assert np.array_equal(found.argmax(-1), stored["logits"].argmax(-1))
