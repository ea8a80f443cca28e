"""AGRPO, amortized GRPO (arXiv 2510.04019): a policy gradient on the exact conditionals of decoding.

Denoising is a decision process: the state s_t is the partly masked completion, the action a_t the tokens that step t
commits. The policy gradient is a sum over steps, estimated from M of them drawn from a proposal p(t):

    A_n  = r_n - mean of the group
    rho  = p_theta(o_d | s_t) / p_old(o_d | s_t)                   for the tokens d that step t committed
    loss = - mean_n (1 / C_n) (1 / M) sum_{t ~ p} (1 / p(t)) sum_{d in a_t} min(rho A_n, clip(rho, 1 - eps, 1 + eps) A_n)

p_old is what the sampler stored: the probability under its temperature and among the tokens that its top-k and top-p
left, and p_theta is taken over the same ones. The proposal goes by the entropy of a step's tokens, with a uniform share
that bounds the weights; its M uniforms are evenly spaced, by an offset that is stratified over the batch. A KL to the
reference, if any, is rho k3(log p_theta - log p_ref).

Unbiased, at the parameters of the rollout, for the gradient of the expected reward divided by L, if

- the order of decoding does not depend on the policy: sampler.algorithm random, roar, left_to_right or origin, with
  commit = "schedule". Other samplers are allowed, but the probability of the position chosen is then left out, and with it
  part of the gradient;
- tokens = "all" (the default). "live" leaves out what is decoded after the end of the text, on which live tokens may
  depend; "text", the published rule, leaves out steps by their outcome;
- normalizer = "canvas" (C_n = L). "steps" is published: C_n is the completion's own number of steps, which weighs short
  decodings more;
- advantage = "leave_one_out". "mean", the published one, gives (N - 1) / N of it, the same direction;
- every block ends within the completion, for a model with block_size (see `trace_rows`).

Unlike the published code: an index beyond the last step (a rounding of the cumulated proposal) cannot occur; a step of
nearly no entropy cannot weigh 10^7 times another; reference and policy share the rollout's support.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.proposal import filtered
from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.model.denoiser import with_whole_head
from dmpo_jax.objectives import checks, trace_rows
from dmpo_jax.objectives import policy_gradient as pg
from dmpo_jax.objectives.objective import Context, Prepared, Rollout

ROLLOUT = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the `agrpo` objective."""

    name: str = "agrpo"
    advantage: str = "mean"  # reward less the group's: mean | leave_one_out | z_score
    epsilon: float = 0.2  # clip range of the ratio on either side of 1
    beta: float = 0.0  # strength of the KL to the reference; 0: none, and no reference forward
    samples: int = 24  # steps drawn per completion and update (M); each is one forward and backward pass
    proposal: str = "entropy"  # of steps: by the entropy of what they committed, or "uniform"
    uniform_share: float = 0.1  # of the entropy proposal: weights are at most 1 / this; 0 is published
    tokens: str = "all"  # which tokens count: all | live | text (see trace_rows.trace)
    normalizer: str = "canvas"  # divides a completion's sum: canvas, the constant L; steps, its own number of steps
    updates: int = 1  # gradient updates per rollout batch (mu)
    reference_sync: int = 0  # every so many cycles the reference becomes the policy; 0: never

    def validate(self, group_size: int, sampler: SamplerConfig) -> None:
        """Raises UserError on a setting out of range, or a sampler whose conditionals cannot be repeated."""
        checks.compared_group(self, group_size)
        checks.one_of("advantage", self.advantage, pg.ADVANTAGES)
        checks.clip_and_kl(self)
        if not 1 <= self.samples <= 10_000:
            raise UserError(f"objective.samples = {self.samples}: expected 1 to 10,000")
        checks.one_of("proposal", self.proposal, ("entropy", "uniform"))
        if not 0 <= self.uniform_share < 1:
            raise UserError(f"objective.uniform_share = {self.uniform_share}: expected 0 or more, below 1")
        trace_rows.check_counted(self.tokens)
        checks.one_of("normalizer", self.normalizer, ("canvas", "steps"))
        if self.proposal == "entropy" and not sampler.trace_entropy:
            raise UserError(
                'objective.proposal = "entropy" needs sampler.trace_entropy = true; set it, or set proposal = "uniform"'
            )
        for key, wrong, why in (
            ("temperature", sampler.temperature == 0, "agrpo learns from sampled tokens; set it above 0"),
            ("algorithm", sampler.algorithm == "wino", "it takes tokens back, so its states cannot be rebuilt"),
            ("cache", sampler.cache in ("prefix", "dual"), 'its states are approximate; use "none" ("block" for SDAR)'),
            ("cfg_scale", sampler.cfg_scale > 0, "guidance is not part of the policy; leave it out"),
        ):
            if wrong:
                raise UserError(f"sampler.{key} = {checks.as_toml(getattr(sampler, key))}: {why}")


