"""GDPO and ESPO: their estimators by enumeration, their losses in float64, and methods by sequence on a mesh."""

import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_training_cycle import run, setup_of

from dmpo_jax.config import load_config
from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.diffusion.elbo import elbo, elbo_replicates
from dmpo_jax.diffusion.masking import Masks, coefficients, draw_counted, draw_masks, row_keys
from dmpo_jax.diffusion.sampler import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.objectives import espo, gdpo
from dmpo_jax.objectives.objective import Context, Prepared, elbo_on, given_rollout
from dmpo_jax.objectives.policy_gradient import advantages

MASK, EOS = 5, 6
SAMPLER = SamplerConfig(temperature=1.0)


def context_of(model):
    return Context(model=model, reference_model=model, mask_id=MASK, eos_id=EOS, sampler=SAMPLER)


def rollout_of(reward, length=6):
    """Random completions of two-token prompts; the last row of every group counts four tokens."""
    reward = jnp.asarray(reward, jnp.float32)
    groups, size = reward.shape
    tokens = np.random.default_rng(0).integers(0, 5, (groups, size, length))
    live = np.ones(tokens.shape, bool)
    live[:, -1, 4:] = False
    prompts = Prompts(jnp.tile(jnp.array([1, 4], jnp.int32), (groups, 1)), jnp.full((groups,), 2, jnp.int32))
    return given_rollout(prompts, jnp.asarray(tokens, jnp.int32), jnp.asarray(live), reward)


def moved(params, seed, size=0.05):
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten([x + size * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])


def true_elbo(value, length):
    """sum_m 1/m E_{|S| = m} [value(S)]."""
    total = 0.0
    for size in range(1, length + 1):
        chosen = list(itertools.combinations(range(length), size))
        total += sum(value[s] for s in chosen) / len(chosen) / size
    return total


def table(length, seed=0):
    """Any function of the mask set; 0 at the empty one."""
    rng = np.random.default_rng(seed)
    sets = [s for size in range(length + 1) for s in itertools.combinations(range(length), size)]
    return {s: rng.normal() if s else 0.0 for s in sets}


# --- Masks of a given number of tokens


def test_counted_masks_are_uniform_subsets_of_the_live_tokens():
    rows, live = 12_000, jnp.array([True, True, False, True, True])
    count = jnp.tile(jnp.array([[0, 2, 4]]), (rows, 1))
    masked = np.asarray(draw_counted(row_keys(jax.random.key(0), jnp.arange(rows)), count, jnp.tile(live, (rows, 1))))
    assert (masked.sum(-1) == [0, 2, 4]).all() and not masked[..., 2].any()
    codes, frequency = np.unique(masked[:, 1] @ (1 << np.arange(5)), return_counts=True)
    assert len(codes) == math.comb(4, 2)
    np.testing.assert_allclose(frequency / rows, 1 / 6, atol=0.015)  # standard deviation 0.0034


def test_replicates_that_are_not_pairs(tiny_model):
    """The same masks give the same ELBO whether they are known to be pairs or not; each replicate's is its own."""
    model, params = tiny_model
    prompts = Prompts(jnp.array([[1, 2], [3, 0]], jnp.int32), jnp.array([2, 1], jnp.int32))
    completion, live = jnp.array([[1, 0, 3, 4], [2, 2, 0, 1]], jnp.int32), jnp.ones((2, 4), bool)
    pairs = draw_masks(row_keys(jax.random.key(1), jnp.arange(2)), live, 4, "exact")
    single = Masks(pairs.masked, pairs.coefficient, paired=False)
    score = lambda f, m: jax.jit(  # noqa: E731
        lambda p, m: f(p, prompts, completion, m, live, mask_id=MASK, config=model)
    )(params, m)
    np.testing.assert_allclose(score(elbo, single), score(elbo, pairs), rtol=1e-5)
    each = score(elbo_replicates, pairs)
    np.testing.assert_allclose(each, score(elbo_replicates, single), rtol=1e-5)
    np.testing.assert_allclose(jnp.mean(each, axis=1), score(elbo, pairs), rtol=1e-5)


# --- GDPO


