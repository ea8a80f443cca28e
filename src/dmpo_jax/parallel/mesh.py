"""The device mesh, the logical axes and the one table that maps them to mesh axes."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dmpo_jax.errors import UserError

AXES = ("data", "fsdp", "model")
ROWS = ("data", "fsdp")  # rows of a batch are split over both; whole groups stay together

# Logical axis -> mesh axes of the training layout. What is not named here is replicated.
RULES: dict[str, str | tuple[str, ...]] = {
    "rows": ROWS,
    "embed": "fsdp",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "vocab": "model",
}


def make_mesh(shape: Sequence[int], devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """Mesh of axes (data, fsdp, model) with Explicit axis types.

    Raises UserError when the product of `shape` is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    check_shape(shape, len(devices))
    return jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Explicit,) * 3, devices=devices)


def check_shape(shape: Sequence[int], devices: int) -> None:
    """Raises UserError when the product of `shape` is not the number of devices."""
    needed = math.prod(shape)
    if needed != devices:
        raise UserError(
            f"mesh: data x fsdp x model = {' x '.join(map(str, shape))} = {needed}, but there are "
            f"{devices} devices; choose sizes whose product is {devices}, or data = 0 to fill"
        )


def spec(axes: Sequence[str | None], shape: Sequence[int] | None = None, mesh=None) -> PartitionSpec:
    """Partition of an array with logical `axes`; an axis whose size the mesh does not divide is replicated."""
    parts = [None if axis is None else RULES.get(axis) for axis in axes]
    if shape is not None and mesh is not None:
        for i, part in enumerate(parts):
            names = (part,) if isinstance(part, str) else part or ()
            count = 1
            for name in names:
                count *= mesh.shape[name]
            if shape[i] % count:
                parts[i] = None
    return PartitionSpec(*parts)


def named(mesh: jax.sharding.Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
    """The training layout of one parameter on `mesh`."""
    return NamedSharding(mesh, spec(axes, shape, mesh))


def explicit_mesh():
    """The mesh of the current context if its axes are Explicit, else None (no mesh, or inside `shard_map`)."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind != AxisType.Explicit for kind in mesh.axis_types):
        return None
    return mesh


def activation(axes: Sequence[str | None], shape: Sequence[int]) -> PartitionSpec | None:
    """`out_sharding` of an operation whose result has these logical axes; None outside an explicit mesh."""
    mesh = explicit_mesh()
    return None if mesh is None else spec(axes, shape, mesh)


def gathered(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """A weight as the layer uses it: whole along fsdp, still split along model (an all-gather under fsdp)."""
    mesh = explicit_mesh()
    if mesh is None:
        return x
    return jax.reshard(x, spec([None if axis == "embed" else axis for axis in axes], x.shape, mesh))


def replicated(tree):
    """Every leaf whole on every device: the rollout layout, made once per cycle."""
    if explicit_mesh() is None:
        return tree
    return jax.tree.map(lambda x: jax.reshard(x, PartitionSpec()), tree)


def readable(tree):
    """Every leaf as this process can read it: where several processes run, whole on every device.

    One process reads its devices' parts by itself, and had better: XLA's CPU backend runs such an exchange and those of a
    loop in another order on each device, and then they wait for each other (jax 0.10.2).
    """
    return replicated(tree) if jax.process_count() > 1 else tree


def by_group(x: jax.Array, groups: int) -> jax.Array:
    """Rows `[P * N, ...]` as `[P, N, ...]`, whole groups staying where their rows are."""
    x = x.reshape(groups, -1, *x.shape[1:])
    return x if explicit_mesh() is None else jax.reshard(x, PartitionSpec(ROWS))


def by_row(x: jax.Array) -> jax.Array:
    """Groups `[P, N, ...]` as rows `[P * N, ...]`, staying where they are.

    Not left to `reshape`, which forgets the partition of an axis of size 1: a single group, one row of it a shard.
    """
    x = x.reshape(-1, *x.shape[2:])
    return x if explicit_mesh() is None else jax.reshard(x, PartitionSpec(ROWS))


def split_groups(tree, parts: int):
    """Leaves `[P, ...]` as `[parts, P / parts, ...]`; taking every parts-th group keeps each device's own groups on it."""

    def split(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)
        return x if explicit_mesh() is None else jax.reshard(x, PartitionSpec(None, ROWS))

    return jax.tree.map(split, tree)


def row_shards(mesh: jax.sharding.Mesh) -> int:
    """Number of shards that rows are split into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def per_shard(function: Callable, whole, rows, over: tuple[str, ...] = ROWS):
    """Runs `function(whole, rows)` on every shard of rows by itself, with no communication.

    `whole` is a tree of arrays that every shard sees entirely; every leaf of `rows` and of the result has rows as
    its leading axis. Outside a mesh this is a plain call. Inside, loops end when their own shard is done. `over = AXES`
    splits rows over the model axis too, where they divide, for work in which it has no other use.
    """
    mesh = explicit_mesh()
    if mesh is None:
        return function(whole, rows)
    count = jax.tree.leaves(rows)[0].shape[0]
    by_rows = PartitionSpec(over if count % math.prod(mesh.shape[axis] for axis in over) == 0 else ROWS)
    rows = jax.tree.map(lambda x: jax.reshard(x, by_rows), rows)
    mapped = jax.shard_map(function, in_specs=(PartitionSpec(), by_rows), out_specs=by_rows, check_vma=False)
    return jax.tree.map(lambda x: jax.reshard(x, PartitionSpec(ROWS)), mapped(replicated(whole), rows))


def in_turn(function: Callable, rows, at_once: int):
    """`function(rows)` for at most `at_once` rows of every shard at a time, one after the other; 0: all together.

    Every leaf of `rows` and of the result has rows as its leading axis. What a turn computes inside is computed again in the
    backward pass instead of being kept, so memory is that of one turn.
    """
    count, mesh = jax.tree.leaves(rows)[0].shape[0], explicit_mesh()
    local = count // (row_shards(mesh) if mesh else 1)
    turns = min((n for n in range(1, local + 1) if local % n == 0 and local // n <= at_once), default=1)
    if turns == 1:
        return function(rows)
    found = jax.lax.map(jax.checkpoint(function), split_groups(rows, turns))

    def joined(x: jax.Array) -> jax.Array:
        shape = (count, *x.shape[2:])
        return jnp.reshape(jnp.moveaxis(x, 0, 1), shape, out_sharding=None if mesh is None else PartitionSpec(ROWS))

    return jax.tree.map(joined, found)
