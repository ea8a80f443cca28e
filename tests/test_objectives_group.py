"""Group reductions, weights, baselines and the exact tabular behaviour of DMPO."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dmpo_jax.objectives import dmpo, group

# Four rewards and log-ratios whose weights were worked out independently for alpha = 0.04 and alpha = 1.
REWARDS = jnp.array([[1.0, 0.1, 0.0, 1.0]])
LOG_RATIO = jnp.array([[-1.0, 0.5, 0.0, 2.0]])
MASS = jnp.zeros((1, 4))


@pytest.mark.parametrize(
    ("alpha", "weights", "ess", "individual"),
    [
        (0.04, (0.047426, 0.0, 0.0, 0.952574), 0.27483, (0.047426, -0.119203, -0.880797, 0.952574)),
        (1.0, (0.041828, 0.076215, 0.041828, 0.840130), 0.34959, (0.016510, -0.202869, -0.145248, 0.331607)),
    ],
)
def test_golden_weights(alpha, weights, ess, individual):
    w = group.weights(REWARDS, LOG_RATIO, alpha, 1.0, MASS)
    np.testing.assert_allclose(w[0], weights, atol=1e-6)
    assert float(group.effective_sample_size(w, MASS)[0]) == pytest.approx(ess, abs=1e-5)
    negative = group.individual_baseline(REWARDS, LOG_RATIO, alpha, 1.0, MASS)
    np.testing.assert_allclose((w - negative)[0], individual, atol=1e-6)


def test_golden_group_baseline():
    w = group.weights(REWARDS, LOG_RATIO, 0.04, 1.0, MASS)
    np.testing.assert_allclose((w - group.group_baseline(MASS))[0], (-0.202574, -0.25, -0.25, 0.702574), atol=1e-6)


def test_against_float64_softmax():
    rng = np.random.default_rng(0)
    r, d = rng.normal(size=(5, 6)), rng.normal(size=(5, 6)) * 3
    score = 0.7 * (r / 0.3 + d)
    wanted = np.exp(score - score.max(1, keepdims=True))
    wanted /= wanted.sum(1, keepdims=True)
    mass = jnp.zeros((5, 6))
    found = group.weights(jnp.float32(r), jnp.float32(d), 0.3, 0.7, mass)
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    np.testing.assert_allclose(group.effective_sample_size(found, mass), 1 / (6 * (wanted**2).sum(1)), rtol=1e-5)
    theta, v = rng.normal(size=(5, 6)), rng.normal(size=(5, 6))
    model = np.exp(theta - v)
    np.testing.assert_allclose(
        group.model_baseline(jnp.float32(theta), jnp.float32(v), mass), model / model.sum(1, keepdims=True), atol=2e-6
    )


def test_groups_do_not_mix():
    both = group.weights(
        jnp.tile(REWARDS, (2, 1)).at[1].set(0.0), jnp.tile(LOG_RATIO, (2, 1)), 0.04, 1.0, jnp.zeros((2, 4))
    )
    np.testing.assert_allclose(both[0], group.weights(REWARDS, LOG_RATIO, 0.04, 1.0, MASS)[0], rtol=1e-6)
    np.testing.assert_allclose(jnp.sum(both, axis=1), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    "rewards", [(1.0, np.nan, 0.0, 0.0), (1.0, np.inf, 0.0, 0.0), (np.nan,) * 4, (1.0, *(np.nan,) * 3)]
)
def test_bad_rewards_leave_only_their_own_row_out(rewards):
    rewards = jnp.array([rewards])
    mass = group.log_mass_of(rewards)
    good = np.isfinite(np.asarray(rewards[0]))
    w = np.asarray(group.weights(rewards, LOG_RATIO, 0.5, 1.0, mass))[0]
    base = np.asarray(group.group_baseline(mass))[0]
    assert np.isfinite(w).all() and (w[~good] == 0).all() and (base[~good] == 0).all()
    if good.any():
        score = np.asarray(rewards)[0][good] / 0.5 + np.asarray(LOG_RATIO)[0][good]
        wanted = np.exp(score - score.max())
        np.testing.assert_allclose(w[good], wanted / wanted.sum(), atol=1e-6)
        np.testing.assert_allclose(base[good], 1 / good.sum(), rtol=1e-6)
    if good.sum() == 1:  # one usable answer says nothing: weight and baseline are both 1
        assert (w - base == 0).all()
    assert np.isfinite(group.effective_sample_size(jnp.array([w]), mass)).all()


def test_gaps_of_hundreds_of_nats_stay_finite():
    ratio = jnp.array([[0.0, -200.0, 200.0, 0.0]])

    def loss(log_prob):
        w = group.weights(REWARDS, ratio, 0.04, 1.0, MASS)
        b = group.model_baseline(jax.lax.stop_gradient(log_prob), jnp.zeros((1, 4)), MASS)
        signed = dmpo.centered_weights(w, b, 1.0, jnp.array([[True]]))
        return dmpo.weighted_cross_entropy(signed, log_prob, jnp.float32(8))

    value, grad = jax.value_and_grad(loss)(-ratio)
    assert np.isfinite(value) and np.isfinite(grad).all() and float(jnp.abs(grad).max()) > 0


@pytest.mark.parametrize("target", [0.3, 0.5, 0.8])
def test_adaptive_coefficient_reaches_its_target(target):
    rng = np.random.default_rng(3)
    scores = jnp.float32(rng.normal(size=(7, 8)) * np.geomspace(0.01, 50, 7)[:, None])
    mass = jnp.zeros((7, 8))
    found = group.adaptive_coefficient(scores, mass, target, 1.0)
    ess = group.effective_sample_size(group.softmax(found * scores, mass), mass)
    free = group.effective_sample_size(group.softmax(scores, mass), mass)
    for row in range(7):
        if free[row] >= target:
            assert found[row, 0] == 1.0
        else:
            assert float(ess[row]) == pytest.approx(target, abs=2e-4)
    assert (found <= 1.0).all() and (found > 0).all() and (found < 1.0).any() and (found == 1.0).any()


def test_equal_rewards_are_found():
    rewards = jnp.array([[0.5, 0.5, 0.5], [0.0, 0.0, 1.0], [np.nan, 0.2, 0.2], [np.nan] * 3])
    assert group.equal_rewards(rewards).tolist() == [True, False, True, True]


def test_individual_baseline_vanishes_with_equal_rewards():
    rewards = jnp.full((1, 4), 0.3)
    w = group.weights(rewards, LOG_RATIO, 0.04, 1.0, MASS)
    assert float(jnp.abs(w - group.individual_baseline(rewards, LOG_RATIO, 0.04, 1.0, MASS)).max()) < 1e-7


# --- A softmax policy over six outcomes, with exact expectations through the same functions: the rollout batch is
# the whole outcome space, and log_mass = log v says how often each outcome is drawn.
P_REF = np.array([0.161099, 0.124485, 0.269539, 0.157778, 0.083148, 0.203952])
TABULAR_REWARDS = jnp.array([[1.0, 0.0, 0.0, 0.5, 0.0, 1.0]])
P_STAR = np.array([0.330343, 0.034546, 0.074800, 0.119021, 0.023075, 0.418215])
ALPHA, STEP, MARKS = 0.5, 0.5, (8, 24, 48, 240, 480)
FORWARD_KL = {  # KL(p* || p_theta) after each mark, from an independent derivation
    ("none", 1): (0.0806, 0.0124, 0.0026, 0.0000, 0.0000),
    ("model", 1): (0.0806, 0.0124, 0.0026, 0.0000, 0.0000),
    ("none", 8): (0.0806, 0.0124, 0.0026, 0.0000, 0.0000),
    ("model", 8): (0.0806, 0.0124, 0.0026, 0.0000, 0.0000),
    ("model", 24): (0.0806, 0.0124, 0.0026, 0.0000, 0.0000),
    ("none", 24): (0.0806, 0.0124, 0.0026, 0.0000, 0.0000),
    ("group", 1): (0.0806, 0.0124, 0.0026, 0.0000, 0.0000),
    ("group", 8): (0.0364, 0.0071, 0.0018, 0.0000, 0.0000),
    ("group", 24): (0.0364, 0.2840, 0.5864, 0.0723, 1.2896),
    ("individual", 1): (0.0339, 0.8786, 2.567, 17.28, 35.82),
    ("individual", 8): (0.0339, 0.8786, 2.567, 17.28, 35.82),
    ("individual", 24): (0.0339, 0.8786, 2.567, 17.28, 35.82),
}


def tabular_kl(baseline, reuse):
    log_ref = jnp.log(jnp.float32(P_REF / P_REF.sum()))[None]
    log_p = lambda logits: jax.nn.log_softmax(logits)[None]  # noqa: E731
    always = jnp.array([[True]])

    @jax.jit
    def step(logits, rollout_logits):
        log_v = log_p(rollout_logits)
        ratio, mass = log_ref - log_v, log_v
        weight = group.weights(TABULAR_REWARDS, ratio, ALPHA, 1.0, mass)

        def loss(logits):
            value = log_p(logits)
            base = {
                "none": jnp.zeros_like(weight),
                "group": group.group_baseline(mass),
                "individual": group.individual_baseline(TABULAR_REWARDS, ratio, ALPHA, 1.0, mass),
                "model": group.model_baseline(jax.lax.stop_gradient(value), log_v, mass),
            }[baseline]
            signed = dmpo.centered_weights(weight, base, 1.0, always)
            return dmpo.weighted_cross_entropy(signed, value, jnp.float32(1))

        return optax.apply_updates(logits, -STEP * jax.grad(loss)(logits))

    logits, found = jnp.log(jnp.float32(P_REF)), []
    for number in range(MARKS[-1]):
        if number % reuse == 0:
            rollout_logits = logits
        logits = step(logits, rollout_logits)
        if number + 1 in MARKS:
            log_probs = np.asarray(jax.nn.log_softmax(logits), np.float64)
            found.append(float(np.sum(P_STAR * (np.log(P_STAR) - log_probs))))
    return found


@pytest.mark.parametrize(("baseline", "reuse"), FORWARD_KL)
def test_tabular_dmpo(baseline, reuse):
    for found, wanted in zip(tabular_kl(baseline, reuse), FORWARD_KL[baseline, reuse], strict=True):
        assert found == pytest.approx(wanted, abs=1.5e-4, rel=2e-3)


def test_tabular_target_is_the_tilted_reference():
    target = P_REF * np.exp(np.asarray(TABULAR_REWARDS)[0] / ALPHA)
    np.testing.assert_allclose(target / target.sum(), P_STAR, atol=1e-5)
