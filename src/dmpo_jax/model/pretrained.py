"""Checkpoints onto the mesh and back: one tensor at a time through the host, in the target dtype and sharding."""

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dmpo_jax.errors import UserError
from dmpo_jax.model.checkpoint_folder import (
    INDEX,
    claim_folder,
    locate,
    model_of,
    open_folder,
    stored_shape,
    tensor_names,
    write_folder,
)  # fmt: skip
from dmpo_jax.model.families import SHAPE, SpecialIds, same, write_config
from dmpo_jax.model.parameters import ModelConfig, ParamSpec, shardings
from dmpo_jax.model.quantize import store, stored_specs
from dmpo_jax.model.weights import Weight, plain
from dmpo_jax.parallel.mesh import explicit_mesh, replicated

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SMALL_FILE = 40_000_000  # bytes; what lies beside the weights and is smaller is copied with them


def load_pretrained(
    directory: str | Path, dtype: str = "float32", mesh: jax.sharding.Mesh | None = None
) -> tuple[ModelConfig, dict]:
    """(config, params) of a folder with config.json and safetensors, or of a hub id.

    dtype ("float32" or "bfloat16") is that of the parameters and of the activations. With a mesh, every parameter has the
    training layout. Raises UserError for a model of another family and for files that do not fit it.
    """
    if dtype not in DTYPES:
        raise UserError(f'dtype = "{dtype}": expected "float32" or "bfloat16"')
    folder = locate(str(directory))
    config = dataclasses.replace(model_of(folder)[0], dtype=dtype)
    return config, load_params(folder, dataclasses.replace(config, base=dtype), mesh)


def load_params(folder: Path, config: ModelConfig, mesh: jax.sharding.Mesh | None = None) -> dict:
    """Parameters of a folder, stored as `config.base` says. Raises UserError when config.json has another shape."""
    found = model_of(folder)[0]
    for key in SHAPE:
        if not same(key, getattr(config, key), found):
            raise UserError(
                f"{folder}: its model.{key} is {getattr(found, key)!r}, but {getattr(config, key)!r} in this run"
            )
    entries, specs = open_folder(folder, config), stored_specs(config)
    places = shardings(specs, mesh) if mesh is not None else None
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        params: dict = {"blocks": {}}
        for path, layer, name, spec in tensor_names(config):
            raw = entries[name].read()  # while the devices still work on the tensor before
            jax.block_until_ready(params)
            where = None if places is None else functools.reduce(lambda tree, key: tree[key], path, places)
            tensor = _everywhere(raw, mesh)
            if layer is None:
                params[path[0]] = jax.jit(lambda raw, s=spec: _convert(raw, s, config, False), out_shardings=where)(
                    tensor
                )
                continue
            blocks, key = params["blocks"], path[1]
            if layer == 0:
                blocks[key] = jax.jit(lambda s=spec: _empty(s, config), out_shardings=where)()
            blocks[key] = _put(blocks[key], tensor, layer, spec, config)
        return {**params, "blocks": params.pop("blocks")}


def _everywhere(raw: np.ndarray, mesh: jax.sharding.Mesh | None) -> jax.Array:
    with jax.transfer_guard("allow"):
        if mesh is None:
            return jax.device_put(raw)
        return jax.make_array_from_callback(raw.shape, NamedSharding(mesh, PartitionSpec()), lambda part: raw[part])


def _convert(raw: jax.Array, spec: ParamSpec, config: ModelConfig, layered: bool) -> Weight:
    """One tensor as on file (matrices `[out, in]`) to the parameter (matrices `[*in, *out]`) as it is stored."""
    shape = spec.shape[1:] if layered else spec.shape
    return store((raw.T if spec.inputs else raw).reshape(shape), spec, config, layered)


def _empty(spec: ParamSpec, config: ModelConfig) -> Weight:
    return jax.tree.map(lambda x: jnp.zeros_like(x), store(jnp.zeros(spec.shape), spec, config, True))


@functools.partial(jax.jit, donate_argnums=0, static_argnums=(3, 4))
def _put(stack: Weight, raw: jax.Array, layer: jax.Array, spec: ParamSpec, config: ModelConfig) -> Weight:
    """The stack of all layers with one layer's tensor written into it, in place."""

    def write(whole, part):
        if explicit_mesh() is not None:
            part = jax.reshard(part, PartitionSpec(*jax.typeof(whole).sharding.spec[1:]))
        return jax.lax.dynamic_update_index_in_dim(whole, part, layer, 0)

    return jax.tree.map(write, stack, _convert(raw, spec, config, True))


def stored_tensors(params: dict, config: ModelConfig, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Every tensor of a model as on file, in the order of `tensor_names`; quantised and adapted matrices made plain."""
    for path, layer, _, spec in tensor_names(config):
        leaf = functools.reduce(lambda tree, key: tree[key], path, params)
        yield np.asarray(jax.device_get(_take(leaf, layer or 0, spec, layer is not None, dtype)))


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _take(leaf: Weight, layer: jax.Array, spec: ParamSpec, layered: bool, dtype: np.dtype) -> jax.Array:
    if layered:
        leaf = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, layer, 1), leaf)
    leaf = plain(replicated(leaf), spec).astype(dtype)
    rows, *columns = stored_shape(spec, layered)
    return leaf.reshape(*columns, rows).T if spec.inputs else leaf.reshape(rows, *columns)


def export_checkpoint(
    params: dict, config: ModelConfig, ids: SpecialIds, out: Path, dtype: str = "float32", extra: dict | None = None
) -> None:
    """Writes a model (adapters merged) as config.json, the keys of `extra` in it, and safetensors.

    Where `config.pretrained` names a source, its config.json and the small files beside it (the tokenizer's) are kept.
    """
    claim_folder(out)
    content = write_config(config, ids)
    if config.pretrained:
        source = locate(config.pretrained)
        content = model_of(source)[1]
        copy_beside(source, out)
    content = {**content, **(extra or {}), "torch_dtype": dtype}
    write_folder(out, content, config, DTYPES[dtype], stored_tensors(params, config, DTYPES[dtype]))


def import_checkpoint(source: str, out: Path, dtype: str = "") -> tuple[ModelConfig, str]:
    """Writes a checked copy of a checkpoint, from the hub if need be; returns its model and dtype.

    dtype "" keeps the source's (float32 where its tensors are of several). Every name and shape is checked before
    anything is written.
    """
    folder = locate(source)
    config, content = model_of(folder)
    entries = open_folder(folder, config)
    if not dtype:
        found = {entry.dtype for entry in entries.values()}
        dtype = "bfloat16" if found == {DTYPES["bfloat16"]} else "float32"
    claim_folder(out)
    copy_beside(folder, out)
    tensors = (entries[name].read().astype(DTYPES[dtype]) for _, _, name, _ in tensor_names(config))
    write_folder(out, {**content, "torch_dtype": dtype}, config, DTYPES[dtype], tensors)
    return config, dtype


def copy_beside(source: Path, out: Path) -> None:
    """Copies the small files of a checkpoint folder that are neither weights nor config.json."""
    for path in sorted(source.iterdir()):
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".ckpt") or path.name in (INDEX, "config.json")
        if path.is_file() and not weights and path.stat().st_size <= SMALL_FILE:
            shutil.copyfile(path, out / path.name)
