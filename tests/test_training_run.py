"""Whole runs through the command line: training, resuming, stopping, evaluating, refusing."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from dmpo_jax.cli import main

PRETRAIN = """
[run]
cycles = 4
samples_every = 2
compilation_cache = ""
[model]
d_model = 16
n_layers = 1
n_heads = 2
d_mlp = 16
[task]
train_size = 64
validation_size = 8
test_size = 8
[rollout]
prompts = 8
group = 1
[sampler]
steps = 5
[objective]
name = "denoise"
[optimizer]
learning_rate = 1e-3
[evaluation]
every = 2
batch = 8
[checkpoint]
every = 1
"""
DMPO = """
extends = "pretrain.toml"
[run]
cycles = 6
start_from = "{start}"
[rollout]
group = 4
[sampler]
temperature = 1.0
[objective]
name = "dmpo"
updates = 2
masks = 2
weight_masks = 2
equal_rewards = "keep"
baseline = "none"
"""
TIMES = ("time/cycle_s", "time/compile_s", "tokens_per_second")
CONTRACT = {
    "cycle", "updates", "reward/mean", "reward/std", "reward/cells",
    "reward/exact", "reward/zero_std_groups", "ess/mean", "ess/min", "log_ratio/mean",
    "log_ratio/std", "loss", "grad_norm", "completion_length", "nfe/mean",
    "time/cycle_s", "time/compile_s", "tokens_per_second",
}  # fmt: skip


def dmpo(*arguments, cwd, **kwargs):
    """The command in a process of its own, one device."""
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "JAX_COMPILATION_CACHE_DIR": str(cwd / "xla")}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return subprocess.Popen(
        [sys.executable, "-m", "dmpo_jax", *map(str, arguments)],
        cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs,
    )  # fmt: skip


def finish(process, timeout=240):
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(entries):
    return [{k: v for k, v in entry.items() if k not in TIMES} for entry in entries]


def final_params(run_dir):
    import orbax.checkpoint as ocp

    latest = max((run_dir / "checkpoints").iterdir(), key=lambda p: int(p.name) if p.name.isdigit() else -1)
    return jax.device_get(ocp.StandardCheckpointer().restore((latest / "params").absolute()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with both configurations and a finished pretraining run and DMPO run."""
    path = tmp_path_factory.mktemp("runs")
    (path / "pretrain.toml").write_text(PRETRAIN)
    (path / "dmpo.toml").write_text(DMPO.format(start="pretrain"))
    for name in ("pretrain", "dmpo"):
        code, _, err = finish(dmpo("train", f"{name}.toml", "--run-dir", name, cwd=path))
        assert code == 0, err
    return path


def test_a_run_folder_holds_what_the_contract_says(folder):
    metrics = lines(folder / "dmpo" / "metrics.jsonl")
    assert [entry["cycle"] for entry in metrics] == [1, 2, 3, 4, 5, 6]
    assert [entry["updates"] for entry in metrics] == [2, 4, 6, 8, 10, 12]
    for entry in metrics:
        assert not CONTRACT - set(entry)
        assert all(isinstance(value, int | float) for value in entry.values())
        assert ("eval/accuracy" in entry) == (entry["cycle"] % 2 == 0)
    assert sum(entry["time/compile_s"] > 0 for entry in metrics) == 6
    samples = lines(folder / "dmpo" / "samples.jsonl")
    assert {entry["cycle"] for entry in samples} == {1, 2, 4, 6}
    for entry in samples:
        assert {"prompt", "completion", "reward"} <= set(entry)
        prompt, truth = entry["prompt"].rstrip("="), entry["truth"]
        assert len(truth) == 16 and all(p in ("0", t) for p, t in zip(prompt, truth, strict=True))
    summary = json.loads((folder / "dmpo" / "summary.json").read_text())
    assert summary["status"] == "done" and summary["compilations"] == 1
    for when in ("test_before", "test_after", "validation_before", "validation_after"):
        result = summary[when]
        assert result["n"] == 8 and result["task"] == "sudoku" and result["grader_disagreements"] == 0
        low, high = result["exact_ci95"]
        assert 0 <= low <= result["exact"] <= high <= 1
    assert len(lines(folder / "dmpo" / "eval" / "after.jsonl")) == 8
    assert "start_from" in (folder / "dmpo" / "config.toml").read_text()


def test_training_changes_the_parameters_and_starts_from_the_given_ones(folder):
    start, end = final_params(folder / "pretrain"), final_params(folder / "dmpo")
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), start, end)
    assert max(jax.tree.leaves(moved)) > 1e-5
    assert max(jax.tree.leaves(moved)) < 0.1  # twelve small steps away, not another initialisation


