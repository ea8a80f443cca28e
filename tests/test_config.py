import tomllib
from pathlib import Path

import pytest

from dmpo_jax.config import Config, load_config, resolve
from dmpo_jax.errors import UserError
from dmpo_jax.objectives import OBJECTIVES

RECIPES = Path(__file__).parents[1] / "configs"
CONFIGS = sorted(path for path in RECIPES.rglob("*.toml") if path.parent.name not in ("published", "reproduce"))


def test_defaults_are_valid_and_survive_a_round_trip():
    config = Config()
    config.validate()
    assert resolve(tomllib.loads(config.to_toml())) == config
    assert hash(config) == hash(Config())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_recipe_loads_and_says_what_it_is(path):
    config = load_config(path)
    assert resolve(tomllib.loads(config.to_toml())) == config
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_digest_follows_the_content():
    config = resolve({"run": {"seed": 1}})
    assert config.digest() == resolve({"run": {"seed": 1}}).digest() != resolve({"run": {"seed": 2}}).digest()


def test_strings_with_quotes_and_unicode_survive():
    config = resolve({"task": {"train_file": 'a "quoted" \\ päth\n\x7f.csv'}})
    assert resolve(tomllib.loads(config.to_toml())) == config


def test_overrides_and_extends(tmp_path):
    (tmp_path / "base.toml").write_text("[run]\nseed = 3\ncycles = 5\n[model]\nd_model = 32\n")
    (tmp_path / "leaf.toml").write_text('extends = "base.toml"\n[run]\ncycles = 7\n')
    config = load_config(
        tmp_path / "leaf.toml", ["optimizer.learning_rate=1", "task.name=countdown", "rollout.group=4"]
    )
    assert (config.run.seed, config.run.cycles, config.model.d_model) == (3, 7, 32)
    assert config.optimizer.learning_rate == 1.0 and isinstance(config.optimizer.learning_rate, float)
    assert config.task.name == "countdown" and config.rollout.group == 4


