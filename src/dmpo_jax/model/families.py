"""The published model families as data: what config.json says, what the tensors are called, which tokens are special."""

import dataclasses
from collections.abc import Callable
from typing import Any

from dmpo_jax.errors import UserError, shown
from dmpo_jax.model.parameters import ModelConfig

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Token ids that decoding needs: unknown, end of the sequence, padding."""

    mask: int
    eos: int
    pad: int


@dataclasses.dataclass(frozen=True)
class Family:
    """One line of checkpoints.

    `names` maps parameters to tensor names (`{i}`: the layer). `fixed` lists, by key of config.json, the values this code
    computes: a checkpoint with another one is refused, because its numbers would differ.
    """

    name: str
    model_type: str
    architectures: tuple[str, ...]  # the first is written
    names: dict[str, Any]
    fixed: dict[str, tuple]
    read: Callable[[Json], dict[str, Any]]
    write: Callable[[ModelConfig], Json]
    ids: SpecialIds  # of the released models, where config.json does not say
    stop_tokens: tuple[str, ...]  # all that may end an answer
    template: str  # see `chat`


def read_family(json: Json, source: str) -> Family:
    """The family of a config.json. Raises UserError naming an unknown one."""
    kind, architectures = json.get("model_type"), json.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise UserError(f"{source}: architectures = {shown(architectures)}: expected a list of names")
    for family in FAMILIES.values():
        if isinstance(kind, str) and kind.lower() == family.model_type.lower():
            other = [a for a in architectures if a not in family.architectures]
            if other:
                raise UserError(
                    f"{source}: model_type {kind!r} with architecture {shown(other[0])}: expected {family.architectures[0]}; "
                    "this model is not supported"
                )
            return family
    known = ", ".join(family.model_type for family in FAMILIES.values())
    raise UserError(f"{source}: model_type = {shown(kind)}: expected one of {known}; other models are not supported")


def read_config(json: Json, source: str) -> ModelConfig:
    """The model that a config.json describes. Raises UserError naming the key that this code cannot honour."""
    family = read_family(json, source)
    for key, allowed in family.fixed.items():
        if key in json and json[key] not in allowed:
            raise UserError(
                f"{source}: {key} = {shown(json[key])}: only {allowed[0]!r} is supported for {family.model_type}"
            )
    try:
        fields = family.read(_Checked(json))
    except _Wrong as error:
        raise UserError(f"{source}: {error}") from None
    config = ModelConfig(family=family.name, **fields)
    # One spelling of the usual head shapes, so that equal models have equal configurations.
    if config.kv_heads == config.n_heads:
        config = dataclasses.replace(config, n_kv_heads=0)
    if config.head_size * config.n_heads == config.d_model:
        config = dataclasses.replace(config, head_dim=0)
    try:
        config.validate()
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return config


def write_config(config: ModelConfig, ids: SpecialIds) -> Json:
    """The config.json of a model. Raises UserError where its family cannot express it."""
    family = FAMILIES[config.family]
    json = {"architectures": [family.architectures[0]], "model_type": family.model_type, **family.write(config)}
    json |= {"mask_token_id": ids.mask, "eos_token_id": ids.eos, "pad_token_id": ids.pad}
    back, lost = read_config(json, "config.json"), []
    for field in dataclasses.fields(ModelConfig):
        if field.name in SHAPE and not same(field.name, getattr(config, field.name), back):
            lost.append(f"model.{field.name} = {getattr(config, field.name)!r}")
    if lost:
        raise UserError(
            f"model.family = {config.family!r} cannot express {', '.join(lost)}; set another of {', '.join(FAMILIES)}"
        )
    return json


def same(key: str, value: Any, config: ModelConfig) -> bool:
    """Whether a field's value means what `config` has there; 0 stands for the usual one where the field allows it."""
    resolved = {"n_kv_heads": config.kv_heads, "head_dim": config.head_size, "vocab_size": config.vocab_size}
    return value == getattr(config, key) or value == resolved.get(key) or (key == "vocab_size" and value == 0)


def special_ids(json: Json, source: str) -> SpecialIds:
    """Special token ids of a config.json. Raises UserError where one does not fit the vocabulary."""
    family = read_family(json, source)
    vocabulary = read_config(json, source).vocab_size
    found = dataclasses.asdict(family.ids) | stated_ids(json, source, vocabulary)
    for name, value in found.items():
        if value >= vocabulary:
            raise UserError(
                f"{source}: {name}_token_id is missing, and the family's {value} is not below {vocabulary}; state it"
            )
    if found["mask"] in (found["eos"], found["pad"]):
        raise UserError(f"{source}: mask_token_id = {found['mask']} is the end or padding token too")
    return SpecialIds(**found)


