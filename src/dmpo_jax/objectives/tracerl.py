"""TraceRL (arXiv 2509.06949): a clipped policy gradient on the states that decoding passed through.

Every committed token is scored in the state in which its step, or a run of `shrink` merged steps, began. A model with
blocks (SDAR) scores one step of every block in one forward (see `trace_rows`).

    A_n  = z-score of the reward in its group
    rho  = p_theta(o_d | s) / p_old(o_d | s)
    loss = mean_n (1 / C) sum_{rows} sum_{scored d} [ -min(rho A_n, clip(rho, 1 - eps, 1 + eps) A_n)
                                                      + beta k3(log p_theta - log p_old) ]

k3(x) = exp(-x) + x - 1 holds the policy to that of the rollout, not to a fixed reference. Groups whose share of correct
completions is outside an interval teach nothing. Both policies are evaluated on the same rows without temperature or
filters, so nothing depends on how the sampler's caches approximate them.

With shrink = 1, an order that does not depend on the policy and temperature 1, rho is the exact ratio of what was
sampled; merged steps score tokens in a state earlier than their own, and the probability of the chosen positions is
left out. The z-score and the dropped groups weigh prompts by difficulty, so the gradient is not that of the mean reward.

Unlike the published code: the KL has the same normaliser as the surrogate for every model (there, LLaDA's is a sum);
every row takes part in the update (there, the tail of a round was lost). Its value model is not here.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.model.denoiser import with_whole_head
from dmpo_jax.objectives import checks, trace_rows
from dmpo_jax.objectives import policy_gradient as pg
from dmpo_jax.objectives.objective import Context, Prepared, Rollout

ROLLOUT = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the `tracerl` objective."""

    name: str = "tracerl"
    epsilon: float = 0.2  # clip range of the ratio on either side of 1
    beta: float = 0.01  # strength of the KL to the rollout policy; it has no effect in the first update
    shrink: int = 1  # steps merged into one row (s); published: 1 for SDAR, 8 for LLaDA
    rows: int = 0  # rows drawn of each completion, weighted to stand for all of them; 0: all
    tokens: str = "live"  # which tokens count: all | live | text (see trace_rows.trace)
    normalizer: str = "canvas"  # C: canvas, the constant L (SDAR); rows, mean over a row's tokens and over rows (LLaDA)
    correct: float = 1.0  # a completion is correct if its reward is at least this
    least_accuracy: float = 0.2  # groups with a smaller share of correct completions are dropped
    most_accuracy: float = 0.8  # groups with a larger one too; 0 and 1 keep all
    unfinished: str = "wrong"  # completions without an end of sequence: reward 0, or "keep" theirs
    updates: int = 1  # gradient updates per rollout batch

    reference_sync: ClassVar[int] = 0  # there is no reference

    def validate(self, group_size: int, sampler: SamplerConfig) -> None:
        """Raises UserError on a setting out of range."""
        checks.compared_group(self, group_size)
        checks.clip_and_kl(self)
        trace_rows.check_rows(self.shrink, self.rows)
        trace_rows.check_counted(self.tokens)
        checks.one_of("normalizer", self.normalizer, ("canvas", "rows"))
        if not 0 <= self.least_accuracy <= self.most_accuracy <= 1:
            raise UserError(
                f"objective.least_accuracy, most_accuracy = {self.least_accuracy}, {self.most_accuracy}: expected two "
                "shares from 0 to 1, the smaller first"
            )
        checks.one_of("unfinished", self.unfinished, ("wrong", "keep"))
        if sampler.temperature == 0:
            raise UserError("sampler.temperature = 0.0: tracerl learns from sampled tokens; set it above 0")


