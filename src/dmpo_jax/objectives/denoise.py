"""Masked diffusion on given answers: pretraining and supervised fine-tuning.

loss = -ELBO(answer | prompt) / L, in nats per token (LLaDA, arXiv 2502.09992, eq. 3 and 5).
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.objectives import checks
from dmpo_jax.objectives.objective import Context, Prepared, Rollout, normalizer, rollout_elbo

ROLLOUT = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the `denoise` objective."""

    name: str = "denoise"
    masks: int = 2  # replicates per answer and update; antithetic pairs
    mask_law: str = "exact"
    train_after_eos: bool = True  # the model must learn to fill the rest with end-of-sequence tokens
    normalizer: str = "canvas"

    updates: ClassVar[int] = 1
    reference_sync: ClassVar[int] = 0  # there is no reference

    def validate(self, group: int, sampler: SamplerConfig) -> None:
        """Raises UserError on a setting out of range."""
        checks.masks("masks", self.masks, self.mask_law)
        checks.one_of("normalizer", self.normalizer, ("canvas", "live"))
        if group != 1:
            raise UserError(f"rollout.group = {group}: denoise learns from one demonstration a prompt, set it to 1")


def prepare(params, reference, rollout: Rollout, key, config: Config, context: Context) -> Prepared:
    """Nothing to prepare: demonstrations need no weights."""
    return Prepared(groups=(), whole=(), metrics={})


def loss(
    params: dict, rollout: Rollout, prepared: Prepared, key: jax.Array, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss in nats per token, and no metrics of its own."""
    live = jnp.ones_like(rollout.live) if config.train_after_eos else rollout.live
    value = rollout_elbo(params, rollout, live, key, config.masks, config.mask_law, context)
    return -jnp.mean(value / normalizer(live, config.normalizer)), {}
