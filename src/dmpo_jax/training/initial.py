"""Where a run's parameters come from: random numbers, a checkpoint folder, another run, or an adapter on one of these."""

from pathlib import Path
from typing import Any

import jax

from dmpo_jax.config import Config
from dmpo_jax.errors import UserError
from dmpo_jax.model import pretrained
from dmpo_jax.model.adapter_folder import read_adapter
from dmpo_jax.model.checkpoint_folder import locate
from dmpo_jax.model.lora import adapter_specs, init_adapters, policy_of
from dmpo_jax.model.parameters import init_params, param_shardings, shardings
from dmpo_jax.model.quantize import store_tree, stored_specs
from dmpo_jax.model.weights import merge
from dmpo_jax.training import run_folder
from dmpo_jax.training.checkpoint import load_params
from dmpo_jax.training.setup import Setup, make_setup
from dmpo_jax.training.state import random_base


def check_start(config: Config) -> None:
    """Raises UserError, before any device work, where a run's start contradicts its configuration."""
    if config.model.base != "float32" and not config.lora.rank:
        raise UserError(
            f'model.base = "{config.model.base}" stores frozen weights, but lora.rank = 0 trains them all; '
            'set lora.rank, or model.base = "float32"'
        )
    source = config.run.start_from
    if not source:
        return
    changed = run_folder.model_differences(Path(source), config)
    if changed:
        raise UserError(f"run.start_from = {source}: another model ({'; '.join(changed)})")
    other = run_folder.read_config(Path(source))
    if config.lora.rank and other.lora.rank:
        kept = [key for key in ("rank", "alpha", "targets") if getattr(config.lora, key) != getattr(other.lora, key)]
        if config.lora.adapter:
            raise UserError(
                f"lora.adapter: run.start_from = {source} brings an adapter of its own; leave one of them out"
            )
        if kept or config.model.base != other.model.base:
            key = f"lora.{kept[0]}" if kept else "model.base"
            raise UserError(
                f"run.start_from = {source}: its adapter has another {key}; set it as there, or export that run and set "
                "model.pretrained to the folder"
            )


def initial_policy(setup: Setup, mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    """(base, params) at the start of a run; base is None where all parameters are trained, params None where fresh."""
    config, lora = setup.config, setup.config.lora
    base, params = None, None
    if config.run.start_from:
        base, params = policy_of_run(Path(config.run.start_from), mesh)
        if not lora.rank and base is not None:
            other = run_folder.read_config(Path(config.run.start_from))
            stored = policy_of(params, base, other.lora)
            place = param_shardings(setup.model, mesh)
            return None, jax.jit(lambda tree: merge(tree, setup.model), out_shardings=place)(stored)
        if lora.rank and base is None:
            base, params = _stored(params, setup, mesh), None
    elif config.model.pretrained:
        params = pretrained.load_params(locate(config.model.pretrained), setup.model, mesh)
        if lora.rank:
            base, params = params, None
    elif lora.rank:
        base = random_base(setup, mesh)
    if lora.adapter:
        params = read_adapter(Path(lora.adapter), lora, setup.model, mesh)
    return base, params


def _stored(params: Any, setup: Setup, mesh: jax.sharding.Mesh) -> Any:
    place = shardings(stored_specs(setup.model), mesh)
    return jax.jit(lambda tree: store_tree(tree, setup.model), out_shardings=place)(params)


def policy_of_run(run_dir: Path, mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    """(base, params) of a run folder's newest checkpoint, or of its best where `evaluation.select` says so.

    Raises UserError when it has none, or its base is gone.
    """
    setup = make_setup(run_folder.read_config(run_dir))
    best = setup.config.evaluation.select == "best"
    if not setup.config.lora.rank:
        shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), setup.model))
        return None, load_params(run_dir, shapes, param_shardings(setup.model, mesh), best=best)
    shapes = jax.eval_shape(lambda: init_adapters(jax.random.key(0), setup.config.lora, setup.model))
    place = shardings(adapter_specs(setup.config.lora, setup.model), mesh)
    params = load_params(run_dir, shapes, place, best=best)
    return initial_policy(setup, mesh)[0], params
