import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_model import forward, log_softmax

from dmpo_jax.diffusion.canvas import Prompts, live_positions
from dmpo_jax.diffusion.masking import row_keys
from dmpo_jax.diffusion.proposal import KeyedNoise, propose
from dmpo_jax.diffusion.sampler import SamplerConfig, sample
from dmpo_jax.diffusion.selection import top_ranked, transfer_schedule
from dmpo_jax.diffusion.trajectory import trajectory_log_probs
from dmpo_jax.errors import UserError

MASK, EOS = 5, 6
PROMPTS = Prompts(jnp.array([[1, 2, 0], [3, 0, 0], [4, 4, 1], [2, 0, 0]], jnp.int32), jnp.array([2, 1, 3, 1]))


def run(tiny_model, sampler, length=8, prompts=PROMPTS, key=0, rows=None, params=None):
    config, own = tiny_model
    rows = jnp.arange(prompts.length.shape[0]) if rows is None else rows
    keys = row_keys(jax.random.key(key), rows)
    call = jax.jit(
        lambda p, prompts, keys: sample(
            p, prompts, keys, length=length, mask_id=MASK, eos_id=EOS, sampler=sampler, config=config
        )
    )
    return jax.device_get(call(own if params is None else params, prompts, keys))


def test_transfer_schedule():
    assert transfer_schedule(10, 4) == [3, 3, 2, 2]
    assert transfer_schedule(32, 6) == [6, 6, 5, 5, 5, 5]
    assert transfer_schedule(8, 8) == [1] * 8


def test_top_ranked_takes_the_best_allowed_and_the_lowest_index_of_ties():
    score = jnp.array([[0.5, 0.9, 0.5, 0.1], [0.5, 0.5, 0.5, 0.5]])
    allowed = jnp.array([[True, False, True, True], [False, True, True, True]])
    assert top_ranked(score, allowed, 2).tolist() == [[True, False, True, False], [False, True, True, False]]
    assert top_ranked(score, allowed, 9).tolist() == allowed.tolist()
    assert not top_ranked(score, jnp.zeros((2, 4), bool), 2).any()


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_proposals_follow_the_tempered_softmax(temperature):
    logits = jnp.array([0.0, 1.0, -1.0, 2.0, -jnp.inf])
    draws = 40_000
    noise = KeyedNoise(row_keys(jax.random.key(0), jnp.arange(draws)))
    noise = noise.gumbel(jnp.zeros(draws, jnp.int32), 1, 5)
    found = propose(jnp.broadcast_to(logits, (draws, 1, 5)), noise, temperature)
    share = np.bincount(np.asarray(found)[:, 0], minlength=5) / draws
    np.testing.assert_allclose(share, jax.nn.softmax(logits / temperature), atol=0.01)


