"""diffu-GRPO, coupled-GRPO, wd1 and SPG against float64 NumPy and enumeration, and as whole training cycles."""

import functools
import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from reference_model import forward, log_softmax
from test_training_cycle import run, setup_of

from dmpo_jax.config import load_config
from dmpo_jax.diffusion.canvas import Prompts, live_positions
from dmpo_jax.diffusion.masking import row_keys
from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.model.parameters import init_params
from dmpo_jax.objectives import OBJECTIVES, coupled_grpo, diffu_grpo, group, mean_field, policy_gradient, spg, wd1
from dmpo_jax.objectives.objective import Context, Prepared, given_rollout
from dmpo_jax.parallel.mesh import ROWS, make_mesh

MASK, EOS = 5, 6
NAMES = ("diffu_grpo", "coupled_grpo", "wd1", "spg")
KEY = jax.random.key(11)

COMPLETIONS = [
    [[1, 2, 6, 0, 3, 3], [4, 4, 0, 1, 2, 6], [0, 6, 1, 1, 1, 1]],
    [[3, 3, 3, 3, 3, 3], [2, 6, 0, 4, 4, 4], [1, 0, 1, 0, 6, 2]],
]
REWARDS = [[1.0, 0.1, 0.0], [0.0, 0.6, 1.0]]  # fmt: skip


def context_of(model, block=2):
    sampler = SamplerConfig(block_length=block)
    return Context(model=model, reference_model=model, mask_id=MASK, eos_id=EOS, sampler=sampler)


def rollout_of(completion=COMPLETIONS, reward=REWARDS):
    """P x N completions after prompts of 3, 2, 1, 3, ... tokens."""
    completion = jnp.asarray(completion, jnp.int32)
    prompts, _, length = completion.shape
    tokens = (jnp.arange(prompts * 4).reshape(prompts, 4) * 3 + 1) % 5
    live = live_positions(completion.reshape(-1, length), EOS).reshape(completion.shape)
    lengths = 3 - jnp.arange(prompts, dtype=jnp.int32) % 3
    return given_rollout(Prompts(tokens.astype(jnp.int32), lengths), completion, live, jnp.asarray(reward, jnp.float32))


def config_of(name, **settings):
    return OBJECTIVES[name].Config(**settings)


CONFIGS = {  # one of each, so that tests share compiled programs
    "diffu_grpo": config_of("diffu_grpo", prompt_mask=0.4, beta=0.3),
    "coupled_grpo": config_of("coupled_grpo", beta=0.3),
    "wd1": config_of("wd1", prompt_mask=0.4, psi=2.0),
    "spg": config_of("spg", prompt_mask=0.4, mix=0.3, masks=3),
}
WITHOUT_KL = CONFIGS | {
    "diffu_grpo": config_of("diffu_grpo", prompt_mask=0.4, beta=0.0),
    "coupled_grpo": config_of("coupled_grpo", beta=0.0, reference_sync=0),
}


def changed(params, size=0.3):
    """Other parameters of the same shapes."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    return jax.tree.unflatten(
        tree, [x + size * jax.random.normal(k, x.shape) * jnp.std(x) for x, k in zip(leaves, keys, strict=True)]
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def prepare(name, config, context, rollout, old, reference):
    return OBJECTIVES[name].prepare(old, reference, rollout, KEY, config, context)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def step(name, config, context, rollout, params, prepared):
    """((loss, metrics), gradient) of one update."""
    loss = lambda p: OBJECTIVES[name].loss(p, rollout, prepared, KEY, config, context)  # noqa: E731
    return jax.value_and_grad(loss, has_aux=True)(params)


def update(name, config, context, rollout, params, old=None, reference=None):
    """((loss, metrics), gradient) of one update by `params` on what `old` rolled out."""
    old = params if old is None else old
    return step(name, config, context, rollout, params, prepare(name, config, context, rollout, old, reference))


def largest(tree):
    return max(float(jnp.abs(x).max()) for x in jax.tree.leaves(tree))


def finite(tree):
    return all(np.isfinite(x).all() for x in jax.tree.leaves(tree))


def log_probs_shown(params, config, prompt, completion, hidden):
    """float64 log-probabilities [L] of a completion's tokens with `hidden` of them masked."""
    shown = [MASK if h else t for t, h in zip(completion, hidden, strict=True)]
    logits = forward(params, [*prompt, *shown], config)[len(prompt) :]
    return log_softmax(logits)[np.arange(len(completion)), np.asarray(completion)]


