"""The programs of a run as abstract computations on a mesh whose devices need not exist."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from dmpo_jax.evaluation.evaluate import load_examples
from dmpo_jax.model.lora import adapter_specs, policy_of
from dmpo_jax.model.parameters import abstract_params, init_params, init_tree, shardings
from dmpo_jax.model.quantize import store_tree, stored_specs
from dmpo_jax.objectives.objective import Prepared
from dmpo_jax.parallel.mesh import ROWS
from dmpo_jax.training.cycle import gather, make_cycle, roll_out, take_update
from dmpo_jax.training.data import Batch, Batches, encoded
from dmpo_jax.training.setup import Setup
from dmpo_jax.training.state import State, begin

PHASES = ("sample", "grade", "prepare", "update")  # the named scopes of a cycle


def abstract_batch(setup: Setup, mesh: jax.sharding.Mesh) -> Batch:
    """The first batch of a run as shapes. Raises UserError where the task's data cannot be read or do not fit."""
    rollout = setup.config.rollout
    examples = load_examples(setup, "train", setup.config.task.train_file)
    data = encoded(examples, setup)
    width = max(rollout.prompt_buckets, default=data.prompts.tokens.shape[1])
    batch = Batches(data, rollout.prompts, setup.config.run.seed, (width,))[0]
    place = NamedSharding(mesh, PartitionSpec(ROWS))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), batch)


def abstract_state(setup: Setup, batch: Batch, mesh: jax.sharding.Mesh) -> State:
    """The state before the first cycle as shapes in their layout."""
    lora, model = setup.config.lora, setup.model
    base, teacher = None, None
    whole = _abstract(lambda: store_tree(init_params(jax.random.key(0), model), model), stored_specs(model), mesh)
    if lora.rank:
        adapters = adapter_specs(lora, model)
        base, params = whole, _abstract(lambda: init_tree(jax.random.key(0), adapters), adapters, mesh)
    else:
        params = whole
    if setup.teacher:
        taught = setup.teacher
        teacher = _abstract(lambda: init_params(jax.random.key(0), taught), abstract_params(taught), mesh)
    fresh = not (setup.config.run.start_from or lora.adapter)
    state = jax.eval_shape(lambda p: begin(setup, p, fresh=fresh, taught=teacher is not None), params)
    state = _on(mesh, state).replace(base=base, teacher=teacher)
    if setup.config.rollout.staleness:
        kept = jax.eval_shape(lambda s, b: gather(s, b, setup), state, batch)
        state = state.replace(replay=_on(mesh, kept))
    return state


def lowered(setup: Setup, mesh: jax.sharding.Mesh, cycle_only: bool = False) -> dict[str, jax.stages.Lowered]:
    """The rollout, one update and the whole cycle, by name; an objective without rollouts has none of the first."""
    with jax.set_mesh(mesh):
        batch = abstract_batch(setup, mesh)
        state = abstract_state(setup, batch, mesh)
        cycle = jax.jit(make_cycle(setup), donate_argnums=0).lower(state, batch)
        if cycle_only:
            return {"cycle": cycle}
        key = _on(mesh, jax.eval_shape(lambda: jax.random.key(0)))
        policy = lambda params, base: policy_of(params, base, setup.config.lora)  # noqa: E731
        programs = {}
        if setup.objective.ROLLOUT:
            rollout_of = jax.jit(lambda params, base, b, k: roll_out(policy(params, base), b, k, setup)[0])
            programs["rollout"] = rollout_of.lower(state.params, state.base, batch, key)

        def prepared_of(state: State, batch: Batch, key: jax.Array) -> tuple[Any, Prepared]:
            rollout = gather(state, batch, setup).rollout
            reference = state.teacher if state.reference is None else policy(state.reference, state.base)
            learner = policy(state.params, state.base)
            settings, context = setup.config.objective, setup.context
            return rollout, setup.objective.prepare(learner, reference, rollout, key, settings, context)

        rollout, prepared = _on(mesh, jax.eval_shape(prepared_of, state, batch, key))
        update = jax.jit(
            lambda params, optimizer, base, r, p, k: take_update(params, optimizer, r, p, k, setup, base),
            donate_argnums=(0, 1),
        )
        programs["update"] = update.lower(state.params, state.optimizer, state.base, rollout, prepared, key)
        return programs | {"cycle": cycle}


def denoising_steps(setup: Setup) -> float:
    """How often the loop over a block's denoising steps runs at most, after the forward that opens the block."""
    sampler, length = setup.config.sampler, setup.config.rollout.completion_length
    return max(len(sampler.schedule_of(length)) - (sampler.cache != "none"), 1)


def _abstract(make: Callable[[], Any], specs: Any, mesh: jax.sharding.Mesh) -> Any:
    """Shapes of what `make` gives, in the training layout of `specs`."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        jax.eval_shape(make),
        shardings(specs, mesh),
    )


def _on(mesh: jax.sharding.Mesh, shapes: Any) -> Any:
    """The same shapes with their partition bound to the mesh's devices."""

    def place(x):
        spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, shapes)
