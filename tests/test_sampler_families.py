"""Caches, block diffusion, shifted heads, drafts and stopping: what must hold whatever the model's weights are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_model import forward, log_softmax

from dmpo_jax.diffusion.canvas import Prompts, live_positions
from dmpo_jax.diffusion.masking import row_keys
from dmpo_jax.diffusion.sampler import SamplerConfig, sample
from dmpo_jax.diffusion.trajectory import trajectory_log_probs
from dmpo_jax.errors import UserError
from dmpo_jax.model.denoiser import logits as reading_order_logits
from dmpo_jax.model.parameters import ModelConfig, init_params
from dmpo_jax.parallel.mesh import make_mesh, per_shard

MASK, EOS, VOCAB = 12, 13, 14
BASE = {"vocab_size": VOCAB, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_mlp": 24, "rope_theta": 100.0}
SHAPES = {
    "llada": ModelConfig(**BASE),
    "dream": ModelConfig(**BASE, logits_shift=True, qkv_bias=True, family="dream"),
    "sdar": ModelConfig(**BASE, block_size=4, qk_norm=True, family="sdar"),
}
PROMPTS = Prompts(
    jnp.array([[1, 2, 3, 4, 5, 6], [7, 8, 0, 0, 0, 0], [9, 1, 1, 2, 0, 0], [3, 4, 5, 0, 0, 0]], jnp.int32),
    jnp.array([6, 2, 4, 3]),
)


@functools.cache
def model(family):
    """Random weights, with a say for context: as initialised, every mask would be read alike."""
    params = init_params(jax.random.key(4), SHAPES[family])
    blocks = {name: w * {"wo": 6.0, "w_down": 4.0, "wq": 3.0}.get(name, 1.0) for name, w in params["blocks"].items()}
    return SHAPES[family], {**params, "blocks": blocks, "head": params["head"] * 4.0}


def eager_to_end(family):
    """The model with the end of the sequence in the place of one of its favourite tokens."""
    _, params = model(family)
    return {**params, "head": params["head"].at[:, EOS].set(1.1 * params["head"][:, 11])}


@functools.cache
def program(family, length, sampler):
    config, _ = model(family)
    sampler.validate(length)
    sampler.validate_model(config)
    return jax.jit(
        lambda p, prompts, keys: sample(
            p, prompts, keys, length=length, mask_id=MASK, eos_id=EOS, sampler=sampler, config=config
        )
    )


def run(family, length=12, prompts=PROMPTS, key=0, params=None, **settings):
    sampler = SamplerConfig(**{"block_length": 4, "stop_at_eos": False} | settings)
    keys = row_keys(jax.random.key(key), jnp.arange(prompts.length.shape[0]))
    params = model(family)[1] if params is None else params
    return jax.device_get(program(family, length, sampler)(params, prompts, keys))


def same(one, other, fields=("completion", "step")):
    return all(np.array_equal(getattr(one, field), getattr(other, field)) for field in fields)


# Caches.


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_caches_agree_where_they_must(family):
    rule = {"length": 8, "commit": "threshold", "level": 0.7}
    plain, prefix, dual = (run(family, cache=cache, block_length=8, **rule) for cache in ("none", "prefix", "dual"))
    assert same(prefix, dual, ("completion", "step", "forwards"))  # nothing follows the only block
    first = plain.step == 0  # decoded before anything was stale
    assert first.any() and np.array_equal(first, prefix.step == 0)
    assert np.array_equal(plain.completion[first], prefix.completion[first])
    # A window as wide as the suffix hides nothing; a dual cache sees the suffix as it was.
    prefix = run(family, cache="prefix", **rule)
    assert same(run(family, cache="prefix", suffix_window=4, **rule), prefix)
    assert not np.array_equal(run(family, cache="dual", **rule).log_prob, prefix.log_prob)


def test_a_window_that_hides_the_suffix_changes_the_text():
    rule = {"commit": "threshold", "level": 0.7, "cache": "prefix"}
    assert not same(run("llada", suffix_window=1, **rule), run("llada", **rule))


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_one_step_a_block_needs_no_cache_to_be_exact(family):
    plain, *cached = (run(family, steps=3, cache=cache) for cache in ("none", "prefix", "dual"))
    for trace in cached:
        assert same(plain, trace, ("completion", "step", "forwards"))
        np.testing.assert_allclose(plain.log_prob, trace.log_prob, atol=1e-4)


def test_block_cache_is_exact_and_equals_decoding_in_reading_order():
    """SDAR: every row by itself, from a full block-causal forward of the padded sequence at each step."""
    config, params = model("sdar")
    jitted = jax.jit(lambda tokens, lengths: reading_order_logits(params, tokens, config, lengths))
    for settings, rule in (({"steps": 6}, "static"), ({"steps": 6, "commit": "dynamic", "level": 0.3}, "dynamic")):
        cached, plain = (run("sdar", cache=cache, **settings) for cache in ("block", "none"))
        assert same(cached, plain)
        np.testing.assert_allclose(cached.log_prob, plain.log_prob, atol=2e-5)
        assert np.array_equal(cached.forwards, plain.forwards + 1)  # the prompt's
        for row in range(4):
            prompt = PROMPTS.tokens[row, : PROMPTS.length[row]].tolist()
            end = -(-(len(prompt) + 12) // 4) * 4
            tokens, forwards = prompt + [MASK] * (end - len(prompt)), 0
            for start in range(len(prompt) // 4 * 4, end, 4):
                while masked := [i for i in range(start, start + 4) if tokens[i] == MASK]:
                    padded = jnp.asarray([tokens + [0] * (20 - end)])
                    out = np.array(jitted(padded, jnp.array([end])), np.float64)[0]
                    out[:, MASK] = -np.inf
                    log_probs = log_softmax(out)
                    forwards += 1
                    order = sorted(masked, key=lambda i: -log_probs[i].max())
                    sure = [i for i in masked if log_probs[i].max() > np.log(0.3)]
                    chosen = sure if rule == "dynamic" and len(sure) >= 2 else order[:2]
                    for i in chosen:
                        tokens[i] = int(log_probs[i].argmax())
            assert cached.completion[row].tolist() == tokens[len(prompt) : len(prompt) + 12]
            assert cached.forwards[row] == forwards + 1


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "left_to_right", "steps": 6},
        {"algorithm": "entropy", "commit": "entropy_sum", "level": 0.35},
        {"algorithm": "entropy", "commit": "entropy_bound", "level": 0.5},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "confidence": "filtered", "commit": "dynamic", "level": 0.5},
        {"steps": 3, "temperature": 1.0},
    ],
)
def test_block_diffusion_rules_with_and_without_the_cache(settings):
    cached, plain = (run("sdar", cache=cache, **settings) for cache in ("block", "none"))
    assert same(cached, plain)
    if settings.get("algorithm") == "left_to_right":
        assert (np.diff(cached.step.reshape(4, -1), axis=1) >= 0).all()


# Dream.


@pytest.mark.parametrize("algorithm", ["low_confidence", "margin", "entropy"])
def test_dream_equals_its_description(algorithm):
    config, params = model("dream")
    trace = run("dream", length=8, block_length=8, steps=4, schedule="dream", algorithm=algorithm)
    for row in range(4):
        prompt = PROMPTS.tokens[row, : PROMPTS.length[row]].tolist()
        tokens = prompt + [MASK] * 8
        for count in (1, 2, 2, 3):  # Dream's schedule of 8 tokens in 4 steps
            log_probs = forward(params, tokens, config)
            log_probs = np.concatenate([log_probs[:1], log_probs[:-1]])
            log_probs[:, MASK] = -np.inf
            p = np.exp(log_softmax(log_probs))
            top = np.sort(p, axis=1)
            confidence = {
                "low_confidence": top[:, -1],
                "margin": top[:, -1] - top[:, -2],
                "entropy": (p * np.log(p + 1e-10)).sum(1),
            }[algorithm]
            masked = [i for i, t in enumerate(tokens) if t == MASK]
            for i in sorted(masked, key=lambda i: -confidence[i])[:count]:
                tokens[i] = int(p[i].argmax())
        assert trace.completion[row].tolist() == tokens[len(prompt) :]
    assert (trace.forwards == 4).all()


def test_origin_commits_every_position_by_itself():
    many = Prompts(jnp.tile(PROMPTS.tokens[:1], (2000, 1)), jnp.full((2000,), 6))
    settings = {"length": 4, "block_length": 4, "steps": 2, "algorithm": "origin", "temperature": 1.0, "prompts": many}
    trace = run("dream", **settings)
    assert (trace.completion != MASK).all()
    # The first of two steps: noise level from 1 to (1 + 0.001) / 2.
    assert (trace.step == 0).mean() == pytest.approx(1 - 1.001 / 2, abs=0.03)


def test_ranks_drawn_at_a_temperature():
    settings = {"steps": 6, "rank_temperature": 0.5}
    assert not same(run("dream", key=0, **settings), run("dream", key=1, **settings))
    cold = run("dream", key=0, steps=6, rank_temperature=1e-6)
    assert same(cold, run("dream", steps=6))


# Drafts.


@pytest.mark.parametrize(
    ("family", "cache", "drafts"),
    [("llada", "dual", 3), ("llada", "prefix", 2), ("dream", "dual", 4), ("sdar", "block", 4)],
)
def test_drafts_change_nothing_but_the_number_of_forwards(family, cache, drafts):
    settings = {"block_length": 8, "length": 16} if family != "sdar" else {}
    settings |= {"algorithm": "margin", "steps": 8} if family == "dream" else {"trace_entropy": True}
    plain = run(family, cache=cache, **settings)
    drafted = run(family, cache=cache, drafts=drafts, **settings)
    assert same(plain, drafted)
    for field in ("log_prob", "entropy"):
        if getattr(plain, field) is not None:
            np.testing.assert_allclose(getattr(plain, field), getattr(drafted, field), atol=2e-5)
    assert (drafted.forwards <= plain.forwards).all() and drafted.forwards.sum() < plain.forwards.sum()


# Eos, stopping, rows, traces.

WAYS = {
    "threshold": ("llada", {"commit": "threshold", "level": 0.3, "temperature": 0.7}),
    "frechet, prefix": ("llada", {"commit": "frechet", "level": 0.05, "cache": "prefix"}),
    "factor, dual": ("llada", {"commit": "factor", "level": 1.2, "cache": "dual", "temperature": 0.7}),
    "streaming": ("llada", {
        "commit": "threshold", "level": 0.4, "level_decay": 0.5, "cache": "prefix", "suffix_window": 3,
    }),
    "vicinity": ("llada", {"steps": 6, "cache": "dual", "vicinity": 2}),
    "wino": ("llada", {"algorithm": "wino", "level": 0.3, "revoke": 0.35}),
    "guided": ("llada", {"steps": 6, "cfg_scale": 1.0, "cache": "dual"}),
    "drafts": ("llada", {"drafts": 3, "cache": "dual"}),
    "dream": ("dream", {"algorithm": "entropy", "commit": "entropy_bound", "level": 0.5, "cache": "dual"}),
    "sdar": ("sdar", {"commit": "dynamic", "level": 0.4, "cache": "block"}),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_rows_by_themselves_early_stops_and_filled_completions(way):
    family, settings = WAYS[way]
    ending = eager_to_end(family)
    full = run(family, params=ending, **settings)
    assert not (full.completion == MASK).any() and (full.step >= 0).all()
    stopped = run(family, params=ending, **settings | {"stop_at_eos": True})
    live = np.asarray(live_positions(jnp.asarray(full.completion), EOS))
    assert np.array_equal(full.completion[live], stopped.completion[live])
    assert (stopped.forwards <= full.forwards).all() and stopped.forwards.sum() < full.forwards.sum()
    others = Prompts(PROMPTS.tokens[jnp.array([1, 3, 2, 0])], PROMPTS.length[jnp.array([1, 3, 2, 0])])
    elsewhere = run(family, params=ending, prompts=others, **settings)
    for field in ("completion", "step", "forwards", "processed"):
        assert np.array_equal(getattr(elsewhere, field)[2], getattr(full, field)[2])


def test_an_end_of_sequence_that_is_proposed_comes_last_or_never():
    config, ending = model("llada")[0], eager_to_end("llada")
    plain, last, never = (run("llada", params=ending, block_length=12, eos=eos) for eos in ("plain", "last", "forbid"))
    assert (plain.completion == EOS).any() and not (never.completion == EOS).any()
    assert (last.completion == EOS).any() and not same(plain, last)
    for row in range(4):
        prompt, step = PROMPTS.tokens[row, : PROMPTS.length[row]].tolist(), last.step[row]
        ended = last.completion[row] == EOS
        for now in step[ended]:  # when an eos was committed, nothing but eos was proposed
            shown = [MASK if s >= now else t for s, t in zip(step, last.completion[row], strict=True)]
            out = forward(ending, prompt + shown, config)[len(prompt) :]
            out[:, MASK] = -np.inf
            assert (out.argmax(1)[step >= now] == EOS).all()


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 6, "temperature": 0.7, "top_k": 6, "top_p": 0.9},
        {"temperature": 0.7, "commit": "threshold", "level": 0.3},
        {"algorithm": "roar", "temperature": 1.0},
    ],
)
def test_traces_hold_the_law_that_was_sampled(settings):
    config, params = model("llada")
    trace = run("llada", trace_entropy=True, **settings)
    law = {key: settings[key] for key in ("temperature", "top_k", "top_p") if key in settings}
    for options, wanted in (({}, trace.log_prob), (law, trace.sampled_log_prob)):
        found = trajectory_log_probs(
            params, PROMPTS, jnp.asarray(trace.completion), jnp.asarray(trace.step), steps=12, tokens_per_step=4,
            mask_id=MASK, config=config, **options,
        )  # fmt: skip
        np.testing.assert_allclose(found, wanted, atol=2e-5)
    for position in (0, 7):
        now = trace.step[0, position]
        shown = [MASK if s >= now else t for s, t in zip(trace.step[0], trace.completion[0], strict=True)]
        law = forward(params, [*PROMPTS.tokens[0].tolist(), *shown], config)[6 + position]
        law[MASK] = -np.inf
        p = np.delete(np.exp(log_softmax(law)), MASK)
        assert trace.entropy[0, position] == pytest.approx(-(p * np.log(p)).sum(), abs=2e-5)


def test_forwards_and_tokens_are_counted():
    for cache, wanted in (
        ("none", [6 * 18, 6 * 14]),  # lengths 6 + 12 and 2 + 12, two forwards in each of three blocks
        ("prefix", [3 * 18 + 12 + 8 + 4, 3 * 14 + 12 + 8 + 4]),
        ("dual", [3 * 18 + 3 * 4, 3 * 14 + 3 * 4]),
    ):
        trace = run("llada", steps=6, cache=cache)
        assert (trace.forwards == 6).all() and trace.processed[:2].tolist() == wanted
    trace = run("sdar", steps=6, cache="block")
    # Row 0: prompt 6 = a block of 4 and 2 tokens more, of whose block 2 are left: one step, then 2 in three blocks, the
    # last two positions beyond the completion. Row 2: prompt 4, three whole blocks.
    assert trace.forwards[[0, 2]].tolist() == [1 + 1 + 2 + 2 + 2, 1 + 2 + 2 + 2]
    assert trace.processed[[0, 2]].tolist() == [4 + 8 + 3 * (8 + 4), 4 + 3 * (8 + 4)]


# One program.


@pytest.mark.parametrize("way", ["frechet, prefix", "drafts", "wino", "sdar"])
def test_one_compilation_and_no_collective_in_the_loop(way):
    family, settings = WAYS[way]
    config, params = model(family)
    sampler = SamplerConfig(**{"block_length": 4, "stop_at_eos": False} | settings)
    mesh = make_mesh((8, 1, 1))

    def on_shard(whole, local):
        prompts, rows = local
        return sample(
            whole[0], prompts, row_keys(whole[1], rows), length=12, mask_id=MASK, eos_id=EOS, sampler=sampler,
            config=config,
        )  # fmt: skip

    on_mesh = jax.jit(lambda p, key, prompts, rows: per_shard(on_shard, (p, key), (prompts, rows)))
    prompts = jax.tree.map(lambda x: jnp.concatenate([x, x]), PROMPTS)
    with jax.set_mesh(mesh):
        compiled = on_mesh.lower(params, jax.random.key(0), prompts, jnp.arange(8)).compile()
    text = compiled.as_text()
    for collective in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert f" {collective}" not in text, collective
    call = program(family, 12, sampler)
    for shift in (0, 1):  # other lengths, other blocks: the same program
        moved = PROMPTS._replace(length=jnp.maximum(PROMPTS.length - shift, 1))
        call(params, moved, row_keys(jax.random.key(shift), jnp.arange(4)))
    assert call._cache_size() == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"commit": "threshold"}, ["sampler.level", "threshold"]),
        ({"level": 0.9}, ["sampler.level", "fixed schedule"]),
        ({"commit": "threshold", "level": 0.9, "steps": 8}, ["sampler.steps", "threshold"]),
        ({"commit": "entropy_bound", "level": 0.9}, ["sampler.commit", "entropy"]),
        ({"algorithm": "roar", "commit": "factor", "level": 1.0}, ["sampler.commit", "roar"]),
        ({"algorithm": "roar", "cache": "dual"}, ["sampler.cache", "roar"]),
        ({"top_p": 0.9}, ["sampler.top_p", "temperature"]),
        ({"top_k": 5}, ["sampler.top_k", "temperature"]),
        ({"confidence": "filtered", "temperature": 0.5}, ["sampler.confidence", "top_k"]),
        ({"vicinity": 4}, ["sampler.vicinity", "dual"]),
        ({"suffix_window": 4, "cache": "dual"}, ["sampler.suffix_window", "prefix"]),
        ({"drafts": 4}, ["sampler.drafts", "sampler.cache"]),
        ({"drafts": 4, "cache": "dual", "temperature": 0.5}, ["sampler.drafts", "temperature"]),
        ({"revoke": 0.4}, ["sampler.revoke", "wino"]),
        ({"algorithm": "wino", "level": 0.6, "cache": "dual"}, ["sampler.cache", "wino"]),
        ({"eos": "last", "algorithm": "random"}, ["sampler.eos", "random"]),
        ({"level_decay": 0.4}, ["sampler.level_decay", "threshold"]),
        ({"cache": "blocks"}, ["sampler.cache", "dual"]),
        ({"top_p": 0.0}, ["sampler.top_p"]),
        ({"schedule": "dream", "commit": "threshold", "level": 0.5}, ["sampler.schedule", "threshold"]),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, words):
    with pytest.raises(UserError) as error:
        SamplerConfig(**settings).validate(8)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("family", "settings", "word"),
    [
        ("sdar", {"block_length": 8}, "block_size"),
        ("sdar", {"cache": "dual"}, '"block"'),
        ("llada", {"cache": "block"}, "block_size"),
        ("sdar", {"algorithm": "roar"}, "sampler.algorithm"),
        ("dream", {"algorithm": "wino", "level": 0.5}, "sampler.algorithm"),
        ("sdar", {"cfg_scale": 1.0}, "sampler.cfg_scale"),
    ],
)
def test_samplers_that_do_not_suit_a_family_are_refused(family, settings, word):
    sampler = dataclasses.replace(SamplerConfig(block_length=4), **settings)
    with pytest.raises(UserError, match=word):
        sampler.validate_model(SHAPES[family])