def rows_of(rollout):
    """(prompt, completion, live) of each row in NumPy, by group."""
    for p, n in np.ndindex(*rollout.reward.shape):
        prompt = np.asarray(rollout.prompts.tokens[p])[: int(rollout.prompts.length[p])]
        yield (p, n), prompt, np.asarray(rollout.completion[p, n]), np.asarray(rollout.live[p, n])


# --- Hidden tokens

hide = jax.jit(mean_field.masked_prompts, static_argnums=(2, 3, 4))
block_masks = jax.jit(spg.block_masks, static_argnums=(2, 3, 4))
coupled_log_probs = jax.jit(coupled_grpo.coupled_log_probs, static_argnums=4)


def test_prompt_tokens_are_hidden_by_key_and_global_row():
    rollout = rollout_of()
    plain = hide(rollout, KEY, 0.0, MASK, 1)
    np.testing.assert_array_equal(plain.tokens, np.repeat(rollout.prompts.tokens, 3, axis=0))
    found = hide(rollout, KEY, 0.5, MASK, 2)
    assert found.tokens.shape == (12, 4) and found.length.tolist() == [3] * 6 + [2] * 6
    tokens, hidden = np.asarray(found.tokens), np.asarray(found.tokens) == MASK
    assert hidden.any() and not hidden[np.arange(4) >= np.asarray(found.length)[:, None]].any()  # pads are left alone
    assert ((tokens == np.repeat(rollout.prompts.tokens, 6, axis=0)) | hidden).all()
    second = jax.tree.map(lambda x: x[1:], rollout)  # the second group alone, as a micro-batch
    np.testing.assert_array_equal(hide(second, KEY, 0.5, MASK, 2).tokens, tokens[6:])
    other = hide(rollout, jax.random.key(12), 0.5, MASK, 2)
    assert (np.asarray(other.tokens) != tokens).any()


def test_share_of_hidden_prompt_tokens():
    rollout = rollout_of(np.zeros((100, 8, 1)), np.zeros((100, 8)))
    rollout = rollout._replace(prompts=Prompts(jnp.zeros((100, 50), jnp.int32), jnp.full((100,), 50)))
    share = float(jnp.mean(hide(rollout, KEY, 0.15, MASK, 1).tokens == MASK))
    assert share == pytest.approx(0.15, abs=4 * math.sqrt(0.15 * 0.85 / 40_000))


# --- diffu-GRPO


def clipped_loss_in_numpy(log_prob, old, reference, advantage, live, epsilon, beta):
    """(loss, gradient in log_prob [P, N, L]), token after token."""
    total, grad, tokens = 0.0, np.zeros(log_prob.shape), live.sum()
    for index in np.ndindex(*log_prob.shape):
        if not live[index]:
            continue
        a, rho = advantage[index[:2]], np.exp(log_prob[index] - old[index])
        inside = 1 - epsilon <= rho <= 1 + epsilon
        total -= min(rho * a, np.clip(rho, 1 - epsilon, 1 + epsilon) * a)
        if inside or (rho > 1 and a < 0) or (rho < 1 and a > 0):
            grad[index] -= rho * a
        x = log_prob[index] - reference[index]
        total += beta * (np.exp(-x) + x - 1)
        grad[index] += beta * (1 - np.exp(-x))
    return total / tokens, grad / tokens


@functools.partial(jax.jit, static_argnums=5)
def tabular(log_prob, old, reference, rollout, advantage, config):
    """((loss, metrics), gradient) of the clipped loss whose log-probabilities are the parameters."""
    groups = {"advantage": advantage, "mean_length": policy_gradient.mean_length(rollout.live)}
    prepared = Prepared(groups, {"old": old, "reference": reference}, {})
    loss = lambda p: diffu_grpo.clipped_loss(lambda q: q, p, rollout, prepared, config)  # noqa: E731
    return jax.value_and_grad(loss, has_aux=True)(log_prob)


@pytest.mark.parametrize(("epsilon", "beta"), [(0.5, 0.04), (0.2, 0.0), (0.1, 1.0)])
def test_clipped_loss_against_float64(epsilon, beta):
    rng, rollout = np.random.default_rng(0), rollout_of()
    log_prob, old, reference = (rng.normal(size=(2, 3, 6)) * 0.5 - 2 for _ in range(3))
    advantage = rng.normal(size=(2, 3))
    config = config_of("diffu_grpo", epsilon=epsilon, beta=beta)
    (loss, metrics), grad = tabular(log_prob, old, reference, rollout, advantage, config)
    live = np.asarray(rollout.live)
    wanted, wanted_grad = clipped_loss_in_numpy(log_prob, old, reference, advantage, live, epsilon, beta)
    assert float(loss) == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(grad, wanted_grad, atol=1e-6)
    assert ("kl" in metrics) == (beta > 0)
    ratio = np.exp(log_prob - old)
    beyond = np.where(advantage[..., None] > 0, ratio > 1 + epsilon, ratio < 1 - epsilon)
    assert float(metrics["ratio/clipped"]) == pytest.approx(beyond[live].mean(), abs=1e-6)
    sums = ((log_prob - old) * live).sum(-1)
    assert float(metrics["log_ratio/mean"]) == pytest.approx(sums.mean(), abs=1e-5)
    assert float(metrics["log_ratio/std"]) == pytest.approx(sums.std(), abs=1e-5)