BAD = {
    "unknown key": ({"rollout": {"promts": 3}}, ["rollout.promts", "did you mean prompts"]),
    "unknown section": ({"rolout": {}}, ["[rolout]", "did you mean rollout"]),
    "wrong type": ({"rollout": {"prompts": "16"}}, ["rollout.prompts", "'16'", "expected int"]),
    "bool is no number": ({"rollout": {"prompts": True}}, ["rollout.prompts", "expected int"]),
    "float for int": ({"rollout": {"prompts": 1.5}}, ["rollout.prompts", "expected int"]),
    "list expected": ({"rollout": {"prompt_buckets": 8}}, ["rollout.prompt_buckets", "expected a list"]),
    "list of the wrong type": ({"rollout": {"prompt_buckets": ["8"]}}, ["rollout.prompt_buckets", "expected int"]),
    "no section": ({"run": 3}, ["run = 3", "section"]),
    "unknown objective": ({"objective": {"name": "dmppo"}}, ["objective.name", "did you mean dmpo"]),
    "key of another objective": ({"objective": {"name": "denoise", "alpha": 1.0}}, ["objective.alpha"]),
    "unknown task": ({"task": {"name": "sodoku"}}, ["task.name", "sodoku"]),
    "group of one": ({"rollout": {"group": 1}}, ["rollout.group = 1", "2 or more"]),
    "group for demonstrations": ({"objective": {"name": "denoise"}}, ["rollout.group", "set it to 1"]),
    "odd masks": ({"objective": {"masks": 3}}, ["objective.masks = 3", "pairs"]),
    "mask law": ({"objective": {"mask_law": "uniform"}}, ["objective.mask_law", "exact"]),
    "alpha": ({"objective": {"alpha": -1.0}}, ["objective.alpha", "positive"]),
    "baseline": ({"objective": {"baseline": "mean"}}, ["objective.baseline", "model"]),
    "no effect": ({"objective": {"baseline": "none", "centering": 0.5}}, ["objective.centering", "no effect"]),
    "target ess": ({"objective": {"target_ess": 1.5}}, ["objective.target_ess"]),
    "trajectory without roar": ({"objective": {"log_ratio": "trajectory"}}, ["trajectory", "roar", "low_confidence"]),
    "steps": ({"sampler": {"steps": 99}}, ["sampler.steps = 99"]),
    "block": ({"sampler": {"block_length": 7}}, ["sampler.block_length", "completion_length"]),
    "accumulation": ({"rollout": {"accumulation": 3}}, ["rollout.accumulation = 3", "rollout.prompts = 16"]),
    "learning rate": ({"optimizer": {"learning_rate": -1.0}}, ["optimizer.learning_rate"]),
    "schedule": ({"optimizer": {"schedule": "step"}}, ["optimizer.schedule", "cosine"]),
    "too many": ({"rollout": {"prompts": 100_000_000_000}}, ["rollout.prompts", "2^31"]),
    "not finite": ({"optimizer": {"clip": float("inf")}}, ["optimizer.clip = inf", "finite"]),
    "nan": ({"sampler": {"temperature": float("nan")}}, ["sampler.temperature = nan", "finite"]),
    "huge": ({"run": {"cycles": 10**400}}, ["run.cycles = 1000", "finite number"]),
    "seed that would repeat": ({"run": {"seed": 2**32}}, ["run.seed", "4294967295"]),
    "objective by list": ({"objective": {"name": ["dmpo"]}}, ["objective.name"]),
    "negative heads": ({"model": {"n_kv_heads": -1}}, ["model.n_kv_heads = -1"]),
    "huge model": ({"model": {"d_model": 10**9}}, ["model.d_model"]),
    "no rotation": ({"model": {"rope_theta": 0.0}}, ["model.rope_theta"]),
    "tiny alpha": ({"objective": {"alpha": 1e-300}}, ["objective.alpha"]),
    "cold evaluation": ({"evaluation": {"temperature": -1.0}}, ["evaluation.temperature"]),
    "weight decay": ({"optimizer": {"weight_decay": -1.0}}, ["optimizer.weight_decay"]),
    "updates": ({"objective": {"updates": 10**10}}, ["objective.updates"]),
    "warmup": (
        {"optimizer": {"schedule": "cosine", "warmup": 9}, "run": {"cycles": 1}},
        ["optimizer.warmup = 9", "8 updates"],
    ),
    "cycles": ({"run": {"cycles": 0}}, ["run.cycles", "1 or more"]),
    "careless": ({"task": {"careless": 1.5}}, ["task.careless", "1.5"]),
    "model": ({"model": {"d_model": 10}}, ["model.d_model", "n_heads"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_named(name):
    tables, words = BAD[name]
    with pytest.raises(UserError) as error:
        resolve(tables)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [("[run\n", "not valid TOML"), ('extends = "none.toml"\n', "none.toml"), ("extends = 3\n", "extends")],
)
def test_bad_files_are_named(tmp_path, text, word):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=word):
        load_config(path)


def test_extends_may_be_a_chain_but_not_a_ring(tmp_path):
    (tmp_path / "root.toml").write_text("[run]\ncycles = 3\nseed = 4\n[objective]\nalpha = 0.5\nupdates = 3\n")
    (tmp_path / "middle.toml").write_text('extends = "root.toml"\n[run]\nseed = 5\n[objective]\nupdates = 2\n')
    (tmp_path / "leaf.toml").write_text('extends = "middle.toml"\n[objective]\nname = "espo"\n')
    middle, leaf = load_config(tmp_path / "middle.toml"), load_config(tmp_path / "leaf.toml")
    assert (middle.run.cycles, middle.run.seed, middle.objective.alpha, middle.objective.updates) == (3, 5, 0.5, 2)
    assert leaf.run.seed == 5 and leaf.objective == OBJECTIVES["espo"].Config()  # another method's settings are its own
    (tmp_path / "ring.toml").write_text('extends = "ring.toml"\n')
    with pytest.raises(UserError, match="does one extend itself"):
        load_config(tmp_path / "ring.toml")


def test_missing_file():
    with pytest.raises(UserError, match=r"nowhere\.toml"):
        load_config("nowhere.toml")


def test_a_byte_order_mark_is_no_syntax_error(tmp_path):
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbf[run]\nseed = 3\n")
    assert load_config(tmp_path / "bom.toml").run.seed == 3


@pytest.mark.parametrize("text", ["run.seed", "seed=3", "=3", "run.=1", "run.seed=3\nx=1", "run.seed=3\n[model]"])
def test_bad_override(text):
    with pytest.raises(UserError, match=r"section\.key=value"):
        resolve({}, [text])


def test_groups_must_divide_over_the_mesh():
    config = resolve({"rollout": {"prompts": 12}})
    config.validate_mesh(4, (4, 1, 1))
    with pytest.raises(UserError, match=r"rollout.prompts = 12.*8 row shards"):
        config.validate_mesh(8, (8, 1, 1))
    with pytest.raises(UserError, match=r"evaluation\.batch"):
        resolve({"rollout": {"prompts": 24}, "evaluation": {"batch": 20}}).validate_mesh(8, (8, 1, 1))
