"""Every sampler of `dmpo bench sample`, token by token against a slow decoder in NumPy, and the laws of its randomness."""

import dataclasses
import functools
import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_sampler import Row, double

from dmpo_jax.config import resolve
from dmpo_jax.diffusion import sampler as sampler_module
from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.diffusion.masking import row_keys
from dmpo_jax.diffusion.proposal import KeyedNoise, propose, propose_block
from dmpo_jax.diffusion.sampler import SamplerConfig, sample
from dmpo_jax.diffusion.selection import dream_schedule, rounded_schedule, top_ranked, transfer_schedule
from dmpo_jax.diffusion.trajectory import trajectory_log_probs
from dmpo_jax.evaluation.sampler_table import samplers_for
from dmpo_jax.model.parameters import ModelConfig, init_params
from dmpo_jax.parallel.mesh import make_mesh, per_shard
from dmpo_jax.training.flops import decoding_flops, forward_flops, forward_sizes, phase_flops
from dmpo_jax.training.setup import make_setup

MASK, EOS, VOCAB, LENGTH, BLOCK = 12, 13, 14, 8, 4
SHAPE = {"vocab_size": VOCAB, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_mlp": 24, "rope_theta": 100.0}
MODELS = {
    "llada": ModelConfig(**SHAPE),
    "dream": ModelConfig(**SHAPE, logits_shift=True, qkv_bias=True, family="dream"),
    "sdar": ModelConfig(**SHAPE, block_size=BLOCK, qk_norm=True, family="sdar"),
}
PROMPTS = Prompts(
    jnp.array([[1, 2, 3, 4, 5, 6], [7, 8, 0, 0, 0, 0], [9, 1, 1, 2, 0, 0], [3, 4, 5, 0, 0, 0]], jnp.int32),
    jnp.array([6, 2, 4, 3]),
)


# XLA's other code generator on CPU compiles such programs in less than half the time.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_cpu_use_fusion_emitters": False})


def chi_square_limit(freedom):
    """The 1 % point of chi-square, by Wilson and Hilferty."""
    return freedom * (1 - 2 / (9 * freedom) + 2.3263 * math.sqrt(2 / (9 * freedom))) ** 3


@functools.cache
def weights(family, scale=4.0):
    """Random weights, with a say for context: as initialised, every mask would be read alike."""
    params = init_params(jax.random.key(4), MODELS[family])
    blocks = {name: w * {"wo": 6.0, "w_down": 4.0, "wq": 3.0}.get(name, 1.0) for name, w in params["blocks"].items()}
    return {**params, "blocks": blocks, "head": params["head"] * scale}


def samplers(family):
    """Those of the table; in so short a completion, windows of 32 or 16 tokens would hide nothing."""
    base = SamplerConfig(block_length=BLOCK, steps=6, temperature=0.0 if family == "dream" else 0.7)
    short = lambda s: {"suffix_window": min(s.suffix_window, 1), "vicinity": min(s.vicinity, 1)}  # noqa: E731
    found = samplers_for(base, MODELS[family])
    return {name: dataclasses.replace(s, stop_at_eos=True, **short(s)) for name, s in found.items()}


CASES = [(family, name) for family in MODELS for name in samplers(family)]
KEY, NUMBERS = 7, np.arange(16)


def checked(sampler, family, length=LENGTH):
    sampler.validate(length)
    sampler.validate_model(MODELS[family])
    return sampler


@functools.cache
def on_mesh(family, name):
    """One program on 8 devices with two rows each, its lowered text, and what it gave in several situations."""
    sampler, config = checked(samplers(family)[name], family), MODELS[family]

    def on_shard(whole, local):
        params, key, eos = whole
        return sample(
            params, local[0], row_keys(key, local[1]), length=LENGTH, mask_id=MASK, eos_id=eos, sampler=sampler,
            config=config,
        )  # fmt: skip

    program = quick_jit(lambda whole, rows: per_shard(on_shard, whole, rows))

    params, key, order = weights(family), jax.random.key(KEY), (NUMBERS * 5 + 3) % 16

    def inputs(eos, order=NUMBERS, lengths=PROMPTS.length):
        return (params, key, jnp.int32(eos)), (
            Prompts(PROMPTS.tokens[order % 4], lengths[order % 4]),
            jnp.asarray(order),
        )

    with jax.set_mesh(make_mesh((8, 1, 1))):
        full, moved, _ = jax.device_get(
            [program(*inputs(-1)), program(*inputs(-1, order)), program(*inputs(-1, lengths=jnp.array([1, 5, 6, 4])))]
        )
        # Whatever token ends in their first block some rows but not most.
        early = [np.sum((full.completion[:, :BLOCK] == token).any(1)) for token in range(VOCAB)]
        end = max(range(VOCAB), key=lambda token: (early[token] <= 8) * early[token])
        stopped = jax.device_get(program(*inputs(end)))
        text = program.lower(*inputs(-1)).compile().as_text()
    return SimpleNamespace(program=program, text=text, order=order, end=end, full=full, moved=moved, stopped=stopped)


@functools.cache
def recorded_noise(width, vocab=VOCAB, key=KEY, steps=16):
    """The uniforms and Gumbel noise that the keys stand for, as arrays by step and row."""
    noise = KeyedNoise(row_keys(jax.random.key(key), jnp.asarray(NUMBERS)))
    at = lambda draw: np.stack([np.asarray(draw(jnp.full((16,), step))) for step in range(steps)])  # noqa: E731
    return (
        at(jax.jit(lambda step: noise.gumbel(step, width, vocab))),
        at(jax.jit(lambda step: noise.uniform(step, width))),
        [np.asarray(noise.order(jnp.int32(start), width)) for start in range(steps)],
    )


def noise_of(row):
    return SimpleNamespace(
        gumbel=lambda step, width: recorded_noise(width)[0][step, row],
        uniform=lambda step, width: recorded_noise(width)[1][step, row],
        order=lambda start: recorded_noise(BLOCK)[2][start][row],
    )


def slow(family, sampler, row, length=LENGTH, params=None, prompts=PROMPTS, level=None):
    """Row by row, so no row can depend on another."""
    prompt = prompts.tokens[row % 4, : prompts.length[row % 4]].tolist()
    params = double(weights(family) if params is None else params)
    return Row(params, MODELS[family], sampler, prompt, length, MASK, noise_of(row)).decode(level)


def agree(trace, row, wanted, length=LENGTH):
    part = slice(wanted.begin, wanted.begin + length)
    assert trace.completion[row].tolist() == wanted.text[part]
    assert trace.step[row].tolist() == wanted.step[part].tolist()
    assert (trace.forwards[row], trace.processed[row]) == (wanted.forwards, wanted.processed)
    np.testing.assert_allclose(trace.log_prob[row], wanted.log_prob[part], atol=1e-4)
    np.testing.assert_allclose(trace.sampled_log_prob[row], wanted.sampled[part], atol=1e-4)


# Every sampler of the table.


@pytest.mark.parametrize(("family", "name"), CASES)
def test_rows_equal_a_slow_decoder_that_is_given_the_same_noise(family, name):
    """Tokens, steps, log-probabilities, forwards and tokens processed; greedy and at a temperature, every row alone."""
    trace = on_mesh(family, name).full
    for row in range(8 if samplers(family)[name].temperature else 4):
        agree(trace, row, slow(family, samplers(family)[name], row))
    assert len({tuple(c) for c in trace.completion[:8].tolist()}) >= 4  # the model does not say always the same


@pytest.mark.parametrize(("family", "name"), CASES)
def test_one_program_serves_all_blocks_and_prompt_lengths_and_its_loop_does_not_communicate(family, name):
    """One entry in the jit cache after prompts of many lengths; no collective in the text compiled for 8 devices."""
    found = on_mesh(family, name)
    assert found.program._cache_size() == 1
    for collective in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f" {collective}" not in found.text, collective
    assert "while" in found.text


@pytest.mark.parametrize(("family", "name"), CASES)
def test_rows_ignore_their_neighbours_and_an_early_stop_leaves_what_comes_before_the_end(family, name):
    """Other rows beside a row change nothing; text up to the first eos is that of the run that never stops."""
    found = on_mesh(family, name)
    full, stopped = found.full, found.stopped
    for field in ("completion", "step", "forwards", "processed"):
        assert np.array_equal(getattr(found.moved, field), getattr(full, field)[found.order]), field
    ends = 0
    for row in range(16):
        ended = np.flatnonzero(full.completion[row] == found.end)
        if not len(ended):
            assert np.array_equal(stopped.completion[row], full.completion[row])
            continue
        assert np.array_equal(stopped.completion[row, : ended[0] + 1], full.completion[row, : ended[0] + 1])
        lead = int(PROMPTS.length[row % 4]) % BLOCK if family == "sdar" else 0
        after = (lead + ended[0]) // BLOCK * BLOCK + BLOCK - lead  # the first position after the block that ends it
        assert (stopped.completion[row, after:] == found.end).all() and (stopped.step[row, after:] == -1).all()
        if after < LENGTH:
            ends += 1
            assert stopped.forwards[row] < full.forwards[row]
    assert ends


WITHOUT_CACHE = [
    (family, name)
    for family, name in CASES
    for s in [samplers(family)[name]]
    if s.cache == "none" and s.algorithm != "wino" and not s.cfg_scale
]


@functools.cache
def teacher_forcing(family, temperature=1.0, top_p=1.0):
    return quick_jit(
        lambda completion, step: trajectory_log_probs(
            weights(family), jax.tree.map(lambda x: x[NUMBERS % 4], PROMPTS), completion, step, steps=LENGTH,
            tokens_per_step=BLOCK, mask_id=MASK, config=MODELS[family], temperature=temperature, top_p=top_p,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("family", "name"), WITHOUT_CACHE)
def test_log_probabilities_of_the_trace_come_back_by_teacher_forcing(family, name):
    """At temperature 1, and under the temperature and nucleus that sampled, to 2e-5."""
    trace, sampler = on_mesh(family, name).full, samplers(family)[name]
    held = np.ones(trace.step.shape, bool)
    if family == "sdar":  # a last block that reaches beyond the completion has tokens that the trace does not hold
        end = np.asarray(PROMPTS.length)[NUMBERS % 4, None] + LENGTH
        held = end - LENGTH + np.arange(LENGTH) < end // BLOCK * BLOCK
    again = np.asarray(teacher_forcing(family)(trace.completion, trace.step))
    np.testing.assert_allclose(again[held], trace.log_prob[held], atol=2e-5)
    if sampler.temperature:
        law = teacher_forcing(family, sampler.temperature, sampler.top_p)
        again = np.asarray(law(trace.completion, trace.step))
        np.testing.assert_allclose(again[held], trace.sampled_log_prob[held], atol=2e-5)


@pytest.mark.parametrize(("family", "static"), [("dream", "dual cache")])
def test_drafts_give_the_text_of_their_static_sampler_in_fewer_forwards(family, static):
    """The greedy static sampler with the same cache, token for token and step for step."""
    drafted, plain = on_mesh(family, "drafts, dual").full, on_mesh(family, static).full
    assert np.array_equal(drafted.completion, plain.completion) and np.array_equal(drafted.step, plain.step)
    assert (drafted.forwards <= plain.forwards).all() and drafted.forwards.sum() < plain.forwards.sum()


# Single settings.


def decode(family, sampler, length=LENGTH, prompts=PROMPTS, noise=None, watch=None):
    """A program that takes parameters and, in the place of the sampler's, a level: one compilation for all levels."""
    checked(sampler, family, length)

    def call(params, level):
        chosen = dataclasses.replace(sampler, level=level) if sampler.level else sampler
        keys = row_keys(jax.random.key(KEY), jnp.arange(prompts.length.shape[0]))
        return sample(
            params, prompts, keys, length=length, mask_id=MASK, eos_id=EOS, sampler=chosen, config=MODELS[family],
            noise=noise, watch=watch,
        )  # fmt: skip

    program = quick_jit(call)
    return lambda params=weights(family), level=sampler.level: jax.device_get(program(params, jnp.float32(level)))


@pytest.mark.parametrize(
    "settings",
    [{}, {"cache": "prefix"}, {"cache": "dual"}, {"cache": "prefix", "suffix_window": 1, "level_decay": 0.5}],
)
def test_thresholds_decide_tokens_and_forwards_whatever_the_sharpness_of_the_model(settings):
    """Greedy parallel decoding without and with caches, and Streaming-dLLM's falling threshold behind its window:
    thresholds 0.5, 0.7, 0.9 by heads scaled 1, 6, 12."""
    sampler = SamplerConfig(block_length=BLOCK, stop_at_eos=False, commit="threshold", level=0.5, **settings)
    program, forwards = decode("llada", sampler), set()
    for level, scale in itertools.product((0.5, 0.7, 0.9), (1.0, 6.0, 12.0)):
        params = weights("llada", scale)
        trace = program(params, level)
        for row in range(4):
            agree(trace, row, slow("llada", sampler, row, params=params, level=np.float32(level)))
        forwards |= set(trace.forwards.tolist())
    assert len(forwards) >= 4


@pytest.mark.parametrize(
    "settings", [{"cache": "dual", "vicinity": 1}, {"cache": "prefix", "suffix_window": 1}, {"cache": "dual"}]
)
def test_windows_lie_around_a_block_with_others_on_both_sides(settings):
    """Three blocks: what a cached forward recomputes and sees, in the middle and at both ends."""
    sampler = SamplerConfig(block_length=BLOCK, stop_at_eos=False, **settings)
    trace = decode("llada", sampler, length=12)()
    for row in range(4):
        agree(trace, row, slow("llada", sampler, row, length=12), length=12)


@pytest.mark.parametrize("block", [16, 32])
def test_wide_in_narrow_out_equals_its_description(block):
    """WINO on 32 tokens: tokens, forwards, and tokens of earlier iterations taken back."""
    sampler = SamplerConfig(algorithm="wino", level=0.6, revoke=0.9, block_length=block, stop_at_eos=False)
    program, revoked = decode("llada", sampler, length=32), 0
    for scale in (1.0, 6.0, 12.0):
        trace = program(weights("llada", scale))
        for row in range(3):
            wanted = slow("llada", sampler, row, length=32, params=weights("llada", scale))
            agree(trace, row, wanted, length=32)
            assert wanted.forwards <= 32
            revoked += wanted.revoked
    assert revoked


@pytest.mark.parametrize(
    ("family", "cache", "drafts"), [("llada", "dual", 2), ("llada", "prefix", 8), ("sdar", "block", 2)]
)
def test_any_number_of_drafts_gives_the_static_text(family, cache, drafts):
    """FreeDave with two and with more guesses than steps: the static sampler's text, forwards as verification says."""
    sampler = SamplerConfig(block_length=BLOCK, stop_at_eos=False, cache=cache, drafts=drafts)
    trace, saved = decode(family, sampler)(), 0
    for row in range(4):
        agree(trace, row, slow(family, sampler, row))
        static = slow(family, dataclasses.replace(sampler, drafts=0), row)
        assert trace.completion[row].tolist() == static.text[static.begin : static.begin + LENGTH]
        saved += static.forwards - trace.forwards[row]
    assert saved > 0


EVERY_REMAINDER = Prompts(
    jnp.array([[1, 2, 3, 4, 0, 0, 0], [7, 8, 9, 1, 2, 0, 0], [9, 1, 1, 2, 3, 4, 0], [3, 4, 5, 6, 7, 8, 9]], jnp.int32),
    jnp.array([4, 5, 6, 7]),
)


@pytest.mark.parametrize(
    ("steps", "settings"),
    [(1, {}), (2, {}), (4, {"cache": "block"}), (4, {"commit": "dynamic", "level": 0.4})],
)
def test_block_diffusion_of_prompts_that_fill_part_of_a_block(steps, settings):
    """SDAR, greedy: steps of a block 1, 2, 4; prompts with 0 to 3 tokens in the block where the completion begins."""
    sampler = SamplerConfig(block_length=BLOCK, steps=2 * steps, stop_at_eos=False, **settings)
    trace = decode("sdar", sampler, prompts=EVERY_REMAINDER)()
    for row in range(4):
        agree(trace, row, slow("sdar", sampler, row, prompts=EVERY_REMAINDER))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("dream", {"algorithm": "origin", "steps": 6, "temperature": 0.7}),
        ("dream", {"algorithm": "entropy", "commit": "entropy_bound", "level": 0.5, "cache": "dual"}),
        ("sdar", {"commit": "dynamic", "level": 0.4, "steps": 4, "cache": "block"}),
    ],
)
def test_prompts_and_tokens_once_committed_never_change(family, settings, monkeypatch):
    """Step by step in the working slots, prompt tokens among them, in rows with different numbers of masks left."""
    monkeypatch.setattr(sampler_module, "completion_of", lambda space, values, length: values)
    seen = []
    sampler = SamplerConfig(block_length=BLOCK, stop_at_eos=False, **settings)
    prompts = EVERY_REMAINDER if family == "sdar" else PROMPTS
    trace = decode(family, sampler, prompts=prompts, watch=lambda *a: seen.append(jax.tree.map(np.array, a)))()
    jax.effects_barrier()
    for row, length in enumerate(prompts.length.tolist()):
        lead = length % BLOCK if family == "sdar" else 1
        prompt = prompts.tokens[row, :length].tolist()[length - lead :]
        masks = np.zeros(trace.completion.shape[1], bool)
        masks[lead : lead + LENGTH] = True
        if family == "sdar":
            masks[lead : -(-(lead + LENGTH) // BLOCK) * BLOCK] = True
        tokens = np.array(prompt + [MASK] * (len(masks) - lead))
        for token, masked in ((t[row], m[row]) for t, m in seen):
            assert not (masked & ~masks).any()
            assert np.array_equal(token[~masks], tokens[~masks])
            masks, tokens = masked, token
        assert not masks[lead : lead + LENGTH].any() and (trace.step[row, :lead] == -1).all()
    counts = [m.sum(1) for _, m in seen]
    assert any(len(set(count.tolist())) > 1 for count in counts)


# Random order, one token per forward.


def test_random_order_in_blocks_of_one_is_left_to_right():
    """With its noise given, each token is the best of its law plus noise, given all before it."""
    sampler = SamplerConfig(algorithm="roar", block_length=1, temperature=0.7, stop_at_eos=False)
    trace = decode("llada", sampler)()
    left_to_right = SamplerConfig(algorithm="left_to_right", block_length=1, temperature=0.7)
    for row in range(4):
        agree(trace, row, slow("llada", left_to_right, row))
        assert trace.step[row].tolist() == list(range(LENGTH))


def test_orders_are_permutations_of_each_block_uniform_and_independent_of_other_rows():
    """Orders of neighbouring rows and of neighbouring blocks: each pair of the 36 of three positions as often."""
    trace = on_mesh("llada", "roar").full
    for row in trace.step:
        assert sorted(row[:BLOCK]) == [0, 1, 2, 3] and sorted(row[BLOCK:]) == [4, 5, 6, 7]
    assert len({tuple(row[:BLOCK]) for row in trace.step}) >= 8
    noise = KeyedNoise(row_keys(jax.random.key(0), jnp.arange(7200)))
    orders = [np.argsort(noise.order(jnp.int32(start), 3), axis=1) for start in (0, 3)]
    number = [order @ np.array([9, 3, 1]) for order in orders]
    for one, other in ((number[0][::2], number[0][1::2]), (number[0][::2], number[1][::2])):
        count = np.unique(one * 27 + other, return_counts=True)[1]
        assert len(count) == 36 and ((count - 100) ** 2 / 100).sum() < chi_square_limit(35)


# Schedules and draws.


def test_schedules_of_every_size_follow_their_rules():
    """All numbers of tokens and steps up to 64, against exact fractions."""
    for masked in range(1, 65):
        for steps in range(1, masked + 1):
            assert transfer_schedule(masked, steps) == [len(x) for x in np.array_split(np.arange(masked), steps)]
            left, rounded, cut = masked, [], []
            for step in range(steps):
                rounded.append(round(Fraction(left, steps - step)))
                left -= rounded[-1]
            assert rounded_schedule(masked, steps) == [count for count in rounded if count]
            left, levels = masked, [1 - Fraction(i, steps) * Fraction(999, 1000) for i in range(steps + 1)]
            for step in range(steps):
                share = 1 if step == steps - 1 else 1 - levels[step + 1] / levels[step]
                cut.append(int(left * share))
                left -= cut[-1]
            assert dream_schedule(masked, steps) == cut


def test_the_ratio_form_and_the_log_form_choose_alike():
    """exp(logit) / (-ln u)^T against logit + T g, in fp32, for logits up to 60."""
    rng = np.random.default_rng(1)
    for temperature in (0.2, 0.7, 1.0):
        logits, u = rng.uniform(-20, 60, (1000, 1, 200)), rng.random((1000, 1, 200))
        ratio = (np.exp(logits - 60) / (-np.log(u)) ** temperature).argmax(-1)
        noise = jnp.asarray(-np.log(-np.log(u)), jnp.float32)
        found = np.asarray(propose(jnp.asarray(logits, jnp.float32), noise, temperature))
        assert (found == ratio).mean() >= 0.999


def test_a_million_draws_follow_the_law_to_its_tail():
    """Fifty tokens, four of them with probability 1e-6, drawn by the samplers' own noise."""
    share = np.append(np.exp(np.linspace(0, -4, 46)), np.zeros(4))
    share = share / share.sum() * (1 - 4e-6) + np.append(np.zeros(46), np.full(4, 1e-6))
    logits = jnp.asarray(np.log(share), jnp.float32)

    def draw(step):
        noise = KeyedNoise(row_keys(jax.random.key(2), jnp.arange(50))).gumbel(step, 1000, 50)
        return jnp.bincount(propose(jnp.broadcast_to(logits, noise.shape), noise, 1.0).ravel(), length=50)

    count = np.asarray(jax.lax.map(draw, jnp.arange(20))).sum(0)
    count, wanted = np.append(count[:46], count[46:].sum()), 1e6 * np.append(share[:46], 4e-6)
    assert ((count - wanted) ** 2 / wanted).sum() < chi_square_limit(46)


def test_noise_keeps_its_tail_in_a_large_vocabulary():
    """Ten million draws: as many beyond 12 as the law says, and no two alike, as coarse uniforms would make them."""
    noise = KeyedNoise(row_keys(jax.random.key(3), jnp.arange(8)))
    draw = jax.jit(lambda step: jax.lax.top_k(noise.gumbel(step, 10, 126_464).reshape(-1), 200)[0])
    tail = np.asarray(draw(jnp.zeros(8, jnp.int32)))
    tail, wanted = tail[tail > 12], 10 * 8 * 126_464 * -math.expm1(-math.exp(-12))
    assert abs(len(tail) - wanted) < 4 * math.sqrt(wanted)
    assert len(np.unique(tail)) == len(tail)


def test_positions_at_a_rank_temperature_are_drawn_one_after_the_other_without_replacement():
    """Two of three positions by softmax(confidence / temperature), as `propose_block` scores them."""
    draws, temperature, confidence = 20_000, 0.5, np.array([0.9, 0.6, 0.5])
    logits = jnp.log(jnp.asarray(np.stack([confidence, 1 - confidence], axis=1), jnp.float32))
    sampler = SamplerConfig(rank_temperature=temperature)

    def choose(key):
        noise = KeyedNoise(row_keys(key, jnp.arange(draws)))
        batch = jnp.broadcast_to(logits, (draws, 3, 2))
        proposal = propose_block(batch, jnp.zeros(draws, jnp.int32), noise, sampler, 99)
        return top_ranked(proposal.score, jnp.ones((draws, 3), bool), 2)

    left_out = np.bincount(np.asarray(jax.jit(choose)(jax.random.key(5))).argmin(1), minlength=3)
    p = np.exp(confidence / temperature)
    p = p / p.sum()
    wanted = np.zeros(3)
    for i, j in itertools.permutations(range(3), 2):
        wanted[3 - i - j] += draws * p[i] * p[j] / (1 - p[i])
    assert ((left_out - wanted) ** 2 / wanted).sum() < chi_square_limit(2)


# Costs.


def tokens_pushed(prompt, length, model=MODELS["llada"], **settings):
    """Of one row whose sampler takes every step of its schedule."""
    sampler = SamplerConfig(**settings)
    again = [len(sampler.schedule_of(length)) - 1] * (length // sampler.block_length)
    return sum(size * count for size, count in forward_sizes(sampler, model, prompt, length, again).items())


def test_forward_sizes_are_those_of_the_caches():
    """200 prompt tokens, 256 to come in blocks of 32, 16 steps each: counts by hand."""
    shape = {"prompt": 200, "length": 256, "block_length": 32, "steps": 128}
    assert tokens_pushed(**shape) == tokens_pushed(**shape, cfg_scale=1.0) == 128 * 456
    assert tokens_pushed(**shape | {"steps": 0}, algorithm="roar") == 256 * 456
    suffixes = sum(range(32, 257, 32))
    assert tokens_pushed(**shape, cache="prefix") == 8 * 456 + 15 * suffixes == 20_928
    assert tokens_pushed(**shape, cache="prefix", suffix_window=32) == 8 * 456 + 15 * (7 * 64 + 32)
    assert tokens_pushed(**shape, cache="dual") == 8 * 456 + 120 * 32 == 7_488
    assert tokens_pushed(**shape, cache="dual", vicinity=16) == 8 * 456 + 120 * 64
    assert tokens_pushed(**shape, cache="dual", drafts=4) == 8 * 456 + 120 * 4 * 32
    assert tokens_pushed(**shape, cache="dual", model=MODELS["dream"]) == 8 * 456 + 120 * 33
    assert tokens_pushed(**shape | {"steps": 0}, algorithm="wino", level=0.6) == 256 * (456 + 32)
    block = {"prompt": 200, "length": 256, "block_length": 4, "cache": "block", "model": MODELS["sdar"]}
    assert tokens_pushed(**block) == 200 + 64 * (8 + 3 * 4)


@pytest.mark.parametrize(("family", "name"), [("llada", "prefix cache"), ("llada", "dual cache"), ("llada", "wino")])
def test_the_cost_model_counts_the_tokens_that_the_sampler_counts(family, name):
    """Forwards by block from the steps of one row alone; prompt without padding."""
    sampler = samplers(family)[name]
    found, steps = slow(family, sampler, 0), LENGTH // BLOCK
    rest = found.forwards / steps - 1
    sizes = forward_sizes(sampler, MODELS[family], 6, LENGTH, [rest] * steps)
    assert (
        sum(size * count for size, count in sizes.items()) == found.processed == on_mesh(family, name).full.processed[0]
    )


def test_flops_of_a_published_model_and_of_cached_forwards():
    """LLaDA-8B: 8,015,581,184 parameters less embedding and norms, twice a token, and 524,288 a pair of tokens."""
    llada = ModelConfig(vocab_size=126_464, d_model=4096, n_layers=32, n_heads=32, d_mlp=12_288)
    matmuls = 8_015_581_184 - 126_464 * 4096 - 65 * 4096
    assert forward_flops(llada, 1, 1, 1) == 2 * matmuls + 524_288
    head, layers = 2 * 126_464 * 4096, 2 * (matmuls - 126_464 * 4096)
    settings, full = {"block_length": 32, "steps": 128}, 456 * layers + 456**2 * 524_288
    cost = lambda **more: decoding_flops(SamplerConfig(**settings, **more), llada, 3, 200, 256, [15] * 8)  # noqa: E731
    assert cost() == 3 * 128 * (full + 32 * head)
    assert cost(cfg_scale=1.0) == 2 * cost()
    dual = 8 * full + 120 * (32 * layers + 32 * 456 * 524_288) + 128 * 32 * head
    assert cost(cache="dual") == 3 * dual
    suffixes = 15 * sum(range(32, 257, 32))
    assert cost(cache="prefix") == 3 * (8 * full + suffixes * (layers + 456 * 524_288) + 128 * 32 * head)


def test_the_rollout_of_a_cycle_is_billed_for_what_its_cache_recomputes():
    """`dmpo bench` beside the cost model, and a dual cache cheaper than none."""
    tables = {"model": {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_mlp": 16}, "rollout": {"completion_length": 16}}
    bills = {}
    for cache in ("none", "prefix", "dual"):
        setup = make_setup(resolve(tables | {"sampler": {"block_length": 4, "cache": cache}}))
        bills[cache] = phase_flops(setup, 24)["rollout"]
        assert bills[cache] == decoding_flops(setup.config.sampler, setup.model, 16 * 8, 24, 16, [3] * 4)
    assert bills["dual"] < bills["prefix"] < bills["none"]
