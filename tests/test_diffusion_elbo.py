"""The ELBO estimators, by enumeration and against a float64 model."""

import dataclasses
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_model import forward, log_softmax, masked_log_prob

from dmpo_jax.diffusion.canvas import Prompts, live_positions
from dmpo_jax.diffusion.elbo import elbo, masked_log_probs
from dmpo_jax.diffusion.masking import Masks, coefficients, draw_masks, masks_from_uniforms, row_keys
from dmpo_jax.model.parameters import init_params

MASK, EOS = 5, 6


def subsets(length):
    return [s for size in range(length + 1) for s in itertools.combinations(range(length), size)]


def probability(subset, length):
    """Of a Bernoulli(lambda) mask, lambda ~ U(0, 1): the integral of lambda^m (1 - lambda)^(L - m)."""
    return 1.0 / ((length + 1) * math.comb(length, len(subset)))


def true_elbo(value, length):
    """sum_m 1/m E_{|S| = m} [value(S)], straight from the definition."""
    total = 0.0
    for size in range(1, length + 1):
        chosen = list(itertools.combinations(range(length), size))
        total += sum(value(s) for s in chosen) / len(chosen) / size
    return total


def as_masks(subset, length):
    """The subset and its complement as one antithetic pair, batch of one."""
    first = np.zeros((1, 1, length), bool)
    first[0, 0, list(subset)] = True
    return jnp.asarray(np.concatenate([first, ~first], axis=1))


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_exact_law_is_unbiased_by_enumeration(length):
    rng = np.random.default_rng(length)
    table = {s: rng.normal() for s in subsets(length)}
    table[()] = 0.0
    live = jnp.ones((1, length), bool)
    average = 0.0
    for s in subsets(length):
        masked = as_masks(s, length)
        weight = np.asarray(coefficients(masked, live, "exact"), np.float64)[0]
        other = tuple(i for i in range(length) if i not in s)
        average += probability(s, length) * 0.5 * (weight[0] * table[s] + weight[1] * table[other])
    assert average == pytest.approx(true_elbo(table.get, length), abs=1e-6)


def test_division_by_m_alone_is_biased_by_l_over_l_plus_one():
    length = 4
    rng = np.random.default_rng(0)
    table = {s: rng.normal() for s in subsets(length)}
    average = 0.0
    for s in subsets(length):
        weight = coefficients(as_masks(s, length), jnp.ones((1, length), bool), "published")[0, 0]
        average += probability(s, length) * float(weight) * table[s]
    assert average == pytest.approx(0.8 * true_elbo(table.get, length), abs=1e-6)


@pytest.mark.parametrize("length", [2, 4])
def test_estimate_on_a_real_model_equals_brute_force(tiny_model, length):
    config, params = tiny_model
    prompt, completion = [1, 4, 2], [3, 0, 6, 2][:length]
    prompts = Prompts(jnp.array([[*prompt, 0, 0]], jnp.int32), jnp.array([3], jnp.int32))
    tokens, live = jnp.array([completion], jnp.int32), jnp.ones((1, length), bool)
    masked = jnp.concatenate([as_masks(s, length) for s in subsets(length)])  # [S, 2, L]
    count = masked.shape[0]
    spread = lambda x: jnp.repeat(x, count, axis=0)  # noqa: E731
    estimates = elbo(
        params, Prompts(*map(spread, prompts)), spread(tokens),
        Masks(masked, coefficients(masked, spread(live), "exact")), spread(live), mask_id=MASK, config=config,
    )  # fmt: skip
    average = sum(probability(s, length) * float(e) for s, e in zip(subsets(length), estimates, strict=True))
    wanted = true_elbo(lambda s: masked_log_prob(params, prompt, completion, s, MASK, config), length)
    assert average == pytest.approx(wanted, abs=2e-5)


