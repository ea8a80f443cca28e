"""What to propose at a masked position: temperature, filters and the noise that draws."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.parallel.mesh import explicit_mesh


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
        return jax.vmap(draw)(self._folded(*numbers))

    def _folded(self, *numbers) -> jax.Array:
        keys = self._keys
        for number in numbers:
            keys = jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(number, keys.shape))
        return keys

    def gumbel(self, step: jax.Array, width: int, vocab: int) -> jax.Array:
        """From one draw of 32 bits each, exact where it is large, up to 22.9.

        JAX's own either clips near 16, which a vocabulary of 126,464 exceeds once in seventy draws, or takes two draws and
        three times as long.
        """

        def draw(key):
            tail = (jax.random.bits(key, (width, vocab), jnp.uint32).astype(jnp.float32) + 0.5) * 2.0**-32
            return -jnp.log(-jnp.log1p(-jnp.minimum(tail, _LARGEST_TAIL)))

        # Row by row: fused with the argmax that follows, all rows at once take three times as long on CPUs.
        return jax.lax.map(draw, self._folded(step))

    def uniform(self, step: jax.Array, width: int) -> jax.Array:
        """A stream of its own: the proposal already used the step's key."""
        return self._draw(lambda key: jax.random.uniform(key, (width,)), step, 1)

    def order(self, start: jax.Array, width: int) -> jax.Array:
        """Keyed by the block's first position."""
        return self._draw(lambda key: jax.random.uniform(key, (width,)), -1 - start)


def forbid(logits: jax.Array, token: int) -> jax.Array:
    """Logits with one token's at minus infinity."""
    if explicit_mesh() is not None:  # the vocabulary may be split
        return jnp.where(jnp.arange(logits.shape[-1]) == token, -jnp.inf, logits)
    # Written in place: a comparison would be fused into everything that reads the logits, at a third of its time on CPUs.
    never = jnp.full((*logits.shape[:-1], 1), -jnp.inf, logits.dtype)
    return jax.lax.dynamic_update_slice_in_dim(logits, never, token, logits.ndim - 1)


def filtered(logits: jax.Array, top_k: int = 0, top_p: float = 1.0) -> jax.Array:
    """Logits `[..., V]` outside the `top_k` largest (0: all) at minus infinity, then outside the nucleus of mass `top_p`.

    The nucleus is the smallest set of most probable tokens whose mass exceeds `top_p`. Equal logits at an edge stay.
    """
    if top_k:
        least = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_p < 1.0:
        logits = jnp.where(logits >= _least_of_nucleus(logits, top_p), logits, -jnp.inf)
    return logits


def _least_of_nucleus(logits: jax.Array, top_p: float) -> jax.Array:
    """The smallest number `[..., 1]` that has a mass of at most `top_p` above it.

    Found by bisection over the ordered bit patterns of fp32: exact in 32 passes, where a sort takes several times as long.
    """
    probability = jax.nn.softmax(logits, axis=-1)
    pattern = _ordered(jax.lax.bitcast_convert_type(logits, jnp.int32))

    def halve(_, bracket):
        low, high = bracket  # too much mass above `low`, not too much above `high`
        middle = (low & high) + ((low ^ high) >> 1)
        mass = jnp.sum(jnp.where(pattern > middle, probability, 0), axis=-1, keepdims=True)
        return jnp.where(mass > top_p, middle, low), jnp.where(mass > top_p, high, middle)

    high = jnp.max(pattern, axis=-1, keepdims=True)
    low = jnp.full_like(high, jnp.iinfo(jnp.int32).min)
    _, least = jax.lax.fori_loop(0, 32, halve, (low, high))
    return jax.lax.bitcast_convert_type(_ordered(least), jnp.float32)


def _ordered(pattern: jax.Array) -> jax.Array:
    """int32 in the order of the fp32 numbers whose bits they are, and back."""
    return jnp.where(pattern < 0, pattern ^ 0x7FFFFFFF, pattern)


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


_LARGEST_TAIL = 1 - 2.0**-24  # the largest fp32 below 1
_AFTER_ALL = -1e30  # a score below any other, yet above what is not allowed