@pytest.mark.parametrize(
    ("nodes", "points", "weights"),
    [
        (1, (0.5,), (1.0,)),
        (2, (0.21132, 0.78868), (0.5, 0.5)),
        (3, (0.11270, 0.5, 0.88730), (5 / 18, 8 / 18, 5 / 18)),
    ],
)
def test_golden_nodes(nodes, points, weights):
    found = gdpo.gauss_legendre(nodes)
    np.testing.assert_allclose(found[0], points, atol=1e-5)
    np.testing.assert_allclose(found[1], weights, atol=1e-12)
    for power in range(2 * nodes):
        assert found[1] @ found[0] ** power == pytest.approx(1 / (power + 1), abs=1e-14)
    assert found[1] @ found[0] ** (2 * nodes) != pytest.approx(1 / (2 * nodes + 1), abs=1e-4)


def quadrature(length, nodes=3, draws=1, node_weight="node", rows=1):
    live = jnp.ones((rows, length), bool)
    return gdpo.quadrature_masks(row_keys(jax.random.key(2), jnp.arange(rows)), live, nodes, draws, node_weight)


def test_masks_of_the_nodes():
    masks = quadrature(20, draws=2, rows=3)
    assert not masks.paired
    assert np.asarray(masks.masked).sum(-1).tolist() == [[2, 2, 10, 10, 17, 17]] * 3
    t, w = gdpo.gauss_legendre(3)
    np.testing.assert_allclose(masks.coefficient[0], np.repeat(3 * w / t, 2), rtol=1e-6)  # elbo() takes the mean of 6
    assert np.asarray(quadrature(4).masked).sum(-1).tolist() == [[1, 2, 3]]
    shares = quadrature(20, node_weight="share")
    np.testing.assert_allclose(shares.coefficient[0], 3 * w / (np.array([2, 10, 17]) / 20), rtol=1e-6)
    nothing = gdpo.quadrature_masks(row_keys(jax.random.key(2), jnp.arange(1)), jnp.zeros((1, 4), bool), 3, 1, "node")
    assert not np.asarray(nothing.masked).any() and (np.asarray(nothing.coefficient) == 0).all()


@pytest.mark.parametrize(("length", "bias"), [(20, -0.04298), (100, -0.00891)])
def test_bias_of_rounding(length, bias):
    """Where every token costs the same under any mask, the published weights miss the ELBO by the rounding alone."""
    found = {
        kind: float((np.asarray(m.coefficient) * np.asarray(m.masked).sum(-1)).mean()) / length
        for kind in ("node", "share")
        for m in [quadrature(length, node_weight=kind)]
    }
    assert found["node"] - 1 == pytest.approx(bias, abs=1e-4)
    assert found["share"] == pytest.approx(1.0, abs=1e-6)


def test_bias_of_quadrature_by_enumeration():
    """L = 4: exact in expectation for log-probabilities linear in the number of masks, biased for any others."""
    length, t_w = 4, gdpo.gauss_legendre(3)
    counts = [max(1, math.floor(t * length)) for t in t_w[0]]

    def expected(value):
        """Over uniform subsets, with weights w L / k."""
        mean = lambda k: np.mean([value[s] for s in itertools.combinations(range(length), k)])  # noqa: E731
        return sum(w * length / k * mean(k) for k, w in zip(counts, t_w[1], strict=True))

    assert expected({s: -2.0 * len(s) for s in table(4)}) == pytest.approx(
        true_elbo({s: -2.0 * len(s) for s in table(4)}, 4)
    )
    value = table(length)
    assert abs(expected(value) - true_elbo(value, length)) > 0.1  # the price of a low variance

    masks = quadrature(length, node_weight="share", rows=6000)
    rows = np.asarray(masks.masked)
    estimates = [
        np.mean([c * value[tuple(np.flatnonzero(m))] for m, c in zip(row, coefficient, strict=True)])
        for row, coefficient in zip(rows, np.asarray(masks.coefficient), strict=True)
    ]
    assert np.mean(estimates) == pytest.approx(expected(value), abs=4 * float(np.std(estimates)) / math.sqrt(6000))


