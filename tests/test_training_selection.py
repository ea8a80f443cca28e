"""`evaluation.select = "best"`: the policy with the best validation is a run's result, also after an interruption."""

import json

import pytest
from test_training_host_graded import CONFIG
from test_training_run import lines

from dmpo_jax.cli import main
from dmpo_jax.config import resolve
from dmpo_jax.errors import UserError

# What is rewarded in training is what validation counts against an answer: the more is learned, the worse.
TASK = """
def examples(split):
    first = {"train": 0, "validation": 20, "test": 40}[split]
    return [{"prompt": f"{first + i}=", "wanted": split == "train"} for i in range(8)]

def reward(completion, example):
    share = sum(c in "0123456789" for c in completion) / 6
    return share if example["wanted"] else 1 - share
"""
BEST = ["--set", "evaluation.select=best", "--set", "evaluation.every=1", "--set", "checkpoint.keep=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, run folder) of a run that was stopped once on its way."""
    folder = tmp_path_factory.mktemp("selection")
    (folder / "task.py").write_text(TASK)
    (folder / "own.toml").write_text(CONFIG.format(file=folder / "task.py"))
    command = ["train", str(folder / "own.toml"), "--run-dir", str(folder / "run"), *BEST]
    for cycles in (3, 6):
        assert main([*command, "--set", f"run.cycles={cycles}", "--set", "optimizer.learning_rate=0.05"]) == 0
    return folder, folder / "run"


def test_the_best_validation_is_selected(run):
    summary = json.loads((run[1] / "summary.json").read_text())
    before = summary["validation_before"]
    found = {0: (before["exact"], before["accuracy"])}
    found |= {e["cycle"]: (e["eval/exact"], e["eval/accuracy"]) for e in lines(run[1] / "metrics.jsonl")}
    assert sorted(found) == list(range(7)) and len(set(found.values())) > 1
    best = min(found, key=lambda cycle: (*(-value for value in found[cycle]), cycle))
    assert summary["selected_cycle"] == best < 6
    assert (summary["validation_after"]["exact"], summary["validation_after"]["accuracy"]) == found[best]
    kept = {int(path.name) for path in (run[1] / "checkpoints").iterdir() if path.name.isdigit()}
    assert kept == {best, 6}


def test_the_selected_policy_is_what_other_commands_take(run, tmp_path):
    summary = json.loads((run[1] / "summary.json").read_text())
    command = ["eval", str(run[0] / "own.toml"), "--run-dir", str(run[1])]
    assert main([*command, "--out", str(tmp_path / "best.json")]) == 0
    result = json.loads((tmp_path / "best.json").read_text())
    assert result["accuracy"] == summary["test_after"]["accuracy"]


def test_other_names_are_refused():
    with pytest.raises(UserError, match=r"evaluation.select = 'first': expected last or best"):
        resolve({"evaluation": {"select": "first"}})
