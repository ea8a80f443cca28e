"""Adapters: counts, equivalence with merged weights, gradients for them alone, and PEFT's files."""

import dataclasses
import json
from pathlib import Path

import hf_checkpoints as hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmpo_jax import load_pretrained
from dmpo_jax.errors import UserError
from dmpo_jax.model.adapter_folder import read_adapter, write_adapter
from dmpo_jax.model.checkpoint_folder import tensor_names
from dmpo_jax.model.denoiser import logits
from dmpo_jax.model.families import read_config
from dmpo_jax.model.lora import (
    Adapted,
    LoraConfig,
    adapter_specs,
    attach,
    digest,
    init_adapters,
    matrices,
    with_dropout,
)  # fmt: skip
from dmpo_jax.model.parameters import count, shardings
from dmpo_jax.model.pretrained import DTYPES, stored_tensors
from dmpo_jax.model.quantize import store_tree, stored_specs
from dmpo_jax.model.safetensors import read_header
from dmpo_jax.model.weights import contract, merge
from dmpo_jax.parallel.mesh import make_mesh

FIXTURES = Path(__file__).resolve().parents[2] / "shared" / "fixtures"
LORA = LoraConfig(rank=4, alpha=6.0)
TOKENS = np.random.default_rng(0).integers(0, 240, (4, 10))
run = jax.jit(logits, static_argnums=2)


def model(tmp_path, family="llada"):
    content = hf.CONFIGS[family]
    tensors = hf.random_tensors(content, seed=6)
    config, params = load_pretrained(hf.write_checkpoint(tmp_path / "m", content, tensors))
    return tensors, config, params


def trained(config, lora=LORA, seed=0):
    """Adapters whose product is not zero."""
    fresh = init_adapters(jax.random.key(seed), lora, config)
    noise = lambda path, x: 0.1 * jax.random.normal(jax.random.key(len(str(path))), x.shape) + x  # noqa: E731
    return jax.tree_util.tree_map_with_path(noise, fresh)


def test_counts_of_llada_8b():
    content = {**hf.LLADA, "d_model": 4096, "n_heads": 32, "n_kv_heads": 32, "n_layers": 32, "mlp_hidden_size": 12288}
    config = read_config(content, "")
    assert count(adapter_specs(LoraConfig(rank=128), config)) == 335_544_320
    assert count(adapter_specs(LoraConfig(rank=128, targets=("published",)), config)) == 167_772_160


def test_presets():
    llada, dream = (read_config(hf.CONFIGS[name], name) for name in ("llada", "dream"))
    assert matrices(LoraConfig(rank=1, targets=("published",)), llada) == ("wq", "wk", "wv", "w_up")
    assert len(matrices(LoraConfig(rank=1, targets=("published",)), dream)) == 7  # Qwen's names all match
    assert matrices(LoraConfig(rank=1, targets=("w_down", "wq")), llada) == ("wq", "w_down")
    assert len(matrices(LoraConfig(rank=1), llada)) == 7


@pytest.mark.parametrize(
    "family", ["llada", "sdar", *(pytest.param(f, marks=pytest.mark.slow) for f in ("illada", "dream"))]
)
def test_merged_weights_are_the_same_function(tmp_path, family):
    tensors, config, params = model(tmp_path, family)
    adapters = trained(config)
    apart = run(attach(params, adapters, LORA), TOKENS, config)
    merged = jax.jit(merge, static_argnums=1)(attach(params, adapters, LORA), config)
    np.testing.assert_allclose(apart, run(merged, TOKENS, config), atol=5e-5)
    assert np.abs(apart - run(params, TOKENS, config)).max() > 0.1

    # By hand, on the matrices as they lie on file: W + (alpha / rank) B A.
    folder = tmp_path / "adapter"
    write_adapter(adapters, LORA, config, "base", folder)
    stored = {name: entry.read() for name, entry in read_header(folder / "adapter_model.safetensors").items()}
    assert len(stored) == 2 * 7 * config.n_layers
    by_hand = dict(tensors)
    for name in [n.removesuffix(".lora_A.weight") for n in stored if n.endswith("lora_A.weight")]:
        down, up = stored[f"{name}.lora_A.weight"], stored[f"{name}.lora_B.weight"]
        key = name.removeprefix("base_model.model.") + ".weight"
        assert down.shape == (4, tensors[key].shape[1]) and up.shape == (tensors[key].shape[0], 4)
        by_hand[key] = tensors[key] + 1.5 * up @ down
    wanted = np.stack([hf.forward(hf.CONFIGS[family], by_hand, row) for row in TOKENS])
    np.testing.assert_allclose(apart, wanted, atol=8e-5)

    # The exported merged weights are these, written from the unmerged tree one tensor at a time.
    names = [name for _, _, name, _ in tensor_names(config)]
    exported = dict(zip(names, stored_tensors(attach(params, adapters, LORA), config, DTYPES["float32"]), strict=True))
    assert all(np.allclose(exported[n], by_hand[n], atol=1e-6) for n in names)
    back = read_adapter(folder, LORA, config)
    assert jax.tree.all(jax.tree.map(np.array_equal, back, jax.device_get(adapters)))


