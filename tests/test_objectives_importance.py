"""DMPO's two losses: modes of the weights, the published arithmetic written out in float64, and WDDO."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_model import masked_log_prob

from dmpo_jax.config import resolve
from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.diffusion.elbo import elbo_replicates
from dmpo_jax.diffusion.masking import Masks, coefficients, draw_masks, row_keys
from dmpo_jax.diffusion.sampler import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.objectives import dmpo, group, importance, wddo
from dmpo_jax.objectives.objective import Context, Prepared, elbo_on, given_rollout

MASK, EOS = 5, 6
SAMPLER = SamplerConfig(temperature=1.0)
REWARDS = jnp.array([[1.0, 0.1, 0.0, 1.0]])
LOG_RATIO = jnp.array([[-1.0, 0.5, 0.0, 2.0]])


def context_of(model):
    return Context(model=model, reference_model=model, mask_id=MASK, eos_id=EOS, sampler=SAMPLER)


def rollout_of(reward, length=4, seed=0):
    """Random completions of two-token prompts; the first row of every group ends after two tokens."""
    reward = jnp.asarray(reward, jnp.float32)
    groups, size = reward.shape
    tokens = np.random.default_rng(seed).integers(0, 5, (groups, size, length))
    tokens[:, 0, 1] = EOS
    live = np.ones((groups, size, length), bool)
    live[:, 0, 2:] = False
    prompts = Prompts(jnp.broadcast_to(jnp.array([1, 4, 0], jnp.int32), (groups, 3)), jnp.full((groups,), 2, jnp.int32))
    return given_rollout(prompts, jnp.asarray(tokens, jnp.int32), jnp.asarray(live), reward)


def moved(params, size=0.3, seed=9):
    """Other parameters near these."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten([x + size * 0.1 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])


def published_masks(rollout, replicates=4, seed=5):
    rows = rollout.completion.shape[0] * rollout.completion.shape[1]
    live = jnp.ones((rows, rollout.completion.shape[2]), bool)
    return draw_masks(row_keys(jax.random.key(seed), jnp.arange(rows)), live, replicates, "published")


def prepare(module, params, reference, rollout, key, config, context):
    return jax.jit(lambda *args: module.prepare(*args, config, context))(params, reference, rollout, key)


def terms_of(params, rollout, masks, config):
    """Coefficient x summed log-probabilities, float64 [P, N, R], from the slow model."""
    groups, size, _ = rollout.completion.shape
    masked, scale = np.asarray(masks.masked), np.asarray(masks.coefficient, np.float64)
    found = np.zeros((groups, size, masked.shape[1]))
    for g, n, r in np.ndindex(found.shape):
        row, completion = g * size + n, rollout.completion[g, n].tolist()
        hidden = np.flatnonzero(masked[row, r]).tolist()
        found[g, n, r] = scale[row, r] * masked_log_prob(params, [1, 4], completion, hidden, MASK, config)
    return found


def softmax(x, axis=-1):
    x = np.exp(x - x.max(axis, keepdims=True))
    return x / x.sum(axis, keepdims=True)


# --- Modes of the weights


def test_alpha_zero_needs_neither_policy_nor_reference():
    config = dmpo.Config(alpha=0.0, coefficient=0.3, baseline="individual")
    config.validate(4, SAMPLER)
    rollout = rollout_of([[1.0, 0.0, -0.5, 2.0]])
    prepared = dmpo.prepare_on(None, None, rollout, None, config, context_of(None))
    np.testing.assert_allclose(prepared.groups["weight"], softmax(0.3 * np.asarray(rollout.reward)), rtol=1e-6)
    np.testing.assert_allclose(prepared.groups["opposite"], softmax(-0.3 * np.asarray(rollout.reward)), rtol=1e-6)
    assert prepared.metrics["log_ratio/std"] == 0
    assert prepared.whole == ()


