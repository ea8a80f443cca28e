"""Reductions over the group axis: softmax weights, weight baselines, effective sample size.

Every array is `f32[P, N]`, P prompts by N rollouts each, and every reduction is over N. `log_mass` is the log of how much a
row counts in its group: 0 for an ordinary rollout, minus infinity for one that is left out (its reward is not
finite), and log v(o) where a test enumerates outcomes instead of sampling them.
"""

import jax
import jax.numpy as jnp


def log_mass_of(rewards: jax.Array) -> jax.Array:
    """0 where the reward is finite, minus infinity elsewhere: a bad reward leaves its own row out and no other."""
    return jnp.where(jnp.isfinite(rewards), 0.0, -jnp.inf)


def softmax(scores: jax.Array, log_mass: jax.Array) -> jax.Array:
    """Softmax of `scores + log_mass` over the group; rows of no mass get 0, a group without any mass gets zeros."""
    present = log_mass > -jnp.inf
    shifted = jnp.where(present, scores + jnp.where(present, log_mass, 0.0), -jnp.inf)
    top = jnp.max(shifted, axis=1, keepdims=True)
    mass = jnp.where(present, jnp.exp(shifted - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    total = jnp.sum(mass, axis=1, keepdims=True)
    return mass / jnp.where(total > 0, total, 1.0)


def tilt(rewards: jax.Array, alpha: float) -> jax.Array:
    """r / alpha, with rewards that are not finite read as 0 (they have no mass)."""
    return jnp.where(jnp.isfinite(rewards), rewards, 0.0) / alpha


def weights(
    rewards: jax.Array, log_ratio: jax.Array, alpha: float, coefficient: jax.Array | float, log_mass: jax.Array
) -> jax.Array:
    """softmax(coefficient x (r / alpha + log p_ref - log p)) over the group: DMPO's importance weights (sum 1).

    log_ratio is log p_ref(o) - log p(o) in nats under the policy p that rolled out. DMPO (arXiv 2510.08233), section 3
    and, for the coefficient, the proximal form of appendix B.2.
    """
    return softmax(coefficient * (tilt(rewards, alpha) + log_ratio), log_mass)


def individual_baseline(
    rewards: jax.Array, log_ratio: jax.Array, alpha: float, coefficient: jax.Array | float, log_mass: jax.Array
) -> jax.Array:
    """The weights of the negated reward: softmax(coefficient x (-r / alpha + log p_ref - log p))."""
    return softmax(coefficient * (log_ratio - tilt(rewards, alpha)), log_mass)


def group_baseline(log_mass: jax.Array) -> jax.Array:
    """Equal weights, 1 / N."""
    return softmax(jnp.zeros_like(log_mass), log_mass)


def model_baseline(log_prob: jax.Array, rollout_log_prob: jax.Array, log_mass: jax.Array) -> jax.Array:
    """softmax(log p_theta - log p) of the current parameters against the rollout policy."""
    return softmax(log_prob - rollout_log_prob, log_mass)


def group_size(log_mass: jax.Array) -> jax.Array:
    """`f32[P]`: rows that count."""
    return jnp.sum(log_mass > -jnp.inf, axis=1).astype(jnp.float32)


def effective_sample_size(weight: jax.Array, log_mass: jax.Array) -> jax.Array:
    """`f32[P]` in (0, 1]: (sum w)^2 / (N sum w^2), the share of the group that the weights make use of."""
    square = jnp.sum(weight * weight, axis=1)
    return jnp.where(
        square > 0, jnp.sum(weight, axis=1) ** 2 / (group_size(log_mass) * jnp.maximum(square, 1e-30)), 0.0
    )


def entropy(weight: jax.Array) -> jax.Array:
    """`f32[P]` in nats: -sum w log w of weights that sum to 1; 0 where one rollout has it all, log N where all are equal."""
    return -jnp.sum(jnp.where(weight > 0, weight * jnp.log(jnp.where(weight > 0, weight, 1.0)), 0.0), axis=1)


def mean(weight: jax.Array, log_mass: jax.Array) -> jax.Array:
    """Mean weight of the rows that count, at each of them; 0 at the others. 1 / N for weights that sum to 1."""
    counted = log_mass > -jnp.inf
    total = jnp.sum(jnp.where(counted, weight, 0.0), axis=1, keepdims=True)
    return jnp.where(counted, total / jnp.maximum(group_size(log_mass)[:, None], 1.0), 0.0)


def adaptive_coefficient(
    scores: jax.Array, log_mass: jax.Array, target: float, most: float, iterations: int = 30
) -> jax.Array:
    """`f32[P, 1]`: the largest coefficient up to `most` at which softmax(coefficient x scores) keeps ESS >= target.

    ESS falls as the coefficient grows, so bisection finds it; solved for each group by itself.
    """

    def ess(coefficient):
        return effective_sample_size(softmax(coefficient * scores, log_mass), log_mass)[:, None]

    def halve(_, bracket):
        low, high = bracket
        middle = 0.5 * (low + high)
        enough = ess(middle) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    high = jnp.full_like(scores[:, :1], most)
    low, _ = jax.lax.fori_loop(0, iterations, halve, (jnp.zeros_like(high), high))
    return jnp.where(ess(high) >= target, high, low)


def equal_rewards(rewards: jax.Array) -> jax.Array:
    """bool `[P]`: groups whose finite rewards are all the same, which therefore say nothing about what is better."""
    finite = jnp.isfinite(rewards)
    highest = jnp.max(jnp.where(finite, rewards, -jnp.inf), axis=1)
    lowest = jnp.min(jnp.where(finite, rewards, jnp.inf), axis=1)
    return highest <= lowest
