"""Everything a run changes as it goes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from dmpo_jax.model.lora import adapter_specs, init_adapters
from dmpo_jax.model.parameters import init_params, param_shardings, shardings
from dmpo_jax.model.quantize import store_tree, stored_specs
from dmpo_jax.objectives.objective import Rollout
from dmpo_jax.training.optimizer import make_optimizer
from dmpo_jax.training.setup import Setup


class Replay(NamedTuple):
    """What is learned from: a graded rollout, its reward components and metrics, and the parameters that drew it."""

    rollout: Rollout
    components: dict[str, jax.Array]
    metrics: dict[str, jax.Array]
    params: Any


@struct.dataclass
class State:
    """`cycle int32[]` counts finished cycles, `seed uint32[]` is the run's: an input, so that seeds share one program.

    `reference` is None for objectives that learn from demonstrations.

    Under LoRA, params and reference are adapters (`{}`: the adapter off) on the frozen `base`; else base is None.
    `teacher`, another model's frozen parameters, takes the reference's place where the objective names one. `replay` is
    kept from one cycle to the next under `rollout.staleness`.
    """

    params: Any
    reference: Any
    optimizer: Any
    cycle: jax.Array
    seed: jax.Array
    base: Any = None
    teacher: Any = None
    replay: Replay | None = None


def optimizer_of(setup: Setup):
    """The run's optimiser, scheduled over all its updates."""
    return make_optimizer(setup.config.optimizer, setup.config.run.cycles * setup.config.objective.updates)


def random_base(setup: Setup, mesh: jax.sharding.Mesh) -> Any:
    """The frozen base of a run that starts from random numbers."""
    make = lambda key: store_tree(init_params(key, setup.model), setup.model)  # noqa: E731
    place = shardings(stored_specs(setup.model), mesh)
    return jax.jit(make, out_shardings=place)(jax.random.key(setup.config.run.seed))


def fresh_state(
    setup: Setup, mesh: jax.sharding.Mesh, params: Any = None, base: Any = None, teacher: Any = None
) -> State:
    """State before the first cycle, from given parameters or random ones; the reference starts as their copy.

    Under LoRA, params are adapters on `base`; the reference of fresh ones, whose product is zero, is the base itself.
    """
    lora, key, fresh = setup.config.lora, jax.random.key(setup.config.run.seed), params is None
    if lora.rank and base is None:
        base = random_base(setup, mesh)
    if params is None and lora.rank:
        init = lambda key: init_adapters(jax.random.fold_in(key, 1), lora, setup.model)  # noqa: E731
        params = jax.jit(init, out_shardings=shardings(adapter_specs(lora, setup.model), mesh))(key)
    elif params is None:
        init = jax.jit(init_params, static_argnums=1, out_shardings=param_shardings(setup.model, mesh))
        params = init(key, setup.model)

    start = jax.jit(lambda params: begin(setup, params, fresh=fresh, taught=teacher is not None))
    return start(params).replace(base=base, teacher=teacher)


def begin(setup: Setup, params: Any, *, fresh: bool, taught: bool) -> State:
    """What starts from parameters: copies of them, the reference and the optimiser's state.

    `fresh` adapters are their own reference switched off; what is `taught` is compared with its teacher instead.
    """
    copy = lambda tree: jax.tree.map(jnp.copy, tree)  # noqa: E731  (donation needs buffers of their own)
    reference = None
    if setup.objective.ROLLOUT and not taught:
        adapter_off = setup.config.lora.rank and fresh and not setup.config.objective.reference_sync
        reference = {} if adapter_off else copy(params)
    return State(
        copy(params), reference, optimizer_of(setup).init(params), jnp.int32(0), jnp.uint32(setup.config.run.seed)
    )