def test_a_fresh_adapter_changes_nothing(tmp_path):
    _, config, params = model(tmp_path)
    fresh = init_adapters(jax.random.key(0), LORA, config)
    for base in ("int8", "nf4"):
        stored = store_tree(params, dataclasses.replace(config, base=base))
        both = jax.jit(
            lambda a, s: (logits(attach(s, a, LORA), TOKENS, config), logits(attach(s, {}, LORA), TOKENS, config))
        )
        on, off = both(fresh, stored)
        assert np.array_equal(on, off), base


@pytest.mark.parametrize("base", ["int8", *(pytest.param(b, marks=pytest.mark.slow) for b in ("float32", "nf4"))])
def test_gradients_reach_every_adapter_and_only_them(tmp_path, base):
    _, config, params = model(tmp_path)
    config = dataclasses.replace(config, base=base, remat="full")
    stored, adapters = store_tree(params, config), trained(config)
    weight = jax.random.normal(jax.random.key(1), (4, 10, 256))
    loss = jax.jit(lambda a: jnp.sum(logits(attach(stored, a, LORA), TOKENS, config) * weight))
    grads = jax.jit(jax.grad(loss))(adapters)
    assert jax.tree.structure(grads) == jax.tree.structure(adapters)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))
    direction = jax.tree.map(lambda g: g / 1e4, grads)
    ends = [float(loss(jax.tree.map(lambda a, d, s=s: a + s * d, adapters, direction))) for s in (0.01, -0.01)]
    slope = sum(float(jnp.vdot(g, d)) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True))
    assert (ends[0] - ends[1]) / 0.02 == pytest.approx(slope, rel=0.05)


def test_dropout(tmp_path):
    _, config, params = model(tmp_path)
    lora = dataclasses.replace(LORA, dropout=0.5)
    adapted = attach(params, trained(config), lora)
    off = run(adapted, TOKENS, config)
    assert np.array_equal(off, run(attach(params, trained(config), LORA), TOKENS, config))  # no key, no dropout
    drawn = lambda key: run(with_dropout(adapted, jax.random.key(key)), TOKENS, config)  # noqa: E731
    assert np.array_equal(drawn(0), drawn(0))
    assert np.abs(drawn(0) - drawn(1)).max() > 1e-3
    assert with_dropout(attach(params, trained(config), LORA), jax.random.key(0))["blocks"]["wq"].keys is None

    both = with_dropout({"old": adapted, "reference": adapted}, jax.random.key(0))  # compared policies drop the same
    alone = with_dropout(adapted, jax.random.key(0))
    for name in matrices(lora, config):
        drawn_keys = [
            jax.random.key_data(tree["blocks"][name].keys) for tree in (alone, both["old"], both["reference"])
        ]
        assert np.array_equal(drawn_keys[0], drawn_keys[1]) and np.array_equal(drawn_keys[0], drawn_keys[2])

    # One matrix, one layer: the mean over keys is the product without dropout, and kept inputs are scaled up.
    x, a, b = jnp.ones((2, 3, 64)), jnp.eye(64)[:, :8], jnp.eye(8)
    one = lambda key: contract("bsd,df->bsf", x, Adapted(jnp.zeros((64, 8)), a, b, key, 1.0, 0.25))  # noqa: E731
    many = jax.vmap(one)(jax.random.split(jax.random.key(0), 2000))
    assert set(np.unique(many).tolist()) == {0.0, np.float32(1 / 0.75)}
    np.testing.assert_allclose(many.mean(), 1.0, atol=0.02)
    np.testing.assert_allclose((many[:, 0] * many[:, 1]).mean(), 1.0, atol=0.05)  # rows are independent


