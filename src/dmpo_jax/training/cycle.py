"""The whole method on one page: `cycle(state, batch) -> (state, record)` is one XLA program.

Roll out a group of completions per prompt, grade them, prepare what the objective needs (ELBOs, weights), and take its
updates. No callback, no host work in between. With `rollout.staleness`, later cycles take their updates on the same rollout.
A task that no device can grade cuts it in two, `gather` and `learn` (`host_cycle.py`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dmpo_jax.diffusion.canvas import Prompts, live_positions, repeat
from dmpo_jax.diffusion.masking import row_keys
from dmpo_jax.diffusion.sampler import Trace, sample
from dmpo_jax.model.lora import policy_of, with_dropout
from dmpo_jax.model.weights import cast
from dmpo_jax.objectives.objective import Prepared, Rollout, given_rollout
from dmpo_jax.parallel.mesh import AXES, by_group, per_shard, readable, split_groups
from dmpo_jax.tasks.bytes import to_bytes
from dmpo_jax.training.data import Batch
from dmpo_jax.training.setup import Setup
from dmpo_jax.training.state import Replay, State, optimizer_of

ROLLOUT_STREAM, PREPARE_STREAM, UPDATE_STREAM = range(3)
DROPOUT_STREAM = 2**31  # of an update's key; rows have the small numbers


class Record(NamedTuple):
    """What a cycle reports: scalar metrics, completions `int32[P, N, L]`, reward components `f32[P, N]` by name."""

    metrics: dict[str, jax.Array]
    completion: jax.Array
    components: dict[str, jax.Array]


def make_cycle(setup: Setup) -> Callable[[State, Batch], tuple[State, Record]]:
    """The cycle of a configuration, to be jitted with its state donated."""
    staleness = setup.config.rollout.staleness

    def cycle(state: State, batch: Batch) -> tuple[State, Record]:
        fresh = lambda: gather(state, batch, setup)  # noqa: E731
        due = _age(state, setup) == 0
        return learn(state, jax.lax.cond(due, fresh, lambda: state.replay) if staleness else fresh(), setup)

    return cycle


def learn(state: State, replay: Replay, setup: Setup) -> tuple[State, Record]:
    """The objective's updates on a graded rollout, and what the cycle reports."""
    objective, context, settings = setup.objective, setup.context, setup.config.objective
    policy = lambda params: policy_of(params, state.base, setup.config.lora)  # noqa: E731
    reference = state.reference
    if settings.reference_sync:
        due = state.cycle % settings.reference_sync == 0
        reference = jax.tree.map(lambda new, old: jnp.where(due, new, old), state.params, reference)

    rollout, components, metrics, params_then = replay
    age = _age(state, setup)
    with jax.named_scope("prepare"):
        compared = state.teacher if reference is None else policy(reference)
        # At every age of a rollout the same masks, so the same weights.
        prepare_key = _stream(state, PREPARE_STREAM, age)
        prepared = objective.prepare(policy(params_then), compared, rollout, prepare_key, settings, context)
    metrics = metrics | prepared.metrics
    if setup.config.rollout.staleness:
        metrics["rollout_age"] = age.astype(jnp.float32)

    def update(carry, number):
        params, optimizer = carry
        update_key = jax.random.fold_in(_stream(state, UPDATE_STREAM), number)
        params, optimizer, step_metrics = take_update(
            params, optimizer, rollout, prepared, update_key, setup, state.base
        )
        return (params, optimizer), step_metrics

    with jax.named_scope("update"):
        (params, optimizer), steps = jax.lax.scan(update, (state.params, state.optimizer), jnp.arange(settings.updates))
    metrics |= jax.tree.map(jnp.mean, steps) | {"param_norm": optax.tree.norm(params)}
    kept = replay if setup.config.rollout.staleness else None
    return (
        State(params, reference, optimizer, state.cycle + 1, state.seed, state.base, state.teacher, kept),
        readable(Record(metrics, rollout.completion, components)),
    )


