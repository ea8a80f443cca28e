"""PEFT adapters: a folder with adapter_config.json and adapter_model.safetensors, under the family's own module names."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dmpo_jax.errors import UserError
from dmpo_jax.inputs import read_json
from dmpo_jax.model.checkpoint_folder import claim_folder
from dmpo_jax.model.families import FAMILIES
from dmpo_jax.model.lora import LoraConfig, adapter_specs, matrices
from dmpo_jax.model.parameters import ModelConfig, abstract_params, shardings
from dmpo_jax.model.safetensors import read_header, write_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def _keys(lora: LoraConfig, config: ModelConfig) -> dict[str, tuple[str, str, int, tuple[int, int]]]:
    """Tensor name on file -> (matrix, "a" or "b", layer, shape on file)."""
    names, specs, keys = FAMILIES[config.family].names["blocks"], abstract_params(config)["blocks"], {}
    for matrix in matrices(lora, config):
        shape, inputs = specs[matrix].shape, specs[matrix].inputs
        fan_in, fan_out = int(np.prod(shape[1 : 1 + inputs])), int(np.prod(shape[1 + inputs :]))
        for layer in range(config.n_layers):
            module = "base_model.model." + names[matrix].format(i=layer).removesuffix(".weight")
            keys[f"{module}.lora_A.weight"] = (matrix, "a", layer, (lora.rank, fan_in))
            keys[f"{module}.lora_B.weight"] = (matrix, "b", layer, (fan_out, lora.rank))
    return keys


def _target_pattern(lora: LoraConfig, config: ModelConfig) -> str:
    """Regular expression of the adapted modules: whole names, as LLaDA's head shares its last part with a matrix."""
    names = FAMILIES[config.family].names["blocks"]
    parts = [names[m].removesuffix(".weight").split(".{i}.") for m in matrices(lora, config)]
    return rf"{re.escape(parts[0][0])}\.\d+\.({'|'.join(re.escape(tail) for _, tail in parts)})"


def write_adapter(adapters: dict, lora: LoraConfig, config: ModelConfig, base: str, out: Path) -> None:
    """Writes fp32 adapters so that `peft.PeftModel.from_pretrained(model, out)` finds them; `base` names the model."""
    claim_folder(out)
    keys, host = _keys(lora, config), jax.device_get(adapters)["blocks"]
    # On file lora_A is [rank, in] and lora_B [out, rank]; here a is [*in, rank] and b [rank, *out].
    flat = lambda matrix, part, layer, shape: host[matrix][part][layer].reshape(shape[::-1]).T  # noqa: E731
    shapes = {name: (np.dtype(np.float32), key[3]) for name, key in keys.items()}
    write_file(out / WEIGHTS, shapes, (flat(*key) for key in keys.values()))
    content = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _target_pattern(lora, config),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    (out / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_adapter(folder: Path, lora: LoraConfig, config: ModelConfig, mesh: jax.sharding.Mesh | None = None) -> dict:
    """fp32 adapters of a PEFT folder. Raises UserError unless they are exactly those that `lora` describes."""
    content = read_json(folder / CONFIG)
    _check(folder / CONFIG, content, lora)
    keys, entries = _keys(lora, config), read_header(folder / WEIGHTS)
    missing, extra = sorted(keys.keys() - entries.keys()), sorted(entries.keys() - keys.keys())
    if missing or extra:
        raise UserError(
            f"{folder / WEIGHTS}: {len(missing)} adapters missing and {len(extra)} unknown "
            f"(first: {(missing or extra)[0]}); set lora.targets to the adapter's"
        )
    specs = adapter_specs(lora, config)
    host = jax.tree.map(lambda s: np.empty(s.shape, np.float32), specs, is_leaf=lambda s: hasattr(s, "axes"))
    for name, (matrix, part, layer, shape) in keys.items():
        if entries[name].shape != shape:
            raise UserError(f"{folder / WEIGHTS}: {name} has shape {entries[name].shape}: expected {shape}")
        whole = host["blocks"][matrix][part]
        whole[layer] = entries[name].read().astype(np.float32).T.reshape(whole.shape[1:])
    if mesh is None:
        return jax.device_put(host)
    place = lambda x, where: jax.make_array_from_callback(x.shape, where, lambda part: x[part])  # noqa: E731
    return jax.tree.map(place, host, shardings(specs, mesh))


def _check(path: Path, content: dict[str, Any], lora: LoraConfig) -> None:
    wanted = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha}
    absent = {"use_rslora": False, "use_dora": False, "bias": "none", "modules_to_save": None, "fan_in_fan_out": False}
    for key, value in (wanted | absent).items():
        found = content.get(key, None if key in wanted else value)
        if found != value:
            remedy = {"r": "; set lora.rank", "lora_alpha": "; set lora.alpha"}.get(key, ", others are not supported")
            raise UserError(f"{path}: {key} = {found!r}: expected {value!r}{remedy}")
    for key in ("rank_pattern", "alpha_pattern", "layers_to_transform"):
        if content.get(key):
            raise UserError(f"{path}: {key} is not supported: all matrices must share one rank and alpha")
