"""A frozen teacher: another run's policy or a checkpoint folder, of any size, that shares the policy's tokens."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dmpo_jax.errors import UserError
from dmpo_jax.model import pretrained
from dmpo_jax.model.checkpoint_folder import TOKENIZER_KEY, locate, model_of
from dmpo_jax.model.lora import policy_of
from dmpo_jax.model.parameters import ModelConfig
from dmpo_jax.model.pretrained_tokenizer import load_tokenizer
from dmpo_jax.model.tokenizer import make_tokenizer
from dmpo_jax.training import run_folder
from dmpo_jax.training.initial import policy_of_run
from dmpo_jax.training.setup import Setup, make_setup


def source_of(setup: Setup) -> str:
    """Where the objective's teacher lies; "" when it has none."""
    return getattr(setup.config.objective, "teacher", "")


def with_teacher(setup: Setup) -> Setup:
    """The setup, knowing its teacher's shape. Raises UserError unless both read and write the same tokens."""
    source = source_of(setup)
    if not source:
        return setup
    model, tokenizer = _describe(source, setup)
    mine = setup.tokenizer
    found = {
        "vocabulary": (model.vocab_size, setup.model.vocab_size),
        "mask token": (tokenizer.mask_id, mine.mask_id),
        "end of sequence": (tokenizer.eos_id, mine.eos_id),
    }
    for name, (theirs, ours) in found.items():
        if theirs != ours:
            raise UserError(
                f"objective.teacher = {source}: its {name} is {theirs}, the policy's {ours}; a teacher needs the "
                "policy's tokenizer"
            )
    if not all(np.array_equal(a, b) for a, b in zip(tokenizer.byte_table(), mine.byte_table(), strict=True)):
        raise UserError(
            f"objective.teacher = {source}: its tokens stand for other text than the policy's; use one tokenizer"
        )
    return dataclasses.replace(setup, teacher=model)


def load_teacher(setup: Setup, mesh: jax.sharding.Mesh) -> Any:
    """The teacher's parameters on the mesh, or None where the objective has none."""
    source = source_of(setup)
    if not source:
        return None
    if _is_run(source):
        base, params = policy_of_run(Path(source), mesh)
        return policy_of(params, base, run_folder.read_config(Path(source)).lora)
    return pretrained.load_params(locate(source), setup.teacher, mesh)


def _describe(source: str, setup: Setup) -> tuple[ModelConfig, Any]:
    if _is_run(source):
        other = make_setup(run_folder.read_config(Path(source)))
        return other.model, other.tokenizer
    folder = locate(source)
    model, content = model_of(folder)
    kind, mine = content.get(TOKENIZER_KEY, "pretrained"), setup.config.model
    tokenizer = load_tokenizer(folder) if kind == "pretrained" else make_tokenizer(kind)
    return dataclasses.replace(model, dtype=mine.dtype, base=mine.base), tokenizer


def _is_run(source: str) -> bool:
    return (Path(source) / run_folder.CONFIG).is_file()
