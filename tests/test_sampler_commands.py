"""`dmpo sample` and `dmpo bench sample`."""

import json

import jax
import numpy as np
import pytest

from dmpo_jax import cli
from dmpo_jax.config import resolve
from dmpo_jax.errors import UserError
from dmpo_jax.evaluation import sample as sampling
from dmpo_jax.evaluation import sampler_table
from dmpo_jax.model.parameters import init_params
from dmpo_jax.training.setup import make_setup

TABLES = {
    "tokenizer": {"kind": "byte"},
    "model": {"vocab_size": 260, "d_model": 16, "n_layers": 1, "n_heads": 2, "d_mlp": 16},
    "rollout": {"prompts": 4, "group": 2, "completion_length": 8},
    "sampler": {"block_length": 4, "temperature": 1.0, "cache": "dual"},
    "evaluation": {"batch": 8},
}


@pytest.fixture
def config(monkeypatch):
    config = resolve(TABLES)
    params = init_params(jax.random.key(0), make_setup(config).model)
    monkeypatch.setattr(sampling, "answering_policy", lambda *_: params)
    return config


def test_answers_come_in_the_order_of_the_prompts_and_do_not_depend_on_the_batch(config):
    prompts = ["a much longer prompt than the others, of some forty bytes", "b", "cc"]
    answers = sampling.sample_prompts(config, None, prompts)
    assert [answer["prompt"] for answer in answers] == prompts
    assert all(answer["nfe"] >= 4 and 0 <= answer["tokens"] <= 8 for answer in answers)
    assert sampling.sample_prompts(config, None, prompts[:1]) == answers[:1]


def test_the_screen_shows_what_is_masked(config):
    written = []
    screen = sampling.Screen(make_setup(config), written.append)
    screen.rows = 1
    ids = np.array([list(b"ab\ncd"), list(b"zzzzz")])
    screen(ids, np.array([[False, True, False, True, True]] * 2))
    assert written == ["a\u2591 \u2591\u2591\n"]


def test_prompt_files(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\\nline\n\ntwo\n", encoding="utf-8")
    assert sampling.read_prompts(file) == ["one\nline", "two"]
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(UserError, match="no prompt"):
        sampling.read_prompts(file)
    with pytest.raises(UserError, match="cannot be read"):
        sampling.read_prompts(tmp_path / "missing.txt")


def test_watching_several_devices_is_refused(config):
    with pytest.raises(UserError, match="--watch"):
        sampling.sample_prompts(config, None, ["a"], watch=True)


@pytest.mark.parametrize("shape", [{}, {"logits_shift": True}, {"block_size": 4}])
def test_every_sampler_of_the_table_suits_its_family(shape):
    config = resolve(TABLES | {"model": TABLES["model"] | shape, "sampler": {"block_length": 4}})
    for sampler in sampler_table.samplers_for(config.sampler, config.model).values():
        sampler.validate(8)
        sampler.validate_model(config.model)


def test_the_table_counts_and_compares(tmp_path, capsys):
    file, out = tmp_path / "c.toml", tmp_path / "t.json"
    lines = [f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in t.items()) for name, t in TABLES.items()]
    file.write_text("".join(lines))
    only = "low_confidence;prefix cache;dual cache"
    arguments = ["bench", "sample", str(file), "--set", "sampler.cache=none", "--prompt-width", "8", "--repeats", "1"]
    assert cli.main([*arguments, "--only", only, "--out", str(out), "--set", "run.compilation_cache="]) == 0
    rows = json.loads(out.read_text())["samplers"]
    assert [row["sampler"] for row in rows] == only.split(";") and [row["nfe"] for row in rows] == [8, 8, 8]
    # Two blocks of four tokens, one a step, after 8 prompt tokens.
    wanted = [16, (2 * 16 + 3 * (8 + 4)) / 8, (2 * 16 + 6 * 4) / 8]
    assert [row["tokens_per_forward"] for row in rows] == pytest.approx(wanted)
    assert all(row["seconds"] > 0 and row["share_of_peak"] > 0 for row in rows)
    assert capsys.readouterr().out.startswith("sampler")
    assert cli.main([*arguments, "--only", "other"]) == 2
    assert "no such sampler" in capsys.readouterr().err
    assert cli.main(["bench", str(file), "--only", "x"]) == 2
