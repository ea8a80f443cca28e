"""`dmpo bench`: the phases of a cycle timed one by one, beside the whole program."""

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from dmpo_jax.config import Config
from dmpo_jax.evaluation.evaluate import load_examples
from dmpo_jax.model.lora import policy_of
from dmpo_jax.parallel.mesh import make_mesh, row_shards
from dmpo_jax.training.cycle import demonstrations, empty_replay, make_cycle, roll_out, take_update
from dmpo_jax.training.data import Batches, encoded, place
from dmpo_jax.training.flops import matmul_peak, phase_flops
from dmpo_jax.training.setup import make_setup
from dmpo_jax.training.state import fresh_state
from dmpo_jax.training.teacher import load_teacher, with_teacher


def bench(config: Config, repeats: int) -> dict[str, Any]:
    """Median seconds, FLOP/s and share of the measured matmul peak for each phase, from random parameters.

    `updates` is one update's time times their number; `cycle` is the one program that training runs.
    """
    setup = with_teacher(make_setup(config))
    shape = config.mesh.shape(jax.device_count())
    mesh = make_mesh(shape)
    config.validate_mesh(row_shards(mesh), shape)
    examples = load_examples(setup, "train", config.task.train_file)
    rollout_config = config.rollout
    data = encoded(examples, setup)
    peak = matmul_peak()
    with jax.set_mesh(mesh):
        batch = place(Batches(data, rollout_config.prompts, config.run.seed, rollout_config.prompt_buckets)[0], mesh)
        state = fresh_state(setup, mesh, teacher=load_teacher(setup, mesh))
        if rollout_config.staleness:
            state = state.replace(replay=empty_replay(state, batch, setup))
        policy = policy_of(state.params, state.base, config.lora)
        reference = state.teacher if state.reference is None else policy_of(state.reference, state.base, config.lora)
        key = jax.random.key(0)
        settings, objective, context = config.objective, setup.objective, setup.context

        seconds: dict[str, float] = {}
        if objective.ROLLOUT:
            run, rollout = _compiled(lambda p, b, k: roll_out(p, b, k, setup)[0], policy, batch, key)
            seconds["rollout"] = _median(run, repeats)
        else:
            rollout = jax.jit(lambda b: demonstrations(b, setup))(batch)
        run, prepared = _compiled(
            lambda p, r, x, k: objective.prepare(p, r, x, k, settings, context),
            policy, reference, rollout, key,
        )  # fmt: skip
        seconds["prepare"] = _median(run, repeats)
        run, _ = _compiled(
            lambda p, o, x, q, k, b: take_update(p, o, x, q, k, setup, b),
            state.params, state.optimizer, rollout, prepared, key, state.base,
        )  # fmt: skip
        seconds["update"] = _median(run, repeats) * settings.updates

        start = time.perf_counter()
        program = jax.jit(make_cycle(setup), donate_argnums=0).lower(state, batch).compile()
        compile_seconds = time.perf_counter() - start
        memory = program.memory_analysis()
        timed = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            state, record = program(state, batch)
            jax.block_until_ready((state, record))
            timed.append(time.perf_counter() - start)
        seconds["cycle"] = statistics.median(timed[1:])

    flops = phase_flops(setup, batch.prompts.tokens.shape[1])
    if flops.keys() >= seconds.keys() - {"cycle"}:
        flops["cycle"] = sum(flops.values())
    rows = rollout_config.prompts * rollout_config.group
    return {
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "machine": platform.machine(),
        "jax": jax.__version__,
        "mesh": dict(mesh.shape),
        "rows": rows,
        "prompt_width": batch.prompts.tokens.shape[1],
        "completion_length": rollout_config.completion_length,
        "matmul_peak_flops": peak,
        "compile_s": compile_seconds,
        "temporary_bytes": getattr(memory, "temp_size_in_bytes", None),
        "completions_per_second": rows / seconds["cycle"],
        "tokens_per_second": rows * rollout_config.completion_length / seconds["cycle"],
        "phases": {
            name: {"seconds": spent}
            | ({"flops": flops[name], "share_of_peak": flops[name] / spent / peak} if name in flops else {})
            for name, spent in seconds.items()
        },
    }


def _compiled(function: Callable, *arguments) -> tuple[Callable, Any]:
    program = jax.jit(function).lower(*arguments).compile()
    return lambda: program(*arguments), jax.block_until_ready(program(*arguments))


def _median(run: Callable, repeats: int) -> float:
    timed = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        timed.append(time.perf_counter() - start)
    return statistics.median(timed)
