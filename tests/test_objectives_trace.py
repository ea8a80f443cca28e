"""Methods that learn from the trace of decoding: AGRPO, TraceRL, TOPD, and the rows that all of them are built on."""

import dataclasses
import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_training_cycle import batches_of, setup_of

from dmpo_jax.config import load_config
from dmpo_jax.diffusion.canvas import Prompts, live_positions, repeat
from dmpo_jax.diffusion.forward import doubled_hidden
from dmpo_jax.diffusion.masking import row_keys
from dmpo_jax.diffusion.sampler import SamplerConfig, sample
from dmpo_jax.diffusion.trajectory import trajectory_log_probs
from dmpo_jax.errors import UserError
from dmpo_jax.model import denoiser
from dmpo_jax.model.parameters import ModelConfig, init_params, param_shardings
from dmpo_jax.objectives import agrpo, topd, trace_rows, tracerl
from dmpo_jax.objectives.objective import Context, Rollout
from dmpo_jax.parallel.mesh import ROWS, make_mesh
from dmpo_jax.training.cycle import make_cycle
from dmpo_jax.training.data import place
from dmpo_jax.training.state import fresh_state

VOCAB, MASK, EOS = 8, 5, 6
BASE = {"vocab_size": VOCAB, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_mlp": 24, "rope_theta": 100.0}
SHAPES = {
    "llada": ModelConfig(**BASE),
    "dream": ModelConfig(**BASE, logits_shift=True, family="dream"),
    "sdar": ModelConfig(**BASE, block_size=4, qk_norm=True, family="sdar"),
}
PROMPTS = Prompts(jnp.array([[1, 2, 3, 4, 0, 1], [3, 4, 0, 0, 0, 0]], jnp.int32), jnp.array([6, 2], jnp.int32))
LENGTH = 8


@functools.cache
def weights(family, seed=4):
    """Random weights, with a say for context: as initialised, every mask would be read alike."""
    params = init_params(jax.random.key(seed), SHAPES[family])
    blocks = {name: w * {"wo": 6.0, "w_down": 4.0, "wq": 3.0}.get(name, 1.0) for name, w in params["blocks"].items()}
    return {**params, "blocks": blocks, "head": params["head"] * 2.0}


def context_of(family, **settings):
    sampler = SamplerConfig(**{"block_length": 4, "temperature": 1.0, "algorithm": "random"} | settings)
    sampler.validate(LENGTH)
    sampler.validate_model(SHAPES[family])
    model = SHAPES[family]
    return Context(model=model, reference_model=model, mask_id=MASK, eos_id=EOS, sampler=sampler, loss_chunk=3)


# How the rollouts of these tests are drawn. Few, as each takes a compilation.
WAYS = {
    "random": ("llada", {"steps": 4, "temperature": 0.6, "top_k": 4, "top_p": 0.9}),
    "roar": ("llada", {"algorithm": "roar", "temperature": 1.3}),
    "threshold": ("llada", {"algorithm": "low_confidence", "commit": "threshold", "level": 0.4, "top_p": 0.8}),
    "shifted": ("dream", {"block_length": 8, "steps": 4, "temperature": 0.7, "top_k": 3, "eos": "forbid"}),
    "blocks": ("sdar", {"steps": 4, "temperature": 0.7, "top_k": 3, "cache": "block"}),
    "dynamic": ("sdar", {"algorithm": "low_confidence", "commit": "dynamic", "level": 0.4, "steps": 4}),
}


def way(name):
    family, settings = WAYS[name]
    return context_of(family, trace_entropy=True, **settings)


@functools.cache
def decoded(context, size=3, prompts_seed=0):
    """A rollout of two prompts with `size` completions each, drawn by the context's own sampler."""
    family = context.model.family
    keys = row_keys(jax.random.key(1), jnp.arange(2 * size))
    run = lambda params: sample(  # noqa: E731
        params, repeat(PROMPTS, size), keys, length=LENGTH, mask_id=MASK, eos_id=EOS, sampler=context.sampler,
        config=context.model,
    )  # fmt: skip
    trace = jax.jit(run)(weights(family))
    grouped = lambda x: None if x is None else x.reshape(2, size, *x.shape[1:])  # noqa: E731
    reward = jnp.arange(2.0 * size).reshape(2, size) % 3
    return Rollout(
        PROMPTS, jnp.arange(2 * size, dtype=jnp.int32).reshape(2, size), grouped(trace.completion), grouped(trace.step),
        grouped(trace.log_prob), grouped(trace.sampled_log_prob), grouped(trace.entropy),
        grouped(live_positions(trace.completion, EOS)), reward,
    )  # fmt: skip


def given(completion, step):
    """A rollout of completions `[2, N, L]` and commit steps as they are."""
    size, nothing = completion.shape[1], jnp.zeros(completion.shape, jnp.float32)
    live = live_positions(completion.reshape(2 * size, -1), EOS).reshape(completion.shape)
    row = jnp.arange(2 * size, dtype=jnp.int32).reshape(2, size)
    return Rollout(PROMPTS, row, completion, step, nothing, nothing, None, live, nothing[..., 0])


@functools.cache
def _forward(config):
    return jax.jit(lambda params, tokens: denoiser.logits(params, tokens, config))


def plain_log_probs(config, params, prompt, shown):
    """float64 `[L, V]` of a partly masked completion, from an ordinary forward in reading order without padding."""
    tokens = jnp.array([*prompt, *shown], jnp.int32)[None]
    logits = _forward(config)(params, tokens)
    logits = np.asarray(denoiser.shifted(logits) if config.logits_shift else logits, np.float64)[0, len(prompt) :]
    logits[:, MASK] = -np.inf
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def loop_rows(prompt_length, step, shrink, block_size):
    """The row of every token, by loops: {position: (block, row)}."""
    found = {}
    block = lambda i: (prompt_length + i) // block_size if block_size else 0  # noqa: E731
    for b in {block(i) for i in range(len(step))}:
        inside = [i for i in range(len(step)) if block(i) == b and step[i] >= 0]
        order = sorted({int(step[i]) for i in inside})
        found |= {i: (b, order.index(int(step[i])) // shrink) for i in inside}
    return found


def loop_states(config, params, prompt, completion, step, counted, shrink=1):
    """Per counted token: (block, row, log-probabilities `[V]` in its row's state), from a forward for every state."""
    rows = loop_rows(len(prompt), step, shrink, config.block_size)
    result, known = {}, {}
    for i, own in rows.items():
        if not counted[i]:
            continue
        if own not in known:
            # Everything of later blocks, and of this block what is not committed before this row, is masked.
            shown = [
                completion[j] if j in rows and (rows[j] < own if config.block_size else rows[j][1] < own[1]) else MASK
                for j in range(len(completion))
            ]
            known[own] = plain_log_probs(config, params, prompt, shown)
        result[i] = (*own, known[own][i])
    return result


def whole_blocks(config, prompt_length, length=LENGTH):
    """bool `[L]`: not in a last block that the completion's end cuts."""
    size = config.block_size or 1
    return np.array([((prompt_length + i) // size + 1) * size <= prompt_length + length for i in range(length)])


def completions(rollout):
    """(p, n, prompt, completion, step, live) of every completion, in NumPy."""
    for p, n in np.ndindex(*rollout.row.shape):
        prompt = np.asarray(rollout.prompts.tokens)[p, : int(rollout.prompts.length[p])]
        yield p, n, prompt, *(np.asarray(x)[p, n] for x in (rollout.completion, rollout.step, rollout.live))


# Rows.


@pytest.mark.parametrize("shrink", [1, 2, 3])
def test_row_numbers_against_loops(shrink):
    rng = np.random.default_rng(0)
    step = np.where(rng.random((20, 9)) < 0.2, -1, rng.integers(0, 5, (20, 9)))
    step[0], step[1] = -1, 3
    found = np.asarray(trace_rows.row_numbers(jnp.array(step), jnp.zeros_like(jnp.array(step)), 1, shrink))
    for row, steps in zip(found, step, strict=True):
        wanted = loop_rows(0, steps, shrink, 0)
        assert [wanted[i][1] if i in wanted else -1 for i in range(9)] == row.tolist()
    # By blocks of 3 that begin within the prompt: a block's steps come after those of the block before.
    lead = rng.integers(0, 3, 20)
    block = (lead[:, None] + np.arange(9)) // 3
    later = np.where(step < 0, -1, step + 5 * block)
    found = np.asarray(trace_rows.row_numbers(jnp.array(later), jnp.array(block), 4, shrink))
    for row, steps, first in zip(found, later, lead, strict=True):
        wanted = loop_rows(first, steps, shrink, 3)
        assert [wanted[i][1] if i in wanted else -1 for i in range(9)] == row.tolist()


def test_which_tokens_count():
    rollout = given(
        completion=jnp.array([[[0, EOS, 1, EOS, EOS, EOS, EOS, EOS]], [[0, 1, 2, 3, 4, 0, 1, 2]]]),
        step=jnp.array([[[0, 1, 3, 2, 4, 5, -1, -1]], [[0, 1, 2, 3, 4, 5, 6, 7]]]),
    )
    run = jax.jit(trace_rows.trace, static_argnums=(1, 2, 3))
    for kind, wanted in (
        ("all", [1, 1, 1, 1, 1, 1, 0, 0]),
        ("live", [1, 1, 0, 0, 0, 0, 0, 0]),
        ("text", [1] * 4 + [0] * 4),
    ):
        counted = run(rollout, kind, 1, context_of("llada")).counted[:, 0].astype(int)
        assert counted[0].tolist() == wanted and counted[1].all()


SLOW = pytest.mark.slow
SOME = ["random", "roar", "blocks", pytest.param("shifted", marks=SLOW), pytest.param("threshold", marks=SLOW)]


@pytest.mark.parametrize(("name", "shrink"), [("random", 2), ("roar", 1), ("blocks", 1), ("dynamic", 2)])
def test_rows_hold_every_counted_token_once(name, shrink):
    context = way(name)
    rollout = jax.device_get(decoded(context))
    traced = jax.jit(trace_rows.trace, static_argnums=(1, 2, 3))(rollout, "all", shrink, context)
    most, width = trace_rows.limits(LENGTH, context.sampler, context.model, shrink)
    select = jax.jit(trace_rows.select, static_argnums=(3, 4, 5))
    rows = jax.device_get(select(traced, rollout, jax.random.key(0), 0, most, width))
    seen = np.zeros((2, 3, LENGTH), int)
    for p, n, r, w in np.argwhere(np.asarray(rows.scored)):
        assert rows.weight[p, n, r] == 1
        seen[p, n, rows.position[p, n, r, w]] += 1
        assert rows.token[p, n, r, w] == rollout.completion[p, n, rows.position[p, n, r, w]]
    assert np.array_equal(seen, np.asarray(traced.counted))
    for p, n, prompt, _, step, _ in completions(rollout):
        inside = whole_blocks(context.model, len(prompt)) & (step >= 0)
        assert np.array_equal(inside, np.asarray(traced.counted)[p, n])


def test_drawn_rows_stand_for_all_of_them():
    """R of K rows: the weighted sum's mean over many completions is the sum over all rows."""
    count, length = 3000, 7
    step = jnp.broadcast_to(jnp.array([0, 1, 2, 2, 3, 4, -1], jnp.int32), (count, 1, length))
    nothing = jnp.zeros(step.shape, jnp.float32)
    rollout = Rollout(
        Prompts(jnp.zeros((count, 1), jnp.int32), jnp.ones((count,), jnp.int32)), jnp.arange(count)[:, None], step, step,
        nothing, nothing, None, step >= 0, nothing[..., 0],
    )  # fmt: skip
    traced = trace_rows.Traced(jnp.maximum(step, -1), jnp.zeros_like(step), step >= 0)
    value = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 0.0])  # of rows 0 to 4; there is no sixth
    for size in (1, 2, 3, 6):
        rows = jax.jit(trace_rows.select, static_argnums=(3, 4, 5))(traced, rollout, jax.random.key(size), size, 6, 2)
        assert rows.number.shape == (count, 1, size)
        estimate = np.sum(value[np.asarray(rows.number[:, 0])] * np.asarray(rows.weight[:, 0]), axis=1)
        assert abs(estimate.mean() - 14.0) < 4 * max(estimate.std(), 1e-9) / count**0.5 + 1e-6, size
        used = np.asarray(rows.number[:, 0])[np.asarray(rows.weight[:, 0]) > 0].reshape(count, -1)
        assert used.shape[1] == min(size, 5) and all(len(set(row)) == len(row) for row in used)


@pytest.mark.parametrize("lengths", [(6, 2), (4, 8), (1, 7)])
def test_a_doubled_row_is_a_forward_for_every_block(lengths):
    """Blocks of 4 at absolute positions, prompts that end inside one: earlier blocks clean, this one partly masked.

    A last block that the completion's end cuts is read with masks in its rest, as it is decoded.
    """
    config, params = SHAPES["sdar"], weights("sdar")
    rng = np.random.default_rng(1)
    prompts = Prompts(jnp.array(rng.integers(0, 5, (2, 8)), jnp.int32), jnp.array(lengths, jnp.int32))
    completion = rng.integers(0, 5, (2, LENGTH))
    noisy = np.where(rng.random((2, LENGTH)) < 0.5, MASK, completion)
    hidden = jax.jit(doubled_hidden, static_argnums=(4, 5))(
        params, jnp.array(noisy), jnp.array(completion), prompts, MASK, config
    )
    found = np.asarray(denoiser.head_logits(params, hidden, config), np.float64)
    assert np.isfinite(found).all()
    found[..., MASK] = -np.inf
    for row, length in enumerate(lengths):
        prompt = np.asarray(prompts.tokens)[row, :length]
        block = (length + np.arange(LENGTH)) // 4
        for b in np.unique(block):
            shown = np.where(block < b, completion[row], np.where(block == b, noisy[row], MASK))
            rest = [MASK] * (-(length + LENGTH) % 4)
            wanted = plain_log_probs(config, params, prompt, [*shown, *rest])[:LENGTH][block == b]
            got = found[row][block == b]
            got = got - np.log(np.exp(got).sum(axis=-1, keepdims=True))
            np.testing.assert_allclose(got, wanted, atol=2e-5)
    assert not np.allclose(found[0], np.asarray(denoiser.head_logits(params, hidden[::-1], config))[0], atol=0.1)


# AGRPO.


@pytest.mark.parametrize("name", [*SOME, pytest.param("dynamic", marks=SLOW)])
def test_agrpo_ratio_is_one_at_the_rollouts_parameters(name):
    context = way(name)
    params, rollout, config = weights(WAYS[name][0]), decoded(context), agrpo.Config(samples=6, beta=0.1)
    config.validate(3, context.sampler)

    @jax.jit
    def run(params):
        prepared = agrpo.prepare(params, params, rollout, jax.random.key(0), config, context)
        most, width = trace_rows.limits(LENGTH, context.sampler, context.model, 1)
        traced = prepared.groups["traced"]
        rows = trace_rows.select(traced, rollout, jax.random.key(1), 0, most, width)
        log_prob, reference = agrpo.log_probs(params, prepared.whole, rollout, traced, rows, context)
        old = jnp.take_along_axis(rollout.sampled_log_prob[:, :, None], rows.position, axis=-1)
        _, metrics = agrpo.loss(params, rollout, prepared, jax.random.key(2), config, context)
        return log_prob, reference, old, rows.scored, metrics

    log_prob, reference, old, scored, metrics = jax.device_get(run(params))
    assert scored.sum() > 20 and np.abs(old[scored]).max() > 0.1
    np.testing.assert_allclose(log_prob[scored], old[scored], atol=2e-5)
    np.testing.assert_allclose(reference[scored], old[scored], atol=2e-5)
    assert abs(metrics["log_ratio/mean"]) < 1e-4 and metrics["ess/min"] == pytest.approx(1, abs=1e-4)
    assert metrics["kl"] == pytest.approx(0, abs=1e-6) and metrics["ratio/clipped"] == 0


SMALL = dataclasses.replace(SHAPES["llada"], vocab_size=4)  # two tokens, mask 2, end of sequence 3


def enumerated(temperature):
    """All pairs of trajectories of two tokens, each in both orders: a rollout, and its log-probabilities `f32[pairs, 2, 2]`."""
    single = [(tokens, order) for tokens in itertools.product((0, 1, 3), repeat=2) for order in ((0, 1), (1, 0))]
    pairs = list(itertools.product(range(len(single)), repeat=2))
    completion = jnp.array([[single[i][0] for i in pair] for pair in pairs], jnp.int32)
    step = jnp.array([[single[i][1] for i in pair] for pair in pairs], jnp.int32)
    prompts = Prompts(jnp.ones((len(pairs), 2), jnp.int32), jnp.full((len(pairs),), 2, jnp.int32))

    def log_probs(params):
        return trajectory_log_probs(
            params, repeat(prompts, 2), completion.reshape(-1, 2), step.reshape(-1, 2), steps=2, tokens_per_step=1,
            mask_id=2, config=SMALL, temperature=temperature,
        ).reshape(completion.shape)  # fmt: skip

    nothing = jnp.zeros(completion.shape, jnp.float32)
    rollout = Rollout(
        prompts, jnp.arange(2 * len(pairs), dtype=jnp.int32).reshape(-1, 2), completion, step, nothing, nothing, None,
        jnp.ones(completion.shape, bool), jnp.sum(completion * jnp.array([1.0, 0.3]), axis=-1) % 2.0,
    )  # fmt: skip
    return rollout, log_probs


def test_agrpo_is_the_policy_gradient_of_the_expected_reward():
    """The expectation over all pairs of trajectories of -gradient x L is the gradient of E[reward], by enumeration.

    Random order, one token a step, both steps drawn, below temperature 1.
    """
    temperature = 0.7
    rollout, log_probs = enumerated(temperature)
    sampler = SamplerConfig(algorithm="random", temperature=temperature)
    context = Context(model=SMALL, reference_model=SMALL, mask_id=2, eos_id=3, sampler=sampler)
    config = agrpo.Config(samples=2, proposal="uniform", advantage="leave_one_out")
    params = init_params(jax.random.key(0), SMALL)
    params["head"] = params["head"] * 4.0

    @jax.jit
    def both(params):
        old = log_probs(params)
        pair = jnp.prod(jnp.exp(jnp.sum(old, axis=2)) / 2, axis=1)
        given = rollout._replace(sampled_log_prob=old)
        prepared = agrpo.prepare(params, params, given, jax.random.key(0), config, context)
        weighted = prepared.groups["advantage"] * pair[:, None] * len(pair)
        prepared = prepared._replace(groups=prepared.groups | {"advantage": weighted})
        loss = lambda p: agrpo.loss(p, given, prepared, jax.random.key(1), config, context)[0]  # noqa: E731

        def expected(p):  # the first of a pair runs over all 18 trajectories in the first 18^2 pairs, 18 times each
            return jnp.sum(jnp.exp(jnp.sum(log_probs(p)[::18, 0], axis=-1)) / 2 * rollout.reward[::18, 0])

        found = jax.tree.map(lambda g: -2 * g, jax.grad(loss)(params))
        return found, jax.grad(expected)(params), jnp.sum(pair)

    found, wanted, total = jax.device_get(both(params))
    assert total == pytest.approx(1, abs=1e-5)
    size = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
    assert size > 1e-2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * size, rtol=1e-3), found, wanted)


@pytest.mark.parametrize(("normalizer", "tokens"), [("steps", "live"), pytest.param("canvas", "all", marks=SLOW)])
def test_agrpo_estimates_the_sum_over_steps(normalizer, tokens):
    """Expectation over the drawn step, each with its probability under the entropy proposal, against a sum by loops."""
    context = way("roar")
    config = agrpo.Config(samples=1, normalizer=normalizer, tokens=tokens, uniform_share=0.25)
    params, rollout, key = weights("llada"), decoded(context), jax.random.key(5)
    rollout = rollout._replace(entropy=rollout.entropy.at[0, 0, 0].set(50.0))  # a lopsided proposal
    rollout = jax.tree.map(lambda x: x[:1, :1], rollout._replace(prompts=()))._replace(
        prompts=jax.tree.map(lambda x: x[:1], rollout.prompts)
    )

    @jax.jit
    def estimate(params, advantage):
        prepared = agrpo.prepare(params, params, rollout, jax.random.key(0), config, context)
        proposal = prepared.groups["proposal"][0, 0]
        middle = jnp.cumsum(proposal) - proposal / 2
        shift = jax.random.uniform(key)

        def of_step(point):
            groups = prepared.groups | {"advantage": advantage, "uniform": (point - shift)[None, None] % 1.0}
            return agrpo.loss(params, rollout, prepared._replace(groups=groups), key, config, context)[0]

        return jnp.sum(proposal * jax.lax.map(of_step, middle)), proposal

    (value, proposal), grad = jax.value_and_grad(estimate, has_aux=True)(params, jnp.array([[1.5]]))
    *_, step, live = next(completions(rollout))
    counted = (step >= 0) & (live if tokens == "live" else True)
    mass = np.zeros(len(proposal))
    for i in np.flatnonzero(counted):
        mass[step[i]] += rollout.entropy[0, 0, i]
    used = mass > 0
    np.testing.assert_allclose(proposal, 0.75 * mass / mass.sum() + 0.25 * used / used.sum(), rtol=1e-4)
    size = LENGTH if normalizer == "canvas" else used.sum()
    assert value == pytest.approx(-1.5 * counted.sum() / size, rel=1e-4)  # every ratio is 1

    def by_loops(params):
        log_prob = trajectory_log_probs(
            params, rollout.prompts, rollout.completion[0], rollout.step[0], steps=8, tokens_per_step=1, mask_id=MASK,
            config=context.model, temperature=1.3,
        )  # fmt: skip
        return -1.5 * jnp.sum(jnp.where(counted, log_prob[0], 0.0)) / size

    wanted = jax.jit(jax.grad(by_loops))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-3), grad, wanted)


