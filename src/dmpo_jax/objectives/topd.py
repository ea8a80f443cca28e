"""TOPD, trace-based on-policy distillation (arXiv 2607.16872): the student learns from a teacher at its own states.

The student decodes; its trace is rebuilt into rows (see `trace_rows`), and at every token that a step committed, student
p and frozen teacher q are compared in that same state (eq. 7):

    loss = mean_n sum_t (1 / |a_t|) sum_{d in a_t} D(p(. | s_t, d), q(. | s_t, d))

    D = KL(p || q)                              reverse_kl
        KL(q || p)                              forward_kl
        KL(p || m) / 2 + KL(q || m) / 2         jensen_shannon, m = (p + q) / 2

What the paper leaves open is settled so, in nats, at temperature 1 and without the tokens that the sampler never
proposes:

- vocabulary = "full": D over all tokens. Exact in any state, whatever rule chose the positions.
- "top_k": the k most probable tokens (equal ones at the edge too) of the student, or of the teacher for forward_kl; the
  others make one more outcome, nothing is renormalised. A divergence between two coarser distributions, at most the full one.
- "sampled": eq. 8-9 and 22, whose gradient is - grad log p(x) (log q(x) - log p(x)) at the sampled token x. Unbiased for the
  reverse KL only if x ~ p whatever was selected: under confidence or threshold selection it is biased.
- normalizer = "steps": eq. 7, where a step of a model with blocks is one of a single block. "rows": Algorithm 1, every
  row's mean over its tokens, averaged over the rows of the batch; a row of such a model holds a step of every block.

States are constants: no gradient flows through how they were reached. Rewards play no part. Student and teacher must
share a vocabulary; families may differ unless one has blocks.
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
from dmpo_jax.parallel.mesh import by_group, by_row, per_shard

ROLLOUT = True
DIVERGENCES = ("reverse_kl", "forward_kl", "jensen_shannon")
VOCABULARIES = ("full", "top_k", "sampled")
NEVER = -1e9  # nats: log-probability of what cannot be proposed; finite, so that 0 times it is 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the `topd` objective."""

    name: str = "topd"
    teacher: str = (
        ""  # run or checkpoint folder of the teacher; "": the policy as the run began, which teaches nothing new
    )
    divergence: str = "reverse_kl"  # reverse_kl | forward_kl | jensen_shannon
    vocabulary: str = "full"  # full | top_k | sampled: what the divergence is taken over
    top_k: int = 0  # for vocabulary = "top_k"; the paper's LLaDA run has 10
    shrink: int = 1  # steps merged into one row
    rows: int = 0  # rows drawn of each completion and update, weighted to stand for all of them; 0: all
    tokens: str = "live"  # which tokens count: all | live | text (see trace_rows.trace)
    normalizer: str = "steps"  # steps, eq. 7 | rows, Algorithm 1
    updates: int = 1  # gradient updates per rollout batch

    reference_sync: ClassVar[int] = 0  # the teacher is frozen

    def validate(self, group_size: int, sampler: SamplerConfig) -> None:
        """Raises UserError on a setting out of range. A group of one is fine: nothing is compared within it."""
        checks.updates(self)
        checks.one_of("divergence", self.divergence, DIVERGENCES)
        checks.one_of("vocabulary", self.vocabulary, VOCABULARIES)
        if (self.top_k > 0) != (self.vocabulary == "top_k") or self.top_k < 0:
            raise UserError(
                f'objective.top_k = {self.top_k} with objective.vocabulary = "{self.vocabulary}": expected a positive number '
                'with "top_k" and 0 (left out) with the others'
            )
        trace_rows.check_rows(self.shrink, self.rows)
        trace_rows.check_counted(self.tokens)
        checks.one_of("normalizer", self.normalizer, ("steps", "rows"))
        if self.vocabulary == "sampled":
            plain = sampler.temperature == 1 and not sampler.top_k and sampler.top_p == 1 and not sampler.cfg_scale
            for wrong, needs in (
                (self.divergence != "reverse_kl", 'objective.divergence = "reverse_kl"'),
                (self.updates != 1, "objective.updates = 1, as tokens are the policy's only then"),
                (self.shrink != 1, "objective.shrink = 1, as tokens are sampled in their own step's state"),
                (not plain, "sampler.temperature = 1 without top_k, top_p and cfg_scale"),
            ):
                if wrong:
                    raise UserError(f'objective.vocabulary = "sampled" needs {needs}; or use "full"')


def prepare(
    params: dict, reference: dict, rollout: Rollout, key: jax.Array, config: Config, context: Context
) -> Prepared:
    """The traced rows, each token's share `f32[P, N, L]` of its step, and the teacher.

    Raises UserError where the teacher's vocabulary or blocks are not the student's.
    """
    for field in ("vocab_size", "block_size"):
        own, other = getattr(context.model, field), getattr(context.reference_model, field)
        if own != other:
            raise UserError(
                f'objective.teacher = "{config.teacher}": its {field} = {other}, the student\'s is {own}; '
                "choose a teacher with the same"
            )
    traced = trace_rows.trace(rollout, config.tokens, config.shrink, context)
    most, _ = trace_rows.limits(rollout.completion.shape[-1], context.sampler, context.model, config.shrink)
    groups = {
        "traced": traced,
        "share": step_share(traced, most, context.model.block_size),
        "mean_length": pg.mean_length(traced.counted),
        "mean_rows": pg.mean_length(trace_rows.occupied(traced, most)),
    }
    return Prepared(groups=groups, whole=reference, metrics={})


