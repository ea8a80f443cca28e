"""Decoding: one jitted loop that fills a masked completion block by block."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.diffusion.forward import completion_hidden
from dmpo_jax.diffusion.selection import propose, top_ranked, transfer_schedule
from dmpo_jax.errors import UserError
from dmpo_jax.model.denoiser import head_logits
from dmpo_jax.model.parameters import ModelConfig

ALGORITHMS = ("low_confidence", "random", "roar")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How a completion is decoded.

    low_confidence: at every step commit the most confident proposals (LLaDA's low-confidence remasking).
    random: commit uniformly random positions. roar: one position per forward in a random order drawn per block; its
    `log_prob` sums to the exact log-probability of the completion given that order.
    """

    algorithm: str = "low_confidence"
    steps: int = 0  # denoising steps of the whole completion; 0: one per token
    block_length: int = 0  # tokens decoded together, left to right by blocks; 0: the whole completion
    temperature: float = 0.0  # of the proposal; confidence and log-probabilities are untempered
    stop_at_eos: bool = True  # a row whose finished block holds the end-of-sequence token is done

    def validate(self, length: int) -> None:
        """Raises UserError when completions of `length` tokens cannot be decoded this way."""
        if self.algorithm not in ALGORITHMS:
            raise UserError(f'sampler.algorithm = "{self.algorithm}": expected one of {", ".join(ALGORITHMS)}')
        block = self.block_length or length
        if not 0 < block <= length or length % block:
            raise UserError(
                f"sampler.block_length = {self.block_length} does not divide rollout.completion_length = {length}"
            )
        blocks, steps = length // block, self.steps or length
        if steps % blocks or not blocks <= steps <= length:
            raise UserError(
                f"sampler.steps = {self.steps}: expected a multiple of the {blocks} blocks from {blocks} to {length}"
            )
        if self.algorithm == "roar" and steps != length:
            raise UserError(
                f"sampler.steps = {self.steps}: roar decodes one token per forward, so steps must be {length} (or 0)"
            )
        if self.temperature < 0:
            raise UserError(f"sampler.temperature = {self.temperature}: expected 0 (greedy) or more")


class Trace(NamedTuple):
    """What decoding leaves behind; B rows, completions of L tokens.

    completion `int32[B, L]`; step `int32[B, L]`, the denoising step at which each token was committed (-1: filled with
    eos after the row was done); log_prob `f32[B, L]` of each token at its step, at temperature 1 and among all tokens
    that may be proposed; forwards `int32[B]`, the number of function evaluations.
    """

    completion: jax.Array
    step: jax.Array
    log_prob: jax.Array
    forwards: jax.Array


class _Loop(NamedTuple):
    step: jax.Array
    trace: Trace
    masked: jax.Array  # bool [B, L]
    done: jax.Array  # bool [B]


def forbid(logits: jax.Array, token: int) -> jax.Array:
    """Logits with one token's at minus infinity."""
    return jnp.where(jnp.arange(logits.shape[-1]) == token, -jnp.inf, logits)


def sample(
    params: dict,
    prompts: Prompts,
    keys: jax.Array,
    *,
    length: int,
    mask_id: int,
    eos_id: int,
    sampler: SamplerConfig,
    config: ModelConfig,
) -> Trace:
    """Completes every prompt with `length` tokens. Keys `[B]`, one per row: a row's result ignores its neighbours.

    The head is applied to the active block only (to one position under roar), so no `[B, L, V]` array exists. The
    loop ends when every row of the call is done.
    """
    batch = prompts.tokens.shape[0]
    block = sampler.block_length or length
    block_steps = (sampler.steps or length) // (length // block)
    schedule = jnp.array(transfer_schedule(block, block_steps), jnp.int32)
    whole_block = sampler.algorithm != "roar"

    def active(state: _Loop) -> jax.Array:
        return (state.step < block_steps * (length // block)) & ~jnp.all(state.done)

    def denoise(state: _Loop) -> _Loop:
        start = state.step // block_steps * block
        step_keys = jax.vmap(lambda key: jax.random.fold_in(key, state.step))(keys)
        window = lambda x: jax.lax.dynamic_slice_in_dim(x, start, block, axis=1)  # noqa: E731
        allowed = window(state.masked) & ~state.done[:, None]

        shown = jnp.where(state.masked, mask_id, state.trace.completion)
        hidden = window(completion_hidden(params, shown, prompts, config))
        if whole_block:
            commit, position = allowed, None
        else:  # the random order is known before the forward's result, so one row of the head is enough
            commit = top_ranked(_order(keys, start, block), allowed, 1)
            position = jnp.argmax(commit, axis=1)[:, None]
            hidden = jnp.take_along_axis(hidden, position[..., None], axis=1)
        logits = forbid(head_logits(params, hidden, config), mask_id)
        token = propose(logits, step_keys, sampler.temperature)
        log_prob = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)
        if whole_block:
            score = log_prob if sampler.algorithm == "low_confidence" else _uniform(step_keys, block)
            commit = top_ranked(score, allowed, schedule[state.step % block_steps])

        update = lambda x, new: jax.lax.dynamic_update_slice_in_dim(  # noqa: E731
            x, jnp.where(commit, new, window(x)), start, axis=1
        )
        trace = Trace(
            update(state.trace.completion, token),
            update(state.trace.step, state.step),
            update(state.trace.log_prob, log_prob),
            state.trace.forwards + ~state.done,
        )
        done = state.done
        if sampler.stop_at_eos:
            ended = jnp.any((trace.completion == eos_id) & (trace.step >= 0), axis=1)
            done |= ended & ((state.step + 1) % block_steps == 0)
        return _Loop(state.step + 1, trace, update(state.masked, False), done)

    blank = Trace(
        jnp.full((batch, length), eos_id, jnp.int32),
        jnp.full((batch, length), -1, jnp.int32),
        jnp.zeros((batch, length), jnp.float32),
        jnp.zeros((batch,), jnp.int32),
    )
    start = _Loop(jnp.int32(0), blank, jnp.ones((batch, length), bool), jnp.zeros((batch,), bool))
    with jax.named_scope("sample"):
        return jax.lax.while_loop(active, denoise, start).trace


def _uniform(keys: jax.Array, width: int) -> jax.Array:
    # A stream of its own: the proposal already used the step's key.
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (width,)))(keys)


def _order(keys: jax.Array, start: jax.Array, block: int) -> jax.Array:
    """Scores whose ranking is the block's decoding order; the same at each of the block's steps."""
    return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, -1 - start), (block,)))(keys)