def prepare(
    params: dict, reference: dict, rollout: Rollout, key: jax.Array, config: Config, context: Context
) -> Prepared:
    """Advantages `f32[P, N]`, the traced rows, the proposal `f32[P, N, K]` over them and stratified uniforms `f32[P, N]`."""
    length = rollout.completion.shape[-1]
    traced = trace_rows.trace(rollout, config.tokens, 1, context)
    rows, _ = trace_rows.limits(length, context.sampler, context.model, 1)
    entropy = rollout.entropy if config.proposal == "entropy" else None
    groups = {
        "advantage": pg.advantages(rollout.reward, config.advantage),
        "traced": traced,
        "proposal": step_proposal(traced, entropy, rows, config.uniform_share),
        "uniform": stratified(key, rollout.row.shape),
        "mean_length": pg.mean_length(traced.counted),
    }
    whole = {"reference": reference} if config.beta else {}
    if _filters(context.sampler):
        whole["old"] = params  # says which tokens the filters left
    return Prepared(groups=groups, whole=whole, metrics=pg.rollout_metrics(rollout))


def step_proposal(traced: trace_rows.Traced, entropy: jax.Array | None, rows: int, uniform_share: float) -> jax.Array:
    """Probability `f32[..., K]` with which each row of a completion is drawn; 0 for those that score nothing.

    By the summed `entropy f32[..., L]` of what the row scores (plus 1e-8 nats), mixed with the uniform distribution over
    rows; uniform alone where entropy is None.
    """
    held = trace_rows.occupied(traced, rows)
    even = held / jnp.maximum(jnp.sum(held, axis=-1, keepdims=True), 1)
    if entropy is None:
        return even
    of_row = traced.row[..., None, :] == jnp.arange(rows, dtype=jnp.int32)[:, None]
    mass = jnp.sum(jnp.where(of_row & traced.counted[..., None, :], entropy[..., None, :], 0.0), axis=-1)
    mass = jnp.where(held, jnp.maximum(mass, 0.0) + 1e-8, 0.0)
    total = jnp.sum(mass, axis=-1, keepdims=True)
    return (1 - uniform_share) * mass / jnp.where(total > 0, total, 1.0) + uniform_share * even


