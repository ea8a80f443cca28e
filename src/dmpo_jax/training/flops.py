"""Analytic floating-point operations of each phase of a cycle, and the machine's measured matmul peak."""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.model.parameters import ModelConfig
from dmpo_jax.training.setup import Setup


def forward_flops(model: ModelConfig, rows: int, width: int, head_positions: int) -> float:
    """Matmul FLOPs of one forward of `rows` x `width` tokens with the head at `head_positions` of each row."""
    heads = model.n_heads * model.head_size
    kv = model.kv_heads * model.head_size
    per_token = model.n_layers * (2 * model.d_model * heads + 2 * model.d_model * kv + 3 * model.d_model * model.d_mlp)
    attention = model.n_layers * 2 * heads * width * width
    head = model.d_model * model.vocab_size * head_positions
    return 2.0 * rows * (per_token * width + attention + head)


def forward_sizes(
    sampler: SamplerConfig, model: ModelConfig, prompt_width: int, length: int, again: Sequence[float]
) -> dict[int, float]:
    """How many forwards of a decoding push so many tokens of a row through the network.

    again: for each block, its forwards after the first (all of which are as large as the first without a cache).
    """
    block, width, depth = sampler.block_length or length, prompt_width + length, sampler.drafts or 1
    shift, blocks = int(model.logits_shift), len(again)
    if sampler.cache == "none":
        return {width + (block if sampler.algorithm == "wino" else 0): blocks + sum(again)}
    if sampler.cache == "block":
        found = [(prompt_width, 1.0), (2 * block, blocks), (depth * block, sum(again))]
    elif sampler.cache == "dual":
        size = min(block + shift + 2 * sampler.vicinity, length + shift)
        found = [(width, blocks), (depth * size, sum(again))]
    else:
        reach = block + shift + (sampler.suffix_window or length)
        windows = [depth * min(reach, length + shift - number * block) for number in range(blocks)]
        found = [(width, blocks), *zip(windows, again, strict=True)]
    sizes: dict[int, float] = {}
    for size, count in found:
        sizes[size] = sizes.get(size, 0.0) + count
    return sizes


def scored_positions(sampler: SamplerConfig, length: int) -> int:
    """Positions of a row at which a forward's head is evaluated; for drafts, in a forward that checks them."""
    if sampler.algorithm == "roar":
        return 1
    return (sampler.block_length or length) * (2 if sampler.algorithm == "wino" else sampler.drafts or 1)


def decoding_flops(
    sampler: SamplerConfig, model: ModelConfig, rows: int, prompt_width: int, length: int, again: Sequence[float]
) -> float:
    """Matmul FLOPs of decoding `rows` completions with forwards as in `forward_sizes`, with their heads."""
    rows *= 2 if sampler.cfg_scale else 1
    width, total = prompt_width + length, 0.0
    for size, count in forward_sizes(sampler, model, prompt_width, length, again).items():
        cached = 0 if sampler.cache == "none" else width - size  # a token reads the whole canvas, not `size` slots
        reading = 4.0 * rows * model.n_layers * model.n_heads * model.head_size * size * cached
        total += count * (forward_flops(model, rows, size, 0) + reading)
    passes = len(again) + sum(again)
    return total + passes * forward_flops(model, rows, 0, scored_positions(sampler, length))


def phase_flops(setup: Setup, prompt_width: int) -> dict[str, float]:
    """FLOPs of rollout, prepare and all updates of one cycle; the recomputation of remat is not counted.

    An upper bound for the rollout: it counts every denoising step that the sampler may need, also where rows stop early, a
    step commits more than one token or drafts save forwards. A cached forward counts for what it recomputes. Prepare and
    updates are counted for `dmpo` and `denoise`; of other methods the rollout alone is returned.
    """
    config, model = setup.config, setup.model
    rows, length = config.rollout.prompts * config.rollout.group, config.rollout.completion_length
    width, settings = prompt_width + length, config.objective
    sampler = config.sampler
    # An antithetic pair of masks shares one evaluation of the head per completion position.
    pair = forward_flops(model, 2 * rows, width, length / 2)
    if settings.name == "denoise":
        return {"rollout": 0.0, "prepare": 0.0, "update": 3 * (settings.masks // 2) * pair}
    again = [len(sampler.schedule_of(length)) - 1] * (length // (sampler.block_length or length))
    found = {"rollout": decoding_flops(sampler, model, rows, prompt_width, length, again)}
    if settings.name == "dmpo":
        exact = length * forward_flops(model, rows, width, 1)  # of a trajectory, under the reference
        found["prepare"] = 2 * (settings.weight_masks // 2) * pair if settings.log_ratio == "elbo" else exact
        forwards = 3 + (
            settings.baseline == "model"
        )  # backward counts twice; the baseline is the rollout policy's forward
        found["update"] = settings.updates * forwards * (settings.masks // 2) * pair
    return found


def matmul_peak(size: int = 1024, repeats: int = 8) -> float:
    """FLOP/s of the best of several square fp32 matmuls of `size`, one on each of this process's devices at a time."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    copies = [jax.device_put(a, device) for device in jax.local_devices()]
    product = jax.jit(lambda x: x @ x)
    run = lambda: jax.block_until_ready([product(x) for x in copies])  # noqa: E731
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return len(copies) * 2.0 * size**3 / best
