"""Training adapters on a frozen base: in one cycle, and through the command line from an exported checkpoint."""

import json

import jax
import numpy as np
import pytest
from hf_checkpoints import LLADA
from test_training_cycle import batches_of, setup_of

from dmpo_jax import load_pretrained
from dmpo_jax.cli import main
from dmpo_jax.config import resolve
from dmpo_jax.errors import UserError
from dmpo_jax.model.lora import LoraConfig, digest, init_adapters
from dmpo_jax.model.safetensors import read_header
from dmpo_jax.parallel.mesh import make_mesh
from dmpo_jax.training.cycle import make_cycle
from dmpo_jax.training.data import place
from dmpo_jax.training.initial import check_start
from dmpo_jax.training.state import fresh_state

CONFIG = """
[run]
cycles = {cycles}
compilation_cache = "{cache}"
[model]
d_model = 16
n_layers = 1
n_heads = 2
d_mlp = 16
[task]
train_size = 16
validation_size = 8
test_size = 8
[rollout]
prompts = 8
group = {group}
[sampler]
steps = 5
temperature = 1.0
[objective]
name = "{objective}"
[evaluation]
batch = 8
test = false
[checkpoint]
every = 1
"""


def cycles(setup, count=2, **given):
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    batches, records = batches_of(setup), []
    with jax.set_mesh(mesh):
        state = fresh_state(setup, mesh, **given)
        before = int(digest(state.base)), jax.device_get(state.reference)
        program = jax.jit(make_cycle(setup), donate_argnums=0)
        for k in range(count):
            state, record = program(state, place(batches[k], mesh))
            records.append(jax.device_get(record))
        assert int(digest(state.base)) == before[0]
        assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(state.reference), before[1]))
        return jax.device_get(state), records


def test_from_a_trained_adapter_only_adapters_learn_and_the_first_log_ratio_is_zero():
    """The given adapter is the frozen reference; dropout is off where likelihoods are compared."""
    setup = setup_of(lora={"rank": 2, "alpha": 8.0, "dropout": 0.2}, model={"base": "int8"})
    fresh = init_adapters(jax.random.key(0), setup.config.lora, setup.model)
    given = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), fresh)
    state, records = cycles(setup, params=given)
    assert jax.tree.all(jax.tree.map(np.array_equal, state.reference, jax.device_get(given)))
    assert records[0].metrics["log_ratio/std"] == records[0].metrics["log_ratio/mean"] == 0.0
    assert records[0].metrics["grad_norm"] > 1e-3 and records[1].metrics["log_ratio/std"] > 0.0
    assert not any(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (state.params, given)), strict=True))
    moments = [x for x in jax.tree.leaves(state.optimizer) if np.ndim(x)]
    assert sum(x.size for x in moments) == 2 * sum(x.size for x in jax.tree.leaves(state.params))


def write(path, **values):
    path.write_text(CONFIG.format(**values))
    return str(path)