def test_diffu_grpo_against_a_float64_model(tiny_model):
    model, params = tiny_model
    rollout, config = rollout_of(), CONFIGS["diffu_grpo"]
    old, reference = changed(params), changed(params, 0.6)
    (loss, _), _ = update("diffu_grpo", config, context_of(model), rollout, params, old, reference)
    hidden = np.asarray(hide(rollout, KEY, 0.4, MASK, 1).tokens).reshape(2, 3, -1)
    assert (hidden == MASK).any()
    found = []
    for tree in (params, old, reference):
        table = np.zeros((2, 3, 6))
        for at, prompt, completion, _ in rows_of(rollout):
            table[at] = log_probs_shown(tree, model, hidden[at][: len(prompt)], completion, [True] * 6)
        found.append(table)
    rewards = np.asarray(REWARDS)
    advantage = rewards - rewards.mean(1, keepdims=True)
    wanted, _ = clipped_loss_in_numpy(*found, advantage, np.asarray(rollout.live), 0.5, 0.3)
    assert float(loss) == pytest.approx(wanted, abs=2e-5)


def test_mean_field_gradient_is_exact_for_a_one_step_sampler_by_enumeration():
    """All completions of a factorised policy, weighed by their probability: the gradient of the expected reward."""
    rng = np.random.default_rng(1)
    table = jnp.float32(rng.normal(size=(3, 4)))  # logits of 3 positions over 4 tokens
    every = np.array(list(itertools.product(range(4), repeat=3)))[None]  # [1, 64, 3]
    reward = jnp.float32(rng.normal(size=(1, 64)))
    log_probs = lambda t: jax.nn.log_softmax(t)[jnp.arange(3), every]  # noqa: E731
    expected = lambda t: jnp.sum(jnp.exp(jnp.sum(log_probs(t), axis=-1)) * reward)  # noqa: E731
    rollout = rollout_of(every, reward)
    share = jnp.exp(jnp.sum(log_probs(table), axis=-1))
    per_token = jnp.full((1, 64), 3.0)  # the sum over tokens instead of their mean: loss x 3, x 64 rows
    prepared = Prepared({"advantage": share * reward * 64 * 3, "mean_length": per_token}, {"old": table}, {})
    config = config_of("diffu_grpo", beta=0.0)
    loss = lambda t: diffu_grpo.clipped_loss(log_probs, t, rollout, prepared, config)[0]  # noqa: E731
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(table), -jax.jit(jax.grad(expected))(table), atol=1e-6)


def test_mean_field_likelihood_is_not_the_completions(tiny_model):
    """The bias: a distribution over completions, but not the one of a sampler that decodes a token at a time."""
    model, params = tiny_model
    prompt, mean_field_mass, gap = [1, 2], 0.0, 0.0
    first = log_softmax(forward(params, [*prompt, MASK, MASK], model))[2:]
    after = {(i, t): None for i in range(2) for t in range(7)}
    for i, t in after:
        shown = [*prompt, *([t, MASK] if i == 0 else [MASK, t])]
        after[i, t] = log_softmax(forward(params, shown, model))[2 + (1 - i)]
    for a, b in itertools.product(range(7), repeat=2):
        factorised = np.exp(first[0, a] + first[1, b])
        in_order = 0.5 * (np.exp(first[0, a] + after[0, a][b]) + np.exp(first[1, b] + after[1, b][a]))
        mean_field_mass += factorised
        gap += abs(factorised - in_order)
    assert mean_field_mass == pytest.approx(1, abs=1e-9)
    assert gap > 0.01


