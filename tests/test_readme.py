"""What the README shows and names is there and runs."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dmpo_jax.config import resolve
from dmpo_jax.grading.pool import GraderPool
from dmpo_jax.objectives import OBJECTIVES
from dmpo_jax.parallel.mesh import make_mesh
from dmpo_jax.tasks import get_task
from dmpo_jax.training.cycle import make_cycle
from dmpo_jax.training.data import Batches, encode, place
from dmpo_jax.training.setup import make_setup
from dmpo_jax.training.state import fresh_state

ROOT = Path(__file__).parents[1]


BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_the_library_example_runs(tmp_path):
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[0])
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(2, 5, 32)") and "denoise: " in done.stdout


def test_an_objective_of_ones_own_trains(tmp_path, monkeypatch):
    """The file of the README, registered by its name, through the configuration and the one program."""
    assert len(BLOCKS) == 3
    (tmp_path / "best_of_group.py").write_text(BLOCKS[1])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(OBJECTIVES, "best_of_group", importlib.import_module("best_of_group"))
    setup = make_setup(
        resolve(
            {
                "model": {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_mlp": 16},
                "task": {"train_size": 8},
                "rollout": {"prompts": 4, "group": 2, "completion_length": 20},
                "sampler": {"steps": 5, "temperature": 1.0},
                "objective": {"name": "best_of_group"},
            },
            ["objective.masks=4", "optimizer.learning_rate=1e-2"],
        )
    )
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    data = encode(setup.task.examples(setup.config.task, "train"), setup.tokenizer, 20)
    with jax.set_mesh(mesh):
        state, batch = fresh_state(setup, mesh), place(Batches(data, 4, 0)[0], mesh)
        before = jax.device_get(state.params)
        state, record = jax.jit(make_cycle(setup))(state, batch)
    assert record.metrics["loss"] > 0 and record.metrics["reward/best"] >= record.metrics["reward/mean"]
    assert not np.array_equal(state.params["head"], before["head"])


def test_a_task_of_ones_own_grades(tmp_path):
    (tmp_path / "sums.py").write_text(BLOCKS[2])
    config = resolve({"task": {"name": "own", "file": str(tmp_path / "sums.py"), "grading_seconds": 20.0}}).task
    task = get_task("own", config)
    train, validation, test = (task.examples(config, split) for split in ("train", "validation", "test"))
    assert len(validation) >= 256 and len(test) == 200 and len(train) + len(validation) == 2000
    assert task.components == ("reward", "correct")
    texts = [test[0].truth, f" {test[0].truth} ", "7 apples", "1000"]
    with GraderPool(task.worker, config.grading_seconds, workers=1) as pool:
        verdicts = pool.grade([task.request(text, test[0].features) for text in texts])
    assert [v.values["reward"] for v in verdicts] == [1.0, 1.0, 0.0, pytest.approx(0.1)]


def test_the_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert links and all((ROOT / link).exists() for link in links)
    assert all((ROOT / command).exists() for command in re.findall(r"^\./(\S+)", text, re.MULTILINE))
