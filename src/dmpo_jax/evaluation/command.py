"""`dmpo eval`: the newest parameters of a run folder, or a checkpoint folder's, on a split or a data file."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from dmpo_jax.config import Config
from dmpo_jax.errors import UserError
from dmpo_jax.evaluation.evaluate import Evaluator, load_examples, write_items
from dmpo_jax.model.checkpoint_folder import locate
from dmpo_jax.model.lora import policy_of
from dmpo_jax.model.pretrained import load_params
from dmpo_jax.parallel.mesh import make_mesh, row_shards
from dmpo_jax.toml_files import parse_override
from dmpo_jax.training import run_folder
from dmpo_jax.training.host_grading import host_grader
from dmpo_jax.training.initial import policy_of_run
from dmpo_jax.training.metrics import check_output, write_text
from dmpo_jax.training.setup import Setup, make_setup

# Sections and settings that a command reads; what a configuration file says beyond them is training's.
SAMPLE_SETTINGS = (
    "model", "tokenizer", "sampler", "mesh", "run.seed", "run.compilation_cache", "rollout.completion_length",
    "evaluation.batch",
)  # fmt: skip
EVAL_SETTINGS = (
    *SAMPLE_SETTINGS, "task.name", "task.prompt", "task.test_file", "task.test_size", "task.seed", "task.file",
    "task.grading_seconds", "task.grading_workers",
    "rollout.prompt_buckets", "evaluation.temperature", "evaluation.protocol", "evaluation.tokens_per_step",
    "evaluation.samples", "evaluation.completion_length",
)  # fmt: skip
# Options of a command that decide a setting themselves.
OVERRULED = {
    "--run-dir": ("model.pretrained", "model.base"),
    "--model": ("model.pretrained",),
    "--data": ("task.test_file", "task.test_size"),
}


def check_settings(
    config: Config, overrides: Sequence[str], command: str, used: Sequence[str], options: Sequence[str]
) -> None:
    """Raises UserError on an override that a command does not read, or that one of the `options` given to it overrules."""
    for section, key, _ in map(parse_override, overrides):
        name = f"{section}.{key}"
        if section not in used and name not in used:
            raise UserError(f"--set {name}: dmpo {command} does not use it; leave it out")
        for option in options:
            if name in OVERRULED[option]:
                raise UserError(f"--set {name}: {option} decides it already; leave one of them out")
        decided = section == "sampler" or name in ("task.prompt", "model.attend_to_padding")
        if decided and "evaluation.protocol" in used and config.evaluation.protocol == "published":
            raise UserError(f'--set {name}: evaluation.protocol = "published" decides it; leave it out')
        drawn, greedy = config.sampler.temperature, config.evaluation.temperature
        if name == "sampler.temperature" and "evaluation.temperature" in used and drawn != greedy:
            raise UserError(
                f"--set {name}: dmpo {command} decodes at evaluation.temperature = {greedy}, not at {drawn}; set that one"
            )


def evaluate_run(config: Config, run_dir: Path | None, data: str, out: Path) -> dict[str, Any]:
    """Writes `out` (JSON) and, beside it, one line per item (`.jsonl`). Returns the result.

    Without a run folder, the weights are those of `config.model.pretrained` as they are. Raises UserError when the folder's
    model is not the configuration's, or the data file is malformed.
    """
    check_output(out, ".json")
    check_output(out.with_suffix(".jsonl"), ".jsonl")
    setup = make_setup(config)
    examples = load_examples(setup, "test", data or config.task.test_file)
    shape = config.mesh.shape(jax.device_count())
    mesh = make_mesh(shape)
    config.validate_batch(row_shards(mesh), shape)
    with jax.set_mesh(mesh), host_grader(setup) as grader:
        result, items = Evaluator(setup, examples, mesh, grader).run(answering_policy(config, run_dir, setup, mesh))
    source = {"run_dir": str(run_dir)} if run_dir else {"model": config.model.pretrained}
    result |= {"data": data or config.task.test_file or "generated test split", **source}
    write_items(out.with_suffix(".jsonl"), items)
    write_text(out, json.dumps(result, indent=1) + "\n")
    return result


def answering_policy(config: Config, run_dir: Path | None, setup: Setup, mesh: jax.sharding.Mesh) -> Any:
    """Parameters of a run folder's newest policy, or those of `config.model.pretrained` as they are.

    Raises UserError when the folder's model is not the configuration's.
    """
    if not run_dir:
        return policy_of(load_params(locate(config.model.pretrained), setup.model, mesh), None, config.lora)
    changed = run_folder.model_differences(run_dir, config)
    if changed:
        raise UserError(f"--run-dir {run_dir}: its model is not this configuration's ({'; '.join(changed)})")
    base, params = policy_of_run(run_dir, mesh)
    return policy_of(params, base, run_folder.read_config(run_dir).lora)