def test_steps_are_drawn_by_their_probability():
    proposal = jnp.array([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0], [0, 0, 0, 0, 0, 0]])
    points = (jnp.arange(1000) + 0.5) / 1000
    number, probability = agrpo.draw_steps(proposal, jnp.broadcast_to(points, (2, 1000)))
    assert np.bincount(number[0], minlength=6).tolist() == [0, 250, 0, 500, 250, 0]
    assert np.array_equal(probability[0], proposal[0][number[0]]) and not probability[1].any()
    edge = np.nextafter(np.float32(1), np.float32(0))
    thirds = jnp.array([1 / 3, 1 / 3, 1 / 3 - 1e-7, 0.0])
    assert agrpo.draw_steps(thirds, jnp.array([edge, 0.0]))[0].tolist() == [2, 0]  # never beyond the last
    strata = np.sort(np.asarray(agrpo.stratified(jax.random.key(0), (5, 4))).ravel()) * 20
    assert np.array_equal(np.floor(strata), np.arange(20))


# TraceRL.


@functools.cache
def gradient_of(objective, config, context):
    """(params, rollout policy, reference, rollout) -> (loss, metrics, gradient), compiled once."""

    def run(params, old, reference, rollout):
        prepared = objective.prepare(old, reference, rollout, jax.random.key(0), config, context)
        loss = lambda p: objective.loss(p, rollout, prepared, jax.random.key(1), config, context)  # noqa: E731
        (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(params)
        return value, metrics | prepared.metrics, grad

    return jax.jit(run)


def largest(tree):
    return max(float(np.abs(x).max()) for x in jax.tree.leaves(jax.device_get(tree)))


TRACERL = [
    pytest.param("threshold", {"shrink": 3, "normalizer": "rows", "beta": 0.5}, marks=SLOW),
    ("blocks", {"normalizer": "canvas", "beta": 0.5, "unfinished": "keep", "tokens": "all"}),
]


@pytest.mark.parametrize(("name", "settings"), TRACERL)
def test_tracerl_against_loops(name, settings):
    """The loss off-policy, in float64 from a forward for every state."""
    context, config, family = way(name), tracerl.Config(**settings), WAYS[name][0]
    config.validate(3, context.sampler)
    rollout, model = decoded(context), context.model
    rollout = rollout._replace(reward=jnp.array([[0.0, 1.0, jnp.nan], [1.0, 1.0, 1.0]]))
    rollout = rollout._replace(completion=rollout.completion.at[0, :2, 5].set(EOS))
    params, old = weights(family, 5), weights(family)
    value, metrics, _ = gradient_of(tracerl, config, context)(params, old, old, rollout)

    surrogate, kl, row_count, clipped = [], [], [], 0
    for p, n, prompt, completion, step, live in completions(rollout):
        advantage = {(0, 0): -1.0, (0, 1): 1.0}.get((p, n), 0.0)  # z-scores of 0 and 1; all correct: dropped
        counted = whole_blocks(model, len(prompt)) & (step >= 0) & (live if config.tokens == "live" else True)
        args = (prompt, completion, step, counted, config.shrink)
        new, before = loop_states(model, params, *args), loop_states(model, old, *args)
        terms = {}
        for i, (_, row, log_prob) in new.items():
            x = np.clip(log_prob[completion[i]] - before[i][2][completion[i]], -10, 10)
            ratio = np.exp(x)
            gain = min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
            clipped += gain != ratio * advantage
            terms.setdefault(row, []).append((gain, np.exp(-x) + x - 1 if p == 0 else 0.0))
        row_count.append(len(terms))
        if config.normalizer == "canvas":
            sums = np.sum([np.sum(row, axis=0) / LENGTH for row in terms.values()], axis=0)
        else:
            sums = np.sum([np.mean(row, axis=0) for row in terms.values()], axis=0)
        surrogate.append(sums[0])
        kl.append(sums[1])
    size = np.mean(row_count) if config.normalizer == "rows" else 1.0
    wanted = (-np.mean(surrogate) + 0.5 * np.mean(kl)) / size
    assert clipped and np.mean(kl) > 0.01
    assert value == pytest.approx(wanted, rel=1e-4)
    assert metrics["kl"] == pytest.approx(np.mean(kl) / size, rel=1e-4)
    assert metrics["groups_kept"] == 0.5 and metrics["rewards_not_finite"] == 1


def test_tracerl_drops_groups_that_are_too_easy_or_too_hard_and_what_is_unfinished():
    reward = jnp.array([[0, 0, 0, 0, 1.0], [0, 0, 0, 0, 0.9], [1, 1, 1, 1, 0.5], [1, 1, 1, 1, 1], [jnp.nan] * 4 + [1]])
    assert tracerl.kept(reward, tracerl.Config()).tolist() == [True, False, True, False, False]
    assert tracerl.kept(reward, tracerl.Config(least_accuracy=0.0, most_accuracy=1.0)).all()
    rollout = given(jnp.array([[[0, EOS], [0, 1]], [[1, 1], [1, 1]]]), jnp.zeros((2, 2, 2), jnp.int32))
    rollout = rollout._replace(reward=jnp.array([[3.0, 3.0], [-1.0, jnp.nan]]))
    found = tracerl.graded(rollout, tracerl.Config(), context_of("llada"))
    np.testing.assert_array_equal(found, [[3.0, 0.0], [0.0, jnp.nan]])


# TOPD.


def of_logits(config, teacher):
    """(value, gradient) with respect to the student's logits, by the very functions that the loss uses."""

    def value(logits, token):
        log_q = topd._log_softmax(jnp.log(jnp.array(teacher)))
        return topd.divergence(topd._log_softmax(logits), log_q, jnp.array(token), config)

    return jax.value_and_grad(value)


def test_divergences_as_computed_by_hand():
    """p = (.5, .3, .2), q = (.2, .5, .3): values and gradients with respect to the student's logits.

    sum p log(p/q) = .5 log 2.5 + .3 log .6 + .2 log(2/3) = 0.223805; gradient p (log(p/q) - KL); forward: gradient p - q.
    """
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    wanted = {
        "reverse_kl": (0.223805, [0.346243, -0.220389, -0.125854]),
        "forward_kl": (0.193794, [0.3, -0.2, -0.1]),
        "jensen_shannon": (0.050875, None),
    }
    for kind, (value, gradient) in wanted.items():
        found, grad = of_logits(topd.Config(divergence=kind), q)(jnp.log(jnp.array(p)), 0)
        assert found == pytest.approx(value, abs=2e-6)
        if gradient:
            np.testing.assert_allclose(grad, gradient, atol=2e-6)
    # Jensen-Shannon's gradient: p (log(p/m) - KL(p || m)) / 2.
    _, grad = of_logits(topd.Config(divergence="jensen_shannon"), q)(jnp.log(jnp.array(p)), 0)
    ratio = np.log(p / ((p + q) / 2))
    np.testing.assert_allclose(grad, p * (ratio - p @ ratio) / 2, atol=1e-6)

    # The sampled form: gap x (onehot - p) per token; its mean under p is the full gradient.
    sampled = of_logits(topd.Config(vocabulary="sampled"), q)
    total = np.zeros(3)
    for token in range(3):
        found, grad = sampled(jnp.log(jnp.array(p)), token)
        gap = np.log(p[token] / q[token])
        assert found == pytest.approx(gap, abs=1e-6)
        np.testing.assert_allclose(grad, gap * (np.eye(3)[token] - p), atol=1e-6)
        total += p[token] * np.asarray(grad)
    np.testing.assert_allclose(total, wanted["reverse_kl"][1], atol=3e-6)


def test_top_k_puts_the_other_tokens_into_one_outcome():
    p, q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.15, 0.25, 0.5])
    kl = lambda a, b: float(np.sum(a * np.log(a / b)))  # noqa: E731
    own, other = np.array([0.4, 0.3, 0.3]), np.array([0.1, 0.15, 0.75])  # the student's two
    taught, guess = np.array([0.25, 0.5, 0.25]), np.array([0.2, 0.1, 0.7])  # the teacher's two
    middle = (own + other) / 2
    for kind, wanted in (
        ("reverse_kl", kl(own, other)),
        ("forward_kl", kl(taught, guess)),
        ("jensen_shannon", (kl(own, middle) + kl(other, middle)) / 2),
    ):
        config = topd.Config(divergence=kind, vocabulary="top_k", top_k=2)
        assert of_logits(config, q)(jnp.log(jnp.array(p)), 0)[0] == pytest.approx(wanted, abs=1e-6)
        every = topd.Config(divergence=kind, vocabulary="top_k", top_k=9)
        full = of_logits(topd.Config(divergence=kind), q)(jnp.log(jnp.array(p)), 0)
        for a, b in zip(of_logits(every, q)(jnp.log(jnp.array(p)), 0), full, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("kind", topd.DIVERGENCES)
@pytest.mark.parametrize("vocabulary", ["full", "top_k"])
def test_divergences_are_finite_for_opposite_distributions(kind, vocabulary):
    config = topd.Config(divergence=kind, vocabulary=vocabulary, top_k=2 * (vocabulary == "top_k"))

    def value(logits):
        taught = topd._log_softmax(jnp.array([0.0, 200.0, 0.0, -jnp.inf]))
        return topd.divergence(topd._log_softmax(logits), taught, jnp.array(0), config)

    found, grad = jax.value_and_grad(value)(jnp.array([200.0, 0.0, 0.0, -jnp.inf]))
    assert found == pytest.approx(np.log(2) if kind == "jensen_shannon" else 200.0, rel=1e-5)
    assert np.isfinite(grad).all()


TOPD = [
    ("random", "dream", {"tokens": "all", "shrink": 2}),
    ("dynamic", "sdar", {"tokens": "all"}),
    pytest.param("blocks", "sdar", {"normalizer": "rows", "tokens": "all"}, marks=SLOW),
    pytest.param("roar", "llada", {"normalizer": "rows", "divergence": "forward_kl"}, marks=SLOW),
]


@pytest.mark.parametrize(("name", "teacher", "settings"), TOPD)
def test_topd_against_loops(name, teacher, settings):
    """Eq. 7 and Algorithm 1's mean, in float64 from a forward of student and teacher for every state."""
    context, config, family = way(name), topd.Config(**settings), WAYS[name][0]
    config.validate(1, context.sampler)
    rollout, params, taught = decoded(context), weights(family), weights(teacher, 7)
    context = dataclasses.replace(context, reference_model=SHAPES[teacher])
    value, metrics, grad = gradient_of(topd, config, context)(params, params, taught, rollout)

    by_step, by_row, tokens = [], [], []
    for _, _, prompt, completion, step, live in completions(rollout):
        counted = whole_blocks(context.model, len(prompt)) & (step >= 0) & (live if config.tokens == "live" else True)
        args = (prompt, completion, step, counted, config.shrink)
        own, other = loop_states(context.model, params, *args), loop_states(SHAPES[teacher], taught, *args)
        steps, rows = {}, {}
        for i, (block, row, log_p) in own.items():
            a, b = (log_p, other[i][2]) if config.divergence == "reverse_kl" else (other[i][2], log_p)
            with np.errstate(invalid="ignore"):
                kl = np.nansum(np.exp(a) * (a - b))
            steps.setdefault((block, row), []).append(kl)
            rows.setdefault(row, []).append(kl)
            tokens.append(kl)
        by_step.append(sum(np.mean(x) for x in steps.values()))
        by_row += [np.mean(x) for x in rows.values()]
    wanted = np.mean(by_step) if config.normalizer == "steps" else np.mean(by_row)
    assert wanted > 0.1 and value == pytest.approx(wanted, rel=1e-4)
    assert metrics["divergence"] == pytest.approx(np.mean(tokens), rel=1e-4)
    assert 0 < largest(grad) < np.inf


def test_topd_moves_the_student_to_the_teacher_and_rests_there():
    context, config = way("dynamic"), topd.Config(tokens="all")
    student, teacher, rollout = weights("sdar"), weights("sdar", 7), decoded(context)
    step = gradient_of(topd, config, context)
    before, _, grad = step(student, student, teacher, rollout)
    after, _, _ = step(jax.tree.map(lambda p, g: p - 2e-3 * g, student, grad), student, teacher, rollout)
    assert after < before - 1e-3
    value, _, grad = step(student, student, student, rollout)
    assert abs(value) < 1e-5 and largest(grad) < 1e-5


# What every method promises.


def sizes(jaxpr, vocabulary):
    """Elements of every array with a vocabulary axis in a program, inner programs included."""
    for equation in jaxpr.eqns:
        for value in equation.outvars:
            shape = getattr(value.aval, "shape", ())
            if vocabulary in shape and len(shape) > 1:
                yield int(np.prod(shape))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from sizes(inner, vocabulary)


@pytest.mark.parametrize(
    ("objective", "config"),
    [(agrpo, agrpo.Config(samples=2)), (tracerl, tracerl.Config(updates=2)), (topd, topd.Config())],
)
def test_no_array_holds_the_vocabulary_at_every_position(objective, config):
    """Logits of 8 of 64 positions at a time, forwards and backwards."""
    model = dataclasses.replace(SHAPES["llada"], vocab_size=509, d_model=8, n_heads=1, d_mlp=8)
    sampler = SamplerConfig(commit="threshold", level=0.9, temperature=0.8, top_p=0.9, trace_entropy=True)
    context = Context(model=model, reference_model=model, mask_id=MASK, eos_id=EOS, sampler=sampler, loss_chunk=8)
    blank = given(jnp.zeros((2, 2, 64), jnp.int32), jnp.zeros((2, 2, 64), jnp.int32))
    rollout = blank._replace(entropy=blank.log_prob)
    params = jax.eval_shape(lambda: init_params(jax.random.key(0), model))
    run = gradient_of.__wrapped__(objective, config, context)
    found = list(sizes(jax.make_jaxpr(run)(params, params, params, rollout).jaxpr, 509))
    assert found and max(found) <= 4 * 8 * 509


METHODS = [
    (agrpo, agrpo.Config(samples=4, proposal="uniform")),
    (tracerl, tracerl.Config(tokens="all", unfinished="keep")),
]


@pytest.mark.parametrize(("objective", "config"), METHODS)
def test_rewards_good_bad_equal_and_not_finite(objective, config):
    context = way("roar")
    params, rollout = weights("llada"), jax.tree.map(lambda x: x[:, :2], decoded(context)._replace(prompts=()))
    rollout = rollout._replace(prompts=PROMPTS)
    step = gradient_of(objective, config, context)

    @jax.jit
    def likelihood(params):
        return jnp.sum(trajectory_log_probs(
            params, repeat(PROMPTS, 2), rollout.completion.reshape(4, -1), rollout.step.reshape(4, -1), steps=LENGTH,
            tokens_per_step=1, mask_id=MASK, config=context.model, temperature=1.3,
        ), axis=-1).reshape(2, 2)  # fmt: skip

    def run(reward, **changes):
        value, metrics, grad = step(params, params, params, rollout._replace(reward=jnp.array(reward), **changes))
        assert np.isfinite(value) and np.isfinite(largest(grad))
        return float(value), metrics, grad

    _, metrics, grad = run([[1.0, 0.0], [0.5, 0.5]])
    assert metrics["reward/zero_std_groups"] == 0.5
    change = likelihood(jax.tree.map(lambda p, g: p - 1e-3 * g, params, grad)) - likelihood(params)
    assert change[0, 0] > 0 > change[0, 1]

    value, metrics, grad = run([[1.0, 1.0], [0.5, 0.5]])
    assert value == 0 and largest(grad) == 0 and metrics["reward/zero_std_groups"] == 1

    value, metrics, grad = run([[1.0, 0.0], [jnp.nan, 2.0]])
    assert metrics["rewards_not_finite"] == 1
    other = run([[1.0, 0.0], [2.0, 2.0]])
    assert value == pytest.approx(other[0], abs=1e-7)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grad, other[2])
    run([[jnp.inf, jnp.nan], [jnp.nan, jnp.nan]])

    # A gap of 200 nats either way, and no counted token at all.
    wild = {**params, "head": params["head"] * 100.0}
    far = rollout._replace(sampled_log_prob=rollout.sampled_log_prob - jnp.array([200.0, -200.0])[:, None])
    for rows in (far, rollout._replace(step=jnp.full_like(rollout.step, -1))):
        value, metrics, grad = step(wild, params, params, rows._replace(reward=jnp.array([[1.0, 0.0], [0.0, 1.0]])))
        assert np.isfinite(value) and np.isfinite(largest(grad)) and np.isfinite(metrics["log_ratio/std"])


