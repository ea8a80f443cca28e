"""Tiny random checkpoints in the Hugging Face layout, and a slow float64 forward over their tensors as they lie on file."""

import json
import struct

import ml_dtypes
import numpy as np
from reference_model import rms_norm

LLADA = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 64, "n_heads": 4, "n_kv_heads": 4, "n_layers": 3,
    "mlp_hidden_size": 192, "mlp_ratio": 4, "vocab_size": 256, "embedding_size": 256, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "weight_tying": False, "include_qkv_bias": False, "include_bias": False, "rope": True,
    "rope_full_precision": True, "alibi": False, "activation_type": "silu", "block_type": "llama",
    "layer_norm_type": "rms", "input_emb_norm": False, "scale_logits": False, "mask_token_id": 255, "eos_token_id": 250,
    "pad_token_id": 250,
}  # fmt: skip
DREAM = {
    "model_type": "Dream", "architectures": ["DreamModel"], "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "intermediate_size": 160, "vocab_size": 256, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "use_sliding_window": False,
    "mask_token_id": 255, "eos_token_id": 250, "pad_token_id": 250,
}  # fmt: skip
SDAR = {
    "model_type": "sdar", "architectures": ["SDARForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 3, "intermediate_size": 128, "vocab_size": 256,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
    "block_size": 4, "mask_token_id": 255, "eos_token_id": 250, "pad_token_id": 250,
}  # fmt: skip
CONFIGS = {
    "llada": LLADA,
    "illada": {**LLADA, "n_kv_heads": 2, "weight_tying": True},
    "dream": DREAM,
    "sdar": SDAR,
}


def sizes(c):
    """(layers, width, heads, kv heads, head size, mlp, vocabulary, eps, tied) of either spelling of a config.json."""
    llada = c["model_type"] == "llada"
    names = ("n_layers", "d_model", "n_heads", "n_kv_heads", "mlp_hidden_size", "vocab_size")
    if not llada:
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
        names += ("vocab_size",)
    n, d, h, k, f, v = (c[name] for name in names)
    return (
        n,
        d,
        h,
        k,
        c.get("head_dim", d // h),
        f,
        v,
        c["rms_norm_eps"],
        c["weight_tying" if llada else "tie_word_embeddings"],
    )


def names(c):
    """Tensor names of a layer with {}, by role, written out from the released checkpoints."""
    if c["model_type"] == "llada":
        layer = "model.transformer.blocks.{}."
        parts = ("attn_norm", "ff_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out")
        whole = ("model.transformer.wte.weight", "model.transformer.ln_f.weight", "model.transformer.ff_out.weight")
    else:
        layer = "model.layers.{}."
        parts = (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
        )
        parts += ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        whole = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    roles = ("ln1", "ln2", "q", "k", "v", "o", "gate", "up", "down")
    return dict(zip(roles, [f"{layer}{part}" for part in parts], strict=True)), whole


def random_tensors(c, seed=0, head_scale=3.0):
    """Every tensor by name, float32: norms 1 + 0.1 N(0, 1), matrices N(0, 1 / fan_in), Dream's biases N(0, 0.25)."""
    rng = np.random.default_rng(seed)
    n, d, h, k, e, f, v, _, tied = sizes(c)
    layer, (embed, norm, head) = names(c)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    matrix = lambda out, inside: draw(out, inside) / np.float32(np.sqrt(inside))  # noqa: E731
    shapes = {
        "q": (h * e, d),
        "k": (k * e, d),
        "v": (k * e, d),
        "o": (d, h * e),
        "gate": (f, d),
        "up": (f, d),
        "down": (d, f),
    }
    tensors = {embed: draw(v, d) * (3.0 / np.sqrt(d) if tied else 1.0), norm: 1 + 0.1 * draw(d)}
    tensors[embed] = tensors[embed].astype(np.float32)
    if not tied:
        tensors[head] = (matrix(v, d) * head_scale).astype(np.float32)
    for i in range(n):
        for role, name in layer.items():
            name = name.format(i)
            tensors[f"{name}.weight"] = matrix(*shapes[role]) if role in shapes else 1 + 0.1 * draw(d)
            if c["model_type"] == "Dream" and role in "qkv":
                tensors[f"{name}.bias"] = 0.5 * draw(shapes[role][0])
        if c["model_type"] == "sdar":
            for part in ("q_norm", "k_norm"):
                tensors[f"model.layers.{i}.self_attn.{part}.weight"] = 1 + 0.1 * draw(e)
    return tensors


def write_safetensors(path, tensors):
    """The format by hand: 8 bytes of header length, JSON header, data."""
    header, data = {}, b""
    kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8"}
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kinds[value.dtype.name], "shape": list(value.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_checkpoint(folder, c, tensors, shards=1, dtype="float32"):
    """config.json and one safetensors file, or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(c))
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    tensors = {name: value.astype(kind) for name, value in tensors.items()}
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    order, index = sorted(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = order[number::shards]
        write_safetensors(folder / file, {name: tensors[name] for name in part})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def rotate(x, positions, theta):
    """x [H, S, E]; component j is turned with component j + E/2."""
    size = x.shape[-1]
    angle = np.asarray(positions)[:, None] * theta ** (-np.arange(0, size, 2) / size)
    turned = (x[..., : size // 2] + 1j * x[..., size // 2 :]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def forward(c, tensors, tokens, positions=None, key_mask=None, states=None):
    """float64 logits [S, V] of one row as the released model gives them (Dream's are one position early).

    `key_mask` bool [S] hides keys; `states`, a list, receives the hidden states and (rotated keys, values) of every layer.
    """
    n, _, h, k, e, _, _, eps, tied = sizes(c)
    t = {name: value.astype(np.float64) for name, value in tensors.items()}
    layer, (embed, norm, head) = names(c)
    positions = np.arange(len(tokens)) if positions is None else np.asarray(positions)
    allowed = np.ones((len(tokens), len(tokens)), bool)
    if "block_size" in c:
        allowed = positions[None] // c["block_size"] <= positions[:, None] // c["block_size"]
    if key_mask is not None:
        allowed &= np.asarray(key_mask)[None]
    x = t[embed][np.asarray(tokens)]
    for i in range(n):
        w = lambda role, kind="weight", i=i: t[f"{layer[role].format(i)}.{kind}"]  # noqa: E731
        bias = lambda role, i=i: t.get(f"{layer[role].format(i)}.bias", 0.0)  # noqa: E731
        a = rms_norm(x, w("ln1"), eps)
        q, key, value = (
            (a @ w(role).T + bias(role)).reshape(len(tokens), count, e).transpose(1, 0, 2)
            for role, count in (("q", h), ("k", k), ("v", k))
        )
        if c["model_type"] == "sdar":
            q = rms_norm(q, t[f"model.layers.{i}.self_attn.q_norm.weight"], eps)
            key = rms_norm(key, t[f"model.layers.{i}.self_attn.k_norm.weight"], eps)
        q, key = rotate(q, positions, c["rope_theta"]), rotate(key, positions, c["rope_theta"])
        if states is not None:
            states.append((x, key, value))
        heads = []
        for number in range(h):
            scores = q[number] @ key[number // (h // k)].T / np.sqrt(e)
            weights = np.where(allowed, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
            total = weights.sum(-1, keepdims=True)  # 0 for a query that sees nothing: a pad, whose output nobody reads
            heads.append(weights / np.where(total > 0, total, 1.0) @ value[number // (h // k)])
        x = x + np.concatenate(heads, -1) @ w("o").T
        a = rms_norm(x, w("ln2"), eps)
        gate = a @ w("gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (a @ w("up").T)) @ w("down").T
    return rms_norm(x, t[norm], eps) @ t[embed if tied else head].T