@pytest.mark.parametrize("name", ["diffu_grpo", "coupled_grpo"])
def test_on_policy_ratios_are_exactly_one_and_the_reference_is_optional(tiny_model, name):
    model, params = tiny_model
    rollout, context = rollout_of(), context_of(model)
    (loss, metrics), grad = update(name, WITHOUT_KL[name], context, rollout, params)
    assert metrics["log_ratio/std"] == metrics["log_ratio/mean"] == metrics["ratio/clipped"] == 0
    assert metrics["ess/min"] == pytest.approx(1) and largest(grad) > 1e-3 and "kl" not in metrics
    assert set(prepare(name, WITHOUT_KL[name], context, rollout, params, None).whole) == {"old"}
    (same, metrics), _ = update(name, CONFIGS[name], context, rollout, params, reference=params)
    assert metrics["kl"] == 0 and float(same) == pytest.approx(float(loss), abs=1e-7)
    (more, metrics), _ = update(name, CONFIGS[name], context, rollout, params, reference=changed(params))
    assert float(more - loss) == pytest.approx(0.3 * float(metrics["kl"]), rel=1e-5) and metrics["kl"] > 1e-3


# --- Coupled-GRPO


def coupled_in_numpy(params, model, prompt, completion, live, first, rate):
    """l_d [L] of one row for the masks `first` and the rest of the live tokens."""
    whole = log_probs_shown(params, model, prompt, completion, [True] * len(completion))
    one = log_probs_shown(params, model, prompt, completion, first | ~live)
    other = log_probs_shown(params, model, prompt, completion, ~first)
    return 0.5 * (whole + np.where(first, one / rate, other / (1 - rate)))


def test_coupled_grpo_against_a_float64_model(tiny_model):
    model, params = tiny_model
    rollout, config = rollout_of(), CONFIGS["coupled_grpo"]
    old, reference = changed(params), changed(params, 0.6)
    (loss, _), _ = update("coupled_grpo", config, context_of(model), rollout, params, old, reference)
    masked, rate = coupled_grpo.coupled_masks(
        row_keys(KEY, jnp.arange(6)), rollout.live.reshape(6, 6), config.lowest_rate, config.highest_rate
    )
    first, rate = np.asarray(masked[:, 0]).reshape(2, 3, 6), np.asarray(rate, np.float64).reshape(2, 3)
    assert ((rate > 0.2) & (rate < 0.8)).all() and len(set(rate.ravel())) == 6  # every row has its own
    np.testing.assert_array_equal(masked[:, 0] ^ masked[:, 1], rollout.live.reshape(6, 6))
    found = []
    for tree in (params, old, reference):
        table = np.zeros((2, 3, 6))
        for at, prompt, completion, live in rows_of(rollout):
            table[at] = coupled_in_numpy(tree, model, prompt, completion, live, first[at], rate[at])
        found.append(table)
    rewards = np.asarray(REWARDS)
    others = (rewards.sum(1, keepdims=True) - rewards) / 2
    wanted, _ = clipped_loss_in_numpy(*found, rewards - others, np.asarray(rollout.live), 0.5, 0.3)
    assert float(loss) == pytest.approx(wanted, abs=5e-5)


def test_coupled_log_probability_is_biased_as_stated_by_enumeration(tiny_model):
    """Over all masks of 3 tokens at rate rho: (f(1) + f(rho) + f(1 - rho)) / 2, which is not f(1) and not their mean."""
    model, params = tiny_model
    completion, rate = [2, 0, 4], 0.3
    every = np.array(list(itertools.product([False, True], repeat=3)))
    rollout = rollout_of([[completion] * 8], np.zeros((1, 8)))
    masks = jnp.asarray(np.stack([every, ~every], axis=1))
    found = coupled_log_probs(params, rollout, masks, jnp.full((8,), rate), context_of(model))[0]
    mean = np.asarray(found, np.float64).T @ (rate ** every.sum(1) * (1 - rate) ** (~every).sum(1))
    prompt = np.asarray(rollout.prompts.tokens[0])[:3]

    def f(t):  # token's mean log-probability when it is hidden and the others are at rate t
        total = np.zeros(3)
        for hidden in every:
            for d in np.flatnonzero(hidden):
                others = hidden.sum() - 1
                chance = t**others * (1 - t) ** (2 - others)
                total[d] += chance * log_probs_shown(params, model, prompt, completion, hidden)[d]
        return total

    np.testing.assert_allclose(mean, (f(1) + f(rate) + f(1 - rate)) / 2, atol=1e-5)
    assert np.abs(mean - (f(1) + f(rate) + f(1 - rate)) / 3).min() > 0.1  # one and a half log-probabilities


# --- wd1


