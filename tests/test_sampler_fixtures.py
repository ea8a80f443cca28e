"""Every decoding algorithm against what the official code gave on a tiny LLaDA model: tokens and forwards, equal."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmpo_jax import load_pretrained
from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.diffusion.sampler import SamplerConfig, sample
from dmpo_jax.diffusion.trajectory import trajectory_log_probs

FIXTURES = Path(__file__).resolve().parents[2] / "shared" / "fixtures"
pytestmark = pytest.mark.skipif(not FIXTURES.exists(), reason="../shared/fixtures is absent")
MASK, EOS, LENGTH = 505, 500, 32

CASES = {
    "llada_s32_b16": {"steps": 32},
    "llada_s10_b16": {"steps": 10},
    "pd_s16_b16": {"steps": 16},
    "pd_s8_b32": {"steps": 8, "block_length": 32},
    "pd_random_s16_b16": {"steps": 16, "algorithm": "random"},
    "pd_thr0.6_b16": {"commit": "threshold", "level": 0.6},
    "pd_factor1.0_b16_row0": {"commit": "published_factor", "level": 1.0},
    "prefix_s32_b16": {"steps": 32, "cache": "prefix"},
    "prefix_s10_b16": {"steps": 10, "cache": "prefix"},
    "prefix_thr0.9_b16": {"commit": "threshold", "level": 0.9, "cache": "prefix"},
    "prefix_thr0.4_b16": {"commit": "threshold", "level": 0.4, "cache": "prefix"},
    "prefix_factor2.0_b16_row0": {"commit": "published_factor", "level": 2.0, "cache": "prefix"},
    "dual_s32_b16": {"steps": 32, "cache": "dual"},
    "dual_s10_b16": {"steps": 10, "cache": "dual"},
    "dual_thr0.9_b16": {"commit": "threshold", "level": 0.9, "cache": "dual"},
    "dual_thr0.4_b16": {"commit": "threshold", "level": 0.4, "cache": "dual"},
    "dual_factor2.0_b16_row0": {"commit": "published_factor", "level": 2.0, "cache": "dual"},
    "llada_cfg1.5_s16_b16": {"steps": 16, "cfg_scale": 1.5},
    "wino_0.4_0.6_b16": {"algorithm": "wino", "level": 0.4, "revoke": 0.6},
    "wino_0.6_0.9_b32": {"algorithm": "wino", "level": 0.6, "revoke": 0.9, "block_length": 32},
    "pd_T0.2_s16_b16": {"steps": 16, "temperature": 0.2},
    "prefix_T0.2_s16_b16": {"steps": 16, "temperature": 0.2, "cache": "prefix"},
    "dual_T0.2_s16_b16": {"steps": 16, "temperature": 0.2, "cache": "dual"},
}


@functools.cache
def fixture():
    return *load_pretrained(FIXTURES / "model"), np.load(FIXTURES / "samplers.npz")


class Given:
    """Noise from arrays: uniforms `[step, B, width, V]` of proposals, `[step, B, width]` of ranks, `[block, B, width]`."""

    def __init__(self, gumbel=None, uniform=None, order=None, block=16):
        self._gumbel, self._uniform, self._order, self._block = gumbel, uniform, order, block

    def _rows(self, array, step):
        return jax.vmap(lambda a, s: a[s], in_axes=(1, 0))(array, step)

    def gumbel(self, step, width, vocab):
        return self._rows(self._gumbel, step)

    def uniform(self, step, width):
        return self._rows(self._uniform, step)

    def order(self, start, width):
        return self._order[start // self._block]


def official_uniforms(shapes, per_call, chosen, windows):
    """RandomState(123)'s draws in call order: `per_call` of each shape, of which number `chosen` counts."""
    stream, out = np.random.RandomState(123), []
    for shape, calls, window in zip(shapes, per_call, windows, strict=True):
        draws = [stream.random_sample(shape) for _ in range(calls)]
        out.append(draws[chosen if calls > 1 else 0][:, window])
    u = np.stack(out)
    return jnp.asarray(-np.log(-np.log(u + 1e-10) + 1e-10), jnp.float32)


