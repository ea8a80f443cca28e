"""The denoiser's shape, and one abstract tree from which everything about its parameters is derived."""

import dataclasses
import math
import zlib

import jax
import jax.numpy as jnp

from dmpo_jax.errors import UserError
from dmpo_jax.parallel import mesh as meshes

REMAT = ("none", "dots", "outputs", "full")  # values of model.remat, in the order of falling memory
STORED = ("float32", "bfloat16", "int8", "nf4")  # values of model.base
ATTENTION = ("auto", "xla", "splash", "cudnn")  # values of model.attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and numerics of a bidirectional transformer denoiser. Hashable, so it can be static under jit."""

    vocab_size: int = 0  # 0: the tokenizer's size
    d_model: int = 64
    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int = 0  # 0: as many as n_heads
    head_dim: int = 0  # 0: d_model / n_heads
    d_mlp: int = 176
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    rope_full_precision: bool = True  # False: cos, sin and the rotation in `dtype`
    logits_shift: bool = False  # the output at reading position i scores token i + 1
    block_size: int = 0  # above 0: a token sees its own and earlier blocks of so many reading positions
    family: str = "llada"  # names the tensors and the chat template of a checkpoint; see `families`
    pretrained: str = ""  # folder or hub id of the weights that a run starts from; they bring their shape
    base: str = "float32"  # how frozen weights are stored under LoRA: float32, bfloat16, int8 or nf4
    attend_to_padding: bool = False  # as the published code: prompts padded on the left, pads attended like text
    dtype: str = "float32"  # of activations and of the weights where they are used
    attention: str = "auto"  # auto, xla, splash (TPU) or cudnn (GPU); which serves what: `model.attention.attend`
    remat: str = "none"  # what the backward pass recomputes: none, dots (all else), outputs (within half layers), full
    rows_at_once: int = 0  # rows of a shard that go through the network together in scoring and updates; 0: all

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.head_dim or self.d_model // self.n_heads

    def validate(self) -> None:
        """Raises UserError on a shape that cannot be built."""
        limits = {"d_model": 2**20, "n_layers": 10_000, "n_heads": 2**16, "d_mlp": 2**22}
        optional = {"n_kv_heads": 2**16, "head_dim": 2**16, "vocab_size": 2**24}
        for key, most in (limits | optional).items():
            value, least = getattr(self, key), int(key in limits)
            if not least <= value <= most:
                raise UserError(f"model.{key} = {value}: expected {least} to {most}")
        if not self.rope_theta > 0 or not self.norm_eps > 0:
            raise UserError(
                f"model.rope_theta = {self.rope_theta}, model.norm_eps = {self.norm_eps}: expected positive numbers"
            )
        if not self.head_dim and self.d_model % self.n_heads:
            raise UserError(
                f"model.d_model = {self.d_model} is not a multiple of model.n_heads = {self.n_heads}; "
                "change one of them or set model.head_dim"
            )
        if self.n_heads % self.kv_heads:
            raise UserError(f"model.n_heads = {self.n_heads} is not a multiple of model.n_kv_heads = {self.kv_heads}")
        if self.head_size % 2:
            raise UserError(f"model: head size {self.head_size} is odd, but rotary positions need pairs")
        if self.block_size < 0:
            raise UserError(f"model.block_size = {self.block_size}: expected 0 (attention to all) or a positive number")
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f'model.dtype = "{self.dtype}": expected "float32" or "bfloat16"')
        if self.remat not in REMAT:
            raise UserError(f'model.remat = "{self.remat}": expected one of {", ".join(REMAT)}')
        if self.rows_at_once < 0:
            raise UserError(f"model.rows_at_once = {self.rows_at_once}: expected 0 (all) or a positive number")
        if self.base not in STORED:
            raise UserError(f'model.base = "{self.base}": expected one of {", ".join(STORED)}')
        self._validate_attention()

    def _validate_attention(self) -> None:
        """What is known of a kernel without shapes and devices; `model.attention` refuses the rest while it is traced."""
        asked = f'model.attention = "{self.attention}"'
        if self.attention not in ATTENTION:
            raise UserError(f"{asked}: expected one of {', '.join(ATTENTION)}")
        if self.attention in ("splash", "cudnn") and self.block_size:
            raise UserError(
                f"{asked}: the kernel attends to all keys, but model.block_size = {self.block_size} hides later blocks; "
                'use "auto" or "xla"'
            )
        if self.attention != "cudnn":
            return
        if self.dtype == "float32":
            raise UserError(
                f'{asked}: the kernel needs model.dtype = "bfloat16", found "float32"; set that, or use "auto"'
            )
        if self.head_size % 8 or self.head_size > 256:
            raise UserError(
                f"{asked}: the kernel needs a head size that is a multiple of 8 and at most 256, found {self.head_size}; "
                'use "auto" or "xla"'
            )


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """One parameter: shape, logical axes (see `parallel.mesh.RULES`) and the scale of its initial values."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    scale: float | None  # standard deviation; None: ones; 0.0: zeros
    inputs: int = 0  # axes that a product sums over: the first ones after the layer's; 0: not a matrix


def abstract_params(config: ModelConfig) -> dict:
    """Nested dict of ParamSpec. Layer parameters are stacked on a leading axis of n_layers.

    Kernels are stored input-first: `wq [layer, d, heads, head]`, `wo [layer, heads, head, d]`, `w_gate [layer, d, mlp]`.
    """
    c, n, d = config, config.n_layers, config.d_model
    h, k, e, f, v = c.n_heads, c.kv_heads, c.head_size, c.d_mlp, c.vocab_size
    fan_in, fan_heads, fan_mlp = d**-0.5, (h * e) ** -0.5, f**-0.5
    depth = (2 * n) ** -0.5  # keeps the residual stream's variance independent of depth
    blocks = {
        "ln1": ParamSpec((n, d), (None, None), None),
        "ln2": ParamSpec((n, d), (None, None), None),
        "wq": ParamSpec((n, d, h, e), (None, "embed", "heads", None), fan_in, 1),
        "wk": ParamSpec((n, d, k, e), (None, "embed", "kv_heads", None), fan_in, 1),
        "wv": ParamSpec((n, d, k, e), (None, "embed", "kv_heads", None), fan_in, 1),
        "wo": ParamSpec((n, h, e, d), (None, "heads", None, "embed"), fan_heads * depth, 2),
        "w_gate": ParamSpec((n, d, f), (None, "embed", "mlp"), fan_in, 1),
        "w_up": ParamSpec((n, d, f), (None, "embed", "mlp"), fan_in, 1),
        "w_down": ParamSpec((n, f, d), (None, "mlp", "embed"), fan_mlp * depth, 1),
    }
    if c.qkv_bias:
        blocks |= {
            "bq": ParamSpec((n, h, e), (None, "heads", None), 0.0),
            "bk": ParamSpec((n, k, e), (None, "kv_heads", None), 0.0),
            "bv": ParamSpec((n, k, e), (None, "kv_heads", None), 0.0),
        }
    if c.qk_norm:
        blocks |= {
            "q_norm": ParamSpec((n, e), (None, None), None),
            "k_norm": ParamSpec((n, e), (None, None), None),
        }
    tree = {
        "embed": ParamSpec((v, d), ("vocab", "embed"), fan_in if c.tied_head else 1.0),
        "blocks": blocks,
        "ln_f": ParamSpec((d,), (None,), None),
    }
    if not c.tied_head:
        tree["head"] = ParamSpec((d, v), ("embed", "vocab"), fan_in, 1)
    return tree


def is_spec(x) -> bool:
    """Whether this is a leaf of an abstract tree."""
    return isinstance(x, ParamSpec)


def count(specs) -> int:
    """Number of parameters of an abstract tree."""
    return sum(math.prod(s.shape) for s in jax.tree.leaves(specs, is_leaf=is_spec))


def count_params(config: ModelConfig) -> int:
    """Number of parameters, from the abstract tree alone."""
    return count(abstract_params(config))


def shardings(specs, mesh: jax.sharding.Mesh):
    """Training layout of every leaf of an abstract tree."""
    return jax.tree.map(lambda s: meshes.named(mesh, s.axes, s.shape), specs, is_leaf=is_spec)


def param_shardings(config: ModelConfig, mesh: jax.sharding.Mesh) -> dict:
    """Training layout of every parameter."""
    return shardings(abstract_params(config), mesh)


def init_params(key: jax.Array, config: ModelConfig) -> dict:
    """Random fp32 parameters. Each leaf's numbers depend on the key and the leaf's name only."""
    return init_tree(key, abstract_params(config))


def init_tree(key: jax.Array, specs):
    """Random fp32 values of an abstract tree."""

    def init(path, s: ParamSpec) -> jax.Array:
        if s.scale is None:
            return jnp.ones(s.shape, jnp.float32)
        if s.scale == 0.0:
            return jnp.zeros(s.shape, jnp.float32)
        leaf_key = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return s.scale * jax.random.normal(leaf_key, s.shape, jnp.float32)

    return jax.tree_util.tree_map_with_path(init, specs, is_leaf=is_spec)