def test_golden_wd1_weights():
    """softmax of r and of -r for r = (1, 0.1, 0, 1), worked out in float64 (softmax ignores the group's mean)."""
    reward = jnp.array([[1.0, 0.1, 0.0, 1.0]])
    signed, positive = wd1.signed_weights(reward, 1.0, 1.0)
    e = np.exp([1.0, 0.1, 0.0, 1.0])
    np.testing.assert_allclose(positive[0], e / e.sum(), atol=1e-6)
    np.testing.assert_allclose(positive[0], (0.360433, 0.146542, 0.132597, 0.360433), atol=1e-5)
    np.testing.assert_allclose(signed[0], e / e.sum() - (1 / e) / (1 / e).sum(), atol=1e-6)
    assert float(jnp.sum(signed)) == pytest.approx(0, abs=1e-6)
    # DMPO's individual baseline with alpha = 1 / psi and equal likelihoods
    mass = jnp.zeros((1, 4))
    dmpo = group.weights(reward, jnp.zeros((1, 4)), 0.5, 1.0, mass)
    dmpo -= group.individual_baseline(reward, jnp.zeros((1, 4)), 0.5, 1.0, mass)
    np.testing.assert_allclose(wd1.signed_weights(reward, 2.0, 1.0)[0], dmpo, atol=1e-6)
    np.testing.assert_allclose(
        wd1.signed_weights(reward, 2.0, 0.0)[0], group.weights(reward, jnp.zeros((1, 4)), 0.5, 1.0, mass), atol=1e-6
    )


def test_wd1_against_a_float64_model(tiny_model):
    model, params = tiny_model
    rollout, config = rollout_of(), CONFIGS["wd1"]
    (loss, _), _ = update("wd1", config, context_of(model), rollout, params)
    hidden = np.asarray(hide(rollout, KEY, 0.4, MASK, 1).tokens).reshape(2, 3, -1)
    up, down = np.exp(2.0 * np.asarray(REWARDS)), np.exp(-2.0 * np.asarray(REWARDS))
    weight = up / up.sum(1, keepdims=True) - down / down.sum(1, keepdims=True)
    wanted = 0.0
    for at, prompt, completion, live in rows_of(rollout):
        value = log_probs_shown(params, model, hidden[at][: len(prompt)], completion, [True] * 6)
        wanted -= weight[at] * value[live].sum() / 2
    assert float(loss) == pytest.approx(wanted, abs=2e-5)
    metrics = prepare("wd1", config, context_of(model), rollout, params, None).metrics
    plus = up / up.sum(1, keepdims=True)
    assert float(metrics["ess/mean"]) == pytest.approx((1 / (3 * (plus**2).sum(1))).mean(), rel=1e-5)


# --- SPG


def bounds_in_numpy(log_prob, scored, live, beta):
    """(lower, upper) of one row from [V, L] arrays, straight from the definition."""
    lower = np.mean([log_prob[v][k].mean() for v, k in enumerate(scored)])
    total = []
    for d in np.flatnonzero(scored.any(0)):
        shares = scored.sum(1) / live.sum()
        total.append(np.log(np.mean(np.exp(log_prob[:, d]) ** beta * scored[:, d] / shares)))
    return lower, np.mean(total) / beta


def test_spg_against_a_float64_model(tiny_model):
    model, params = tiny_model
    rollout, config = rollout_of(), CONFIGS["spg"]
    (loss, metrics), _ = update("spg", config, context_of(model), rollout, params)
    view_key, prompt_key = jax.random.split(KEY)
    hidden = block_masks(row_keys(view_key, jnp.arange(6)), rollout.live.reshape(6, 6), 3, 2, 0.4)
    hidden = np.asarray(hidden).reshape(2, 3, 3, 6)
    prompts = np.asarray(hide(rollout, prompt_key, 0.4, MASK, 3).tokens).reshape(2, 3, 3, -1)
    rewards = np.asarray(REWARDS)
    advantage, total, uppers = rewards - rewards.mean(1, keepdims=True), 0.0, []
    for at, prompt, completion, live in rows_of(rollout):
        views = zip(prompts[at], hidden[at], strict=True)
        log_prob = np.array([log_probs_shown(params, model, q[: len(prompt)], completion, h) for q, h in views])
        lower, upper = bounds_in_numpy(log_prob, hidden[at] & live, live, 1.5)
        uppers.append(upper)
        value = lower if advantage[at] > 0 else 0.3 * upper + 0.7 * lower
        total += advantage[at] * value * live.sum()
    assert float(loss) == pytest.approx(-total / float(rollout.live.sum()), abs=2e-5)
    assert float(metrics["bound/upper"]) == pytest.approx(np.mean(uppers), abs=2e-5)