def test_elbo_is_the_mean_log_probability_over_decoding_orders(tiny_model):
    config, params = tiny_model
    prompt, completion = [1, 2], [3, 0, 4]
    orders, total = list(itertools.permutations(range(3))), 0.0
    for order in orders:
        for step, position in enumerate(order):
            shown = [MASK if i in order[step:] else token for i, token in enumerate(completion)]
            log_probs = log_softmax(forward(params, prompt + shown, config))
            total += log_probs[len(prompt) + position, completion[position]]
    value = lambda s: masked_log_prob(params, prompt, completion, s, MASK, config)  # noqa: E731
    assert total / len(orders) == pytest.approx(true_elbo(value, 3), abs=1e-9)


def test_drawn_masks_have_a_uniform_count_and_are_complementary():
    length, rows = 6, 20_000
    live = jnp.broadcast_to(jnp.arange(length) < 5, (rows, length))
    masks = draw_masks(row_keys(jax.random.key(0), jnp.arange(rows)), live, 4, "exact")
    masked = np.asarray(masks.masked)
    assert not masked[..., 5].any()
    assert (masked[:, :2] ^ masked[:, 2:])[..., :5].all()
    counts = np.bincount(masked[:, 0].sum(-1), minlength=6) / rows
    np.testing.assert_allclose(counts, 1 / 6, atol=0.01)  # sd 0.0026
    wanted = np.where(masked.sum(-1) > 0, 6 / np.maximum(masked.sum(-1), 1), 0)
    np.testing.assert_allclose(masks.coefficient, wanted, rtol=1e-6)


def test_published_law_moments_at_256():
    """Mean mask fraction 0.500 and mean square 0.320 of the pair average (uniform: 0.333)."""
    length, rows = 256, 4000
    masks = draw_masks(row_keys(jax.random.key(1), jnp.arange(rows)), jnp.ones((rows, length), bool), 2, "published")
    share = np.asarray(masks.masked).mean(-1)
    assert share.mean() == pytest.approx(0.5, abs=1e-6)
    assert (share**2).mean() == pytest.approx(0.320, abs=0.004)
    assert share[:, 0].min() > 0.03  # lambda is 0.1 or more


def test_uniforms_decide_masks():
    level = jnp.array([[0.5, 0.0]])
    position = jnp.array([[[0.1, 0.6, 0.4], [0.05, 0.2, 0.5]]])
    live = jnp.ones((1, 3), bool)
    exact = masks_from_uniforms(level, position, live, "exact")
    assert exact.masked[0].tolist() == [[True, False, True], [False] * 3, [False, True, False], [True] * 3]
    np.testing.assert_allclose(exact.coefficient[0], [2.0, 0.0, 4.0, 4 / 3], rtol=1e-6)
    published = masks_from_uniforms(level, position, live, "published")
    assert published.masked[0, 1].tolist() == [True, False, False]  # 0.1 + 0.9 x 0
    np.testing.assert_allclose(published.coefficient[0], [1.5, 3.0, 3.0, 1.5], rtol=1e-6)


def test_masks_depend_on_the_row_number_alone():
    live = jnp.ones((6, 8), bool)
    key = jax.random.key(5)
    together = draw_masks(row_keys(key, jnp.arange(6)), live, 2, "exact").masked
    alone = draw_masks(row_keys(key, jnp.array([4])), live[:1], 2, "exact").masked
    assert np.array_equal(together[4], alone[0])
    assert not np.array_equal(together[3], together[4])


def tiny_batch(rows=3, length=6):
    tokens = jax.random.randint(jax.random.key(2), (rows, length), 0, 5)
    prompts = Prompts(jnp.array([[1, 2, 0], [3, 0, 0], [4, 4, 1]], jnp.int32), jnp.array([2, 1, 3], jnp.int32))
    return prompts, tokens.astype(jnp.int32)


def test_packed_log_probs_equal_each_replicate_by_itself(tiny_model):
    config, params = tiny_model
    prompts, tokens = tiny_batch()
    live = jnp.ones(tokens.shape, bool)
    masks = draw_masks(row_keys(jax.random.key(7), jnp.arange(3)), live, 4, "exact")
    found = masked_log_probs(params, prompts, tokens, masks.masked, live, mask_id=MASK, config=config)
    for row, replicate in itertools.product(range(3), range(4)):
        hidden = [i for i in range(6) if masks.masked[row, replicate, i]]
        prompt = prompts.tokens[row, : prompts.length[row]].tolist()
        wanted = masked_log_prob(params, prompt, tokens[row].tolist(), hidden, MASK, config)
        assert float(sum(found[row, replicate % 2, i] for i in hidden)) == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize("chunk", [1, 2, 4, 32])