def noise_of(name, arrays):
    if "random" in name:
        rand = arrays[f"{name}/rand"]
        blocks = [rand[i, :, 24 + i // 8 * 16 :][:, :16] for i in range(16)]
        return Given(uniform=jnp.asarray(np.stack(blocks)))
    if "_T" not in name:
        return None
    starts = [24 + i // 8 * 16 for i in range(16)]
    whole = (4, 56, 512)
    if name.startswith("pd"):
        shapes, calls = [whole] * 16, [1] * 16
        windows = [slice(s, s + 16) for s in starts]
    elif name.startswith("prefix"):
        shapes = [whole if i % 8 == 0 else (4, 56 - s, 512) for i, s in enumerate(starts)]
        calls = [1 if i % 8 == 0 else 2 for i in range(16)]
        windows = [slice(s, s + 16) if i % 8 == 0 else slice(0, 16) for i, s in enumerate(starts)]
    else:
        shapes = [whole if i % 8 == 0 else (4, 16, 512) for i in range(16)]
        calls = [1] * 16
        windows = [slice(s, s + 16) if i % 8 == 0 else slice(0, 16) for i, s in enumerate(starts)]
    return Given(gumbel=official_uniforms(shapes, calls, 1, windows))


def forwards_of(trace, rows, block):
    """(every row's forwards, the batch's) counted from the official model calls: those that find a mask in the block."""
    per_row = np.zeros(rows, int)
    for call in trace:
        call = call[:rows]
        completion = call[:, 24:56]
        first = np.where((completion == MASK).any(0))[0]
        start = first[0] // block * block
        per_row += (completion[:, start : start + block] == MASK).any(1)
    return per_row, len(trace)


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_forwards_equal_the_official_ones(name):
    config, params, arrays = fixture()
    wanted = arrays[f"{name}/tokens"].astype(int)
    settings = {"block_length": 16, "stop_at_eos": False} | CASES[name]
    sampler = SamplerConfig(**settings)
    sampler.validate(LENGTH)
    sampler.validate_model(config)
    rows = len(wanted)
    prompts = Prompts(jnp.asarray(arrays["prompts"][:rows], jnp.int32), jnp.full((rows,), 24))
    noise, block = noise_of(name, arrays), sampler.block_length
    keys = jax.random.split(jax.random.key(0), rows)
    call = functools.partial(
        sample, length=LENGTH, mask_id=MASK, eos_id=EOS, sampler=sampler, config=config, noise=noise
    )
    trace = jax.device_get(jax.jit(call)(params, prompts, keys))
    assert np.array_equal(trace.completion, wanted[:, 24:])
    nfe = int(arrays[f"{name}/nfe"])
    if sampler.algorithm == "wino":  # decoded row by row
        assert trace.forwards.sum() == nfe
        return
    assert (trace.passes == nfe).all()
    if sampler.cache == "none":
        assert np.array_equal(trace.forwards, forwards_of(arrays[f"{name}/trace"], rows, block)[0])


def adapted(params, adapter):
    """Parameters with the fixture's adapter merged in: W + scale * B A."""
    names = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "up_proj": "w_up"}
    blocks = dict(params["blocks"])
    for official, own in names.items():
        pair = [[adapter[f"model.transformer.blocks.{i}.{official}.lora_{x}.weight"] for x in "BA"] for i in range(4)]
        whole = [float(adapter["scale"]) * b @ a for b, a in pair]
        change = np.stack(whole).swapaxes(1, 2)
        blocks[own] = blocks[own] + change.reshape(blocks[own].shape)
    return {**params, "blocks": blocks}


@pytest.mark.parametrize("block", [32, 1])
def test_roar_decodes_and_scores_as_the_official_one(block):
    config, base, arrays = fixture()
    name = f"roar_b{block}"
    params = adapted(base, np.load(FIXTURES / "lora.npz"))
    prompts = Prompts(jnp.asarray(arrays["prompts"], jnp.int32), jnp.full((4,), 24))
    noise = Given(order=-jnp.asarray(arrays[f"{name}/rand"]), block=block)  # there the smallest comes first
    sampler = SamplerConfig(algorithm="roar", block_length=block, stop_at_eos=False)
    call = functools.partial(
        sample, length=LENGTH, mask_id=MASK, eos_id=EOS, sampler=sampler, config=config, noise=noise
    )
    trace = jax.jit(call)(params, prompts, None)
    assert np.array_equal(trace.completion, arrays[f"{name}/tokens"][:, 24:])
    assert (trace.forwards == LENGTH).all()  # the official count has the reference model's forwards too
    assert int(arrays[f"{name}/nfe"]) == 2 * LENGTH
    np.testing.assert_allclose(trace.log_prob, arrays[f"{name}/log_prob_cur"], atol=1e-4)
    again = functools.partial(trajectory_log_probs, steps=32, tokens_per_step=1, mask_id=MASK, config=config)
    found = jax.jit(again)(base, prompts, trace.completion, trace.step)
    np.testing.assert_allclose(found, arrays[f"{name}/log_prob_pre"], atol=1e-4)