@pytest.mark.parametrize("live_length", [5, 3])
def test_block_masks_follow_their_law(live_length):
    """Frequencies of all masks of 5 tokens in blocks of 2, 2 and 1 against their probabilities by enumeration."""
    rate, draws = 0.3, 40_000
    live = np.arange(5) < live_length
    blocks = [b for b in ([0, 1], [2, 3], [4]) if live[b[0]]]
    wanted = {}
    for block in blocks:
        members = [d for d in block if live[d]]
        for count in range(1, len(members) + 1):
            for inside in itertools.combinations(members, count):
                for before in itertools.product([False, True], repeat=block[0]):
                    hidden = tuple(
                        before[d] if d < block[0] else (d in inside if d in members else True) for d in range(5)
                    )
                    chance = 1 / len(blocks) / len(members) / math.comb(len(members), count)
                    chance *= np.prod([rate if b else 1 - rate for b in before])
                    wanted[hidden] = wanted.get(hidden, 0.0) + chance
    assert sum(wanted.values()) == pytest.approx(1)
    keys = row_keys(KEY, jnp.arange(draws))
    found = np.asarray(block_masks(keys, jnp.tile(jnp.asarray(live), (draws, 1)), 2, 2, rate))
    drawn, counts = np.unique(found[:, 1], axis=0, return_counts=True)  # the second view is drawn like the first
    assert {tuple(row.tolist()) for row in drawn} == set(wanted)
    for row, count in zip(drawn, counts, strict=True):
        chance = wanted[tuple(row.tolist())]
        assert count / draws == pytest.approx(chance, abs=5 * math.sqrt(chance / draws))
    assert found[:, :, ~live].all() and (found & live).any(-1).all()
    if live_length == 3:  # two live blocks: one view drew each, and one of the two shows the first block's live tokens
        opens = ~(found[:, :, :2].all(-1)) & found[:, :, 2]
        assert opens.any(1).mean() > 0.5


def test_one_block_bounds_by_enumeration_of_all_masks_and_completions(tiny_model):
    """The mean over masks of `lower` is ELBO / L, at most log p / L; `upper` from all masks is not below `lower`."""
    model, params = tiny_model
    prompt = [1, 2]
    masks = [m for m in itertools.product([False, True], repeat=3) if any(m)]
    views = [m for m in masks for _ in range({1: 1, 2: 1, 3: 3}[sum(m)])]  # U{1..3} tokens: 9 equally likely views
    tables = {}  # log-probabilities [3, 7] under every state
    for state in itertools.product([*range(5), MASK, EOS], repeat=3):
        if MASK in state:
            tables[state] = log_softmax(forward(params, [*prompt, *state], model))[2:]

    def shown(o, mask):
        return tuple(MASK if hidden else t for t, hidden in zip(o, mask, strict=True))

    every = list(itertools.product([*range(5), EOS], repeat=3))
    log_prob = np.array([[tables[shown(o, m)][np.arange(3), o] for m in views] for o in every])  # [216, 9, 3]
    scored = np.broadcast_to(np.array(views), log_prob.shape)
    live = jnp.ones((1, len(every), 3), bool)
    for beta in (1.0, 1.5):
        lower, upper = spg.bounds(jnp.float32(log_prob)[None], jnp.asarray(scored)[None], live, beta)
        assert (np.asarray(upper) >= np.asarray(lower) - 1e-6).all()
        wanted = bounds_in_numpy(log_prob[7], scored[7], np.ones(3, bool), beta)
        np.testing.assert_allclose((lower[0, 7], upper[0, 7]), wanted, atol=1e-5)
    for n, o in enumerate(every):
        elbo, probability = 0.0, 0.0
        for order in itertools.permutations(range(3)):
            mask, total = [True] * 3, 0.0
            for d in order:
                total += tables[shown(o, mask)][d, o[d]]
                mask[d] = False
            elbo += total / 6
            probability += np.exp(total) / 6
        assert 3 * float(lower[0, n]) == pytest.approx(elbo, abs=1e-5)
        assert elbo <= np.log(probability) + 1e-9


# --- All four