# --- ESPO


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_explicit_counts_are_unbiased_by_enumeration(length):
    value, average = table(length, seed=length), 0.0
    for count in range(length + 1):
        chosen = list(itertools.combinations(range(length), count))
        for s in chosen:
            first = np.zeros((1, 1, length), bool)
            first[0, 0, list(s)] = True
            masked = jnp.asarray(np.concatenate([first, ~first], axis=1))
            weight = np.asarray(coefficients(masked, jnp.ones((1, length), bool), "exact"), np.float64)[0]
            other = tuple(i for i in range(length) if i not in s)
            pair = 0.5 * (weight[0] * value[s] + weight[1] * value[other])
            average += pair / len(chosen) / (length + 1)
    assert average == pytest.approx(true_elbo(value, length), abs=1e-6)


def test_counts_are_stratified_over_the_group_and_uniform_for_every_row():
    groups, size, length = 3000, 5, 4
    rows = jnp.arange(groups * size)
    live = jnp.broadcast_to(jnp.arange(6) < length, (groups * size, 6))
    masks = jax.jit(lambda key: espo.stratified_masks(key, rows, live, size, 4))(jax.random.key(3))
    masked = np.asarray(masks.masked)
    assert (masked[:, :2] ^ masked[:, 2:])[..., :length].all() and not masked[..., length:].any()
    counts = masked[:, :2].sum(-1).reshape(groups, size, 2)
    assert (np.sort(counts, axis=1) == np.arange(5)[None, :, None]).all()  # N = L + 1: each l once
    for row in range(size):
        np.testing.assert_allclose(np.bincount(counts[:, row, 0], minlength=5) / groups, 0.2, atol=0.03)
    wanted = np.where(masked.sum(-1) > 0, 5 / np.maximum(masked.sum(-1), 1), 0)
    np.testing.assert_allclose(masks.coefficient, wanted, rtol=1e-6)
    some = jnp.array([7, 12, 13])
    alone = espo.stratified_masks(jax.random.key(3), some, live[some], size, 4)
    assert np.array_equal(alone.masked, masked[np.asarray(some)])


def test_golden_leave_one_out_advantage():
    """(r - mean) N / (N - 1)."""
    reward = np.array([[1.0, 0.1, 0.0, 1.0]])
    others = [[np.delete(reward[0], i).mean() for i in range(4)]]
    found = advantages(jnp.asarray(reward), "leave_one_out")
    np.testing.assert_allclose(found, reward - others, atol=1e-6)
    np.testing.assert_allclose(found, (reward - reward.mean()) * 4 / 3, atol=1e-6)


# --- Both losses


def loss_of(module, config, model, rollout, now, old, reference, key=7):
    """(loss, metrics, gradient) of an update."""

    @jax.jit
    def run(now, old, reference, rollout):
        context = context_of(model)
        prepared = module.prepare(old, reference, rollout, jax.random.key(1), config, context)
        value = lambda p: module.loss(p, rollout, prepared, jax.random.key(key), config, context)  # noqa: E731
        (loss, metrics), grad = jax.value_and_grad(value, has_aux=True)(now)
        return loss, metrics, grad

    return run(now, old, reference, rollout)