REFUSED = [
    (agrpo, {}, 1, {"trace_entropy": True}, "rollout.group = 1"),
    (agrpo, {}, 4, {}, "sampler.trace_entropy = true"),
    (agrpo, {"proposal": "uniform"}, 4, {"temperature": 0.0}, "sampler.temperature"),
    (agrpo, {"proposal": "uniform"}, 4, {"cache": "prefix"}, 'sampler.cache = "prefix"'),
    (agrpo, {"proposal": "uniform"}, 4, {"algorithm": "wino", "level": 0.9}, 'sampler.algorithm = "wino"'),
    (agrpo, {"proposal": "uniform"}, 4, {"cfg_scale": 1.0}, "sampler.cfg_scale"),
    (agrpo, {"proposal": "best"}, 4, {}, "objective.proposal"),
    (agrpo, {"proposal": "uniform", "epsilon": 0.0}, 4, {}, "objective.epsilon"),
    (agrpo, {"proposal": "uniform", "samples": 0}, 4, {}, "objective.samples"),
    (agrpo, {"proposal": "uniform", "reference_sync": 3}, 4, {}, "objective.reference_sync"),
    (tracerl, {}, 1, {}, "rollout.group = 1"),
    (tracerl, {"shrink": 0}, 4, {}, "objective.shrink"),
    (tracerl, {"tokens": "some"}, 4, {}, "objective.tokens"),
    (tracerl, {"least_accuracy": 0.9}, 4, {}, "objective.least_accuracy"),
    (tracerl, {"normalizer": "live"}, 4, {}, "objective.normalizer"),
    (topd, {"divergence": "kl"}, 1, {}, "objective.divergence"),
    (topd, {"top_k": 4}, 1, {}, "objective.top_k"),
    (topd, {"vocabulary": "top_k"}, 1, {}, "objective.top_k"),
    (topd, {"vocabulary": "sampled", "shrink": 2}, 1, {}, "objective.shrink = 1"),
    (topd, {"vocabulary": "sampled"}, 1, {"top_p": 0.9}, "without top_k, top_p"),
    (topd, {"rows": -1}, 1, {}, "objective.rows"),
]