@pytest.mark.parametrize("name", NAMES)
def test_one_step_raises_the_good_answer_and_lowers_the_bad_one(tiny_model, name):
    """One good, one bad and one middling answer of each prompt, made of different tokens, under a nearly uniform model."""
    model, context = tiny_model[0], context_of(tiny_model[0])
    params = init_params(jax.random.key(0), model)
    good, bad, middling = [1, 2, 1, 2, 1, 2], [3, 4, 4, 3, 3, 4], [0, 0, 0, 0, 0, 0]
    rollout = rollout_of([[good, bad, middling]] * 2, [[1.0, 0.0, 0.5]] * 2)
    _, grad = update(name, WITHOUT_KL[name], context, rollout, params, params)
    stepped = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grad)
    change = np.zeros((2, 3))
    for at, prompt, completion, _ in rows_of(rollout):
        for sign, tree in ((1, stepped), (-1, params)):
            change[at] += sign * log_probs_shown(tree, model, prompt, completion, [True] * 6).sum()
    assert (change[:, 0] > 1e-4).all() and (change[:, 1] < -1e-4).all(), change


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_give_exactly_no_gradient(tiny_model, name):
    model, params = tiny_model
    rollout = rollout_of(reward=[[0.3, 0.3, 0.3], [np.nan, 0.7, 0.7]])
    (loss, _), grad = update(name, WITHOUT_KL[name], context_of(model), rollout, params, params)
    assert loss == 0 and largest(grad) == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_reward_leaves_only_its_own_row_out(tiny_model, name, bad):
    model, params = tiny_model
    context, config = context_of(model), CONFIGS[name]
    rollout = rollout_of(reward=[[1.0, bad, 0.0], REWARDS[1]])
    prepared = prepare(name, config, context, rollout, params, params)
    rest = rollout._replace(
        completion=rollout.completion[:, ::2], live=rollout.live[:, ::2], reward=jnp.array([[1.0, 0.0], [0.0, 1.0]])
    )
    alone = prepare(name, config, context, rest, params, params)
    key = "signed" if name == "wd1" else "advantage"
    np.testing.assert_allclose(prepared.groups[key][0, ::2], alone.groups[key][0], atol=1e-6)
    assert prepared.groups[key][0, 1] == 0 and prepared.metrics["rewards_not_finite"] == 1
    (loss, metrics), grad = update(name, config, context, rollout, params, changed(params), params)
    assert np.isfinite(loss) and finite(grad) and finite(metrics) and largest(grad) > 0


@pytest.mark.parametrize("name", NAMES)
def test_text_after_the_end_has_no_effect(tiny_model, name):
    model, params = tiny_model
    rollout, config = rollout_of(), CONFIGS[name]
    other = rollout._replace(completion=jnp.where(rollout.live, rollout.completion, (rollout.completion + 1) % 5))
    assert (other.completion != rollout.completion).any()
    args = (params, changed(params), changed(params, 0.6))
    (loss, _), grad = update(name, config, context_of(model), rollout, *args)
    (same, _), same_grad = update(name, config, context_of(model), other, *args)
    assert loss == same and loss != 0
    jax.tree.map(np.testing.assert_array_equal, grad, same_grad)


def test_gaps_of_hundreds_of_nats_stay_finite():
    rollout = rollout_of()
    gap = np.linspace(-200, 200, 36).reshape(2, 3, 6)
    config = config_of("diffu_grpo")
    (loss, metrics), grad = tabular(gap, np.zeros_like(gap), -gap, rollout, np.asarray(REWARDS) - 0.5, config)
    assert np.isfinite(loss) and finite(grad) and finite(metrics) and metrics["log_ratio/clamped"] > 0.5

    log_prob = jnp.float32(-np.abs(gap) - 200)[:, :, None]
    scored = rollout.live[:, :, None] & jnp.array([True, False, True, True, False, True])

    def value(log_prob):
        lower, upper = spg.bounds(log_prob, scored, rollout.live, 1.5)
        return jnp.sum(lower) + jnp.sum(upper), (lower, upper)

    (total, (_, upper)), grad = jax.jit(jax.value_and_grad(value, has_aux=True))(log_prob)
    assert np.isfinite(total) and finite(grad) and (upper < -100).all()  # p^1.5 underflows, its logarithm does not
    assert (np.asarray(grad)[np.asarray(scored)] > 0).all() and (np.asarray(grad)[~np.asarray(scored)] == 0).all()
    nothing = jnp.zeros_like(scored)
    assert [float(jnp.abs(x).max()) for x in spg.bounds(log_prob, nothing, rollout.live, 1.5)] == [0, 0]

    signed, _ = wd1.signed_weights(jnp.array([[0.0, 200.0, -200.0]]), 1.0, 1.0)
    np.testing.assert_allclose(signed, [[0, 1, -1]], atol=1e-6)


@pytest.mark.parametrize("name", ["coupled_grpo", "wd1"])
def test_an_update_on_eight_devices_equals_the_one_on_one(tiny_model, name):
    model, params = tiny_model
    config, context, rng = WITHOUT_KL[name], context_of(model), np.random.default_rng(2)
    rollout = rollout_of(rng.integers(0, 7, (8, 2, 6)), rng.normal(size=(8, 2)))
    args = (params, changed(params), changed(params, 0.6))
    one = update(name, config, context, rollout, *args)
    mesh = make_mesh((8, 1, 1))
    with jax.set_mesh(mesh):
        args = jax.device_put(args, NamedSharding(mesh, PartitionSpec()))
        many = update(name, config, context, jax.device_put(rollout, NamedSharding(mesh, PartitionSpec(ROWS))), *args)
        many = jax.device_get(many)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4), many, one)
    assert largest(one[1]) > 1e-3


