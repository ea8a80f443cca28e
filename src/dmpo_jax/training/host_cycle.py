"""The cycle of a task that only the host can grade: two programs, and the worker processes between them."""

from collections.abc import Callable

import jax
import numpy as np

from dmpo_jax.parallel.mesh import readable
from dmpo_jax.training.cycle import Record, gather, learn, regraded
from dmpo_jax.training.data import Batch, place
from dmpo_jax.training.host_grading import HostGrader
from dmpo_jax.training.setup import Setup
from dmpo_jax.training.state import Replay, State

Cycle = Callable[[State, Batch, dict[str, np.ndarray], int], tuple[State, Record]]


def compile_host_cycle(setup: Setup, mesh: jax.sharding.Mesh, grader: HostGrader, state: State, batch: Batch) -> Cycle:
    """`cycle(state, batch, features, number)` for arrays like these; features are the batch's, on the host.

    Gives what `make_cycle` would if the device could grade. The state is donated to it.
    """

    def drawn(state: State, batch: Batch) -> tuple[Replay, jax.Array]:
        replay = gather(state, batch, setup)._replace(params=None)
        return replay, readable(replay.rollout.completion)

    def learned(state: State, replay: Replay, components: dict[str, jax.Array]) -> tuple[State, Record]:
        return learn(state, regraded(replay._replace(params=state.params), components), setup)

    draw = jax.jit(drawn).lower(state, batch).compile()
    replay, _ = jax.eval_shape(drawn, state, batch)
    update = jax.jit(learned, donate_argnums=0).lower(state, replay, replay.components).compile()
    staleness = setup.config.rollout.staleness
    again = jax.jit(lambda state: learn(state, state.replay, setup), donate_argnums=0)
    if staleness:
        again = again.lower(state).compile()

    def cycle(state: State, batch: Batch, features: dict[str, np.ndarray], number: int) -> tuple[State, Record]:
        if number % (1 + staleness):
            return again(state)
        replay, completion = draw(state, batch)
        completion = jax.device_get(completion)
        groups, size, _ = completion.shape
        texts = [setup.tokenizer.decode(ids) for ids in completion.reshape(groups * size, -1)]
        graded = grader.grade(texts, {name: np.repeat(value, size, axis=0) for name, value in features.items()})
        components = {name: value.reshape(groups, size) for name, value in graded.components.items()}
        state, record = update(state, replay, place(components, mesh))
        return state, record._replace(metrics=record.metrics | graded.metrics)

    return cycle
