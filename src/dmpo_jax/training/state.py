"""Everything a run changes as it goes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dmpo_jax.model.parameters import init_params, param_shardings
from dmpo_jax.training.optimizer import make_optimizer
from dmpo_jax.training.setup import Setup


@struct.dataclass
class State:
    """`cycle int32[]` counts finished cycles; `reference` is None for objectives that learn from demonstrations."""

    params: Any
    reference: Any
    optimizer: Any
    cycle: jax.Array


def optimizer_of(setup: Setup):
    """The run's optimiser, scheduled over all its updates."""
    return make_optimizer(setup.config.optimizer, setup.config.run.cycles * setup.config.objective.updates)


def fresh_state(setup: Setup, mesh: jax.sharding.Mesh, params: Any = None) -> State:
    """State before the first cycle, from given parameters or random ones; the reference starts as their copy."""
    if params is None:
        key = jax.random.key(setup.config.run.seed)
        init = jax.jit(lambda: init_params(key, setup.model), out_shardings=param_shardings(setup.model, mesh))
        params = init()

    def start(params) -> State:
        copy = lambda tree: jax.tree.map(jnp.copy, tree)  # noqa: E731  (donation needs buffers of their own)
        reference = copy(params) if setup.objective.ROLLOUT else None
        return State(copy(params), reference, optimizer_of(setup).init(params), jnp.int32(0))

    return jax.jit(start)(params)