def test_a_finished_run_is_left_as_it_is(folder):
    files = [folder / "dmpo" / name for name in ("metrics.jsonl", "samples.jsonl", "summary.json")]
    before = [path.read_text() for path in files]
    code, _, _ = finish(dmpo("train", "dmpo.toml", "--run-dir", "dmpo", cwd=folder))
    assert code == 0 and [path.read_text() for path in files] == before


def test_a_run_may_be_made_longer(folder):
    """Three cycles, then the same command asking for six: the same as six at once."""
    command = ("train", "dmpo.toml", "--run-dir", "longer")
    for cycles in (3, 6):
        code, _, err = finish(dmpo(*command, "--set", f"run.cycles={cycles}", cwd=folder))
        assert code == 0, err
    assert json.loads((folder / "longer" / "summary.json").read_text())["cycles"] == 6
    found, wanted = lines(folder / "longer" / "metrics.jsonl"), lines(folder / "dmpo" / "metrics.jsonl")
    assert [e["loss"] for e in found] == [e["loss"] for e in wanted]
    jax.tree.map(np.testing.assert_array_equal, final_params(folder / "longer"), final_params(folder / "dmpo"))


def test_a_kept_rollout_survives_a_stop_between_its_cycles(folder):
    """Three cycles to a rollout, stopped after the fourth: the fifth and sixth still learn from the second rollout."""
    command = ("train", "dmpo.toml", "--set", "rollout.staleness=2", "--set", "run.samples_every=1")
    for name, stops in (("kept", (8,)), ("kept-in-parts", (4, 8))):
        for cycles in stops:
            code, _, err = finish(dmpo(*command, "--run-dir", name, "--set", f"run.cycles={cycles}", cwd=folder))
            assert code == 0, err
    found, wanted = (without_times(lines(folder / n / "metrics.jsonl")) for n in ("kept-in-parts", "kept"))
    assert [entry["loss"] for entry in found] == [entry["loss"] for entry in wanted]
    assert [entry["rollout_age"] for entry in wanted] == [0, 1, 2, 0, 1, 2, 0, 1]
    texts = [entry["completion"] for entry in lines(folder / "kept" / "samples.jsonl") if "completion" in entry]
    per_cycle = [texts[start : start + 8] for start in range(0, len(texts), 8)]
    assert per_cycle[0] == per_cycle[1] == per_cycle[2] != per_cycle[3] == per_cycle[5]
    jax.tree.map(np.testing.assert_array_equal, final_params(folder / "kept-in-parts"), final_params(folder / "kept"))


def test_kill_9_at_random_moments_then_the_same_command(folder):
    """Three kills, the first before any cycle is saved; the end equals the unbroken run, bit for bit."""
    command = (
        "train",
        "dmpo.toml",
        "--set",
        "run.cycles=60",
        "--set",
        "checkpoint.every=7",
        "--set",
        "evaluation.every=9",
    )
    code, _, err = finish(dmpo(*command, "--run-dir", "unbroken", cwd=folder))
    assert code == 0, err
    dice, run_dir = random.Random(5), folder / "killed"
    for kill in range(3):
        process = dmpo(*command, "--run-dir", "killed", cwd=folder)
        wanted = 60 * kill // 4 + dice.randint(1, 6)
        while process.poll() is None and len(lines_or_none(run_dir)) < wanted:
            time.sleep(0.002)
        assert process.poll() is None, "finished before it could be killed"
        process.kill()
        process.communicate()
    code, out, err = finish(dmpo(*command, "--run-dir", "killed", cwd=folder))
    assert code == 0, err
    assert "resuming" in out
    assert without_times(lines(run_dir / "metrics.jsonl")) == without_times(
        lines(folder / "unbroken" / "metrics.jsonl")
    )
    assert lines(run_dir / "samples.jsonl") == lines(folder / "unbroken" / "samples.jsonl")
    jax.tree.map(np.testing.assert_array_equal, final_params(run_dir), final_params(folder / "unbroken"))