def prepare(
    params: dict, reference: dict, rollout: Rollout, key: jax.Array, config: Config, context: Context
) -> Prepared:
    """Advantages `f32[P, N]`, the cycle's rows, and the rollout policy's log-probabilities `f32[P, N, R, W]` on them."""
    traced = trace_rows.trace(rollout, config.tokens, config.shrink, context)
    most, width = trace_rows.limits(rollout.completion.shape[-1], context.sampler, context.model, config.shrink)
    rows = trace_rows.select(traced, rollout, key, config.rows, most, width)
    reward = graded(rollout, config, context)
    keep = kept(reward, config)
    groups = {
        "advantage": jnp.where(keep[:, None], pg.advantages(reward, "z_score"), 0.0),
        "keep": keep,
        "traced": traced,
        "rows": rows,
        "mean_length": pg.mean_length(traced.counted),
        "mean_rows": pg.mean_length(trace_rows.occupied(traced, most)),
        "old": log_probs(params, rollout, traced, rows, context),
    }
    metrics = pg.rollout_metrics(rollout) | {"groups_kept": jnp.mean(keep.astype(jnp.float32))}
    return Prepared(groups=groups, whole=(), metrics=metrics)


def graded(rollout: Rollout, config: Config, context: Context) -> jax.Array:
    """Rewards `f32[P, N]`, 0 for finite ones of completions that were not finished."""
    if config.unfinished == "keep":
        return rollout.reward
    finished = jnp.any(rollout.completion == context.eos_id, axis=-1)
    return jnp.where(finished | ~jnp.isfinite(rollout.reward), rollout.reward, 0.0)


def kept(reward: jax.Array, config: Config) -> jax.Array:
    """bool `[P]`: groups whose share of correct completions, of those with a finite reward, is within the interval."""
    finite = jnp.isfinite(reward)
    share = jnp.sum(finite & (reward >= config.correct), axis=1) / jnp.maximum(jnp.sum(finite, axis=1), 1)
    return (share >= config.least_accuracy) & (share <= config.most_accuracy)


def loss(
    params: dict, rollout: Rollout, prepared: Prepared, key: jax.Array, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update; all updates of a cycle see the same rows."""
    groups = prepared.groups
    rows = groups["rows"]
    log_prob = log_probs(params, rollout, groups["traced"], rows, context)
    log_ratio = jnp.where(rows.scored, log_prob - groups["old"], 0.0)
    advantage = groups["advantage"][..., None, None]
    keep = groups["keep"][:, None, None, None]

    def over_batch(values, of_row, per_completion):
        summed = jnp.sum(jnp.where(rows.scored, values, 0.0), axis=-1) / of_row
        return jnp.mean(jnp.sum(summed * rows.weight, axis=-1) / per_completion)

    if config.normalizer == "canvas":
        size = (1.0, jnp.float32(rollout.completion.shape[-1]))
    else:
        size = (jnp.maximum(jnp.sum(rows.scored, axis=-1), 1), groups["mean_rows"])
    surrogate = pg.clipped_surrogate(log_ratio, advantage, config.epsilon, config.epsilon)
    kl = over_batch(jnp.where(keep, pg.kl_k3(log_ratio), 0.0), *size)
    total = config.beta * kl - over_batch(surrogate, *size)
    share = lambda condition: over_batch(condition.astype(jnp.float32), 1.0, groups["mean_length"])  # noqa: E731
    of_sequence = jnp.sum(jnp.sum(log_ratio, axis=-1) * rows.weight, axis=-1)
    metrics = pg.ratio_metrics(of_sequence, rollout.reward) | {
        "log_ratio/clamped": share(jnp.abs(log_ratio) > pg.LIMIT),
        "ratio/clipped": share(pg.clipped(log_ratio, advantage, config.epsilon)),
        "kl": kl,
    }
    return total, jax.lax.stop_gradient(metrics)


def log_probs(
    params: dict, rollout: Rollout, traced: trace_rows.Traced, rows: trace_rows.Rows, context: Context
) -> jax.Array:
    """Log-probabilities `f32[P, N, R, W]` of the rows' tokens among all that may be proposed, at temperature 1."""
    texts = trace_rows.texts_of(rollout, traced)
    params = with_whole_head(params, context.model)

    def of_row(row):
        hidden = trace_rows.row_hidden(params, texts, row, context.mask_id, context.model)

        def score(part):
            hidden, token = part
            logits = trace_rows.proposable(params, hidden, context, context.model)
            return trace_rows.chosen(logits, token) - jax.nn.logsumexp(logits, axis=-1)

        return trace_rows.over_positions(score, (hidden, row.token), context.loss_chunk)

    return trace_rows.over_rows(of_row, rows)