def last(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny policy trained in full, exported, and tuned by one cycle of adapters on its int8 base."""
    folder = tmp_path_factory.mktemp("runs")
    cache = folder / "xla"  # the same programs compile again and again here
    pretrain = write(folder / "a.toml", cycles=2, group=1, objective="denoise", cache=cache)
    write(folder / "b.toml", cycles=1, group=2, objective="dmpo", cache=cache)
    assert main(["train", pretrain, "--run-dir", str(folder / "full")]) == 0
    assert main(["export", "--run-dir", str(folder / "full"), "--out", str(folder / "model")]) == 0
    assert tune(folder) == 0
    return folder


def tune(folder, *extra):
    lora = ("--set", f"model.pretrained={folder / 'model'}", "--set", "lora.rank=2", "--set", "model.base=int8")
    return main(["train", str(folder / "b.toml"), "--run-dir", str(folder / "tuned"), *lora, *extra])


def test_adapters_on_the_int8_base_of_an_exported_checkpoint(folder, capsys):
    content = json.loads((folder / "model" / "config.json").read_text())
    assert content["model_type"] == "llada" and content["dmpo_tokenizer"] == "character"
    first = last(folder / "tuned")
    assert first["cycle"] == 1 and first["log_ratio/std"] == 0.0
    summary = json.loads((folder / "tuned" / "summary.json").read_text())
    assert summary["trained_parameters"] < summary["parameters"] / 2
    trees = [
        json.loads(path.read_text())["tree_metadata"]
        for path in (folder / "tuned" / "checkpoints").rglob("_METADATA")
        if path.parent.name in ("params", "rest")
    ]
    params = [key for tree in trees for key in tree if "'blocks'" in key]
    assert params and all(key.endswith(("'a')", "'b')")) for key in params)  # adapters and their moments
    assert not [key for tree in trees for key in tree if "'embed'" in key or "'base'" in key]  # nothing of the base

    # More cycles go on from the saved adapters, on the same base; on another base they do not.
    assert tune(folder, "--set", "run.cycles=2") == 0
    assert last(folder / "tuned")["cycle"] == 2
    weights = folder / "model" / "model.safetensors"
    original = weights.read_bytes()
    weights.write_bytes(original[:-4] + b"\0\0\0\0")
    assert tune(folder, "--set", "run.cycles=3") == 2
    assert "belongs to other base weights" in capsys.readouterr().err
    weights.write_bytes(original)


def test_a_tuned_policy_leaves_merged_or_as_an_adapter(folder):
    run_dir, merged, adapter, copy = (str(folder / name) for name in ("tuned", "merged", "adapter", "copy"))
    assert main(["export", "--run-dir", run_dir, "--out", merged]) == 0
    assert main(["export", "--run-dir", run_dir, "--out", adapter, "--adapter"]) == 0
    assert len(read_header(folder / "adapter" / "adapter_model.safetensors")) == 14
    assert main(["import", merged, "--out", copy, "--dtype", "bfloat16"]) == 0
    _, params = load_pretrained(copy, dtype="bfloat16")
    _, exact = load_pretrained(merged)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b.astype(a.dtype)), params, exact))
    assert main(["export", "--run-dir", str(folder / "full"), "--out", str(folder / "none"), "--adapter"]) == 2


@pytest.mark.slow
def test_a_merged_policy_answers_like_its_run(folder):
    assert main(["export", "--run-dir", str(folder / "tuned"), "--out", str(folder / "whole")]) == 0
    evaluate = ["eval", str(folder / "b.toml"), "--out"]
    assert main([*evaluate, str(folder / "run.json"), "--run-dir", str(folder / "tuned")]) == 0
    assert main([*evaluate, str(folder / "whole.json"), "--model", str(folder / "whole")]) == 0
    assert (folder / "run.jsonl").read_text() == (folder / "whole.jsonl").read_text()


@pytest.fixture
def model(tmp_path):
    """A checkpoint folder's config.json; shapes are read before any weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLADA))
    return str(tmp_path)


def test_shape_comes_from_the_checkpoint(model):
    config = resolve({"model": {"pretrained": model, "d_model": 64, "remat": "full"}})
    assert (config.model.d_model, config.model.n_layers, config.model.vocab_size) == (64, 3, 256)
    assert config.model.remat == "full" and config.tokenizer.kind == "pretrained"
    with pytest.raises(UserError, match=r"model.d_model = 32: model.pretrained = .* has 64; leave the key out"):
        resolve({"model": {"pretrained": model, "d_model": 32}})
    with pytest.raises(UserError, match="nowhere: no such folder"):
        resolve({"model": {"pretrained": "nowhere"}})


def test_a_resolved_configuration_does_not_need_the_folder(model, tmp_path):
    import tomllib

    config = resolve({"model": {"pretrained": model}, "lora": {"rank": 4, "targets": ["published"]}})
    (tmp_path / "config.json").unlink()
    assert resolve(tomllib.loads(config.to_toml())) == config
    assert config.lora == LoraConfig(rank=4, targets=("published",))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"tokenizer": {"template": "none"}}, "tokenizer character has no chat template"),
        ({"tokenizer": {"truncation": "middle"}}, "tokenizer.truncation"),
        ({"lora": {"rank": -1}}, "lora.rank"),
        ({"model": {"base": "int4"}}, "model.base"),
        ({"model": {"block_size": -1}}, "model.block_size"),
        ({"model": {"family": "lada"}}, 'model.family = "lada": expected one of llada'),
    ],
)
def test_bad_settings_are_refused(tables, words):
    with pytest.raises(UserError, match=words):
        resolve(tables)


def test_frozen_storage_needs_adapters():
    with pytest.raises(UserError, match=r'model.base = "nf4" stores frozen weights, but lora.rank = 0'):
        check_start(resolve({"model": {"base": "nf4"}}))
    check_start(resolve({"model": {"base": "nf4"}, "lora": {"rank": 1}}))


def test_prompts_are_cut_only_when_asked_and_then_said(capsys):
    from dmpo_jax.model.tokenizer import make_tokenizer
    from dmpo_jax.tasks.task import Example
    from dmpo_jax.training.data import encode

    tokenizer = make_tokenizer("byte")
    examples = [Example(prompt=text, features={}, truth="", demonstration="") for text in ("abcdef", "ab")]
    with pytest.raises(UserError, match="widest bucket is 4"):
        encode(examples, tokenizer, 4, (4,))
    for side, kept in (("left", "cdef"), ("right", "abcd")):
        batch = encode(examples, tokenizer, 4, (4,), side)
        assert tokenizer.decode(batch.prompts.tokens[0]) == kept and batch.prompts.length.tolist() == [4, 2]
        assert f"1 of 2 prompts cut to 4 tokens on the {side}" in capsys.readouterr().err