def stated_ids(json: Json, source: str, vocabulary: int) -> dict[str, int]:
    """The special ids that a config.json states, of a list the first. Raises UserError where one is not in the vocabulary."""
    found = {}
    for name in (field.name for field in dataclasses.fields(SpecialIds)):
        value = json.get(f"{name}_token_id")
        several = value if isinstance(value, list) else [value]
        if value is None:
            continue
        if not several or not all(type(number) is int and 0 <= number < vocabulary for number in several):
            raise UserError(
                f"{source}: {name}_token_id = {shown(value)}: expected a token id, 0 or more and below {vocabulary}"
            )
        found[name] = several[0]
    return found


class _Wrong(Exception):
    pass


class _Checked:
    """Typed access to an untrusted config.json."""

    def __init__(self, json: Json):
        self._json = json

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._json.get(key)
        if value is None:
            if default is None:
                raise _Wrong(f"{key} is missing")
            return default
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise _Wrong(f"{key} = {shown(value)}: expected {kind.__name__}")
        if kind in _RANGES and not _RANGES[kind][0] <= value <= _RANGES[kind][1]:  # NaN is in no range
            raise _Wrong(f"{key} = {shown(value)}: expected a positive number of ordinary size")
        return float(value) if kind is float else value


# What fits the arithmetic: int32 sizes, and numbers whose float32 is neither 0 nor infinite.
_RANGES = {int: (1, 2**31 - 1), float: (1e-30, 1e30)}


def _read_llada(json: _Checked) -> dict[str, Any]:
    d, heads = json.get("d_model", int), json.get("n_heads", int)
    shared = json.get("multi_query_attention", bool, False)
    return {
        "vocab_size": json.get("embedding_size", int, 0) or json.get("vocab_size", int),
        "d_model": d,
        "n_layers": json.get("n_layers", int),
        "n_heads": heads,
        "n_kv_heads": json.get("n_kv_heads", int, 1 if shared else heads),
        "d_mlp": json.get("mlp_hidden_size", int, 0) or d * json.get("mlp_ratio", int),
        "rope_theta": json.get("rope_theta", float, 10000.0),
        "norm_eps": json.get("rms_norm_eps", float, 1e-5),
        "qkv_bias": json.get("include_qkv_bias", bool, False),
        "tied_head": json.get("weight_tying", bool, False),
        "rope_full_precision": json.get("rope_full_precision", bool, True),
    }


def _write_llada(c: ModelConfig) -> Json:
    return {
        "d_model": c.d_model, "n_layers": c.n_layers, "n_heads": c.n_heads, "n_kv_heads": c.kv_heads,
        "mlp_hidden_size": c.d_mlp, "mlp_ratio": 4, "vocab_size": c.vocab_size, "embedding_size": c.vocab_size,
        "rope_theta": c.rope_theta, "rms_norm_eps": c.norm_eps, "rope_full_precision": c.rope_full_precision,
        "include_qkv_bias": c.qkv_bias, "weight_tying": c.tied_head,
        "max_sequence_length": 4096, "init_device": "cpu", "use_cache": False, "flash_attention": False,
        **{key: allowed[0] for key, allowed in LLADA_FIXED.items() if allowed[0] is not None},
    }  # fmt: skip


def _read_qwen(json: _Checked) -> dict[str, Any]:
    heads, nested = json.get("num_attention_heads", int), json.get("rope_parameters", dict, {})
    if nested.get("rope_type", "default") != "default":
        raise _Wrong(f"rope_parameters.rope_type = {shown(nested['rope_type'])}: only 'default' is supported")
    theta = _Checked(nested).get("rope_theta", float, 0.0) or json.get("rope_theta", float, 10000.0)
    return {
        "vocab_size": json.get("vocab_size", int),
        "d_model": json.get("hidden_size", int),
        "n_layers": json.get("num_hidden_layers", int),
        "n_heads": heads,
        "n_kv_heads": json.get("num_key_value_heads", int, heads),
        "head_dim": json.get("head_dim", int, 0),
        "d_mlp": json.get("intermediate_size", int),
        "rope_theta": theta,
        "norm_eps": json.get("rms_norm_eps", float, 1e-6),
        "tied_head": json.get("tie_word_embeddings", bool, False),
        "rope_full_precision": False,
    }


def _write_qwen(c: ModelConfig) -> Json:
    return {
        "hidden_size": c.d_model, "num_hidden_layers": c.n_layers, "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_size, "intermediate_size": c.d_mlp,
        "vocab_size": c.vocab_size, "rope_theta": c.rope_theta, "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied_head, "max_position_embeddings": 32768, "hidden_act": "silu",
        "attention_dropout": 0.0, "use_sliding_window": False,
    }  # fmt: skip