@pytest.mark.parametrize(("objective", "settings", "group", "sampling", "needle"), REFUSED)
def test_what_is_refused_is_named(objective, settings, group, sampling, needle):
    sampler = SamplerConfig(**{"temperature": 1.0} | sampling)
    with pytest.raises(UserError) as error:
        objective.Config(**settings).validate(group, sampler)
    assert needle in str(error.value) and "\n" not in str(error.value)


def test_a_teacher_of_another_vocabulary_is_refused():
    context = way("roar")
    other = dataclasses.replace(context, reference_model=dataclasses.replace(SHAPES["llada"], vocab_size=9))
    with pytest.raises(UserError, match=r'objective.teacher = "x": its vocab_size = 9'):
        topd.prepare({}, {}, decoded(context), jax.random.key(0), topd.Config(teacher="x"), other)


@pytest.mark.parametrize("name", ["agrpo", "tracerl", "topd"])
def test_presets_load(name):
    path = Path(__file__).parents[1] / "configs" / "objectives" / f"{name}.toml"
    blocks = ["model.block_size=4"] if name != "agrpo" else []
    config = load_config(path, ["rollout.prompts=64", "run.cycles=1000", *blocks])
    assert config.objective.name == name and config.optimizer.clip == 1.0


# The mesh.


def test_rows_and_the_vocabulary_may_be_split_over_devices():
    """AGRPO with the filters' sort on a mesh that splits the head's vocabulary, against one device."""
    context, config = way("random"), agrpo.Config(samples=4, beta=0.1)
    params, reference, rollout = weights("llada"), weights("llada", 7), decoded(context)
    value, metrics, grad = jax.device_get(gradient_of(agrpo, config, context)(params, params, reference, rollout))
    mesh = make_mesh((2, 1, 2), jax.devices()[:4])
    with jax.set_mesh(mesh):
        laid = [jax.device_put(tree, param_shardings(context.model, mesh)) for tree in (params, params, reference)]
        rows = jax.device_put(rollout, jax.NamedSharding(mesh, jax.P(ROWS)))
        assert laid[0]["head"].sharding.spec[1] == "model"
        found = jax.device_get(gradient_of.__wrapped__(agrpo, config, context)(*laid, rows))
    assert found[0] == pytest.approx(float(value), abs=1e-6) and metrics["kl"] > 0.01
    for name, wanted in metrics.items():
        assert found[1][name] == pytest.approx(float(wanted), rel=1e-4, abs=1e-5), name
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-3), found[2], grad)