def _age(state: State, setup: Setup) -> jax.Array:
    """Cycles since the rollout that this one learns from was drawn."""
    return state.cycle % (1 + setup.config.rollout.staleness)


def _stream(state: State, number: int, age: jax.Array | int = 0) -> jax.Array:
    """The key of one stream of a cycle's randomness, or of the cycle `age` before it."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(state.seed), state.cycle - age), number)


def gather(state: State, batch: Batch, setup: Setup) -> Replay:
    """The examples of a batch to learn from: rollouts of the current policy, or the given demonstrations."""
    if not setup.objective.ROLLOUT:
        return Replay(demonstrations(batch, setup), {}, {}, state.params)
    policy = policy_of(state.params, state.base, setup.config.lora)
    rollout, components, forwards = roll_out(policy, batch, _stream(state, ROLLOUT_STREAM), setup)
    metrics = _decoding_metrics(rollout, forwards) | _reward_metrics(components)
    return Replay(rollout, components, metrics, state.params)


def regraded(replay: Replay, components: dict[str, jax.Array]) -> Replay:
    """The same rollout with other reward components `f32[P, N]`."""
    rollout = replay.rollout._replace(reward=components["reward"])
    return replay._replace(rollout=rollout, components=components, metrics=replay.metrics | _reward_metrics(components))


def empty_replay(state: State, batch: Batch, setup: Setup) -> Replay:
    """Zeros in the shape and layout of what the first cycle will keep."""
    shapes = jax.eval_shape(lambda state, batch: gather(state, batch, setup), state, batch)
    place = jax.tree.map(lambda x: x.sharding, shapes)
    return jax.jit(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), out_shardings=place)()


def decode(
    params, prompts: Prompts, keys_key: jax.Array, rows: jax.Array, setup: Setup, sampler=None, watch=None
) -> Trace:
    """Completes rows `[B]`, each shard of rows in a loop of its own; row r's randomness is keyed by r alone.

    `watch` as in `sample`.
    """

    def on_shard(whole, local):
        prompts, rows = local
        return sample(
            whole[0],
            prompts,
            row_keys(whole[1], rows),
            length=setup.config.rollout.completion_length,
            mask_id=setup.tokenizer.mask_id,
            eos_id=setup.tokenizer.eos_id,
            sampler=sampler or setup.config.sampler,
            config=setup.model,
            watch=watch,
        )

    whole = (cast(params, setup.model.dtype), keys_key)  # before they travel: half the bytes in bf16
    return per_shard(on_shard, whole, (prompts, rows), over=AXES)


def grade(completion: jax.Array, features: dict[str, jax.Array], setup: Setup) -> dict[str, jax.Array]:
    """Reward components `f32[B]` of completions `int32[B, L]`, read as bytes on the device; NaN where only a host can."""
    if setup.task.grade_bytes is None:
        return dict.fromkeys(setup.task.components, completion[:, 0] * jnp.float32(jnp.nan))
    table, lengths = setup.tokenizer.byte_table()
    unused = setup.model.vocab_size - len(lengths)  # rows of the vocabulary that no token has: no bytes
    table, lengths = np.pad(table, ((0, unused), (0, 0))), np.pad(lengths, (0, unused))

    def on_shard(whole, local):
        completion, features = local
        stream, length = to_bytes(completion, *whole, setup.tokenizer.end_ids)
        return setup.task.grade_bytes(stream, length, features)

    with jax.named_scope("grade"):
        return per_shard(on_shard, (jnp.asarray(table), jnp.asarray(lengths)), (completion, features))


def roll_out(params, batch: Batch, key: jax.Array, setup: Setup) -> tuple[Rollout, dict[str, jax.Array], jax.Array]:
    """N graded completions per prompt, their reward components `f32[P, N]`, and forwards `int32[P, N]`."""
    prompts, size = batch.prompts, setup.config.rollout.group
    groups = prompts.length.shape[0]
    rows = jnp.arange(groups * size, dtype=jnp.int32)
    trace = decode(params, repeat(prompts, size), key, rows, setup)
    components = grade(trace.completion, repeat(batch.features, size), setup)

    grouped = lambda x: by_group(x, groups)  # noqa: E731
    components = jax.tree.map(grouped, components)
    rollout = Rollout(
        prompts=prompts,
        row=grouped(rows),
        completion=grouped(trace.completion),
        step=grouped(trace.step),
        log_prob=grouped(trace.log_prob),
        sampled_log_prob=grouped(trace.sampled_log_prob),
        entropy=None if trace.entropy is None else grouped(trace.entropy),
        live=grouped(live_positions(trace.completion, setup.tokenizer.eos_id)),
        reward=components["reward"],
    )
    return rollout, components, grouped(trace.forwards)


def demonstrations(batch: Batch, setup: Setup) -> Rollout:
    """Given answers in the place of completions: one per prompt, without trace or reward."""
    live = live_positions(batch.demonstration, setup.tokenizer.eos_id)[:, None]
    return given_rollout(batch.prompts, batch.demonstration[:, None], live, jnp.zeros(live.shape[:2], jnp.float32))


def take_update(
    params, optimizer, rollout: Rollout, prepared: Prepared, key: jax.Array, setup: Setup, base: Any = None
):
    """One optimiser step on the mean loss over groups. Returns (params, optimizer, metrics).

    Under LoRA, params are the adapters on `base`. Their dropout is the same for the policy and for what it is compared
    with (`prepared.whole`), as the masks are.
    """
    objective, settings, context = setup.objective, setup.config.objective, setup.context
    parts, lora = setup.config.rollout.accumulation, setup.config.lora

    def gradient(rollout, groups):
        part = prepared._replace(groups=groups)
        if lora.dropout:
            drop = jax.random.fold_in(jax.random.fold_in(key, DROPOUT_STREAM), jnp.min(rollout.row))
            part = part._replace(whole=with_dropout(part.whole, drop))

        def loss(params):
            policy = policy_of(params, base, lora)
            policy = with_dropout(policy, drop) if lora.dropout else policy
            return objective.loss(policy, rollout, part, key, settings, context)

        return jax.value_and_grad(loss, has_aux=True)(params)

    pieces = split_groups((rollout, prepared.groups), parts)
    scalars, _ = jax.eval_shape(lambda: gradient(*jax.tree.map(lambda x: x[0], pieces)))
    zero = (jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), scalars), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(lambda sums, piece: (jax.tree.map(jnp.add, sums, gradient(*piece)), None), zero, pieces)
    (loss, extra), grads = jax.tree.map(lambda x: x / parts, total)

    steps, optimizer = optimizer_of(setup).update(grads, optimizer, params)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), **extra}
    return optax.apply_updates(params, steps), optimizer, metrics


def _decoding_metrics(rollout: Rollout, forwards: jax.Array) -> dict[str, jax.Array]:
    live = jnp.sum(rollout.live, axis=-1)
    return {
        "completion_length": jnp.mean(live.astype(jnp.float32)),
        "completion_unfinished": jnp.mean(jnp.all(rollout.step >= 0, axis=-1) & jnp.all(rollout.live, axis=-1)),
        "nfe/mean": jnp.mean(forwards.astype(jnp.float32)),
    }


def _reward_metrics(components: dict[str, jax.Array]) -> dict[str, jax.Array]:
    reward = components["reward"]
    mean = lambda value: jnp.mean(value, where=jnp.isfinite(value))  # noqa: E731
    metrics = {f"reward/{name}": mean(value) for name, value in components.items() if name != "reward"}
    return metrics | {"reward/mean": mean(reward), "reward/std": jnp.std(reward, where=jnp.isfinite(reward))}