def lines_or_none(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_sigterm_saves_and_exits_with_17(folder):
    command = ("train", "dmpo.toml", "--run-dir", "stopped", "--set", "run.cycles=400")
    process = dmpo(*command, cwd=folder)
    while not lines_or_none(folder / "stopped") and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 17, err
    assert "run the same command" in out
    done = len(lines_or_none(folder / "stopped"))
    assert 0 < done < 400 and (folder / "stopped" / "checkpoints" / str(done)).is_dir()


def test_eval_writes_result_and_items(folder):
    data = folder / "puzzles.csv"
    data.write_text("Puzzle,Solution\n0234341221434321,1234341221434321\n1030300200430001,1234341221434321\n")
    code, out, err = finish(
        dmpo("eval", "dmpo.toml", "--run-dir", "dmpo", "--data", data, "--out", "out/result.json", cwd=folder)
    )
    assert code == 0, err
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["n"] == 2 and result["task"] == "sudoku" and result["data"] == str(data)
    for key in ("accuracy", "accuracy_ci95", "exact", "mean_nfe", "tokens_per_second", "sampler", "baselines"):
        assert key in result
    items = lines(folder / "out" / "result.jsonl")
    assert [item["prompt"] for item in items] == ["0234341221434321=", "1030300200430001="]
    assert all({"completion", "truth", "score", "nfe"} <= set(item) for item in items)
    assert json.loads(out)["n"] == 2


def test_training_on_a_csv_file(folder):
    from dmpo_jax.tasks.sudoku_grids import grids

    rows = ["Puzzle,Solution"]
    for grid in grids()[:20]:
        solution = "".join(map(str, grid))
        rows.append(f"{'0' * 4}{solution[4:]},{solution}")
    (folder / "train.csv").write_text("\n".join(rows) + "\n")
    command = (
        "train",
        "pretrain.toml",
        "--run-dir",
        "csv",
        "--set",
        "task.train_file=train.csv",
        "--set",
        "run.cycles=2",
    )
    code, _, err = finish(dmpo(*command, cwd=folder))
    assert code == 0, err
    assert lines(folder / "csv" / "metrics.jsonl")[0]["loss"] != lines(folder / "pretrain" / "metrics.jsonl")[0]["loss"]


def test_report(folder):
    code, _, err = finish(dmpo("report", "pretrain", "dmpo", "--out", "report.html", cwd=folder))
    assert code == 0, err
    page = (folder / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "<svg" in page


@pytest.fixture
def refused(folder, capsys, monkeypatch):
    """Runs a command in this process and gives its one line of complaint."""
    monkeypatch.chdir(folder)

    def run(*arguments):
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as exit_:
            code = exit_.code
        err = capsys.readouterr().err
        assert code == 2 and len(err.strip().splitlines()) == 1, err
        return err

    return run


def test_bad_input_gets_one_line_and_code_2(refused, folder):
    fresh = ("--run-dir", "refused")
    assert "did you mean cycles" in refused("train", "dmpo.toml", *fresh, "--set", "run.cycle=3")
    assert "expected int" in refused("train", "dmpo.toml", *fresh, "--set", "run.cycles=many")
    assert "nothing.toml" in refused("train", "nothing.toml", *fresh)
    assert "another configuration" in refused("train", "dmpo.toml", "--run-dir", "dmpo", "--set", "objective.alpha=0.5")
    assert "objective.alpha: 0.04 -> 0.5" in refused(
        "train", "dmpo.toml", "--run-dir", "dmpo", "--set", "objective.alpha=0.5"
    )
    assert "missing.csv" in refused("train", "dmpo.toml", *fresh, "--set", "task.train_file=missing.csv")
    (folder / "bad.csv").write_text("Puzzle,Solution\n0234341221434321,1234341221434321\n12,34\n")
    message = refused("train", "dmpo.toml", *fresh, "--set", "task.train_file=bad.csv")
    assert "bad.csv" in message and "line 3" in message
    assert "row shards" in refused("train", "dmpo.toml", *fresh, "--set", "rollout.prompts=12")
    assert "devices" in refused("train", "dmpo.toml", *fresh, "--set", "mesh.data=3")
    assert "no_run" in refused("train", "dmpo.toml", *fresh, "--set", "run.start_from=no_run")
    assert "model.d_model" in refused("train", "dmpo.toml", *fresh, "--set", "model.d_model=32")
    assert "model.d_model" in refused(
        "eval", "dmpo.toml", "--run-dir", "dmpo", "--set", "model.d_model=32", "--out", "x.json"
    )
    assert "config.toml" in refused("eval", "dmpo.toml", "--run-dir", "nowhere", "--out", "x.json")
    assert "completion_length = 18" in refused(
        "train", "pretrain.toml", *fresh, "--set", "rollout.completion_length=18"
    )
    assert "--nonsense" in refused("train", "dmpo.toml", "--nonsense")
    assert "invalid choice" in refused("trian")
    (folder / "full").mkdir(exist_ok=True)
    (folder / "full" / "thesis.txt").write_text("precious")
    assert "not empty" in refused("train", "dmpo.toml", "--run-dir", "full")
    assert not (folder / "refused").exists()


def test_start_from_a_folder_without_checkpoint(refused, folder):
    (folder / "hollow").mkdir(exist_ok=True)
    (folder / "hollow" / "config.toml").write_text((folder / "pretrain" / "config.toml").read_text())
    message = refused(
        "train", "dmpo.toml", "--run-dir", "refused2", "--set", "run.start_from=hollow", "--set", "mesh.data=8"
    )
    assert "hollow" in message and "checkpoint" in message


def test_paths_stay_in_the_folder(folder):
    assert {p.name for p in Path(folder / "dmpo").iterdir()} == {
        "config.toml", "metrics.jsonl", "samples.jsonl", "checkpoints", "summary.json", "eval",
    }  # fmt: skip