def stratified(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Uniforms `f32[P, N]`, one in each of P N equal strata of (0, 1), in random order."""
    count = shape[0] * shape[1]
    order_key, jitter_key = jax.random.split(key)
    order = jax.random.permutation(order_key, count)
    return ((order + jax.random.uniform(jitter_key, (count,))) / count).reshape(shape)


def draw_steps(proposal: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(row numbers `int32[..., M]`, their probabilities `f32[..., M]`) by the inverse of the cumulated proposal.

    An empty proposal gives a row with probability 0.
    """
    reach = jnp.cumsum(proposal, axis=-1)
    below = reach[..., None, :] <= uniform[..., None] * reach[..., -1:, None]
    last = proposal.shape[-1] - 1 - jnp.argmax((proposal > 0)[..., ::-1], axis=-1, keepdims=True)
    number = jnp.minimum(jnp.sum(below, axis=-1), last).astype(jnp.int32)
    at = number[..., None] == jnp.arange(proposal.shape[-1])
    return number, jnp.sum(jnp.where(at, proposal[..., None, :], 0.0), axis=-1)


def loss(
    params: dict, rollout: Rollout, prepared: Prepared, key: jax.Array, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update, on steps of its own (the cycle's uniforms, shifted by the update's)."""
    groups, length = prepared.groups, rollout.completion.shape[-1]
    whole, traced, proposal = jax.lax.stop_gradient(prepared.whole), groups["traced"], groups["proposal"]
    # Evenly spaced within a completion, and each completion's offset in a stratum of its own.
    offset = (groups["uniform"] + jax.random.uniform(key)) % 1.0
    number, probability = draw_steps(proposal, (offset[..., None] + jnp.arange(config.samples)) / config.samples)
    weight = jnp.where(probability > 0, 1.0 / jnp.where(probability > 0, probability, 1.0), 0.0) / config.samples
    _, width = trace_rows.limits(length, context.sampler, context.model, 1)
    rows = trace_rows.pick(traced, rollout, number, weight, width)

    log_prob, of_reference = log_probs(params, whole, rollout, traced, rows, context)
    old = jnp.take_along_axis(rollout.sampled_log_prob[:, :, None], rows.position, axis=-1)
    log_ratio = jnp.where(rows.scored, log_prob - old, 0.0)
    advantage = groups["advantage"][..., None, None]

    def estimate(values, per_completion):  # of the sum over all steps
        steps = jnp.sum(jnp.where(rows.scored, values, 0.0), axis=-1)
        return jnp.sum(steps * rows.weight, axis=-1) / per_completion

    steps = jnp.maximum(jnp.sum(proposal > 0, axis=-1), 1)
    size = jnp.float32(length) if config.normalizer == "canvas" else steps.astype(jnp.float32)
    total = -jnp.mean(estimate(pg.clipped_surrogate(log_ratio, advantage, config.epsilon, config.epsilon), size))
    share = lambda condition: jnp.mean(estimate(condition.astype(jnp.float32), groups["mean_length"]))  # noqa: E731
    metrics = pg.ratio_metrics(estimate(log_ratio, 1.0), rollout.reward) | {
        "log_ratio/clamped": share(jnp.abs(log_ratio) > pg.LIMIT),
        "ratio/clipped": share(pg.clipped(log_ratio, advantage, config.epsilon)),
        "step_weight/max": jnp.max(rows.weight * config.samples / steps[..., None]),  # 1: as if drawn uniformly
    }
    if config.beta:
        kl = jnp.exp(pg.clamp(log_ratio)) * pg.kl_k3(jnp.where(rows.scored, log_prob - of_reference, 0.0))
        kl = jnp.mean(estimate(kl, size))
        total, metrics["kl"] = total + config.beta * kl, kl
    return total, jax.lax.stop_gradient(metrics)


def log_probs(
    params: dict, whole: dict, rollout: Rollout, traced: trace_rows.Traced, rows: trace_rows.Rows, context: Context
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities `f32[P, N, M, W]` of the rows' tokens as the sampler drew them, under the policy and the reference.

    Under its temperature, and among the tokens that its filters left of the rollout policy's distribution, `whole["old"]`.
    The reference's are the policy's where `whole` holds none.
    """
    sampler, texts = context.sampler, trace_rows.texts_of(rollout, traced)
    models = {name: with_whole_head(p, context.model) for name, p in {"policy": params, **whole}.items()}

    def of_row(row):
        hidden = {
            name: trace_rows.row_hidden(p, texts, row, context.mask_id, context.model) for name, p in models.items()
        }

        def score(part):
            hidden, token = part
            logits = {
                name: trace_rows.proposable(models[name], h, context, context.model) / sampler.temperature
                for name, h in hidden.items()
            }
            if _filters(sampler):
                basis = trace_rows.whole_vocabulary(logits["old"])
                # What was drawn was inside, whatever a rounding at the edge now says.
                inside = filtered(basis, sampler.top_k, sampler.top_p) > -jnp.inf
                inside |= trace_rows.is_token(basis, token)
                logits = {
                    name: jnp.where(inside, trace_rows.whole_vocabulary(x), -jnp.inf) for name, x in logits.items()
                }
            found = {n: trace_rows.chosen(x, token) - jax.nn.logsumexp(x, axis=-1) for n, x in logits.items()}
            return found["policy"], found.get("reference", found["policy"])

        return trace_rows.over_positions(score, (hidden, row.token), context.loss_chunk)

    return trace_rows.over_rows(of_row, rows)


def _filters(sampler: SamplerConfig) -> bool:
    return sampler.top_k > 0 or sampler.top_p < 1
