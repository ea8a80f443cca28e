"""What to propose at a masked position: temperature, filters and the noise that draws."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.sampler_config import SamplerConfig


class Noise(Protocol):
    """Where randomness comes from. `step int32[B]` is each row's own step, so no row depends on its neighbours."""

    def gumbel(self, step: jax.Array, width: int, vocab: int) -> jax.Array:
        """Standard Gumbel noise `f32[B, width, vocab]`."""
        ...

    def uniform(self, step: jax.Array, width: int) -> jax.Array:
        """Uniforms `f32[B, width]` of a step, for rules that choose positions at random."""
        ...

    def order(self, start: jax.Array, width: int) -> jax.Array:
        """Uniforms `f32[B, width]` of the block that begins at `start`, the same at each of its steps."""
        ...


class KeyedNoise:
    """Noise of rows with their own keys `[B]`."""

    def __init__(self, keys: jax.Array):
        self._keys = keys

    def _draw(self, draw: Callable, *numbers) -> jax.Array:
        def row(key, *numbers):
            for number in numbers:
                key = jax.random.fold_in(key, number)
            return draw(key)

        return jax.vmap(row)(self._keys, *(jnp.broadcast_to(n, self._keys.shape) for n in numbers))

    def gumbel(self, step: jax.Array, width: int, vocab: int) -> jax.Array:
        """In its high-accuracy form: the default one clips near 16, which a vocabulary of 126,464 exceeds once in seventy
        draws."""
        return self._draw(lambda key: jax.random.gumbel(key, (width, vocab), jnp.float32, mode="high"), step)

    def uniform(self, step: jax.Array, width: int) -> jax.Array:
        """A stream of its own: the proposal already used the step's key."""
        return self._draw(lambda key: jax.random.uniform(key, (width,)), step, 1)

    def order(self, start: jax.Array, width: int) -> jax.Array:
        """Keyed by the block's first position."""
        return self._draw(lambda key: jax.random.uniform(key, (width,)), -1 - start)


def forbid(logits: jax.Array, token: int) -> jax.Array:
    """Logits with one token's at minus infinity."""
    return jnp.where(jnp.arange(logits.shape[-1]) == token, -jnp.inf, logits)


def filtered(logits: jax.Array, top_k: int = 0, top_p: float = 1.0) -> jax.Array:
    """Logits `[..., V]` outside the `top_k` largest (0: all) at minus infinity, then outside the nucleus of mass `top_p`.

    The nucleus is the smallest set of most probable tokens whose mass exceeds `top_p`. Equal logits at an edge stay.
    """
    if top_k:
        least = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_p < 1.0:
        ordered = -jnp.sort(-logits, axis=-1)
        probability = jax.nn.softmax(ordered, axis=-1)
        inside = jnp.cumsum(probability, axis=-1) - probability <= top_p
        least = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return logits


def propose(logits: jax.Array, noise: jax.Array | None, temperature: float) -> jax.Array:
    """Tokens `int32[B, W]` drawn from softmax(logits / temperature) with Gumbel noise `f32[B, W, V]`; None: argmax."""
    if noise is not None:
        logits = logits + temperature * noise
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def log_prob_of(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Log-probability `f32[...]` of tokens `int32[...]` under logits `[..., V]`."""
    chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def entropy_of(logits: jax.Array) -> jax.Array:
    """Entropy in nats `f32[...]` of softmax(logits `[..., V]`); logits may be minus infinity."""
    log_prob = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.sum(jnp.where(log_prob > -jnp.inf, jnp.exp(log_prob) * log_prob, 0.0), axis=-1)


def margin_of(logits: jax.Array) -> jax.Array:
    """Probability of the best token less that of the second, `f32[...]`."""
    best = jax.lax.top_k(logits, 2)[0]
    best = jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    return best[..., 0] - best[..., 1]


class Proposal(NamedTuple):
    """What a forward says about the W positions of a block: tokens `int32[B, W]`, the rest `f32[B, W]` as in `Trace`.

    `score` ranks positions (higher first) and `probability` is what the commit rules compare.
    """

    token: jax.Array
    log_prob: jax.Array
    sampled_log_prob: jax.Array
    entropy: jax.Array | None
    score: jax.Array
    probability: jax.Array


def needs_entropy(sampler: SamplerConfig) -> bool:
    """Whether proposals carry entropies."""
    return sampler.trace_entropy or sampler.algorithm == "entropy"


def propose_block(logits: jax.Array, step: jax.Array, noise: Noise, sampler: SamplerConfig, eos_id: int) -> Proposal:
    """The proposal of a block from its logits `f32[B, W, V]`, in which tokens never to be proposed are minus infinity."""
    temperature = sampler.temperature
    tempered = logits / temperature if temperature not in (0.0, 1.0) else logits
    inside, drawn_from = logits, tempered
    if temperature and (sampler.top_k or sampler.top_p < 1):
        drawn_from = filtered(tempered, sampler.top_k, sampler.top_p)
        inside = jnp.where(drawn_from > -jnp.inf, logits, -jnp.inf)
    gumbel = noise.gumbel(step, *logits.shape[1:]) if temperature else None
    token = propose(inside, gumbel, temperature)
    log_prob = log_prob_of(logits, token)
    sampled = jnp.zeros_like(log_prob)
    if temperature:
        sampled = log_prob if drawn_from is logits else log_prob_of(drawn_from, token)

    trusted = {"plain": logits, "tempered": tempered, "filtered": drawn_from}[sampler.confidence]
    sure = log_prob if trusted is logits else log_prob_of(trusted, token)
    probability = jnp.exp(sure)
    entropy = entropy_of(trusted) if needs_entropy(sampler) else None
    match sampler.algorithm:
        case "margin":
            score = margin_of(trusted)
        case "entropy":
            score = -entropy
        case "left_to_right":
            score = jnp.broadcast_to(-jnp.arange(token.shape[1], dtype=jnp.float32), token.shape)
        case "random" | "origin":
            score = noise.uniform(step, token.shape[1])
        case _:
            score = probability if sampler.rank_temperature else sure
    if sampler.rank_temperature:  # the best of these are drawn without replacement from softmax(score / temperature)
        uniform = noise.uniform(step, token.shape[1])
        score = score / sampler.rank_temperature - jnp.log(-jnp.log(jnp.maximum(uniform, 1e-30)))
    if sampler.eos == "last":
        score = jnp.where(token == eos_id, _AFTER_ALL, score)
        probability = jnp.where(token == eos_id, 0.0, probability)
    return Proposal(token, log_prob, sampled, entropy, score, probability)


_AFTER_ALL = -1e30  # a score below any other, yet above what is not allowed
