"""`dmpo eval`: the newest parameters of a run folder on a split or a data file."""

import json
from pathlib import Path
from typing import Any

import jax

from dmpo_jax.config import Config
from dmpo_jax.errors import UserError
from dmpo_jax.evaluation.evaluate import Evaluator, load_examples, write_items
from dmpo_jax.model.parameters import init_params, param_shardings
from dmpo_jax.parallel.mesh import make_mesh, row_shards
from dmpo_jax.training import run_folder
from dmpo_jax.training.checkpoint import load_params
from dmpo_jax.training.metrics import write_text
from dmpo_jax.training.setup import make_setup


def evaluate_run(config: Config, run_dir: Path, data: str, out: Path) -> dict[str, Any]:
    """Writes `out` (JSON) and, beside it, one line per item (`.jsonl`). Returns the result.

    Raises UserError when the folder's model is not the configuration's, or the data file is malformed.
    """
    changed = run_folder.model_differences(run_dir, config)
    if changed:
        raise UserError(f"--run-dir {run_dir}: its model is not this configuration's ({'; '.join(changed)})")
    setup = make_setup(config)
    examples = load_examples(setup, "test", data or config.task.test_file)
    shape = config.mesh.shape(jax.device_count())
    mesh = make_mesh(shape)
    config.validate_mesh(row_shards(mesh), shape)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), setup.model))
        params = load_params(run_dir, shapes, param_shardings(setup.model, mesh))
        result, items = Evaluator(setup, examples, mesh).run(params)
    result |= {"data": data or config.task.test_file or "generated test split", "run_dir": str(run_dir)}
    write_items(out.with_suffix(".jsonl"), items)
    write_text(out, json.dumps(result, indent=1) + "\n")
    return result