CYCLES = {  # diffu-GRPO trains adapters
    "diffu_grpo": {"objective": {"updates": 1}, "lora": {"rank": 2, "alpha": 4.0}},
    "coupled_grpo": {"objective": {"updates": 2, "beta": 0.0, "reference_sync": 0}},
    "wd1": {"objective": {"updates": 2}},
    "spg": {"objective": {"updates": 2}},
}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", ["diffu_grpo", "spg", pytest.param("coupled_grpo", marks=SLOW), pytest.param("wd1", marks=SLOW)]
)
def test_cycles_on_eight_devices_in_micro_batches_equal_those_on_one(name):
    rollout = {"prompts": 16, "group": 2}
    sections = {**CYCLES[name], "model": {"n_layers": 1}, "sampler": {"steps": 4, "block_length": 10}}
    sections["objective"] = {"name": name, **sections["objective"]}
    params, records = run(setup_of(rollout=rollout, **sections), (1, 1, 1))
    others, other_records = run(setup_of(rollout={**rollout, "accumulation": 2}, **sections), (8, 1, 1))
    for record, other in zip(records, other_records, strict=True):
        np.testing.assert_array_equal(record.completion, other.completion)
        assert record.metrics["grad_norm"] > 1e-3 and set(record.metrics) == set(other.metrics)
        for key in ("loss", "grad_norm", "param_norm", "reward/mean"):
            assert other.metrics[key] == pytest.approx(record.metrics[key], abs=1e-5, rel=1e-4), key
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), params, others)
    if name == "diffu_grpo":  # one update a cycle: always on policy, the base behind from the second cycle on
        assert all(r.metrics["log_ratio/mean"] == r.metrics["log_ratio/std"] == 0 for r in records)
        assert records[0].metrics["kl"] == 0 and records[1].metrics["kl"] > 0


BAD = [
    ("diffu_grpo", {"epsilon": 0.0}, "epsilon = 0.0"),
    ("diffu_grpo", {"beta": -1.0}, "beta = -1.0"),
    ("diffu_grpo", {"beta": float("nan")}, "beta = nan"),
    ("diffu_grpo", {"prompt_mask": 1.0}, "prompt_mask = 1.0"),
    ("diffu_grpo", {"advantage": "rank"}, 'advantage = "rank"'),
    ("diffu_grpo", {"updates": 0}, "updates = 0"),
    ("diffu_grpo", {"reference_sync": -1}, "reference_sync = -1"),
    ("diffu_grpo", {"reference_sync": 4, "beta": 0.0}, "no effect"),
    ("coupled_grpo", {"lowest_rate": 0.0}, "lowest_rate"),
    ("coupled_grpo", {"lowest_rate": 0.7, "highest_rate": 0.3}, "lowest_rate"),
    ("wd1", {"psi": 0.0}, "psi = 0.0"),
    ("wd1", {"negative": 2.0}, "negative = 2.0"),
    ("wd1", {"prompt_mask": -0.1}, "prompt_mask"),
    ("spg", {"beta": 0.5}, "beta = 0.5"),
    ("spg", {"mix": 1.5}, "mix = 1.5"),
    ("spg", {"masks": 0}, "masks = 0"),
    ("spg", {"block_length": -2}, "block_length = -2"),
    ("spg", {"advantage": "none"}, "advantage"),
]


@pytest.mark.parametrize(("name", "settings", "message"), BAD)
def test_settings_out_of_range_are_named(name, settings, message):
    with pytest.raises(UserError, match=f"objective.*{message}"):
        config_of(name, **settings).validate(4, SamplerConfig())


@pytest.mark.parametrize("name", NAMES)
def test_groups_of_one_are_refused_and_presets_load(name):
    with pytest.raises(UserError, match=r"rollout\.group = 1"):
        config_of(name).validate(1, SamplerConfig())
    preset = load_config(Path(__file__).parents[1] / "configs" / "objectives" / f"{name}.toml")
    assert preset.objective == config_of(name, **({"block_length": 32} if name == "spg" else {}))
    assert preset.rollout.completion_length == 256 and preset.optimizer.clip == 0.2
    preset.validate_mesh(preset.rollout.prompts // preset.rollout.accumulation, ())
