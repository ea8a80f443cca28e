"""Decoding: one jitted loop that fills a masked completion block by block."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.diffusion.drafts import draft, verified
from dmpo_jax.diffusion.proposal import (
    KeyedNoise,
    Noise,
    Proposal,
    forbid,
    log_prob_of,
    needs_entropy,
    propose_block,
)  # fmt: skip
from dmpo_jax.diffusion.recompute import Forwards, Start
from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.diffusion.selection import (
    COMMIT_RULES,
    Candidates,
    Revision,
    dream_shares,
    top_ranked,
    wide_in_narrow_out,
)  # fmt: skip
from dmpo_jax.diffusion.workspace import completion_of, doubled, lay_out
from dmpo_jax.model.denoiser import Cache, head_logits
from dmpo_jax.model.parameters import ModelConfig

__all__ = ["SamplerConfig", "Trace", "sample"]


class Trace(NamedTuple):
    """What decoding leaves behind; B rows, completions of L tokens.

    completion `int32[B, L]`; step `int32[B, L]`, the row's denoising step at which each token was committed (-1: filled
    with eos after the row was done); log_prob `f32[B, L]` of each token at its step, at temperature 1 and among all
    tokens that may be proposed; sampled_log_prob `f32[B, L]`, the same under what it was drawn from (temperature and
    filters; 0 if greedy); entropy `f32[B, L]` in nats of the distribution that ranks (None unless `trace_entropy`);
    forwards `int32[B]`, the number of function evaluations until the row was done; processed `int32[B]`, the tokens that
    these pushed through the network, padding aside; passes `int32[B]`, the forwards of the whole call, in which rows wait
    for the slowest at the end of each block.
    """

    completion: jax.Array
    step: jax.Array
    log_prob: jax.Array
    sampled_log_prob: jax.Array
    entropy: jax.Array | None
    forwards: jax.Array
    processed: jax.Array
    passes: jax.Array


class Drafting(NamedTuple):
    """FreeDave's memory of a block: the last forward's proposal, and the steps taken `int32[B]`."""

    proposal: Proposal
    taken: jax.Array


class Slots(NamedTuple):
    """The working slots as decoded so far, `[B, W]`; fields as in `Trace`."""

    token: jax.Array
    masked: jax.Array
    step: jax.Array
    log_prob: jax.Array
    sampled_log_prob: jax.Array
    entropy: jax.Array | None


class State(NamedTuple):
    """Carry of both loops. Per row `[B]`: done, the next step's number (`clock`), forwards and tokens processed.

    passes: forwards so far; block: number of the active one; index: step within it; memory: what a rule keeps between
    its steps.
    """

    slots: Slots
    done: jax.Array
    clock: jax.Array
    forwards: jax.Array
    processed: jax.Array
    passes: jax.Array
    block: jax.Array
    index: jax.Array
    memory: Any


def sample(
    params: dict,
    prompts: Prompts,
    keys: jax.Array | None,
    *,
    length: int,
    mask_id: int,
    eos_id: int,
    sampler: SamplerConfig,
    config: ModelConfig,
    noise: Noise | None = None,
    watch: Callable[[jax.Array, jax.Array], None] | None = None,
) -> Trace:
    """Completes every prompt with `length` tokens. Keys `[B]`, one per row: a row's result ignores its neighbours.

    The head is applied to the active block only (to one position under roar), so no `[B, L, V]` array exists. The
    loops end when every row of the call is done. `noise` replaces what the keys would give; `watch` is called on the host
    with the completion and where it is masked, `[B, L]` each, after every step.
    """
    return _Decoder(params, prompts, noise or KeyedNoise(keys), length, mask_id, eos_id, sampler, config, watch).run()


class _Decoder:
    """One call of `sample`: its static shape and the arrays that no step changes."""

    def __init__(self, params, prompts, noise, length, mask_id, eos_id, sampler, config, watch):
        self.params, self.config, self.sampler, self.noise = params, config, sampler, noise
        self.length, self.mask_id, self.eos_id, self.watch = length, mask_id, eos_id, watch
        self.block = sampler.block_length or length
        self.shift = int(config.logits_shift)
        self.schedule = jnp.array(sampler.schedule_of(length), jnp.int32)
        self.space = lay_out(prompts, length, self.block, mask_id, config)
        self.blocks = (self.space.tokens.shape[1] - self.shift) // self.block
        seen = doubled(self.space, mask_id) if sampler.cfg_scale else self.space
        self.forwards = Forwards(params, seen, self.block, sampler, config)

    def run(self) -> Trace:
        batch, width = self.space.tokens.shape
        nothing, none = jnp.zeros((batch, width), jnp.float32), jnp.zeros((batch,), jnp.int32)
        slots = Slots(
            token=jnp.where(self.space.masked, self.eos_id, self.space.tokens),
            masked=self.space.masked,
            step=jnp.full((batch, width), -1, jnp.int32),
            log_prob=nothing,
            sampled_log_prob=nothing,
            entropy=nothing if self.sampler.trace_entropy else None,
        )
        zero = jnp.int32(0)
        state = State(slots, none > 0, none, none, none, zero, zero, zero, self._fresh_memory(batch))
        active = lambda carry: (carry[0].block < self.blocks) & jnp.any(self._open(carry[0]))  # noqa: E731
        with jax.named_scope("sample"):
            cache = self.forwards.prefill()
            if cache is not None:
                state = state._replace(processed=self.space.prompts.length, forwards=none + 1, passes=zero + 1)
            state, _ = jax.lax.while_loop(active, self._decode_block, (state, cache))
        slots, whole = state.slots, lambda x: completion_of(self.space, x, self.length)
        return Trace(
            whole(slots.token),
            whole(slots.step),
            whole(slots.log_prob),
            whole(slots.sampled_log_prob),
            None if slots.entropy is None else whole(slots.entropy),
            state.forwards,
            state.processed,
            none + state.passes,
        )

    def _open(self, state: State) -> jax.Array:
        return jnp.any(state.slots.masked, axis=1) & ~state.done

    def _decode_block(self, carry: tuple[State, Cache | None]) -> tuple[State, Cache | None]:
        state, cache = carry
        start = state.block * self.block
        state = state._replace(index=jnp.int32(0), memory=self._fresh_memory(len(state.done)))
        passing = cache
        if self.sampler.cache != "none":
            opening, cache = self.forwards.open(self._shown(state.slots), start, cache)
            passing = cache if self.sampler.cache == "block" else None
            state = self._begin(self._counted(state, start, opening=True), opening, start)
        if self.sampler.cache == "prefix":  # the suffix shrinks from block to block, so each has a loop of its own
            loops = [lambda s, c, i=i: self._fill(s, c, i * self.block) for i in range(self.blocks)]
            state = jax.lax.switch(state.block, loops, state, cache)
        else:
            state = self._fill(state, cache, start)
        done = state.done
        if self.sampler.stop_at_eos:
            done |= jnp.any((state.slots.token == self.eos_id) & (state.slots.step >= 0), axis=1)
        return state._replace(block=state.block + 1, done=done), passing

    def _fill(self, state: State, cache: Cache | None, start: Start) -> State:
        """Steps until no live row has a mask left in the block."""
        return jax.lax.while_loop(
            lambda state: jnp.any(self._allowed(state, start)),
            lambda state: self._advance(state, cache, start),
            state,
        )

    def _begin(self, state: State, hidden: jax.Array, start: Start) -> State:
        if not self.sampler.drafts:
            return self._denoise(state, hidden, start)
        proposal = self._propose(hidden, state.clock)
        return self._last_step(state._replace(memory=Drafting(proposal, jnp.zeros_like(state.clock))), start)

    def _advance(self, state: State, cache: Cache | None, start: Start) -> State:
        state, shown = self._counted(state, start, opening=False), self._shown(state.slots)
        if self.sampler.algorithm == "wino":
            return self._revise(state, *self.forwards.with_shadow(shown, start, self.mask_id), start)
        if self.sampler.drafts:
            return self._leap(state, shown, cache, start)
        return self._denoise(state, self.forwards.again(shown, start, cache), start)

    # One step: propose, choose, write.

    def _denoise(self, state: State, hidden: jax.Array, start: Start) -> State:
        allowed = self._allowed(state, start)
        if (
            self.sampler.algorithm == "roar"
        ):  # the order is known before the forward's result: one row of the head will do
            commit = top_ranked(self.noise.order(start, self.block), allowed, 1)
            position = jnp.argmax(commit, axis=1)[:, None, None]
            position = jnp.concatenate([position] * (len(hidden) // len(position)))
            proposal = self._propose(jnp.take_along_axis(hidden, position, axis=1), state.clock)
        else:
            proposal = self._propose(hidden, state.clock)
            commit = self._choose(proposal, allowed, state, start)
        return self._write(state, commit, proposal, start)

    def _propose(self, hidden: jax.Array, step: jax.Array) -> Proposal:
        return propose_block(self._logits(hidden), step, self.noise, self.sampler, self.eos_id)

    def _logits(self, hidden: jax.Array) -> jax.Array:
        logits = head_logits(self.params, hidden, self.config)
        if self.sampler.cfg_scale:
            with_prompt, without = jnp.split(logits, 2)
            logits = without + (self.sampler.cfg_scale + 1.0) * (with_prompt - without)
        logits = forbid(logits, self.mask_id)
        return forbid(logits, self.eos_id) if self.sampler.eos == "forbid" else logits

    def _choose(self, proposal: Proposal, allowed: jax.Array, state: State, start: Start) -> jax.Array:
        sampler = self.sampler
        if sampler.algorithm == "origin":
            shares = jnp.asarray(dream_shares(len(self.schedule)))
            return allowed & (proposal.score < shares[state.index])
        level = sampler.level
        if sampler.level_decay:
            ahead = jnp.minimum(sampler.suffix_window or self.length, self.length - self.block - start)
            left = (jnp.sum(allowed, axis=1, keepdims=True) + ahead) / (self.block + ahead)
            level = level * (1 - sampler.level_decay * (1 - left))
        candidates = Candidates(
            proposal.score, proposal.probability, proposal.entropy, allowed, self._counts(state.index)
        )
        return COMMIT_RULES[sampler.commit](candidates, level)

    def _write(self, state: State, commit: jax.Array, proposal: Proposal, start: Start, live=None) -> State:
        live = jnp.any(self._allowed(state, start), axis=1) if live is None else live
        step = jnp.broadcast_to(state.clock[:, None], commit.shape)
        state = self._put(state, commit, step, proposal, start)
        if self.watch is not None:
            whole = lambda x: completion_of(self.space, x, self.length)  # noqa: E731
            jax.debug.callback(self.watch, whole(state.slots.token), whole(state.slots.masked), ordered=True)
        return state._replace(clock=state.clock + live, index=state.index + 1)

    def _put(self, state: State, commit: jax.Array, step: jax.Array, proposal: Proposal, start: Start) -> State:
        def put(slots, new):
            part = jnp.where(commit, new, self._take(slots, start))
            return jax.lax.dynamic_update_slice_in_dim(slots, part, start + self.shift, 1)

        slots = state.slots
        entropy = None if slots.entropy is None else put(slots.entropy, proposal.entropy)
        slots = Slots(
            put(slots.token, proposal.token),
            put(slots.masked, False),
            put(slots.step, step),
            put(slots.log_prob, proposal.log_prob),
            put(slots.sampled_log_prob, proposal.sampled_log_prob),
            entropy,
        )
        return state._replace(slots=slots)

    def _revise(self, state: State, hidden: jax.Array, shadow: jax.Array, start: Start) -> State:
        """WINO's step: what it commits is written like any other's, then what it takes back is masked again."""
        proposal = self._propose(hidden, state.clock)
        token = self._take(state.slots.token, start)
        check = jnp.exp(log_prob_of(self._logits(shadow), token))
        candidates = Candidates(proposal.score, proposal.probability, None, self._allowed(state, start), None)
        commit, back, memory = wide_in_narrow_out(
            candidates, check, state.memory, self.sampler.level, self.sampler.revoke
        )
        state = self._write(state, commit, proposal, start)
        masked = self._take(state.slots.masked, start) | back
        masked = jax.lax.dynamic_update_slice_in_dim(state.slots.masked, masked, start, 1)
        return state._replace(slots=state.slots._replace(masked=masked), memory=memory)

    def _leap(self, state: State, shown: jax.Array, cache: Cache, start: Start) -> State:
        """FreeDave's step: the next steps guessed from the last forward's proposal, and as many taken as hold."""
        proposal, taken = state.memory
        depth, allowed = self.sampler.drafts, self._allowed(state, start)
        counts = self._counts(taken[:, None] + jnp.arange(depth))
        added = draft(proposal.score, allowed, counts)
        block = jnp.where(added, proposal.token[:, None], self._take(shown, start)[:, None])
        views = jnp.repeat(shown[:, None], depth, axis=1)
        views = jax.lax.dynamic_update_slice_in_dim(views, block, start + self.shift, 2)
        hidden = self.forwards.branches(views, start, cache)
        batch, _, width = added.shape
        found = self._propose(hidden.reshape(batch, depth * width, -1), state.clock)
        found = jax.tree.map(lambda x: x.reshape(batch, depth, width), found)
        best = verified(added, proposal.token, allowed, counts, found.score, found.token)

        # Every token as its own step would have recorded it: step d's from the forward on draft d - 1.
        source = jnp.sum(~added, axis=1) - 1  # of what draft d adds first, d - 1; -1 is the last forward
        at = jnp.clip(source, 0, depth - 1)[:, None]
        recorded = jax.tree.map(
            lambda now, later: jnp.where(source < 0, now, jnp.take_along_axis(later, at, axis=1)[:, 0]), proposal, found
        )
        commit = jnp.take_along_axis(added, best[:, None, None] - 1, axis=1)[:, 0]
        state = self._put(state, commit, state.clock[:, None] + source + 1, recorded, start)
        latest = jax.tree.map(lambda x: jnp.take_along_axis(x, best[:, None, None] - 1, axis=1)[:, 0], found)
        best = jnp.where(jnp.any(allowed, axis=1), best, 0)
        state = state._replace(clock=state.clock + best, memory=Drafting(latest, taken + best))
        return self._last_step(state, start)

    def _last_step(self, state: State, start: Start) -> State:
        """Takes the block's last step at once where it is next: its tokens are known and nothing follows to check."""
        proposal, taken = state.memory
        allowed = self._allowed(state, start)
        last = jnp.sum(allowed, axis=1) <= self._counts(taken)
        return self._write(state, allowed & last[:, None], proposal, start, live=last & jnp.any(allowed, axis=1))

    # Small helpers.

    def _counts(self, index: jax.Array) -> jax.Array:
        return self.schedule[jnp.minimum(index, len(self.schedule) - 1)]

    def _fresh_memory(self, batch: int) -> Any:
        if self.sampler.algorithm == "wino":
            return Revision(jnp.zeros((batch, self.block), bool), jnp.full((batch,), 30, jnp.int32))
        if self.sampler.drafts:
            blank = jnp.zeros((batch, self.block), jnp.float32)
            entropy = blank if needs_entropy(self.sampler) else None
            proposal = Proposal(blank.astype(jnp.int32), blank, blank, entropy, blank, blank)
            return Drafting(proposal, jnp.zeros((batch,), jnp.int32))
        return None

    def _take(self, slots: jax.Array, start: Start) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(slots, start + self.shift, self.block, 1)

    def _allowed(self, state: State, start: Start) -> jax.Array:
        return self._take(state.slots.masked, start) & ~state.done[:, None]

    def _shown(self, slots: Slots) -> jax.Array:
        shown = jnp.where(slots.masked, self.mask_id, slots.token)
        if not self.sampler.cfg_scale:
            return shown
        leading = jnp.arange(shown.shape[1]) < self.space.lead[:, None]
        return jnp.concatenate([shown, jnp.where(leading, self.mask_id, shown)])

    def _counted(self, state: State, start: Start, opening: bool) -> State:
        """One more forward for the rows that still have a mask in the block."""
        live = jnp.any(self._allowed(state, start), axis=1)
        tokens = self.forwards.processed(start, opening)
        if self.sampler.cfg_scale:
            tokens = 2 * (tokens[: len(live)] if isinstance(tokens, jax.Array) and tokens.ndim else tokens)
        return state._replace(
            forwards=state.forwards + live,
            processed=state.processed + jnp.where(live, tokens, 0),
            passes=state.passes + 1,
        )