@pytest.mark.parametrize(("alpha", "eta", "scale"), [(0.04, 10.0, 2 / 7), (1.0, 1.0, 0.5), (0.0, 10.0, 10.0)])
def test_proximal_step(alpha, eta, scale):
    """eta alpha / (eta alpha + 1), and eta itself at alpha = 0, which is the limit of the exponent."""
    config = dmpo.Config(alpha=alpha, step_size=eta)
    config.validate(4, SAMPLER)
    assert config.scale == pytest.approx(scale)
    rows, _ = importance.weights_of(REWARDS, LOG_RATIO * (alpha > 0), config)
    if alpha == 0:
        near = dmpo.Config(alpha=1e-6, step_size=eta)
        limit, _ = importance.weights_of(REWARDS, LOG_RATIO, near)
        np.testing.assert_allclose(rows["weight"], limit["weight"], rtol=1e-4)
    else:
        wanted = softmax(scale * (np.asarray(REWARDS) / alpha + np.asarray(LOG_RATIO)))
        np.testing.assert_allclose(rows["weight"], wanted, rtol=1e-5)


def test_golden_weights_through_the_configuration():
    """algorithms: r = (1, .1, 0, 1), log-ratio = (-1, .5, 0, 2), alpha = .04, worked out independently."""
    rows, metrics = importance.weights_of(REWARDS, LOG_RATIO, dmpo.Config(alpha=0.04))
    np.testing.assert_allclose(rows["weight"][0], (0.047426, 0.0, 0.0, 0.952574), atol=1e-6)
    np.testing.assert_allclose(rows["opposite"][0], (0.0, 0.119203, 0.880797, 0.0), atol=1e-6)
    assert float(metrics["ess/mean"]) == pytest.approx(0.27483, abs=1e-5)
    assert float(metrics["weight_entropy"]) == pytest.approx(0.190865, abs=1e-5)  # -sum w log w


def test_entropy_runs_from_none_to_log_n():
    weight = jnp.array([[0.25] * 4, [1.0, 0.0, 0.0, 0.0], [0.0] * 4])
    np.testing.assert_allclose(group.entropy(weight), [math.log(4), 0.0, 0.0], atol=1e-6)


def test_the_reward_as_weight_less_its_mean():
    config = dmpo.Config(weights="reward", baseline="group")
    config.validate(4, SAMPLER)
    rollout = rollout_of([[1.0, -0.5, np.nan, 0.25], [2.0, 0.0, 0.0, 1.0]])
    prepared = dmpo.prepare_on(None, None, rollout, None, config, context_of(None))
    base = dmpo.baseline_of(prepared.groups, jnp.zeros((2, 4)), jnp.zeros((2, 4)), config)
    signed = dmpo.centered_weights(prepared.groups["weight"], base, 1.0, prepared.groups["keep"])
    np.testing.assert_allclose(signed, [[0.75, -0.75, 0.0, 0.0], [1.25, -0.75, -0.75, 0.25]], atol=1e-6)


def test_decoding_is_compared_with_the_elbo_per_token(tiny_model):
    model, params = tiny_model
    rollout = rollout_of([[1.0, 0.0], [0.0, 1.0]])
    rollout = rollout._replace(log_prob=jnp.full((2, 2, 4), -0.5))
    config, key = dmpo.Config(), jax.random.key(1)
    prepared = prepare(dmpo, params, params, rollout, key, config, context_of(model))
    masks = importance_masks(rollout, config, key)
    value = jax.jit(lambda p: elbo_on(p, rollout, rollout.live, masks, context_of(model)))(params)
    value = np.asarray(value, np.float64)
    tokens = np.array([[2, 4], [2, 4]])
    wanted = ((-0.5 * tokens - value) / tokens).mean()
    assert float(prepared.metrics["decoded_minus_elbo"]) == pytest.approx(wanted, abs=1e-5)
    for other in ({"train_after_eos": True}, {"alpha": 0.0}, {"weights": "reward", "baseline": "none"}):
        prepared = prepare(dmpo, params, params, rollout, key, dmpo.Config(**other), context_of(model))
        assert "decoded_minus_elbo" not in prepared.metrics  # not the same tokens, or no ELBO


def importance_masks(rollout, config, key):
    live = importance.scored_live(rollout, config).reshape(-1, rollout.live.shape[-1])
    return draw_masks(row_keys(key, rollout.row.reshape(-1)), live, config.weight_masks, config.mask_law)