def step_share(traced: trace_rows.Traced, rows: int, block_size: int) -> jax.Array:
    """`f32[P, N, L]`: one over the number of counted tokens that a counted token's own step committed, else 0."""
    groups, _, length = traced.row.shape
    blocks = length // block_size + 1 if block_size else 1

    def on_shard(_, local):
        row, block, counted = local
        batch = jnp.arange(row.shape[0])[:, None]
        row = jnp.maximum(row, 0)
        count = jnp.zeros((row.shape[0], blocks, rows), jnp.int32).at[batch, block, row].add(counted.astype(jnp.int32))
        return jnp.where(counted, 1.0 / jnp.maximum(count[batch, block, row], 1), 0.0)

    flat = tuple(map(by_row, traced))
    return by_group(per_shard(on_shard, (), flat), groups)


def loss(
    params: dict, rollout: Rollout, prepared: Prepared, key: jax.Array, config: Config, context: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss of one update, in nats."""
    groups, teacher = prepared.groups, jax.lax.stop_gradient(prepared.whole)
    traced = groups["traced"]
    most, width = trace_rows.limits(rollout.completion.shape[-1], context.sampler, context.model, config.shrink)
    rows = trace_rows.select(traced, rollout, key, config.rows, most, width)
    texts = trace_rows.texts_of(rollout, traced)
    params, teacher = with_whole_head(params, context.model), with_whole_head(teacher, context.reference_model)

    def of_row(row):
        own = trace_rows.row_hidden(params, texts, row, context.mask_id, context.model)
        taught = trace_rows.row_hidden(teacher, texts, row, context.mask_id, context.reference_model)

        def score(part):
            own, taught, token = part
            log_p = _log_softmax(trace_rows.proposable(params, own, context, context.model))
            log_q = _log_softmax(trace_rows.proposable(teacher, taught, context, context.reference_model))
            return divergence(log_p, jax.lax.stop_gradient(log_q), token, config)

        return trace_rows.over_positions(score, (own, taught, row.token), context.loss_chunk)

    value = jnp.where(rows.scored, trace_rows.over_rows(of_row, rows), 0.0)
    if config.normalizer == "steps":
        share = jnp.take_along_axis(groups["share"][:, :, None], rows.position, axis=-1)
        total = jnp.mean(jnp.sum(jnp.sum(value * share, axis=-1) * rows.weight, axis=-1))
    else:
        of_row = jnp.sum(value, axis=-1) / jnp.maximum(jnp.sum(rows.scored, axis=-1), 1)
        total = jnp.mean(jnp.sum(of_row * rows.weight, axis=-1) / groups["mean_rows"])
    per_token = jnp.mean(jnp.sum(jnp.sum(value, axis=-1) * rows.weight, axis=-1) / groups["mean_length"])
    return total, {"divergence": jax.lax.stop_gradient(per_token)}


def divergence(log_p: jax.Array, log_q: jax.Array, token: jax.Array, config: Config) -> jax.Array:
    """`f32[...]` in nats of student and teacher log-probabilities `[..., V]`, as `config` says; `token int32[...]` was sampled.

    The sampled form has the gap log p - log q as its value and that gap times grad log p as its gradient.
    """
    if config.vocabulary == "sampled":
        own, other = trace_rows.chosen(log_p, token), trace_rows.chosen(log_q, token)
        gap = jax.lax.stop_gradient(own - other)
        return gap + gap * (own - jax.lax.stop_gradient(own))
    if config.vocabulary == "top_k":
        log_p, log_q = trace_rows.whole_vocabulary(log_p), trace_rows.whole_vocabulary(log_q)
        ranked = log_q if config.divergence == "forward_kl" else jax.lax.stop_gradient(log_p)
        inside = ranked >= jax.lax.top_k(ranked, min(config.top_k, ranked.shape[-1]))[0][..., -1:]
        log_p, log_q = _coarse(log_p, inside), _coarse(log_q, inside)
    kl = lambda a, b: jnp.sum(jnp.exp(a) * (a - b), axis=-1)  # noqa: E731
    if config.divergence == "reverse_kl":
        return kl(log_p, log_q)
    if config.divergence == "forward_kl":
        return kl(log_q, log_p)
    middle = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return 0.5 * kl(log_p, middle) + 0.5 * kl(log_q, middle)


def _log_softmax(logits: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(jnp.maximum(logits, NEVER), axis=-1)


def _coarse(log_prob: jax.Array, inside: jax.Array) -> jax.Array:
    """Log-probabilities `[..., V + 1]` of the tokens inside and, as the last outcome, of all others together."""
    rest = jax.nn.logsumexp(jnp.where(inside, NEVER, log_prob), axis=-1, keepdims=True)
    return jnp.concatenate([jnp.where(inside, log_prob, NEVER), jnp.maximum(rest, NEVER)], axis=-1)