# The cycle.


def cycles_of(setup, shape, teacher=False, cycles=2):
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = make_mesh(shape, devices)
    batches, records = batches_of(setup), []
    with jax.set_mesh(mesh):
        tree = None
        if teacher:
            make = lambda: init_params(jax.random.key(9), setup.model)  # noqa: E731
            tree = jax.jit(make, out_shardings=param_shardings(setup.model, mesh))()
        state = fresh_state(setup, mesh, teacher=tree)
        program = jax.jit(make_cycle(setup), donate_argnums=0)
        for k in range(cycles):
            state, record = program(state, place(batches[k], mesh))
            records.append(jax.device_get(record))
        return jax.device_get(state.params), records


SDAR = {"block_size": 4, "family": "sdar", "qk_norm": True, "n_layers": 1}
FILTERS = {"temperature": 0.8, "top_p": 0.95, "top_k": 12, "algorithm": "random", "trace_entropy": True}
CYCLES = {
    "agrpo": (
        {"name": "agrpo", "samples": 3, "updates": 2, "beta": 0.1},
        {"n_layers": 1},
        FILTERS,
        (2, 2, 2),
    ),
    "tracerl": (
        {"name": "tracerl", "updates": 2, "rows": 2, "correct": 0.003, "unfinished": "keep", "beta": 0.1},
        SDAR,
        {"block_length": 4, "steps": 20, "cache": "block"},
        (8, 1, 1),
    ),
    "topd": ({"name": "topd", "rows": 3}, SDAR, {"block_length": 4, "steps": 10}, (8, 1, 1)),
}


@pytest.mark.parametrize("name", ["topd", pytest.param("agrpo", marks=SLOW), pytest.param("tracerl", marks=SLOW)])
def test_many_devices_in_two_parts_give_the_same_run(name):
    objective, model, sampler, shape = CYCLES[name]

    def setup(accumulation):
        rollout = {"accumulation": accumulation, "prompts": 16}
        return setup_of(objective=objective, model=model, sampler=sampler, rollout=rollout)

    one, other = cycles_of(setup(1), (1, 1, 1), name == "topd"), cycles_of(setup(2), shape, name == "topd")
    assert one[1][0].metrics["grad_norm"] > 1e-3
    for record, wanted in zip(other[1], one[1], strict=True):
        assert np.array_equal(record.completion, wanted.completion)
        for key in ("loss", "grad_norm", "log_ratio/mean", "ratio/clipped", "divergence", "kl"):
            if key in wanted.metrics:
                assert record.metrics[key] == pytest.approx(wanted.metrics[key], rel=1e-3, abs=1e-5), key
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), other[0], one[0])