BAD = {
    "arithmetic": (dmpo, {"arithmetic": "official"}, "objective.arithmetic"),
    "law against arithmetic": (dmpo, {"arithmetic": "published", "mask_law": "exact"}, "objective.mask_law"),
    "end against arithmetic": (dmpo, {"arithmetic": "published", "train_after_eos": False}, "objective.train_after_eos"),
    "skip against arithmetic": (wddo, {"arithmetic": "published", "equal_rewards": "skip"}, "objective.equal_rewards"),
    "normalizer against arithmetic": (dmpo, {"arithmetic": "published", "normalizer": "live"}, "objective.normalizer"),
    "two scales": (dmpo, {"step_size": 1.0, "coefficient": 0.5}, "objective.step_size"),
    "negative step": (dmpo, {"step_size": -1.0}, "objective.step_size"),
    "reward and model": (dmpo, {"weights": "reward"}, "objective.baseline"),
    "reward and alpha": (dmpo, {"weights": "reward", "baseline": "group", "alpha": 0.5}, "objective.alpha"),
    "reward and ess": (dmpo, {"weights": "reward", "baseline": "none", "target_ess": 0.5}, "objective.target_ess"),
    "weights": (dmpo, {"weights": "rank"}, "objective.weights"),
    "reference without effect": (dmpo, {"alpha": 0.0, "reference_sync": 4}, "objective.reference_sync"),
    "beta": (wddo, {"beta": 0.0}, "objective.beta"),
    "alpha_ddo": (wddo, {"alpha_ddo": -1.0}, "objective.alpha_ddo"),
    "two pairs": (wddo, {"masks": 2}, "objective.masks"),
    "odd masks": (wddo, {"masks": 3, "independent": False}, "objective.masks"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_settings_that_contradict_are_named(name):
    module, settings, key = BAD[name]
    with pytest.raises(UserError, match=key):
        module.Config(**settings).validate(4, SAMPLER)


@pytest.mark.parametrize("module", [dmpo, wddo])
def test_a_group_of_one_is_refused(module):
    with pytest.raises(UserError, match=r"rollout.group = 1"):
        module.Config().validate(1, SAMPLER)


def test_a_resolved_configuration_says_what_the_arithmetic_settled():
    import tomllib

    config = resolve({"objective": {"name": "wddo", "arithmetic": "published"}})
    assert (config.objective.mask_law, config.objective.train_after_eos) == ("published", True)
    assert resolve(tomllib.loads(config.to_toml())) == config
    exact = dmpo.Config()
    assert (exact.mask_law, exact.train_after_eos, exact.equal_rewards) == ("exact", False, "skip")


# --- The published arithmetic, sums written out


def test_published_dmpo_written_out(tiny_model):
    model, params = tiny_model
    reference, now = moved(params, seed=1), moved(params, seed=2)
    rollout = rollout_of([[1.0, 0.5, 0.0], [0.0, 0.25, 0.75]])
    config = dmpo.Config(arithmetic="published", alpha=0.5, centering=0.9)
    weight_masks, masks, context = published_masks(rollout, seed=3), published_masks(rollout, seed=4), context_of(model)
    prepared = jax.jit(lambda *args: dmpo.prepare_on(*args, config, context))(params, reference, rollout, weight_masks)
    before = terms_of(params, rollout, weight_masks, model).mean(-1)
    ratio = terms_of(reference, rollout, weight_masks, model).mean(-1) - before
    weight = softmax(np.asarray(rollout.reward) / 0.5 + ratio)
    np.testing.assert_allclose(prepared.groups["weight"], weight, rtol=2e-4)
    terms = terms_of(now, rollout, masks, model)  # (L / m) x sum of log-probabilities, tokens after the end included
    bases = {
        "none": 0.0,
        "group": weight.mean(),
        "individual": softmax(-np.asarray(rollout.reward) / 0.5 + ratio),
        "model": softmax((terms.mean(-1) - before).ravel()).reshape(2, 3),  # over all rows of the device
    }
    for name, base in bases.items():
        wanted = -((weight - 0.9 * base)[..., None] * terms / 4).sum() / 4  # L = 4 drops out; R = 4
        settings = dataclasses.replace(config, baseline=name)
        run = jax.jit(lambda *args: dmpo.loss_on(*args, settings, context)[0])  # noqa: B023
        assert float(run(now, rollout, prepared, masks)) == pytest.approx(wanted, rel=2e-4), name


@pytest.mark.parametrize("independent", [True, False])
def test_published_wddo_written_out(tiny_model, independent):
    model, params = tiny_model
    now, rollout = moved(params, seed=2), rollout_of([[1.0, 0.5, 0.0], [0.0, 0.25, 0.75]])
    config = wddo.Config(arithmetic="published", alpha=0.0, beta=0.3, alpha_ddo=0.7, independent=independent)
    weight_masks, masks, context = published_masks(rollout, seed=3), published_masks(rollout, seed=4), context_of(model)
    prepared = jax.jit(lambda *args: wddo.prepare_on(*args, config, context))(params, None, rollout, weight_masks)
    before, terms = terms_of(params, rollout, weight_masks, model).mean(-1), terms_of(now, rollout, masks, model)
    real, fake = (terms[..., :2].mean(-1), terms[..., 2:].mean(-1)) if independent else (terms.sum(-1),) * 2
    weight = softmax(np.asarray(rollout.reward, np.float64))
    wanted = (weight * np.logaddexp(0, -0.3 * (real - before))).mean()
    wanted += 0.7 * np.logaddexp(0, 0.3 * (fake - before)).mean()
    found, _ = jax.jit(lambda *args: wddo.loss_on(*args, config, context))(now, rollout, prepared, masks)
    assert float(found) == pytest.approx(wanted, rel=2e-4)


# --- WDDO


def test_replicates_are_split_by_pairs_or_as_published():
    """Pairs are (1, 3) and (2, 4)."""
    replicates = jnp.array([1.0, 2.0, 3.0, 6.0])
    settings = itertools.product(("exact", "published"), (True, False))
    found = {
        (arithmetic, independent): [
            float(x) for x in wddo.estimates(replicates, wddo.Config(arithmetic=arithmetic, independent=independent))
        ]
        for arithmetic, independent in settings
    }
    assert found == {
        ("exact", True): [2.0, 4.0], ("exact", False): [3.0, 3.0],
        ("published", True): [1.5, 4.5], ("published", False): [12.0, 12.0],
    }  # fmt: skip


P_REF = np.array([0.161099, 0.124485, 0.269539, 0.157778, 0.083148, 0.203952])
TABULAR_REWARDS = np.array([1.0, 0.0, 0.0, 0.5, 0.0, 1.0])
P_STAR = np.array([0.330343, 0.034546, 0.074800, 0.119021, 0.023075, 0.418215])  # alpha = 0.5


def tabular(logits, rollout_logits, scale=1.0):
    """The exact loss over six outcomes: log_mass = log p says how often each is drawn."""
    log_ref = jnp.log(jnp.float32(P_REF / P_REF.sum()))[None]
    log_p, log_theta = jax.nn.log_softmax(rollout_logits)[None], jax.nn.log_softmax(logits)[None]
    weight = group.weights(jnp.float32(TABULAR_REWARDS)[None], log_ref - log_p, 0.5, 1.0, log_p)
    uniform, change = group.group_baseline(log_p), log_theta - log_p
    return wddo.discriminative_loss(scale * weight, uniform, change, change, jnp.array([[True]]))


def test_the_target_is_the_minimiser_from_any_rollout_policy():
    other = jnp.log(jnp.float32([0.3, 0.1, 0.1, 0.1, 0.3, 0.1]))
    at_target = jax.grad(tabular)(jnp.log(jnp.float32(P_STAR)), other)
    assert float(jnp.abs(at_target).max()) < 1e-5
    logits, step = other, jax.jit(jax.grad(tabular))
    for _ in range(2000):
        logits = logits - 2.0 * step(logits, other)
    np.testing.assert_allclose(jax.nn.softmax(logits), P_STAR, atol=1e-3)


def test_weights_that_sum_to_one_in_place_of_n_have_another_minimiser():
    """The published positive term is N times too weak: with N = 6, the gradient at the target is far from zero."""
    gradient = jax.grad(tabular)(jnp.log(jnp.float32(P_STAR)), jnp.log(jnp.float32(P_REF)), 1 / 6)
    assert float(jnp.abs(gradient).max()) > 0.02


def test_at_the_rollout_policy_the_loss_is_two_log_two(tiny_model):
    model, params = tiny_model
    rollout, config = rollout_of([[1.0, 0.5, 0.0]]), wddo.Config(alpha=0.5)
    prepared = prepare(wddo, params, moved(params), rollout, jax.random.key(1), config, context_of(model))
    found, metrics = jax.jit(lambda p: wddo.loss(p, rollout, prepared, jax.random.key(2), config, context_of(model)))(
        params
    )
    assert float(found) == pytest.approx(2 * math.log(2), rel=1e-6)
    assert metrics["policy_log_ratio/std"] == 0


def test_noise_of_the_elbos_biases_the_loss_upwards(tiny_model):
    """Enumerates the masks of three tokens: D is unbiased, log sigmoid of it lies low by its curvature times Var(D) / 2."""
    model, params = tiny_model
    now, length = moved(params, size=0.7), 3
    subsets = [s for size in range(length + 1) for s in itertools.combinations(range(length), size)]
    chance = np.array([1.0 / ((length + 1) * math.comb(length, len(s))) for s in subsets])
    first = np.zeros((len(subsets), 1, length), bool)
    for row, subset in enumerate(subsets):
        first[row, 0, list(subset)] = True
    masked = jnp.asarray(np.concatenate([first, ~first], axis=1))
    live = jnp.ones((len(subsets), length), bool)
    prompts = Prompts(jnp.tile(jnp.array([[1, 4]], jnp.int32), (len(subsets), 1)), jnp.full((len(subsets),), 2))
    completion = jnp.tile(jnp.array([[3, 0, 2]], jnp.int32), (len(subsets), 1))
    pair = lambda p: np.asarray(jax.jit(lambda p: elbo_replicates(  # noqa: E731
        p, prompts, completion, Masks(masked, coefficients(masked, live, "exact")), live, mask_id=MASK, config=model
    ))(p), np.float64).mean(1)  # fmt: skip
    change = pair(now) - pair(params)
    log_sigmoid = lambda x: -np.logaddexp(0, -x)  # noqa: E731
    mean, truth = chance @ change, sum(
        (masked_log_prob(now, [1, 4], [3, 0, 2], s, MASK, model) - masked_log_prob(params, [1, 4], [3, 0, 2], s, MASK, model))
        / len(s) / math.comb(length, len(s)) for s in subsets if s
    )  # fmt: skip
    assert mean == pytest.approx(truth, abs=1e-4)  # each D is unbiased
    variance = chance @ (change - mean) ** 2
    slope = 1 / (1 + np.exp(-mean))
    gap = log_sigmoid(mean) - chance @ log_sigmoid(change)
    assert variance > 1e-3 and gap > 0
    assert gap == pytest.approx(variance * slope * (1 - slope) / 2, rel=0.3)

    # The loss of many rollouts of this completion is the enumerated expectation, not the loss of the expectation.
    size, groups = 2, 1024
    config, context = wddo.Config(alpha=0.0, equal_rewards="keep", masks=4), context_of(model)
    rollout = given_rollout(
        Prompts(jnp.tile(jnp.array([[1, 4]], jnp.int32), (groups, 1)), jnp.full((groups,), 2)),
        jnp.tile(jnp.array([3, 0, 2], jnp.int32), (groups, size, 1)), jnp.ones((groups, size, length), bool),
        jnp.zeros((groups, size)),
    )  # fmt: skip
    prepared = wddo.prepare_on(params, None, rollout, None, config, context)
    run = jax.jit(lambda key: wddo.loss(now, rollout, prepared, key, config, context)[0])
    expected = -(chance @ (log_sigmoid(change) + log_sigmoid(-change)))
    assert float(run(jax.random.key(3))) == pytest.approx(expected, abs=4 * np.sqrt(variance / 2048))
    assert expected > -log_sigmoid(mean) - log_sigmoid(-mean)


@pytest.mark.parametrize("independent", [True, False])
def test_wddo_raises_the_good_answer_and_lowers_the_bad_one(tiny_model, independent):
    model, params = tiny_model
    params = {**params, "head": params["head"] / 3.0}  # nearly uniform: no common direction that moves both answers
    rollout, context = rollout_of([[1.0, 0.0]], length=6, seed=4), context_of(model)
    completion = jnp.array([[[0, 3, 3, 0, 1, 2], [4, 2, 1, 4, 0, 4]]], jnp.int32)
    rollout = rollout._replace(completion=completion, live=jnp.ones((1, 2, 6), bool))
    config = wddo.Config(alpha=0.1, masks=16, independent=independent)

    @jax.jit
    def change(params):
        prepared = wddo.prepare(params, params, rollout, jax.random.key(1), config, context)
        grad = jax.grad(lambda p: wddo.loss(p, rollout, prepared, jax.random.key(2), config, context)[0])(params)
        stepped = jax.tree.map(lambda p, g: p - 1e-2 * g, params, grad)
        masks = importance_masks(rollout, dataclasses.replace(config, weight_masks=64), jax.random.key(3))
        value = lambda p: elbo_on(p, rollout, rollout.live, masks, context)[0]  # noqa: E731
        return value(stepped) - value(params)

    good, bad = np.asarray(change(params))
    assert bad < 0 < good


@pytest.mark.parametrize(("module", "settings"), [(wddo, {}), (dmpo, {"baseline": "individual"}), (dmpo, {})])
def test_equal_rewards_give_exactly_no_gradient_and_bad_ones_touch_their_row_only(tiny_model, module, settings):
    model, params = tiny_model
    reference, now, context = moved(params, seed=1), moved(params, seed=2), context_of(model)
    config = module.Config(**settings)

    @jax.jit
    def gradient(reward):
        rollout = rollout_of(jnp.zeros((2, 4)))._replace(reward=reward)
        prepared = module.prepare(params, reference, rollout, jax.random.key(1), config, context)
        run = lambda p: module.loss(p, rollout, prepared, jax.random.key(2), config, context)[0]  # noqa: E731
        return jax.value_and_grad(run)(now), prepared.groups["weight"]

    (_, grad), _ = gradient(jnp.array([[0.5] * 4, [0.25] * 4]))
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grad))
    rewards = jnp.array([[1.0, 0.0, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0]])
    (_, _), clean = gradient(rewards)
    for bad in (jnp.nan, jnp.inf):
        (value, grad), weight = gradient(rewards.at[0, 1].set(bad))
        assert np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(grad))
        assert weight[0, 1] == 0 and np.array_equal(weight[1], clean[1])


