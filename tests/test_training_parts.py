"""Batches, optimiser, alarms, metric files, checkpoints."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmpo_jax.config import CheckpointConfig, OptimizerConfig, resolve
from dmpo_jax.errors import UserError
from dmpo_jax.inputs import read_json
from dmpo_jax.model.parameters import ModelConfig, init_params, param_shardings
from dmpo_jax.model.tokenizer import make_tokenizer
from dmpo_jax.parallel.mesh import make_mesh
from dmpo_jax.tasks.task import Example
from dmpo_jax.training.alarms import PATIENCE, Alarms
from dmpo_jax.training.checkpoint import Checkpoints, load_params
from dmpo_jax.training.data import Batches, encode
from dmpo_jax.training.metrics import JsonLines, Progress, check_output
from dmpo_jax.training.optimizer import make_optimizer
from dmpo_jax.training.run_folder import claim
from dmpo_jax.training.state import State

TOKENIZER = make_tokenizer("character")


def examples(count=10):
    return [
        Example("1" * (1 + i % 4) + "=", f"<answer>{i % 10}</answer>", str(i), {"x": np.array([i], np.int32)})
        for i in range(count)
    ]


def test_encode_pads_prompts_and_fills_answers_with_eos():
    batch = encode(examples(3), TOKENIZER, 6)
    assert batch.prompts.tokens.shape == (3, 4) and batch.prompts.length.tolist() == [2, 3, 4]
    assert batch.prompts.tokens[0, 2:].tolist() == [TOKENIZER.pad_id] * 2
    assert TOKENIZER.decode(batch.demonstration[2]) == "<answer>2</answer>"
    assert batch.demonstration[0, 3:].tolist() == [TOKENIZER.eos_id] * 3
    assert batch.features["x"].tolist() == [[0], [1], [2]]


def test_nothing_is_cut_silently():
    with pytest.raises(UserError, match=r"completion_length = 3.*3 tokens"):
        encode(examples(), TOKENIZER, 3)
    with pytest.raises(UserError, match=r"prompt_buckets.*5 tokens.*widest bucket is 4"):
        encode(examples(), TOKENIZER, 6, (2, 4))


def test_batches_are_a_function_of_seed_and_number():
    data = encode(examples(10), TOKENIZER, 6)
    batches, again = Batches(data, 4, seed=3), Batches(data, 4, seed=3)
    for k in (7, 0, 3, 7):
        jax.tree.map(np.testing.assert_array_equal, batches[k], again[k])
    ids = [batches[k].features["x"][:, 0].tolist() for k in range(5)]
    assert ids != [Batches(data, 4, seed=4)[k].features["x"][:, 0].tolist() for k in range(5)]
    flat = [i for batch in ids for i in batch]
    assert sorted(flat[:10]) == sorted(flat[10:20]) == list(range(10))  # every pass sees every example once
    assert flat[:10] != flat[10:20]


def test_a_batch_takes_the_narrowest_bucket_that_holds_it():
    data = encode(examples(8), TOKENIZER, 6, (3, 5, 9))
    for k in range(6):
        batch = Batches(data, 2, 0, (3, 5, 9))[k]
        longest, width = batch.prompts.length.max(), batch.prompts.tokens.shape[1]
        assert width == min(b for b in (3, 5, 9) if b >= longest)
        assert (batch.prompts.tokens[np.arange(2), batch.prompts.length - 1] != TOKENIZER.pad_id).all()


def test_tokenizers_round_trip_and_name_what_they_cannot_say():
    text = "3 + 4*(5-1)/2 = <answer>11</answer>\n"
    for kind in ("character", "byte"):
        tokenizer = make_tokenizer(kind)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and max(ids) < tokenizer.vocab_size
        assert tokenizer.decode([*ids, tokenizer.eos_id, *ids]) == text
        table, lengths = tokenizer.byte_table()
        assert b"".join(bytes(table[i, : lengths[i]]) for i in ids) == text.encode()
    assert len(make_tokenizer("character").encode("<answer>")) == 1
    assert make_tokenizer("byte").decode(make_tokenizer("byte").encode("é漢")) == "é漢"
    with pytest.raises(UserError, match="byte"):
        TOKENIZER.encode("abc")
    with pytest.raises(UserError, match=r"tokenizer\.kind"):
        make_tokenizer("word")


def adamw_in_float64(grads, config, schedule):
    """Parameters after each step from 1.0, straight from the definition of AdamW behind a norm clip."""
    p, m, v, out = 1.0, 0.0, 0.0, []
    for t, g in enumerate(grads, 1):
        g = g * min(1.0, config.clip / abs(g))
        m, v = config.b1 * m + (1 - config.b1) * g, config.b2 * v + (1 - config.b2) * g * g
        step = (m / (1 - config.b1**t)) / (np.sqrt(v / (1 - config.b2**t)) + 1e-8)
        p -= schedule(t - 1) * (step + config.weight_decay * p)
        out.append(p)
    return out


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_optimizer_is_adamw_with_clip_and_schedule(kind):
    config = OptimizerConfig(learning_rate=0.1, schedule=kind, warmup=2, weight_decay=0.3, clip=0.5)

    def schedule(t):
        if t < 2:
            return 0.1 * t / 2
        return 0.1 if kind == "constant" else 0.05 * (1 + np.cos(np.pi * (t - 2) / (8 - 2)))

    optimizer = make_optimizer(config, updates=8)
    params, grads = jnp.float32(1.0), [2.0, -0.1, 0.3, 0.4, -3.0, 0.2, 0.1, 0.1]
    state, found = optimizer.init(params), []
    for g in grads:
        step, state = optimizer.update(jnp.float32(g), state, params)
        params = params + step
        found.append(float(params))
    np.testing.assert_allclose(found, adamw_in_float64(grads, config, schedule), rtol=1e-5)


def test_alarms_speak_once_and_only_after_patience():
    alarms = Alarms()
    fine = {"completion_unfinished": 0.0, "reward/zero_std_groups": 0.1}
    mixed = np.arange(64).reshape(2, 4, 8)
    assert alarms.check(fine, mixed) == []
    said = [alarms.check({**fine, "completion_unfinished": 0.6 + 0.01 * i}, mixed) for i in range(2 * PATIENCE)]
    assert [len(s) for s in said] == [0] * (PATIENCE - 1) + [1] + [0] * PATIENCE
    assert "rollout.completion_length" in said[PATIENCE - 1][0]
    dead = [alarms.check({**fine, "reward/zero_std_groups": 1.0}, mixed) for _ in range(PATIENCE)]
    assert "rollout.group" in dead[-1][0]
    nearly = lambda other: np.where(np.arange(64).reshape(2, 4, 8) < other, 1, 0)  # noqa: E731
    stuck = [alarms.check(fine, nearly(i)) for i in range(PATIENCE)]
    assert "collapsed" in stuck[-1][0]


def test_metrics_file_drops_what_will_be_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"cycle": 1, "x": 1}\n{"cycle": 2, "x": 2}\n{"cycle": 3, "x"')
    lines = JsonLines(path, resume_after=1)
    lines.write({"cycle": 2, "x": float("nan")})
    lines.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"cycle": 1, "x": 1},
        {"cycle": 2, "x": None},
    ]


@pytest.mark.parametrize("line", ["3", '{"a": 1}', '{"cycle": "x"}', "garbage"])
def test_a_damaged_line_is_named_and_nothing_is_lost(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    text = f'{{"cycle": 1}}\n{line}\n{{"cycle": 3}}\n'
    path.write_text(text)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
        JsonLines(path, resume_after=3)
    assert path.read_text() == text


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_damaged_json_file_is_named(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(UserError, match=r"summary\.json"):
        read_json(tmp_path / "summary.json")


@pytest.mark.parametrize("name", ["result.jsonl", "result", "", "file/result.json", "folder.json"])
def test_output_that_cannot_be_written_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UserError, match="--out"):
        check_output(tmp_path / name, ".json")
    check_output(tmp_path / "new" / "result.json", ".json")


def config_of(cycles, schedule="constant"):
    return resolve({"run": {"cycles": cycles}, "optimizer": {"schedule": schedule}})


def test_a_folder_is_claimed_only_when_nothing_is_lost(tmp_path):
    run_dir = tmp_path / "run"
    claim(run_dir, config_of(3))
    claim(run_dir, config_of(5))  # the first start left nothing to keep
    (run_dir / "metrics.jsonl").write_text('{"cycle": 1}\n')
    with pytest.raises(UserError, match="no checkpoint to go on from"):
        claim(run_dir, config_of(5))
    (run_dir / "checkpoints" / "1").mkdir(parents=True)
    claim(run_dir, config_of(6))  # longer
    with pytest.raises(UserError, match=r"run\.cycles: 6 -> 5"):
        claim(run_dir, config_of(5))
    with pytest.raises(UserError, match="is a file"):
        claim(run_dir / "metrics.jsonl", config_of(5))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "checkpoints").write_text("x")
    with pytest.raises(UserError, match="checkpoints: is a file"):
        claim(tmp_path / "odd", config_of(5))
    assert (run_dir / "metrics.jsonl").read_text() == '{"cycle": 1}\n'


def test_progress_counts_completions(capsys):
    progress = Progress(4, 32, "completions", every_s=0.0)
    progress.show(1, {"reward/mean": 0.25})
    progress.show(2, {"reward/mean": 0.5})
    out = capsys.readouterr().err.splitlines()
    assert "32/128 completions" in out[0] and "eta ?" in out[0] and "reward 0.25" in out[0]
    assert "64/128 completions" in out[1] and "eta 0:00" in out[1]


MODEL = ModelConfig(vocab_size=8, d_model=8, n_layers=2, n_heads=2, d_mlp=8)


def state_on(mesh, seed):
    make = jax.jit(lambda: init_params(jax.random.key(seed), MODEL), out_shardings=param_shardings(MODEL, mesh))
    params = make()
    return State(params, jax.tree.map(jnp.copy, params), {"m": params}, jnp.int32(seed), jnp.uint32(0))


def test_a_checkpoint_of_four_devices_is_restored_on_one_and_two(tmp_path):
    devices = jax.devices()
    saved = state_on(make_mesh((2, 2, 1), devices[:4]), 5)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    checkpoints.save(3, saved, {"cycle": 3})
    checkpoints.save(4, saved, {"cycle": 4})
    checkpoints.close()
    for shape in ((1, 1, 1), (1, 2, 1)):
        mesh = make_mesh(shape, devices[: int(np.prod(shape))])
        checkpoints = Checkpoints(tmp_path)
        assert checkpoints.latest == 4
        restored, meta = checkpoints.restore(state_on(mesh, 0))
        assert meta["cycle"] == 4 and int(restored.cycle) == 5
        jax.tree.map(np.testing.assert_array_equal, restored.params, saved.params)
        jax.tree.map(np.testing.assert_array_equal, restored.optimizer, saved.optimizer)
        assert restored.params["head"].sharding == param_shardings(MODEL, mesh)["head"]
        checkpoints.close()
        shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), MODEL))
        alone = load_params(tmp_path, shapes, param_shardings(MODEL, mesh))
        jax.tree.map(np.testing.assert_array_equal, alone, saved.params)


@pytest.mark.parametrize("harm", ["no params", "empty", "no meta"])
def test_a_damaged_checkpoint_is_named(tmp_path, harm):
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(4, state_on(mesh, 5), {"cycle": 4})
    checkpoints.close()
    folder = tmp_path / "checkpoints" / "4"
    for item in {"no params": ["params"], "no meta": ["meta"], "empty": ["params", "rest", "meta"]}[harm]:
        shutil.rmtree(folder / item)
    with pytest.raises(UserError, match=r"checkpoints/4: cannot be restored.*remove that folder"):
        Checkpoints(tmp_path).restore(state_on(mesh, 0))


def test_parameters_of_a_folder_without_checkpoints(tmp_path):
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), MODEL))
    where = param_shardings(MODEL, make_mesh((1, 1, 1), jax.devices()[:1]))
    with pytest.raises(UserError, match="no checkpoints"):
        load_params(tmp_path, shapes, where)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="no complete checkpoint"):
        load_params(tmp_path, shapes, where)


def test_normalizers_weigh_lengths_differently():
    """Two answers with the same value per token, 2 and 20 tokens long: canvas favours the long one ten to one."""
    from dmpo_jax.objectives.objective import normalizer

    live = jnp.arange(20) < jnp.array([2, 20])[:, None]
    value = jnp.array([-2.0, -20.0])
    canvas, per_row = value / normalizer(live, "canvas"), value / normalizer(live, "live")
    assert float(canvas[1] / canvas[0]) == pytest.approx(10.0)
    assert float(per_row[1] / per_row[0]) == pytest.approx(1.0)
