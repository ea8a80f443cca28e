"""What the policy-gradient methods share: advantages of a group, probability ratios, the clipped surrogate and KL terms.

Advantages are `f32[P, N]`; ratios and surrogates have any shape that leads with `[P, N]`, per sequence or per token.
"""

import jax
import jax.numpy as jnp

from dmpo_jax.objectives import group
from dmpo_jax.objectives.objective import Prepared, Rollout

ADVANTAGES = ("mean", "leave_one_out", "z_score")
LIMIT = 10.0  # nats; e^10 is beyond any ratio that says something, and its square is still finite


def advantages(reward: jax.Array, kind: str) -> jax.Array:
    """How much better than its group each rollout is, `f32[P, N]`; 0 for rewards that are not finite, which count nowhere.

    mean: r - mean (Dr. GRPO, arXiv 2503.20783). leave_one_out: r - mean of the others = (r - mean) N / (N - 1) (RLOO,
    arXiv 2402.14740). z_score: (r - mean) / population standard deviation (GRPO, arXiv 2402.03300), 0 where that is 0.
    """
    finite = jnp.isfinite(reward)
    count = jnp.maximum(jnp.sum(finite, axis=1, keepdims=True), 1).astype(jnp.float32)
    total = lambda x: jnp.sum(jnp.where(finite, x, 0.0), axis=1, keepdims=True)  # noqa: E731
    centred = jnp.where(finite, reward - total(reward) / count, 0.0)
    # Rounding must not make a difference out of equal rewards.
    centred = jnp.where(group.equal_rewards(reward)[:, None], 0.0, centred)
    if kind == "leave_one_out":
        return centred * count / jnp.maximum(count - 1.0, 1.0)
    if kind == "z_score":
        deviation = jnp.sqrt(total(centred * centred) / count)
        return jnp.where(deviation > 0, centred / jnp.where(deviation > 0, deviation, 1.0), 0.0)
    return centred


def clamp(log_ratio: jax.Array) -> jax.Array:
    """Log-ratios in nats, safe to exponentiate."""
    return jnp.clip(log_ratio, -LIMIT, LIMIT)


def clipped_surrogate(log_ratio: jax.Array, advantage: jax.Array, low: float, high: float) -> jax.Array:
    """min(rho A, clip(rho, 1 - low, 1 + high) A) with rho = exp(log_ratio) (PPO, arXiv 1707.06347, eq. 7)."""
    ratio = jnp.exp(clamp(log_ratio))
    return jnp.minimum(ratio * advantage, jnp.clip(ratio, 1.0 - low, 1.0 + high) * advantage)


def clipped(log_ratio: jax.Array, advantage: jax.Array, epsilon: float) -> jax.Array:
    """bool: where the clip of `clipped_surrogate` has taken the gradient away."""
    ratio = jnp.exp(clamp(log_ratio))
    return jnp.where(advantage > 0, ratio > 1 + epsilon, ratio < 1 - epsilon) & (advantage != 0)


def kl_k2(log_ratio: jax.Array) -> jax.Array:
    """(log p - log p_ref)^2 / 2, whose gradient is unbiased for the reverse KL's on samples of p."""
    return 0.5 * log_ratio * log_ratio


def kl_k3(log_ratio: jax.Array) -> jax.Array:
    """exp(-x) + x - 1 for x = log p - log p_ref: an estimate of KL(p || p_ref) that is never negative."""
    x = clamp(log_ratio)
    return jnp.exp(-x) + x - 1.0


def mean_over_tokens(values: jax.Array, counted: jax.Array, per_completion: jax.Array) -> jax.Array:
    """Scalar: the sum of `values` where `counted`, both `[P, N, L]`, over the number of completions times `per_completion`.

    With the batch's mean number of counted tokens as `per_completion`, that is the mean over tokens, and parts of a
    batch (micro-batches) average to the whole's.
    """
    summed = jnp.sum(jnp.where(counted, values, 0.0), axis=-1)
    return jnp.mean(summed / per_completion)


def mean_length(live: jax.Array) -> jax.Array:
    """`f32[P, N]`, everywhere the same: the mean number of live tokens of a completion, at least 1."""
    mean = jnp.maximum(jnp.mean(jnp.sum(live, axis=-1).astype(jnp.float32)), 1.0)
    return jnp.broadcast_to(mean, live.shape[:2])


def rollout_metrics(rollout: Rollout) -> dict[str, jax.Array]:
    """Diagnostics of a rollout batch that every method reports when it prepares: groups without a signal, bad rewards."""
    return {
        "reward/zero_std_groups": jnp.mean(group.equal_rewards(rollout.reward).astype(jnp.float32)),
        "rewards_not_finite": jnp.sum(~jnp.isfinite(rollout.reward)).astype(jnp.float32),
    }


def prepare_advantages(params: dict, reference: dict, rollout: Rollout, kind: str, beta: float) -> Prepared:
    """Advantages `f32[P, N]`; the rollout policy and the reference are kept for the updates' own masks."""
    whole = {"old": params, "reference": reference} if beta else {"old": params}
    return Prepared({"advantage": advantages(rollout.reward, kind)}, whole, rollout_metrics(rollout))


def ratio_metrics(log_ratio: jax.Array, reward: jax.Array) -> dict[str, jax.Array]:
    """Diagnostics of sequence log-ratios `f32[P, N]` log p - log p_rollout in nats at an update.

    Mean, spread, share beyond the clamp, and the effective sample size of exp(log_ratio) in its group, a share in (0, 1].
    """
    log_ratio = jax.lax.stop_gradient(log_ratio)
    mass = group.log_mass_of(reward)
    ess = group.effective_sample_size(group.softmax(log_ratio, mass), mass)
    return {
        "log_ratio/mean": jnp.mean(log_ratio),
        "log_ratio/std": jnp.std(log_ratio),
        "log_ratio/clamped": jnp.mean((jnp.abs(log_ratio) > LIMIT).astype(jnp.float32)),
        "ess/mean": jnp.mean(ess),
        "ess/min": jnp.min(ess),
    }
