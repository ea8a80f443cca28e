"""Tasks that the host grades: the same run as where the device grades, and a user's own file through the command line."""

import json
import textwrap

import jax
import numpy as np
import pytest
from test_training_cycle import assert_same, batches_of, run, setup_of

from dmpo_jax.cli import main
from dmpo_jax.config import resolve
from dmpo_jax.errors import UserError
from dmpo_jax.evaluation.evaluate import Evaluator
from dmpo_jax.parallel.mesh import make_mesh
from dmpo_jax.tasks import get_task
from dmpo_jax.training.cycle import empty_replay
from dmpo_jax.training.data import place
from dmpo_jax.training.host_cycle import compile_host_cycle
from dmpo_jax.training.host_grading import Graded, host_grader
from dmpo_jax.training.setup import make_setup
from dmpo_jax.training.state import fresh_state


class ShareOfLowBytes:
    """The device grader of the cycle's tests, as a host grader; failing rows have no verdict."""

    def __init__(self, setup, failing=()):
        self.failing, self.calls = failing, 0
        self.width = setup.config.rollout.completion_length * setup.tokenizer.byte_table()[0].shape[1]

    def grade(self, texts, features):
        self.calls += 1
        assert all(len(value) == len(texts) for value in features.values())
        value = np.array([sum(byte < ord("5") for byte in t.encode()) / self.width for t in texts], np.float32)
        value[list(self.failing)] = np.nan
        failures = ["no verdict" if i in self.failing else "" for i in range(len(texts))]
        return Graded(dict.fromkeys(("reward", "cells", "exact"), value), failures, 0.5, 0.25)