@pytest.mark.parametrize(
    ("family", "base"),
    [
        ("dream", "int8"),
        pytest.param("llada", "nf4", marks=pytest.mark.slow),
        pytest.param("sdar", "float32", marks=pytest.mark.slow),
    ],
)
def test_every_mesh_gives_the_same_numbers(tmp_path, base, family):
    _, config, params = model(tmp_path, family)
    config, lora = dataclasses.replace(config, base=base), dataclasses.replace(LORA, dropout=0.3)
    stored, adapters = store_tree(params, config), trained(config, lora)

    def loss(adapters, stored):
        policy = with_dropout(attach(stored, adapters, lora), jax.random.key(5))
        return jnp.mean(logits(policy, jnp.asarray(TOKENS), config) ** 2)

    wanted = jax.jit(jax.value_and_grad(loss))(adapters, stored)
    mesh = make_mesh((2, 2, 2))
    place = jax.device_put(stored, shardings(stored_specs(config), mesh))
    placed = jax.device_put(adapters, shardings(adapter_specs(lora, config), mesh))
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(loss))(placed, place)
        assert digest(place) == digest(stored)
    assert found[0] == pytest.approx(float(wanted[0]), rel=1e-5)
    assert jax.tree.map(lambda g: g.sharding, found[1]) == jax.tree.map(lambda a: a.sharding, placed)
    for g, w in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(g, w, atol=2e-5 * np.abs(w).max() + 1e-7)


@pytest.mark.skipif(not FIXTURES.exists(), reason="../shared/fixtures is absent")
def test_official_adapter(tmp_path):
    """The published four of seven matrices, rank 8 and scale 2, as PEFT names them."""
    stored = np.load(FIXTURES / "lora.npz")
    hf.write_safetensors(
        tmp_path / "adapter_model.safetensors",
        {f"base_model.model.{name}": stored[name] for name in stored.files if name != "scale"},
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}))
    config, params = load_pretrained(FIXTURES / "model")
    lora = LoraConfig(rank=8, alpha=16.0, targets=("published",))
    policy = attach(params, read_adapter(tmp_path, lora, config), lora)
    f = np.load(FIXTURES / "forward.npz")
    found = run(policy, jnp.asarray(f["input_ids"], jnp.int32), config)
    np.testing.assert_allclose(found, f["logits_cur"], atol=8e-5)  # of deviation 4.9, and the adapter merged there
    assert np.array_equal(found.argmax(-1), f["logits_cur"].argmax(-1))


def test_digest_sees_every_bit(tmp_path):
    _, _, params = model(tmp_path)
    first = int(digest(params))
    assert first == int(digest(jax.tree.map(jnp.copy, params)))
    wq = params["blocks"]["wq"]
    for changed in (wq.at[1, 2, 3, 4].multiply(1 + 2**-22), wq[::-1], jnp.swapaxes(wq, 2, 3).reshape(wq.shape), -wq):
        assert int(digest({**params, "blocks": {**params["blocks"], "wq": changed}})) != first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r": 8}, "r = 8: expected 4; set lora.rank"),
        ({"lora_alpha": 1}, "lora_alpha = 1: expected 6.0; set lora.alpha"),
        ({"use_rslora": True}, "use_rslora = True"),
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA'"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ],
)
def test_other_adapters_are_refused(tmp_path, change, words):
    config = read_config(hf.LLADA, "")
    write_adapter(trained(config), LORA, config, "base", tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=words):
        read_adapter(tmp_path / "a", LORA, config)


def test_an_adapter_of_other_targets_is_refused(tmp_path):
    config = read_config(hf.LLADA, "")
    few = dataclasses.replace(LORA, targets=("wq",))
    write_adapter(trained(config, few), few, config, "base", tmp_path / "a")
    with pytest.raises(UserError, match=r"36 adapters missing and 0 unknown.*lora.targets"):
        read_adapter(tmp_path / "a", LORA, config)
    assert json.loads((tmp_path / "a" / "adapter_config.json").read_text())["target_modules"] == (
        r"model\.transformer\.blocks\.\d+\.(q_proj)"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": -1}, "lora.rank"),
        ({"alpha": 0.0}, "lora.alpha"),
        ({"dropout": 1.0}, "lora.dropout"),
        ({"targets": ("q_proj",)}, "expected some of wq"),
        ({"targets": ()}, "lora.targets"),
        ({"adapter": "x"}, "lora.adapter = x needs lora.rank"),
    ],
)
def test_bad_settings_are_refused(change, words):
    with pytest.raises(UserError, match=words):
        LoraConfig(**change).validate()
