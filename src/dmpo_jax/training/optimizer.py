"""The optimiser: AdamW behind a global-norm clip."""

import optax

from dmpo_jax.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig, updates: int) -> optax.GradientTransformation:
    """AdamW for a run of so many updates in all."""
    peak = config.learning_rate
    if config.schedule == "cosine":
        schedule = optax.warmup_cosine_decay_schedule(0.0 if config.warmup else peak, peak, config.warmup, updates)
    else:
        schedule = optax.schedules.join_schedules(
            [optax.linear_schedule(0.0, peak, config.warmup), optax.constant_schedule(peak)], [config.warmup]
        )
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(schedule, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay),
    )
