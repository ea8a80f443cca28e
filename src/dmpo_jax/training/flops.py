"""Analytic floating-point operations of each phase of a cycle, and the machine's measured matmul peak."""

import time

import jax
import jax.numpy as jnp

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


def phase_flops(setup: Setup, prompt_width: int) -> dict[str, float]:
    """FLOPs of rollout, prepare and all updates of one cycle; the recomputation of remat is not counted.

    An upper bound for the rollout: it counts every denoising step as a forward of the whole canvas, also where rows stop
    early or a cached sampler recomputes only a part.
    """
    config, model = setup.config, setup.model
    rows, length = config.rollout.prompts * config.rollout.group, config.rollout.completion_length
    width, settings = prompt_width + length, config.objective
    steps, block = config.sampler.steps or length, config.sampler.block_length or length
    scored = 1 if config.sampler.algorithm == "roar" else block
    # An antithetic pair of masks shares one evaluation of the head per completion position.
    pair = lambda: forward_flops(model, 2 * rows, width, length / 2)  # noqa: E731
    update = 3 * settings.masks // 2 * pair()
    found = {"rollout": 0.0, "prepare": 0.0, "update": settings.updates * update}
    if setup.objective.ROLLOUT:
        found["rollout"] = steps * forward_flops(model, rows, width, scored)
        if settings.log_ratio == "elbo":
            found["prepare"] = 2 * (settings.weight_masks // 2) * pair()
        else:
            found["prepare"] = length * forward_flops(model, rows, width, 1)
        if settings.baseline == "model":
            found["update"] += settings.updates * (settings.masks // 2) * pair()
    return found


def matmul_peak(size: int = 1024, repeats: int = 8) -> float:
    """FLOP/s of the best of several square fp32 matmuls of `size`, on the default device."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.float32)
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready(product(a))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(product(a))
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best