# What config.json must say; a key that is absent has these values.
LLADA_FIXED = {
    "block_type": ("llama",), "block_group_size": (1,), "activation_type": ("silu",), "alibi": (False,),
    "rope": (True,), "layer_norm_type": ("rms",), "layer_norm_with_affine": (True,),
    "bias_for_layer_norm": (False, None), "attention_layer_norm": (False,), "include_bias": (False,),
    "input_emb_norm": (False,), "scale_logits": (False,), "attention_dropout": (0.0,), "embedding_dropout": (0.0,),
    "residual_dropout": (0.0,), "rope_scaling": (None,), "num_experts": (None,), "quantization_config": (None,),
}  # fmt: skip
QWEN_FIXED = {
    "hidden_act": ("silu",), "use_sliding_window": (False, None), "rope_scaling": (None,), "attention_dropout": (0.0,),
    "partial_rotary_factor": (None, 1.0), "mlp_bias": (False,), "num_experts": (None,), "quantization_config": (None,),
}  # fmt: skip

_LLADA_NAMES = {
    "embed": "model.transformer.wte.weight",
    "ln_f": "model.transformer.ln_f.weight",
    "head": "model.transformer.ff_out.weight",
    "blocks": {
        "ln1": "model.transformer.blocks.{i}.attn_norm.weight",
        "ln2": "model.transformer.blocks.{i}.ff_norm.weight",
        "wq": "model.transformer.blocks.{i}.q_proj.weight",
        "wk": "model.transformer.blocks.{i}.k_proj.weight",
        "wv": "model.transformer.blocks.{i}.v_proj.weight",
        "wo": "model.transformer.blocks.{i}.attn_out.weight",
        "w_gate": "model.transformer.blocks.{i}.ff_proj.weight",
        "w_up": "model.transformer.blocks.{i}.up_proj.weight",
        "w_down": "model.transformer.blocks.{i}.ff_out.weight",
        "bq": "model.transformer.blocks.{i}.q_proj.bias",
        "bk": "model.transformer.blocks.{i}.k_proj.bias",
        "bv": "model.transformer.blocks.{i}.v_proj.bias",
    },
}
_QWEN_NAMES = {
    "embed": "model.embed_tokens.weight",
    "ln_f": "model.norm.weight",
    "head": "lm_head.weight",
    "blocks": {
        "ln1": "model.layers.{i}.input_layernorm.weight",
        "ln2": "model.layers.{i}.post_attention_layernorm.weight",
        "wq": "model.layers.{i}.self_attn.q_proj.weight",
        "wk": "model.layers.{i}.self_attn.k_proj.weight",
        "wv": "model.layers.{i}.self_attn.v_proj.weight",
        "wo": "model.layers.{i}.self_attn.o_proj.weight",
        "w_gate": "model.layers.{i}.mlp.gate_proj.weight",
        "w_up": "model.layers.{i}.mlp.up_proj.weight",
        "w_down": "model.layers.{i}.mlp.down_proj.weight",
        "bq": "model.layers.{i}.self_attn.q_proj.bias",
        "bk": "model.layers.{i}.self_attn.k_proj.bias",
        "bv": "model.layers.{i}.self_attn.v_proj.bias",
        "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
        "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
    },
}

FAMILIES = {
    family.name: family
    for family in (
        Family(
            name="llada",  # LLaDA-8B, LLaDA-1.5, iLLaDA-8B
            model_type="llada",
            architectures=("LLaDAModelLM", "LLaDAModel"),
            names=_LLADA_NAMES,
            fixed=LLADA_FIXED,
            read=_read_llada,
            write=_write_llada,
            ids=SpecialIds(mask=126336, eos=126081, pad=126081),
            stop_tokens=("<|endoftext|>", "<|eot_id|>"),
            template="llada",
        ),
        Family(
            name="dream",  # Dream-v0-7B, Dream-Coder, DiffuCoder-7B
            model_type="Dream",
            architectures=("DreamModel", "DreamForCausalLM", "DreamBaseModel"),
            names=_QWEN_NAMES,
            fixed=QWEN_FIXED,
            read=lambda json: _read_qwen(json) | {"qkv_bias": True, "logits_shift": True},
            write=_write_qwen,
            ids=SpecialIds(mask=151666, eos=151643, pad=151643),
            stop_tokens=("<|endoftext|>", "<|im_end|>"),
            template="dream",
        ),
        Family(
            name="sdar",  # SDAR and TraDo, 1.7B to 8B
            model_type="sdar",
            architectures=("SDARForCausalLM", "SDARModel"),
            names=_QWEN_NAMES,
            fixed={**QWEN_FIXED, "attention_bias": (False,)},
            read=lambda json: _read_qwen(json) | {"qk_norm": True, "block_size": json.get("block_size", int, 4)},
            write=lambda c: _write_qwen(c) | {"block_size": c.block_size, "attention_bias": False},
            ids=SpecialIds(mask=151669, eos=151643, pad=151643),
            stop_tokens=("<|endoftext|>", "<|im_end|>"),
            template="sdar",
        ),
    )
}

# Fields of ModelConfig that a checkpoint decides; the others say how it is used.
SHAPE = (
    "vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_mlp", "rope_theta", "norm_eps",
    "qkv_bias", "qk_norm", "tied_head", "rope_full_precision", "logits_shift", "block_size", "family",
)  # fmt: skip