def drawn(module, config, rollout, key=7):
    rows, live = rollout.row.reshape(-1), rollout.live.reshape(-1, rollout.live.shape[-1])
    if module is espo:
        return espo.stratified_masks(jax.random.key(key), rows, live, rollout.row.shape[1], config.masks)
    return gdpo.quadrature_masks(
        row_keys(jax.random.key(key), rows), live, config.nodes, config.draws, config.node_weight
    )


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (espo, {"beta": 0.3}),
        (espo, {"beta": 0.0, "epsilon": 0.0}),
        (gdpo, {"beta": 0.3}),
        (gdpo, {"ratio": "per_token"}),
    ],
)
def test_losses_written_out(tiny_model, module, settings):
    model, old = tiny_model
    now, reference = moved(old, 1), moved(old, 2)
    rollout, config = rollout_of([[1.0, 0.0, 0.5], [0.0, 0.25, 0.0]]), module.Config(**settings)
    masks, context = drawn(module, config, rollout), context_of(model)
    score = jax.jit(lambda p: elbo_on(p, rollout, rollout.live, masks, context))
    value, before, target = (np.asarray(score(p), np.float64) for p in (now, old, reference))
    length, reward = np.array([[6, 6, 4]] * 2), np.asarray(rollout.reward, np.float64)
    advantage = (reward - reward.mean(1, keepdims=True)) * (1.5 if module is espo else 1.0)
    per_token = module is espo or config.ratio == "per_token"
    ratio = np.exp((value - before) / (length if per_token else 1))
    surrogate = np.minimum(ratio * advantage, np.clip(ratio, 1 - config.epsilon, 1 + config.epsilon) * advantage)
    kl = (value - target) ** 2 / 2 / length
    wanted = -(surrogate / (1 if module is espo else length)).mean() + config.beta * kl.mean()
    found, metrics, _ = loss_of(module, config, model, rollout, now, old, reference)
    assert float(found) == pytest.approx(wanted, rel=1e-4)
    if config.beta:
        assert float(metrics["kl"]) == pytest.approx(kl.mean(), rel=1e-4)
    assert {"ess/mean", "ess/min", "log_ratio/mean", "log_ratio/std"} <= metrics.keys()


METHODS = [(espo, {"beta": 0.0}), (gdpo, {})]


@pytest.mark.parametrize(("module", "settings"), METHODS)
def test_equal_rewards_give_exactly_no_gradient_and_bad_ones_touch_their_row_only(tiny_model, module, settings):
    model, old = tiny_model
    now, config = moved(old, 1), module.Config(**settings)
    rewards = [[1.0, 0.0, 0.5, 0.0], [0.0, 0.3, 1.0, 0.0]]
    _, _, grad = loss_of(module, config, model, rollout_of([[0.3] * 4, [1.0] * 4]), now, old, old)
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grad))
    for bad in (np.nan, np.inf):
        spoiled = np.array(rewards)
        spoiled[0, 1] = bad
        loss, _, grad = loss_of(module, config, model, rollout_of(spoiled), now, old, old)
        assert np.isfinite(loss) and all(np.isfinite(g).all() for g in jax.tree.leaves(grad))
        prepared = module.prepare(old, old, rollout_of(spoiled), None, config, None)
        clean = module.prepare(old, old, rollout_of(rewards), None, config, None)
        assert prepared.groups["advantage"][0, 1] == 0
        assert np.array_equal(prepared.groups["advantage"][1], clean.groups["advantage"][1])


@pytest.mark.parametrize(("module", "settings"), [(espo, {"beta": 0.1}), (gdpo, {"beta": 0.1})])
def test_two_hundred_nats_stay_finite(tiny_model, module, settings):
    model, old = tiny_model
    now = {**old, "head": old["head"] * 60.0}
    rollout, config = rollout_of([[1.0, 0.0, 0.5]]), module.Config(**settings)
    loss, metrics, grad = loss_of(module, config, model, rollout, now, old, old)
    assert float(metrics["log_ratio/std"]) > (5 if module is espo else 50)
    assert np.isfinite(loss) and all(np.isfinite(g).all() for g in jax.tree.leaves(grad))
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grad)) > 0


@pytest.mark.parametrize(("module", "settings"), [(espo, {"beta": 0.0, "masks": 16}), (gdpo, {"draws": 8})])
def test_one_step_raises_the_good_answer_and_lowers_the_bad_one(tiny_model, module, settings):
    model, params = tiny_model
    params = {**params, "head": params["head"] / 3.0}  # nearly uniform: no common direction that moves both answers
    rollout = rollout_of([[1.0, 0.0]])._replace(
        completion=jnp.array([[[0, 3, 3, 0, 1, 2], [4, 2, 1, 4, 0, 4]]], jnp.int32), live=jnp.ones((1, 2, 6), bool)
    )
    _, _, grad = loss_of(module, module.Config(**settings), model, rollout, params, params, params)
    stepped = jax.tree.map(lambda p, g: p - 1e-2 * g, params, grad)
    masks = draw_masks(row_keys(jax.random.key(5), jnp.arange(2)), jnp.ones((2, 6), bool), 64, "exact")
    score = jax.jit(lambda p: elbo_on(p, rollout, rollout.live, masks, context_of(model)))
    good, bad = np.asarray(score(stepped) - score(params))[0]
    assert bad < 0 < good


