"""Whether a configuration can fit in memory at all, judged before anything is placed there."""

import os

import jax

from dmpo_jax.config import Config
from dmpo_jax.errors import UserError
from dmpo_jax.model.lora import adapter_specs
from dmpo_jax.model.parameters import count, count_params
from dmpo_jax.objectives import OBJECTIVES

STORED_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "nf4": 0.5}  # of a frozen parameter
TRACE_BYTES = 17  # of a completion token: id, step and two log-probabilities of 4, and whether it counts


def check_memory(config: Config, rows: int = 0) -> None:
    """Raises UserError where the least that a configuration needs exceeds the memory of all devices (on CPUs, the host's).

    With `rows`, so many completions are decoded at once and nothing is trained. What is counted are lower bounds, so
    what passes may still not fit; where a backend does not say how much it has, everything passes.
    """
    state, work = (_frozen(config), _decoding(config, rows)) if rows else (_trained(config), _cycle(config))
    there = _memory()
    if there is None or state + work <= there:
        return
    remedy = "lower the model's sizes (model.n_layers, d_model, d_mlp, vocab_size)"
    if work > state:
        first = "evaluation.batch" if rows else "rollout.prompts, rollout.group, evaluation.batch or the masks"
        remedy = f"lower rollout.completion_length, {first}"
    raise UserError(
        f"at least {state / 1e9:,.2f} GB for parameters and what is kept with them and {work / 1e9:,.2f} GB for completions "
        f"are needed, but there are {there / 1e9:,.2f} GB in all; {remedy}, or use more devices"
    )


def _memory() -> int | None:
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        return limit * jax.device_count()
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * jax.process_count()
    return None


def _frozen(config: Config) -> float:
    return count_params(config.model) * STORED_BYTES[config.model.base]


def _trained(config: Config) -> float:
    """Parameters, gradient, two moments and the reference; a frozen base is its own reference."""
    if config.lora.rank:
        return _frozen(config) + 16 * count(adapter_specs(config.lora, config.model))
    return count_params(config.model) * 4 * (5 if OBJECTIVES[config.objective.name].ROLLOUT else 4)


def _cycle(config: Config) -> float:
    """The hungriest of a rollout, an evaluation, the ELBOs before the updates, and an update."""
    rows, objective = config.rollout.prompts * config.rollout.group, config.objective
    residual, scores = _forward(config)
    update = getattr(objective, "masks", 1) * (residual * config.model.n_layers + scores) / config.rollout.accumulation
    before = getattr(objective, "weight_masks", 1) * (residual + scores)
    rollout = _decoding(config, rows) if OBJECTIVES[objective.name].ROLLOUT else 0
    return max(rollout, _decoding(config, config.evaluation.batch), rows * before, rows * update)


def _decoding(config: Config, rows: int) -> float:
    """Traces, and the larger of a forward's stream and scores and a block's fp32 logits."""
    length, sampler = config.rollout.completion_length, config.sampler
    residual, scores = _forward(config)
    scored = 1 if sampler.algorithm == "roar" else sampler.block_length or length
    stream = 0 if sampler.cache == "block" else residual + scores
    return rows * (TRACE_BYTES * length + max(stream, 4 * scored * config.model.vocab_size))


def _forward(config: Config) -> tuple[int, int]:
    """Bytes a row of the residual stream, which the backward pass keeps for every layer, and of one layer's fp32 scores."""
    model = config.model
    width = config.rollout.completion_length + min(config.rollout.prompt_buckets, default=0)
    size = 2 if model.dtype == "bfloat16" else 4
    return width * model.d_model * size, 4 * model.n_heads * width * width
