"""The cycle is one program, the same on every mesh, and does what the method says."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmpo_jax.config import resolve
from dmpo_jax.model.parameters import init_params
from dmpo_jax.objectives import OBJECTIVES
from dmpo_jax.parallel.mesh import make_mesh
from dmpo_jax.planning.programs import abstract_batch, abstract_state
from dmpo_jax.tasks.task import Example
from dmpo_jax.training.cycle import empty_replay, make_cycle
from dmpo_jax.training.data import Batches, encode, place
from dmpo_jax.training.setup import make_setup
from dmpo_jax.training.state import fresh_state

TINY = {
    "run": {"seed": 1, "cycles": 3},
    "model": {"d_model": 16, "n_layers": 2, "n_heads": 2, "d_mlp": 24, "rope_theta": 10.0},
    "task": {"train_size": 40, "validation_size": 8, "test_size": 8},
    "rollout": {"prompts": 8, "group": 4, "completion_length": 20},
    "sampler": {"steps": 5, "block_length": 20, "temperature": 1.0},
    "objective": {"name": "dmpo", "updates": 2, "masks": 2, "weight_masks": 2},
    "optimizer": {"learning_rate": 1e-3, "clip": 1.0},
}


def setup_of(grader=None, **sections):
    """TINY with changes. A random policy solves no puzzle, so it is graded by a reward that it does earn."""
    objective = sections.get("objective", {}).get("name", "dmpo")
    base = TINY if objective == "dmpo" else {**TINY, "objective": {}}
    setup = make_setup(resolve({k: {**base.get(k, {}), **sections.get(k, {})} for k in {**base, **sections}}))

    def grade(stream, length, features):
        value = (grader or share_of_low_bytes)(stream, length)
        return {"reward": value, "cells": value, "exact": value}

    return dataclasses.replace(setup, task=setup.task._replace(grade_bytes=grade))


def share_of_low_bytes(stream, length):
    inside = jnp.arange(stream.shape[1]) < length[:, None]
    return jnp.mean((stream < ord("5")) & inside, axis=1)


def batches_of(setup):
    examples = setup.task.examples(setup.config.task, "train")
    rollout = setup.config.rollout
    data = encode(examples, setup.tokenizer, rollout.completion_length, rollout.prompt_buckets)
    return Batches(data, rollout.prompts, setup.config.run.seed, rollout.prompt_buckets)


def run(setup, shape, cycles=2, device_order=None):
    """(params, records) after some cycles on a mesh of the first devices."""
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = make_mesh(shape, [devices[i] for i in device_order] if device_order else devices)
    batches, records = batches_of(setup), []
    with jax.set_mesh(mesh):
        state = fresh_state(setup, mesh)
        program = jax.jit(make_cycle(setup), donate_argnums=0)
        staleness = setup.config.rollout.staleness
        if staleness:
            state = state.replace(replay=empty_replay(state, place(batches[0], mesh), setup))
        for k in range(cycles):
            state, record = program(state, place(batches[k // (1 + staleness)], mesh))
            records.append(jax.device_get(record))
        return jax.device_get(state.params), records


def assert_same(found, wanted, atol=1e-5):
    assert wanted[1][0].metrics["grad_norm"] > 1e-3  # something was learned
    for (params, records), (other_params, others) in [(found, wanted)]:
        for record, other in zip(records, others, strict=True):
            assert np.array_equal(record.completion, other.completion)
            for name, value in other.metrics.items():
                assert record.metrics[name] == pytest.approx(value, abs=atol, rel=1e-4), name
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), params, other_params)


@pytest.fixture(scope="module")
def one_device():
    return run(setup_of(), (1, 1, 1))


@pytest.mark.parametrize("shape", [(2, 1, 1), (8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 4, 2)])
def test_every_mesh_gives_the_same_run(one_device, shape):
    assert_same(run(setup_of(), shape), one_device)


def test_device_order_does_not_matter(one_device):
    assert_same(run(setup_of(), (2, 2, 1), device_order=[2, 0, 3, 1]), one_device)


def test_a_kept_rollout_serves_its_cycles_with_the_weights_it_began_with():
    setup = setup_of(rollout={"staleness": 2})
    found = run(setup, (1, 1, 1), cycles=4)
    assert_same(run(setup, (8, 1, 1), cycles=4), found)
    first, second, third, fourth = found[1]
    assert np.array_equal(first.completion, third.completion) and not np.array_equal(
        first.completion, fourth.completion
    )
    for name in ("ess/mean", "log_ratio/mean", "reward/mean"):
        assert first.metrics[name] == second.metrics[name] == third.metrics[name] != fourth.metrics[name]
    assert len({float(record.metrics["loss"]) for record in found[1]}) == 4  # fresh masks at every update
    fresh = run(setup_of(), (1, 1, 1), cycles=1)
    assert first.metrics["loss"] == pytest.approx(fresh[1][0].metrics["loss"], rel=1e-5)


def test_one_program_without_callbacks_that_reuses_its_state():
    setup = setup_of()
    mesh = make_mesh((8, 1, 1))
    with jax.set_mesh(mesh):
        state = fresh_state(setup, mesh)
        compiled = (
            jax.jit(make_cycle(setup), donate_argnums=0).lower(state, place(batches_of(setup)[0], mesh)).compile()
        )
    text = compiled.as_text()
    assert not re.search(r'custom_call_target="[^"]*callback', text)
    assert "outfeed" not in text and "infeed" not in text
    donated = len(jax.tree.leaves(state))
    header = text.splitlines()[0]
    assert len(re.findall(r"\{\d+\}: \(", header[header.index("input_output_alias") :])) >= donated - 2


def test_no_collective_inside_the_denoising_loop():
    setup = setup_of()
    mesh = make_mesh((2, 4, 1))
    with jax.set_mesh(mesh):
        state = fresh_state(setup, mesh)
        lowered = jax.jit(make_cycle(setup), donate_argnums=0).lower(state, place(batches_of(setup)[0], mesh))
    text = lowered.compile().as_text()
    collective = re.compile(r"= \S+ (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)[-a-z]*\(")
    inside = [line for line in text.splitlines() if collective.search(line) and "/sample/while" in line]
    assert collective.search(text) and not inside


def test_completions_stay_where_one_process_can_read_them():
    """An exchange that nothing else waits for can run in another order on each CPU device, and they wait for ever."""
    setup = setup_of(rollout={"accumulation": 2})
    mesh = make_mesh((4, 1, 1), jax.devices()[:4])
    with jax.set_mesh(mesh):
        state = fresh_state(setup, mesh)
        program = jax.jit(make_cycle(setup)).lower(state, place(batches_of(setup)[0], mesh)).compile()
    record = program.output_shardings[1]
    assert not record.completion.is_fully_replicated
    assert not any(x.is_fully_replicated for x in record.components.values())
    assert all(x.is_fully_replicated for x in record.metrics.values())


def test_one_compilation_for_many_cycles_and_prompt_lengths_of_a_bucket():
    setup = setup_of(
        task={"name": "countdown", "train_size": 40},
        rollout={"prompts": 8, "prompt_buckets": [12, 24], "completion_length": 24},
        sampler={"steps": 4, "block_length": 24},
    )
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    batches = batches_of(setup)
    widths, lengths = set(), set()
    with jax.set_mesh(mesh):
        state = fresh_state(setup, mesh)
        program = jax.jit(make_cycle(setup), donate_argnums=0)
        for k in range(6):
            batch = batches[k]
            widths.add(batch.prompts.tokens.shape[1])
            lengths.update(batch.prompts.length.tolist())
            state, _ = program(state, place(batch, mesh))
    assert len(lengths) > 3
    assert program._cache_size() == len(widths)


def test_accumulation_gives_the_same_update(one_device):
    """Micro-batches of whole groups, with the masks of the whole batch: the same loss, gradient and parameters."""
    for parts, shape in ((2, (1, 1, 1)), (4, (2, 1, 1))):
        assert_same(run(setup_of(rollout={"accumulation": parts}), shape), one_device)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_group_at_a_time_is_served_by_every_objective(name):
    """One group a micro-batch, and one prompt a cycle: axes of size 1 keep their partition."""
    sampler = {"algorithm": "random", "trace_entropy": True} if name == "agrpo" else {}
    lora = {"rank": 2} if name == "diffu_grpo" else {}
    for prompts, parts in ((2, 2), (1, 1)):
        rollout = {"prompts": prompts, "accumulation": parts, "group": 1 if name == "denoise" else 4}
        setup = setup_of(objective={"name": name}, rollout=rollout, sampler=sampler, lora=lora)
        mesh = make_mesh((1, 1, 1), jax.devices()[:1])
        with jax.set_mesh(mesh):
            batch = abstract_batch(setup, mesh)
            begun = abstract_state(setup, batch, mesh)
            state, record = jax.eval_shape(make_cycle(setup), begun, batch)
        assert record.completion.shape == (prompts, rollout["group"], 20)
        assert jax.tree.structure(state.params) == jax.tree.structure(begun.params)


def test_seeds_share_one_program():
    """The seed is data, so another one finds the program in the cache; the keys are those of the number itself."""
    texts = []
    for seed in (1, 2**32 - 1):
        setup = setup_of(run={"seed": seed})
        mesh = make_mesh((1, 1, 1), jax.devices()[:1])
        batch = place(batches_of(setup_of())[0], mesh)
        with jax.set_mesh(mesh):
            state = fresh_state(setup, mesh)
            lowered = jax.jit(make_cycle(setup), donate_argnums=0).lower(state, batch)
            texts.append(lowered.as_text())
            key = jax.random.key(state.seed)
            assert np.array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(seed)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("model", "shape"),
    [({"rows_at_once": 10, "remat": "dots"}, (1, 1, 1)), ({"rows_at_once": 4, "remat": "outputs"}, (2, 2, 2))],
)
def test_what_saves_memory_changes_no_number(one_device, model, shape):
    assert_same(run(setup_of(model=model), shape), one_device)


@pytest.mark.parametrize("baseline", ["none", "group", "individual"])
def test_other_baselines_train_on_a_mesh_as_on_one_device(baseline):
    setup = setup_of(objective={"baseline": baseline, "target_ess": 0.5})
    assert_same(run(setup, (4, 1, 1), cycles=1), run(setup, (1, 1, 1), cycles=1))


def test_trajectory_weights_on_a_mesh():
    setup = setup_of(
        sampler={"algorithm": "roar", "steps": 0, "temperature": 1.0}, objective={"log_ratio": "trajectory"}
    )
    one = run(setup, (1, 1, 1), cycles=2)
    assert_same(run(setup, (8, 1, 1), cycles=2), one)
    assert one[1][0].metrics["log_ratio/std"] == pytest.approx(0, abs=1e-4)  # the policy is the reference
    assert one[1][1].metrics["log_ratio/std"] > 1e-3


def test_pretraining_on_a_mesh():
    setup = setup_of(objective={"name": "denoise"}, rollout={"group": 1})
    assert_same(run(setup, (2, 2, 2)), run(setup, (1, 1, 1)))


def test_on_policy_log_ratio_is_zero_and_the_model_baseline_is_uniform(one_device):
    """Policy = reference and theta = rollout policy: with shared masks both differences are exactly 0."""
    first = one_device[1][0].metrics
    assert first["log_ratio/mean"] == 0 and first["log_ratio/std"] == 0
    assert one_device[1][1].metrics["log_ratio/std"] > 0


def test_reference_sync_really_happens():
    never = run(setup_of(), (1, 1, 1), cycles=3)[1]
    each = run(setup_of(objective={"reference_sync": 1}), (1, 1, 1), cycles=3)[1]
    second = run(setup_of(objective={"reference_sync": 2}), (1, 1, 1), cycles=3)[1]
    assert all(record.metrics["log_ratio/std"] == 0 for record in each)
    assert second[1].metrics["log_ratio/std"] > 0 and second[2].metrics["log_ratio/std"] == 0
    assert never[2].metrics["log_ratio/std"] > 0


def constant(stream, length):
    return jnp.full(length.shape, 0.5)


@pytest.mark.parametrize("baseline", ["model", "individual", "group"])
def test_equal_rewards_give_exactly_no_gradient(baseline):
    _, records = run(setup_of(constant, objective={"baseline": baseline}), (1, 1, 1))
    assert all(record.metrics["grad_norm"] == 0 and record.metrics["loss"] == 0 for record in records)
    assert all(record.metrics["reward/zero_std_groups"] == 1 for record in records)
    kept = setup_of(constant, objective={"baseline": "individual", "equal_rewards": "keep"})
    assert run(kept, (1, 1, 1), cycles=1)[1][0].metrics["grad_norm"] < 1e-6  # w = w- up to rounding


def test_a_reward_that_is_not_finite_is_counted_and_harms_nothing():
    def reward(stream, length):
        value = (length % 5).astype(jnp.float32)
        return jnp.where(value == 0, jnp.nan, value)

    params, records = run(setup_of(reward), (1, 1, 1))
    assert sum(record.metrics["rewards_not_finite"] for record in records) > 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))
    assert all(np.isfinite(record.metrics["loss"]) for record in records)


@pytest.mark.parametrize("baseline", ["model", "group", "individual", "none"])
def test_one_step_raises_the_good_answer_and_lowers_the_bad_one(baseline):
    """Two completions of one prompt, one rewarded: an SGD step on the objective's loss, ELBOs before and after."""
    from dmpo_jax.diffusion.canvas import Prompts
    from dmpo_jax.objectives import dmpo
    from dmpo_jax.objectives.objective import Rollout, rollout_elbo

    setup = setup_of(objective={"baseline": baseline, "masks": 16, "weight_masks": 16, "alpha": 0.5})
    completion = jax.random.randint(jax.random.key(0), (1, 2, 20), 0, 20).astype(jnp.int32)
    rollout = Rollout(
        prompts=Prompts(jnp.zeros((1, 3), jnp.int32), jnp.array([3])), row=jnp.array([[0, 1]]), completion=completion,
        step=jnp.zeros((1, 2, 20), jnp.int32), log_prob=jnp.zeros((1, 2, 20)), sampled_log_prob=jnp.zeros((1, 2, 20)),
        entropy=None, live=jnp.ones((1, 2, 20), bool), reward=jnp.array([[1.0, 0.0]]),
    )  # fmt: skip
    config, context = setup.config.objective, setup.context

    @jax.jit
    def change(params):
        prepared = dmpo.prepare(params, params, rollout, jax.random.key(1), config, context)
        grad = jax.grad(lambda p: dmpo.loss(p, rollout, prepared, jax.random.key(2), config, context)[0])(params)
        stepped = jax.tree.map(lambda p, g: p - 0.05 * g, params, grad)
        value = lambda p: rollout_elbo(p, rollout, rollout.live, jax.random.key(3), 64, "exact", context)[0]  # noqa: E731
        return value(stepped) - value(params)

    change = np.asarray(change(init_params(jax.random.key(0), setup.model)))
    assert change[0] > 0
    if baseline != "none":  # without a baseline both are pulled up: the fault that baselines mend
        assert change[1] < 0 < change[0]
    assert change[0] > change[1]


def test_grading_is_the_hosts_verdict_on_the_decoded_text():
    setup = make_setup(resolve(TINY))
    examples = setup.task.examples(setup.config.task, "train")[:8]
    answers = [
        Example(e.prompt, f"<answer>{e.truth[:n]}</answer>" if n else "no", "", e.features)
        for e, n in zip(examples, (16, 0, 4, 15, 16, 1, 8, 12), strict=True)
        if n
    ]
    from dmpo_jax.training.cycle import grade

    data = encode(answers, setup.tokenizer, 20)
    found = grade(jnp.asarray(data.demonstration), jax.tree.map(jnp.asarray, data.features), setup)
    for row, example in enumerate(answers):
        text = setup.tokenizer.decode(data.demonstration[row])
        for name, value in setup.task.grade_text(text, example.features).items():
            assert float(found[name][row]) == pytest.approx(value)
    assert float(found["reward"][0]) == 1.0