def run_on_host(setup, shape, grader, cycles=2):
    """As `run`, but with the grading between two programs."""
    mesh = make_mesh(shape, jax.devices()[: int(np.prod(shape))])
    setup = setup.__class__(setup.config, setup.tokenizer, setup.task._replace(grade_bytes=None))
    batches, records, staleness = batches_of(setup), [], setup.config.rollout.staleness
    with jax.set_mesh(mesh):
        state = fresh_state(setup, mesh)
        batch = place(batches[0], mesh)
        if staleness:
            state = state.replace(replay=empty_replay(state, batch, setup))
        cycle = compile_host_cycle(setup, mesh, grader, state, batch)
        for k in range(cycles):
            host = batches[k // (1 + staleness)]
            state, record = cycle(state, place(host, mesh), host.features, k)
            records.append(jax.device_get(record))
        return jax.device_get(state.params), records


@pytest.mark.parametrize(("shape", "staleness"), [((1, 1, 1), 0), ((8, 1, 1), 0), ((2, 2, 2), 0), ((1, 1, 1), 1)])
def test_grading_on_the_host_gives_the_run_that_grading_on_the_device_gives(shape, staleness):
    rollout, cycles = {"staleness": staleness}, 2 + 2 * staleness
    wanted = run(setup_of(rollout=rollout), (1, 1, 1), cycles)
    grader = ShareOfLowBytes(setup_of())
    found = run_on_host(setup_of(rollout=rollout), shape, grader, cycles)
    for record in found[1]:
        for name, value in (("grader/failed", 0), ("grader/slowest_s", 0.25), ("time/grading_s", 0.5)):
            assert record.metrics.pop(name, value) == value
    assert_same(found, wanted)
    assert grader.calls == 2


def test_an_answer_without_a_verdict_is_counted_and_teaches_nothing():
    params, records = run_on_host(setup_of(), (1, 1, 1), ShareOfLowBytes(setup_of(), failing=(0, 5)))
    assert records[0].metrics["grader/failed"] == 2
    assert np.isnan(records[0].components["reward"]).sum() == 2
    assert np.isfinite(records[0].metrics["reward/mean"]) and np.isfinite(records[0].metrics["loss"])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


TASK = """
import random

def examples(split):
    if split == "validation":
        return None
    draw = random.Random(split)
    pairs = {(draw.randint(0, 9), draw.randint(0, 9)) for _ in range(60 if split == "train" else 12)}
    return [{"prompt": f"{a} + {b} = ", "answer": str(a + b), "sum": a + b} for a, b in sorted(pairs)]

def reward(completion, example):
    digits = completion.count("1")
    if completion.startswith("7"):
        raise ValueError("seven")
    return {"reward": digits / len(completion) if completion else 0.0, "correct": completion == str(example["sum"])}
"""
CONFIG = """
[run]
cycles = 2
samples_every = 1
compilation_cache = ""
[model]
d_model = 16
n_layers = 1
n_heads = 2
d_mlp = 16
[task]
name = "own"
file = "{file}"
validation_size = 6
grading_workers = 1
[rollout]
prompts = 8
group = 4
completion_length = 6
[sampler]
steps = 3
block_length = 6
temperature = 1.0
[objective]
name = "dmpo"
updates = 1
masks = 2
weight_masks = 2
[evaluation]
batch = 8
[checkpoint]
every = 1
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "sums.py").write_text(textwrap.dedent(TASK))
    (tmp_path / "own.toml").write_text(CONFIG.format(file=tmp_path / "sums.py"))
    return tmp_path


def test_a_task_of_ones_own_trains_evaluates_and_resumes(own, capsys):
    folder = own / "run"
    assert main(["train", str(own / "own.toml"), "--run-dir", str(folder)]) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["cycle"] for line in lines] == [1, 2]
    assert {"reward/mean", "reward/correct", "grader/failed", "time/grading_s"} <= lines[0].keys()
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        text = sample["completion"]
        wanted = text.count("1") / len(text) if text else 0.0
        assert np.isnan(sample["reward"]) if text.startswith("7") else sample["reward"] == pytest.approx(wanted)
    if any(line["grader/failed"] for line in lines):
        assert "an answer has no verdict: ValueError: seven" in capsys.readouterr().err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["validation_after"]["n"] == 6 and summary["test_after"]["task"] == "own"
    out = own / "eval.json"
    assert main(["eval", str(own / "own.toml"), "--run-dir", str(folder), "--out", str(out)]) == 0
    result, after = json.loads(out.read_text()), summary["test_after"]
    assert (result["n"], result["accuracy"]) == (after["n"], after["accuracy"])
    items = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    assert all(("no_verdict" in item) == item["completion"].startswith("7") for item in items)


def test_math_trains_with_verdicts_from_worker_processes(own, tmp_path):
    problems = [{"problem": f"What is ${i}+1$?", "solution": rf"It is \boxed{{{i + 1}}}."} for i in range(16)]
    (tmp_path / "math.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    settings = ["task.name=math", "task.file=", f"task.train_file={tmp_path / 'math.jsonl'}", "evaluation.test=false"]
    settings += ["task.validation_size=4", "tokenizer.kind=byte", "run.cycles=1", "rollout.completion_length=48"]
    settings += ["sampler.block_length=48", "task.format_share=0.25"]
    options = [part for setting in settings for part in ("--set", setting)]
    assert main(["train", str(own / "own.toml"), "--run-dir", str(own / "run"), *options]) == 0
    (line,) = [json.loads(line) for line in (own / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"reward/correct", "reward/format", "grader/failed"} <= line.keys() and line["grader/failed"] == 0
    summary = json.loads((own / "run" / "summary.json").read_text())
    assert summary["validation_after"]["n"] == 4 and summary["validation_after"]["published"]["of"] == 4


def test_the_strict_verdict_does_not_follow_the_published_reward(tmp_path):
    (tmp_path / "math.jsonl").write_text('{"problem": "Half?", "answer": "0.5"}\n')
    task = {"name": "math", "reward": "published", "test_file": str(tmp_path / "math.jsonl"), "grading_seconds": 60.0}
    sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_mlp": 16}
    rollout = {"completion_length": 32}
    config = resolve({"task": task, "model": sizes, "rollout": rollout, "tokenizer": {"kind": "byte"},
                      "sampler": {"steps": 8}, "evaluation": {"batch": 1}})  # fmt: skip
    setup, mesh = make_setup(config), make_mesh((1, 1, 1), jax.devices()[:1])
    examples = setup.task.examples(config.task, "test")
    with host_grader(setup) as grader:
        evaluator = Evaluator(setup, examples, mesh, grader)
        (graded,) = evaluator._graded([r"\boxed{\frac{2}{4}}"], np.zeros(1))
        assert graded["correct"] == 0  # as text it is not 0.5
        (verdict,) = evaluator._verdicts([r"\boxed{\frac{2}{4}}"], np.array([False]), [graded])
    assert (verdict.published.right, verdict.strict.right) == (0, 1)


def test_validation_questions_are_not_trained_on(own):
    config = resolve({"task": {"name": "own", "file": str(own / "sums.py"), "validation_size": 6}}).task
    task = get_task("own", config)
    train, validation = (task.examples(config, split) for split in ("train", "validation"))
    assert len(validation) == 6 and not {e.prompt for e in train} & {e.prompt for e in validation}
    assert task.components == ("reward", "correct")
    example = validation[2]
    asked = task.request("12", {key: np.asarray(value) for key, value in example.features.items()})
    assert asked["completion"] == "12" and asked["example"]["prompt"] == example.prompt


def test_data_of_ones_own_are_read_line_by_line(own, tmp_path):
    config = resolve({"task": {"name": "own", "file": str(own / "sums.py"), "validation_size": 6}}).task
    task = get_task("own", config)
    file = tmp_path / "more.jsonl"
    file.write_text('{"prompt": "1 + 1 = ", "answer": "2", "sum": 2}\n')
    (example,) = task.read(str(file), config)
    assert (example.prompt, example.truth) == ("1 + 1 = ", "2")
    file.write_text('{"prompt": "1 + 1 = "}\n{"question": 3}\n')
    with pytest.raises(UserError, match=r"line 2: .*JSON object with a text under"):
        task.read(str(file), config)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "own"}, "task.file = '' with task.name = 'own': name the Python file"),
        ({"name": "sudoku", "file": "x.py"}, 'set task.name = "own"'),
        ({"name": "own", "file": "x.py", "train_file": "x.jsonl"}, "task.train_file"),
        ({"name": "own", "file": "x.py", "reward": "published"}, "task.reward"),
        ({"name": "own", "file": "x.py", "grading_seconds": 0.0}, "task.grading_seconds = 0.0: expected more than 0"),
        ({"name": "own", "file": "x.py", "grading_workers": -1}, "task.grading_workers = -1"),
        ({"name": "sudoku", "grading_seconds": 1.0}, "sudoku is graded on the device; leave it out"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, words):
    with pytest.raises(UserError) as error:
        resolve({"task": settings})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file; name a Python file"),
        ("def examples(split):\n    return []\ndef reward(c, e):\n    return 1\n", "gives no examples"),
        ("def examples(split):\n    return [3]\ndef reward(c, e):\n    return 1\n", 'a text under "prompt", found 3'),
        ("raise OSError('no data')\n", "OSError: no data (line 1 of sums.py)"),
    ],
)
def test_a_file_that_is_no_task_ends_the_command_in_one_line(own, capsys, text, words):
    (own / "sums.py").unlink()
    if text:
        (own / "sums.py").write_text(text)
    assert main(["train", str(own / "own.toml"), "--run-dir", str(own / "run")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error
    assert not (own / "run").exists()
