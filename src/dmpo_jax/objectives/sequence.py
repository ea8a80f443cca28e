"""What the sequence-level ratio methods ESPO and GDPO share: settings, and ELBOs of whole completions on the same masks."""

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.masking import Masks
from dmpo_jax.objectives import policy_gradient as pg
from dmpo_jax.objectives.importance import scored_live
from dmpo_jax.objectives.objective import Context, Prepared, Rollout, elbo_on


def live_length(rollout: Rollout, config) -> jax.Array:
    """`f32[P, N]`: tokens whose likelihood counts, at least 1."""
    return jnp.maximum(jnp.sum(scored_live(rollout, config), axis=-1), 1).astype(jnp.float32)


def elbo_changes(
    params: dict, rollout: Rollout, prepared: Prepared, masks: Masks, config, context: Context
) -> tuple[jax.Array, jax.Array]:
    """(E_theta - E_old, E_theta - E_ref) `f32[P, N]` in nats for given masks; the latter is 0 where beta is."""
    live, frozen = scored_live(rollout, config), jax.lax.stop_gradient(prepared.whole)
    value = elbo_on(params, rollout, live, masks, context)
    change = value - elbo_on(frozen["old"], rollout, live, masks, context)
    if not config.beta:
        return change, jnp.zeros_like(change)
    return change, value - elbo_on(frozen["reference"], rollout, live, masks, context)


def penalised(
    surrogate: jax.Array, log_ratio: jax.Array, kl: jax.Array, rollout: Rollout, beta: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """-mean(surrogate) + beta mean(kl) of `f32[P, N]`, and the metrics of the log-ratio that was clipped."""
    metrics = pg.ratio_metrics(log_ratio, rollout.reward)
    loss = -jnp.mean(surrogate)
    if not beta:
        return loss, metrics
    return loss + beta * jnp.mean(kl), metrics | {"kl": jnp.mean(kl)}