@pytest.mark.parametrize(("module", "settings"), [(espo, {}), (gdpo, {"beta": 0.1})])
def test_micro_batches_average_to_the_whole(tiny_model, module, settings):
    model, old = tiny_model
    now, context, config = moved(old, 1), context_of(model), module.Config(**settings)
    rollout = rollout_of([[1.0, 0.0, 0.5], [0.0, 0.3, 0.6], [0.2, 0.2, 1.0], [1.0, 1.0, 1.0]])
    prepared = module.prepare(old, moved(old, 2), rollout, None, config, context)
    run = jax.jit(lambda r, p: module.loss(now, r, p, jax.random.key(2), config, context)[0])
    part = lambda tree, rows: jax.tree.map(lambda x: x[rows], tree)  # noqa: E731
    halves = [
        float(run(part(rollout, s), Prepared(part(prepared.groups, s), prepared.whole, {})))
        for s in (np.s_[::2], np.s_[1::2])
    ]
    assert np.mean(halves) == pytest.approx(float(run(rollout, prepared)), rel=1e-5)


BAD = {
    "epsilon": (espo, {"epsilon": 1.0}, "objective.epsilon"),
    "beta": (gdpo, {"beta": -0.1}, "objective.beta"),
    "odd masks": (espo, {"masks": 3}, "objective.masks"),
    "updates": (gdpo, {"updates": 0}, "objective.updates"),
    "nodes": (gdpo, {"nodes": 0}, "objective.nodes"),
    "draws": (gdpo, {"draws": 0}, "objective.draws"),
    "node weight": (gdpo, {"node_weight": "t"}, "objective.node_weight"),
    "ratio": (gdpo, {"ratio": "token"}, "objective.ratio"),
    "reference without effect": (espo, {"beta": 0.0, "reference_sync": 2}, "objective.reference_sync"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_named(name):
    module, settings, key = BAD[name]
    module.Config().validate(2, SAMPLER)
    with pytest.raises(UserError, match=key):
        module.Config(**settings).validate(4, SAMPLER)
    with pytest.raises(UserError, match=r"rollout.group = 1"):
        module.Config().validate(1, SAMPLER)


@pytest.mark.parametrize("name", ["dmpo_gsm8k", "dmpo_countdown", "wddo", "gdpo", "espo"])
def test_presets_load_and_are_a_base(name, tmp_path):
    path = Path(__file__).parents[1] / "configs" / "objectives" / f"{name}.toml"
    preset = load_config(path)
    assert preset.objective.name == name.split("_")[0] and preset.lora.rank == 128
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'extends = "{path}"\n[rollout]\nprompts = 24\n[task]\nname = "countdown"\n')
    assert load_config(recipe).rollout.prompts == 24


# --- The cycle


CYCLES = {
    "espo": {"name": "espo", "masks": 2, "epsilon": 0.01},
    "gdpo": {"name": "gdpo", "nodes": 2, "beta": 0.01},
    "wddo": {"name": "wddo", "weight_masks": 2},
    "published": {"name": "dmpo", "arithmetic": "published", "weight_masks": 2, "masks": 2, "target_ess": 0.5},
}


@pytest.mark.parametrize("name", CYCLES)
def test_every_mesh_gives_the_same_run(name):
    setup = setup_of(objective={"updates": 2, **CYCLES[name]})
    params, records = run(setup, (1, 1, 1))
    others, found = run(setup, (8, 1, 1))
    for record, other in zip(records, found, strict=True):
        assert np.array_equal(record.completion, other.completion)
        assert all(np.isfinite(value) for value in record.metrics.values())
        assert {"ess/mean", "ess/min", "log_ratio/mean", "log_ratio/std"} <= record.metrics.keys()
        for key, value in record.metrics.items():
            assert other.metrics[key] == pytest.approx(value, abs=2e-5, rel=5e-4), key
    assert records[1].metrics["grad_norm"] > 1e-5 and records[1].metrics["log_ratio/std"] > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), params, others)
