"""Low-rank adapters on frozen matrices (LoRA, arXiv 2106.09685): W x + (alpha / rank) B A x."""

import dataclasses
import functools
import zlib
from typing import Any

import jax
import jax.numpy as jnp

from dmpo_jax.errors import UserError
from dmpo_jax.model.families import FAMILIES
from dmpo_jax.model.parameters import ModelConfig, ParamSpec, abstract_params, init_tree

MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
# What the official DMPO and d1 scripts ask PEFT for; in LLaDA only four of these modules exist.
PUBLISHED_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "gate_proj")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters on a frozen base. Rank 0: none, all parameters are trained."""

    rank: int = 0
    alpha: float = 64.0  # the adapter's product is scaled by alpha / rank
    dropout: float = 0.0  # of the adapter's input, in the loss only: rollouts and weights are drawn without
    targets: tuple[str, ...] = ("all",)  # wq wk wv wo w_gate w_up w_down, or "all", or "published" (LLaDA: 4 of them)
    adapter: str = ""  # folder of a PEFT adapter to start from; it then is the reference too

    def validate(self) -> None:
        """Raises UserError on a setting out of range."""
        if self.rank < 0:
            raise UserError(f"lora.rank = {self.rank}: expected 0 (off) or a positive number")
        if not self.alpha > 0:
            raise UserError(f"lora.alpha = {self.alpha}: expected a positive number")
        if not 0 <= self.dropout < 1:
            raise UserError(f"lora.dropout = {self.dropout}: expected 0 or a share below 1")
        unknown = [t for t in self.targets if t not in (*MATRICES, "all", "published")]
        if unknown or not self.targets:
            known = ", ".join((*MATRICES, "all", "published"))
            raise UserError(f"lora.targets = {list(self.targets)}: expected some of {known}")
        if self.adapter and not self.rank:
            raise UserError(f"lora.adapter = {self.adapter} needs lora.rank: set it to the adapter's rank")


def matrices(lora: LoraConfig, config: ModelConfig) -> tuple[str, ...]:
    """Names of the adapted matrices in `params["blocks"]`."""
    chosen = set(lora.targets)
    if "all" in chosen:
        chosen |= set(MATRICES)
    if "published" in chosen:
        names = FAMILIES[config.family].names["blocks"]
        chosen |= {m for m in MATRICES if names[m].split(".")[-2] in PUBLISHED_MODULES}
    return tuple(m for m in MATRICES if m in chosen)


def adapter_specs(lora: LoraConfig, config: ModelConfig) -> dict:
    """Abstract tree of the adapters: per matrix `a [layer, *in, rank]` (random) and `b [layer, rank, *out]` (zero)."""
    specs, blocks = abstract_params(config)["blocks"], {}
    for name in matrices(lora, config):
        spec = specs[name]
        split = 1 + spec.inputs
        fan_in = 1
        for size in spec.shape[1:split]:
            fan_in *= size
        # PEFT's uniform initialisation has this standard deviation.
        a = ParamSpec((*spec.shape[:split], lora.rank), (*spec.axes[:split], None), (3 * fan_in) ** -0.5)
        b = ParamSpec((spec.shape[0], lora.rank, *spec.shape[split:]), (None, None, *spec.axes[split:]), 0.0)
        blocks[name] = {"a": a, "b": b}
    return {"blocks": blocks}


def init_adapters(key: jax.Array, lora: LoraConfig, config: ModelConfig) -> dict:
    """Fresh fp32 adapters, whose product is zero."""
    return init_tree(key, adapter_specs(lora, config))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["base", "a", "b", "keys"], meta_fields=["scale", "rate"]
)
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A matrix with its adapter, stacked over layers; `keys` (one per layer) draw the dropout of the adapter's input."""

    base: Any
    a: jax.Array
    b: jax.Array
    keys: jax.Array | None
    scale: float
    rate: float


def attach(base: dict, adapters: dict, lora: LoraConfig) -> dict:
    """Parameters whose matrices carry their adapters; `{}` for adapters is the base itself (the adapter off)."""
    blocks = dict(base["blocks"])
    for name, pair in adapters.get("blocks", {}).items():
        blocks[name] = Adapted(blocks[name], pair["a"], pair["b"], None, lora.alpha / lora.rank, lora.dropout)
    return {**base, "blocks": blocks}


def policy_of(params: Any, base: Any, lora: LoraConfig) -> Any:
    """The parameters of a policy: the trained ones themselves where there is no frozen base to attach them to."""
    return params if base is None else attach(base, params, lora)


def with_dropout(params: Any, key: jax.Array) -> Any:
    """The same tree with dropout keys in its adapters that have a rate. Equal keys drop equal inputs.

    Also of several policies in one tree: where a matrix stands in its own policy decides.
    """

    def add(path, w):
        if not (isinstance(w, Adapted) and w.rate):
            return w
        own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path[-2:]).encode()))
        return dataclasses.replace(w, keys=jax.random.split(own, w.a.shape[0]))

    return jax.tree_util.tree_map_with_path(add, params, is_leaf=lambda w: isinstance(w, Adapted))


@jax.jit
def digest(params: dict) -> jax.Array:
    """`uint32` of all bits of a tree: equal trees give equal numbers on any mesh, a changed bit another one."""
    total = jnp.uint32(0)
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        bits = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
        place = jnp.uint32(zlib.crc32(jax.tree_util.keystr(path).encode()))
        for axis in range(x.ndim):  # so that swapped values show
            place = _mix(place[..., None] + jnp.arange(x.shape[axis], dtype=jnp.uint32))
        total += jnp.sum(_mix(bits.astype(jnp.uint32) ^ place))
    return total


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of `uint32` in which every bit depends on every bit (MurmurHash3's finaliser)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