def greedy_reference(params, prompt, length, block, steps, config):
    """Low-confidence decoding at temperature 0, one row, straight from its description."""
    tokens = [MASK] * length
    forwards = 0
    for start in range(0, length, block):
        for count in transfer_schedule(block, steps * block // length):
            logits = forward(params, prompt + tokens, config)[len(prompt) :]
            logits[:, MASK] = -np.inf
            forwards += 1
            log_probs = log_softmax(logits)
            masked = [i for i in range(start, start + block) if tokens[i] == MASK]
            best = sorted(masked, key=lambda i: -log_probs[i].max())[:count]
            for i in best:
                tokens[i] = int(log_probs[i].argmax())
    return tokens, forwards


@pytest.mark.parametrize(("block", "steps"), [(8, 8), (8, 3), (4, 8), (4, 4), (2, 4)])
def test_greedy_decoding_equals_the_reference(tiny_model, block, steps):
    config, params = tiny_model
    sampler = SamplerConfig(steps=steps, block_length=block, stop_at_eos=False)
    trace = run(tiny_model, sampler)
    for row in range(4):
        prompt = PROMPTS.tokens[row, : PROMPTS.length[row]].tolist()
        tokens, forwards = greedy_reference(params, prompt, 8, block, steps, config)
        assert trace.completion[row].tolist() == tokens
        assert trace.forwards[row] == forwards == steps


@pytest.mark.parametrize("algorithm", ["low_confidence", "random", "roar"])
def test_every_sampler_fills_everything_and_never_proposes_the_mask(tiny_model, algorithm):
    _, params = tiny_model
    eager = {**params, "head": params["head"].at[:, MASK].add(3.0)}  # a policy that would love to say "mask"
    sampler = SamplerConfig(algorithm=algorithm, block_length=4, temperature=1.0, stop_at_eos=False)
    trace = run(tiny_model, sampler, params=eager)
    assert not (trace.completion == MASK).any()
    for row in trace.step:  # one token a step, block by block
        assert sorted(row[:4].tolist()) == [0, 1, 2, 3] and sorted(row[4:].tolist()) == [4, 5, 6, 7]


@pytest.mark.parametrize("algorithm", ["low_confidence", "random", "roar"])
def test_traces_are_recomputed_by_teacher_forcing(tiny_model, algorithm):
    config, params = tiny_model
    steps = 8 if algorithm == "roar" else 4
    sampler = SamplerConfig(algorithm=algorithm, steps=steps, block_length=4, temperature=0.7, stop_at_eos=False)
    trace = run(tiny_model, sampler)
    again = trajectory_log_probs(
        params, PROMPTS, jnp.asarray(trace.completion), jnp.asarray(trace.step), steps=steps,
        tokens_per_step=8 // steps, mask_id=MASK, config=config,
    )  # fmt: skip
    np.testing.assert_allclose(trace.log_prob, again, atol=2e-5)
    for row in range(4):
        prompt = PROMPTS.tokens[row, : PROMPTS.length[row]].tolist()
        for position in range(8):
            now = trace.step[row, position]
            shown = [MASK if s >= now else t for s, t in zip(trace.step[row], trace.completion[row], strict=True)]
            logits = forward(params, prompt + shown, config)[len(prompt) + position]
            logits[MASK] = -np.inf
            wanted = log_softmax(logits)[trace.completion[row, position]]
            assert trace.log_prob[row, position] == pytest.approx(wanted, abs=2e-5)


def test_roar_draws_from_its_exact_law(tiny_model):
    """Completions of two tokens: the sampled frequencies against the mixture over both orders, by enumeration."""
    config, params = tiny_model
    prompt, draws = [1, 2], 20_000
    prompts = Prompts(jnp.tile(jnp.array([prompt], jnp.int32), (draws, 1)), jnp.full((draws,), 2))
    sampler = SamplerConfig(algorithm="roar", temperature=1.0, stop_at_eos=False)
    trace = run(tiny_model, sampler, length=2, prompts=prompts)
    found = np.zeros((7, 7))
    np.add.at(found, tuple(trace.completion.T), 1 / draws)

    def law(shown):
        logits = forward(params, prompt + shown, config)[2:]
        logits[:, MASK] = -np.inf
        return np.exp(log_softmax(logits))

    wanted = np.zeros((7, 7))
    first = law([MASK, MASK])
    for a, b in itertools.product([t for t in range(7) if t != MASK], repeat=2):
        wanted[a, b] = 0.5 * first[0, a] * law([a, MASK])[1, b] + 0.5 * first[1, b] * law([MASK, b])[0, a]
    assert wanted.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(found, wanted, atol=0.015)  # sd at most 0.0035


@pytest.mark.parametrize("algorithm", ["low_confidence", "random", "roar"])
def test_a_row_ignores_its_neighbours(tiny_model, algorithm):
    sampler = SamplerConfig(algorithm=algorithm, block_length=4, temperature=1.0)
    together = run(tiny_model, sampler)
    row = jax.tree.map(lambda x: x[2:3], PROMPTS)
    alone = run(tiny_model, sampler, prompts=row, rows=jnp.array([2]))
    for field in ("completion", "step", "forwards"):
        assert np.array_equal(getattr(together, field)[2], getattr(alone, field)[0])


def test_temperature_zero_is_deterministic_and_above_zero_is_not(tiny_model):
    greedy = SamplerConfig(temperature=0.0)
    assert np.array_equal(run(tiny_model, greedy, key=0).completion, run(tiny_model, greedy, key=1).completion)
    warm = SamplerConfig(temperature=1.0)
    assert not np.array_equal(run(tiny_model, warm, key=0).completion, run(tiny_model, warm, key=1).completion)


@pytest.mark.parametrize("algorithm", ["low_confidence", "random", "roar"])
def test_early_stop_keeps_the_text_before_the_end(tiny_model, algorithm):
    _, params = tiny_model
    ending = {**params, "head": params["head"].at[:, EOS].add(0.5)}
    full = SamplerConfig(algorithm=algorithm, block_length=2, temperature=1.0, stop_at_eos=False)
    stopped = run(tiny_model, dataclasses.replace(full, stop_at_eos=True), length=12, params=ending)
    whole = run(tiny_model, full, length=12, params=ending)
    live = np.asarray(live_positions(jnp.asarray(whole.completion), EOS))
    assert (whole.forwards == 12).all()
    assert stopped.forwards.min() < 12  # something did stop
    for row in range(4):
        assert np.array_equal(stopped.completion[row][live[row]], whole.completion[row][live[row]])
        blocks = -(-live[row].sum() // 2)
        assert stopped.forwards[row] == 2 * blocks
        assert (stopped.completion[row][2 * blocks :] == EOS).all() and (stopped.step[row][2 * blocks :] == -1).all()


def test_live_positions_end_with_the_first_eos():
    tokens = jnp.array([[1, EOS, 2, EOS], [1, 2, 3, 4], [EOS, 1, 1, 1]])
    assert live_positions(tokens, EOS).tolist() == [
        [True, True, False, False],
        [True] * 4,
        [True, False, False, False],
    ]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"algorithm": "greedy"}, "sampler.algorithm"),
        ({"block_length": 5}, "block_length"),
        ({"block_length": 4, "steps": 3}, "sampler.steps"),
        ({"steps": 9}, "sampler.steps"),
        ({"algorithm": "roar", "steps": 4}, "roar"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_bad_settings_are_refused(settings, word):
    with pytest.raises(UserError, match=word):
        SamplerConfig(**settings).validate(8)