def test_two_hundred_nats_stay_finite():
    change = jnp.array([[200.0, -200.0, 0.0, 1e4]])
    uniform = jnp.full((1, 4), 0.25)
    run = lambda x: wddo.discriminative_loss(uniform, uniform, x, x, jnp.array([[True]]))  # noqa: E731
    value, grad = jax.value_and_grad(run)(change)
    assert np.isfinite(value) and np.isfinite(grad).all() and float(jnp.abs(grad).max()) > 0


def test_prepared_rows_of_a_fixed_rollout_policy_are_kept_for_micro_batches(tiny_model):
    """Two halves of the prompts average to the whole, for both losses."""
    model, params = tiny_model
    reference, now, context = moved(params, seed=1), moved(params, seed=2), context_of(model)
    rollout = rollout_of([[1.0, 0.0, 0.5], [0.0, 0.3, 0.6], [0.2, 0.2, 1.0], [1.0, 1.0, 1.0]])
    for module in (dmpo, wddo):
        config = module.Config()
        prepared = prepare(module, params, reference, rollout, jax.random.key(1), config, context)
        run = jax.jit(lambda r, p: module.loss(now, r, p, jax.random.key(2), config, context)[0])  # noqa: B023
        part = lambda tree, rows: jax.tree.map(lambda x: x[rows], tree)  # noqa: E731
        halves = [
            float(run(part(rollout, s), Prepared(part(prepared.groups, s), prepared.whole, {})))
            for s in (np.s_[:2], np.s_[2:])
        ]
        assert np.mean(halves) == pytest.approx(float(run(rollout, prepared)), rel=1e-5)
