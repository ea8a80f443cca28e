"""A checkpoint folder in the Hugging Face layout: config.json, and safetensors in one file or in shards with an index."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dmpo_jax.errors import UserError
from dmpo_jax.inputs import read_json, regular_size
from dmpo_jax.model.families import FAMILIES, read_config, stated_ids
from dmpo_jax.model.parameters import ModelConfig, ParamSpec, abstract_params
from dmpo_jax.model.safetensors import Entry, read_header, write_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")
HUB_FILES = ("*.json", "*.safetensors", "vocab.txt", "merges.txt", "*.jinja")
SHARD_BYTES = 4_000_000_000
TOKENIZER_KEY = "dmpo_tokenizer"  # in config.json: the embedded tokenizer of a model that has no other


def locate(source: str, weights: bool = True) -> Path:
    """A local folder, fetched from the hub if `source` is an id `owner/name[@revision]` and no folder.

    Without `weights`, config.json alone. Raises UserError in one line where there is nothing to be had.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        for file in path.iterdir():
            if file.exists() and not file.is_dir():
                regular_size(file)  # whichever of them will be read: none may hang
        return path
    if not HUB_ID.fullmatch(source) or path.exists():
        raise UserError(
            f"{source}: no such folder; give a folder with config.json and *.safetensors, or a hub id owner/name"
        )
    import huggingface_hub
    from huggingface_hub import errors

    huggingface_hub.utils.logging.set_verbosity_error()  # its retries are not news
    name, _, revision = source.partition("@")
    try:
        if weights:
            return Path(huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=HUB_FILES))
        return Path(huggingface_hub.hf_hub_download(name, "config.json", revision=revision or None)).parent
    except errors.GatedRepoError:
        remedy = "is gated: accept its terms on its page, then run `hf auth login`"
    except errors.RevisionNotFoundError:
        remedy = f"has no revision {revision!r}"
    except errors.EntryNotFoundError:
        remedy = "cannot be reached and is not in the local cache: check the network, or give a folder"
    except errors.RepositoryNotFoundError:
        remedy = "is not on the hub, or is private: check the name, or run `hf auth login`"
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        remedy = f"cannot be fetched ({type(error).__name__}): check the network, or give a folder"
    raise UserError(f"{source}: no such folder, and the hub model {remedy}")


def model_of(directory: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The model of a folder's config.json, and that file's content. Raises UserError where either is not to be had."""
    path = directory / "config.json"
    content = read_json(path)
    config = read_config(content, str(path))
    stated_ids(content, str(path), config.vocab_size)
    return config, content


def stored_shape(spec: ParamSpec, layered: bool) -> tuple[int, ...]:
    """Shape of one tensor on file: matrices `[out, in]`, everything else flat per layer."""
    shape = spec.shape[1:] if layered else spec.shape
    flat = lambda sizes: int(np.prod(sizes, dtype=np.int64))  # noqa: E731
    if spec.inputs:
        return flat(shape[spec.inputs :]), flat(shape[: spec.inputs])
    return (flat(shape),) if layered else shape


def tensor_names(config: ModelConfig) -> Iterator[tuple[tuple[str, ...], int | None, str, ParamSpec]]:
    """(path in the tree, layer or None, tensor name, spec) of every tensor of a model."""
    names, specs = FAMILIES[config.family].names, abstract_params(config)
    for key, spec in specs.items():
        if key != "blocks":
            yield (key,), None, names[key], spec
    for key, spec in specs["blocks"].items():
        for layer in range(config.n_layers):
            yield ("blocks", key), layer, names["blocks"][key].format(i=layer), spec


def open_folder(directory: Path, config: ModelConfig) -> dict[str, Entry]:
    """Every tensor of a folder by name, checked against the model before any is read.

    Raises UserError on files of another kind, on a missing, extra or repeated name, and on a wrong shape.
    """
    entries = _entries(directory)
    wanted = {name: stored_shape(spec, layer is not None) for _, layer, name, spec in tensor_names(config)}
    missing, extra = sorted(wanted.keys() - entries.keys()), sorted(entries.keys() - wanted.keys())
    if missing or extra:
        parts = [f"{len(n)} {kind} (first: {n[0]})" for kind, n in (("missing", missing), ("unknown", extra)) if n]
        raise UserError(
            f"{directory}: tensors {' and '.join(parts)}; config.json describes a {config.family} model of "
            f"{config.n_layers} layers{' with tied head' if config.tied_head else ''}"
        )
    for name, shape in wanted.items():
        if entries[name].shape != shape:
            raise UserError(f"{directory}: {name} has shape {entries[name].shape}: config.json makes it {shape}")
    return entries


def _entries(directory: Path) -> dict[str, Entry]:
    if (directory / INDEX).exists():
        index = read_json(directory / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise UserError(f"{directory / INDEX}: no weight_map of file names")
        for file in set(index.values()):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise UserError(f"{directory / INDEX}: {file!r}: expected the name of a .safetensors file beside it")
        entries = {}
        for file in sorted(set(index.values())):
            for name, entry in read_header(directory / file).items():
                if index.get(name) != file:
                    raise UserError(f"{directory / file}: holds {name}, which the index places in {index.get(name)}")
                entries[name] = entry
        lost = sorted(index.keys() - entries.keys())
        if lost:
            raise UserError(f"{directory / INDEX}: {lost[0]} is not in {index[lost[0]]}")
        return entries
    if (directory / SINGLE).exists():
        return read_header(directory / SINGLE)
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        raise UserError(
            f"{directory}: only {pickles[0]}, a pickle, which is not read because it can run code; save the model again "
            "with safe_serialization=True"
        )
    raise UserError(f"{directory}: no {SINGLE} and no {INDEX}")


def check_folder(directory: Path) -> None:
    """Raises UserError unless a new folder can be made there, or an empty one is there already; makes nothing."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"--out {directory}: is a file; expected a folder, new or empty")
    if directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"--out {directory}: is not empty; choose another --out")
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"--out {directory}: {nearest} is no folder that can be written; choose another")


def claim_folder(directory: Path) -> None:
    """Makes a folder to write in. Raises UserError when it holds something or cannot be made."""
    check_folder(directory)
    directory.mkdir(parents=True, exist_ok=True)


def write_folder(
    directory: Path,
    content: dict[str, Any],
    config: ModelConfig,
    dtype: np.dtype,
    tensors: Iterable[np.ndarray],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config.json `content` and `tensors`, given in the order of `tensor_names`, as shards of at most so many bytes.

    config.json comes last, so a folder cut short cannot be taken for a whole one.
    """
    shards, size, total = [{}], 0, 0
    for _, layer, name, spec in tensor_names(config):
        shape = stored_shape(spec, layer is not None)
        bytes_ = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if shards[-1] and size + bytes_ > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape)
        size, total = size + bytes_, total + bytes_
    tensors = iter(tensors)
    if len(shards) == 1:
        write_file(directory / SINGLE, shards[0], tensors)
    else:
        index = {}
        for number, shard in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_file(directory / file, shard, (next(tensors) for _ in shard))
            index |= dict.fromkeys(shard, file)
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
    _write_json(directory / "config.json", content)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