def test_chunking_the_vocabulary_changes_nothing(tiny_model, chunk):
    config, params = tiny_model
    prompts, tokens = tiny_batch()
    live = jnp.ones(tokens.shape, bool)
    masks = draw_masks(row_keys(jax.random.key(7), jnp.arange(3)), live, 2, "exact")
    run = lambda p, c: jnp.sum(elbo(p, prompts, tokens, masks, live, mask_id=MASK, config=config, chunk=c))  # noqa: E731
    whole, whole_grad = jax.value_and_grad(run)(params, 6)
    part, part_grad = jax.value_and_grad(run)(params, chunk)
    assert float(part) == pytest.approx(float(whole), abs=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), part_grad, whole_grad)


def test_no_array_of_rows_by_length_by_vocabulary(tiny_model):
    config = dataclasses.replace(tiny_model[0], vocab_size=1009)
    params = init_params(jax.random.key(0), config)
    rows, length, chunk = 4, 32, 4
    tokens = jnp.zeros((rows, length), jnp.int32)
    prompts = Prompts(jnp.zeros((rows, 3), jnp.int32), jnp.full((rows,), 3))
    live = jnp.ones(tokens.shape, bool)
    masks = draw_masks(row_keys(jax.random.key(0), jnp.arange(rows)), live, 2, "exact")
    loss = lambda p: jnp.sum(elbo(p, prompts, tokens, masks, live, mask_id=MASK, config=config, chunk=chunk))  # noqa: E731
    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    sizes = [
        math.prod(map(int, dims.split(",")))
        for dims in re.findall(r"f32\[([\d,]+)\]", text)
        if "1009" in dims.split(",")
    ]
    assert max(sizes) <= rows * chunk * 1009


def test_text_after_the_end_has_exactly_no_effect(tiny_model):
    config, params = tiny_model
    prompts, _ = tiny_batch()
    tokens = jnp.array([[1, EOS, 3, 4, 2, 0], [0, 1, 2, EOS, EOS, EOS], [1, 2, 3, 4, 0, 1]], jnp.int32)
    live = live_positions(tokens, EOS)
    assert live.sum(-1).tolist() == [2, 4, 6]
    masks = draw_masks(row_keys(jax.random.key(1), jnp.arange(3)), live, 4, "exact")
    value = lambda t: elbo(params, prompts, t, masks, live, mask_id=MASK, config=config)  # noqa: E731
    changed = jnp.where(live, tokens, (tokens + 1) % 5)
    assert np.array_equal(value(tokens), value(changed))


def test_nothing_masked_gives_zero_and_no_nan(tiny_model):
    config, params = tiny_model
    prompts, tokens = tiny_batch()
    live = jnp.zeros(tokens.shape, bool)
    masked = jnp.zeros((3, 2, 6), bool)
    run = lambda p: jnp.sum(  # noqa: E731
        elbo(p, prompts, tokens, Masks(masked, coefficients(masked, live, "exact")), live, mask_id=MASK, config=config)
    )
    value, grad = jax.value_and_grad(run)(params)
    assert value == 0
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grad))


def test_a_random_policy_costs_about_log_vocabulary_per_token(tiny_model):
    config, params = tiny_model
    prompts, tokens = tiny_batch()
    live = jnp.ones(tokens.shape, bool)
    masks = draw_masks(row_keys(jax.random.key(0), jnp.arange(3)), live, 64, "exact")
    flat = {**params, "head": params["head"] * 0}
    value = elbo(flat, prompts, tokens, masks, live, mask_id=MASK, config=config)
    assert float(jnp.mean(value)) / 6 == pytest.approx(-math.log(7), rel=0.15)
