"""The PyTorch side of `test_torch_parity.py`, run by an interpreter that has torch, transformers, peft and safetensors.

Usage: python torch_side.py FOLDER. Reads FOLDER/{config.json, model.safetensors, adapter/, tokens.npy}, writes
FOLDER/torch.npz: logits in fp32 and bf16, and in fp32 with the adapter, beside the base and merged.
"""

import functools
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class LladaBlock(nn.Module):
    """LLaDA's layer under its released module names."""

    def __init__(self, c):
        super().__init__()
        d, f, self.c = c["d_model"], c["mlp_hidden_size"], c
        kv = c["n_kv_heads"] * (d // c["n_heads"])
        linear = functools.partial(nn.Linear, bias=False)
        self.attn_norm, self.ff_norm = Norm(d, c["rms_norm_eps"]), Norm(d, c["rms_norm_eps"])
        self.q_proj, self.k_proj, self.v_proj, self.attn_out = linear(d, d), linear(d, kv), linear(d, kv), linear(d, d)
        self.ff_proj, self.up_proj, self.ff_out = linear(d, f), linear(d, f), linear(f, d)

    def forward(self, x):
        rows, width, d = x.shape
        size = d // self.c["n_heads"]

        def heads(y):
            return y.view(rows, width, -1, size).transpose(1, 2)

        angle = torch.outer(
            torch.arange(width).float(), 1.0 / self.c["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
        )
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

        def turn(y):
            wide = y.float()
            half = torch.cat([-wide[..., size // 2 :], wide[..., : size // 2]], -1)
            return (wide * cos + half * sin).to(y.dtype)

        a = self.attn_norm(x)
        q, k, v = turn(heads(self.q_proj(a))), turn(heads(self.k_proj(a))), heads(self.v_proj(a))
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.attn_out(out.transpose(1, 2).reshape(rows, width, d))
        a = self.ff_norm(x)
        return x + self.ff_out(nn.functional.silu(self.ff_proj(a)) * self.up_proj(a))


class Llada(nn.Module):
    def __init__(self, c):
        super().__init__()
        parts = {
            "wte": nn.Embedding(c["vocab_size"], c["d_model"]),
            "blocks": nn.ModuleList([LladaBlock(c) for _ in range(c["n_layers"])]),
            "ln_f": Norm(c["d_model"], c["rms_norm_eps"]),
        }
        if not c["weight_tying"]:
            parts["ff_out"] = nn.Linear(c["d_model"], c["vocab_size"], bias=False)
        self.model = nn.ModuleDict({"transformer": nn.ModuleDict(parts)})

    def forward(self, tokens):
        t = self.model["transformer"]
        x = t["wte"](tokens)
        for block in t["blocks"]:
            x = block(x)
        x = t["ln_f"](x)
        return t["ff_out"](x) if "ff_out" in t else x @ t["wte"].weight.T


def build(c):
    """(model, function from tokens to logits)."""
    if c["model_type"] == "llada":
        model = Llada(c)
        return model, lambda m, tokens: m(tokens)
    kind = {"Dream": "Qwen2", "sdar": "Qwen3"}[c["model_type"]]
    fields = {k: v for k, v in c.items() if k not in ("model_type", "architectures", "rope_theta")}
    fields["rope_parameters"] = {"rope_theta": c["rope_theta"], "rope_type": "default"}
    config = getattr(transformers, f"{kind}Config")(**fields, attn_implementation="sdpa")
    model = getattr(transformers, f"{kind}ForCausalLM")(config)

    def run(m, tokens):
        block = torch.arange(tokens.shape[1]) // c.get("block_size", tokens.shape[1])
        dtype = next(model.parameters()).dtype
        hidden = torch.zeros(tokens.shape[1], tokens.shape[1], dtype=dtype)
        hidden[block[None] > block[:, None]] = torch.finfo(dtype).min
        mask = hidden[None, None].expand(tokens.shape[0], 1, -1, -1)
        return m(input_ids=tokens, attention_mask=mask, use_cache=False).logits

    return model, run


def main():
    folder = Path(sys.argv[1])
    c = json.loads((folder / "config.json").read_text())
    tokens = torch.from_numpy(np.load(folder / "tokens.npy")).long()
    weights, out = load_file(folder / "model.safetensors"), {}
    with torch.no_grad():
        model, run = build(c)
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        model.eval()
        out["fp32"] = run(model, tokens).numpy()
        adapted = PeftModel.from_pretrained(model, str(folder / "adapter")).eval()
        names = {n for n, _ in adapted.named_parameters() if "lora_A" in n}
        assert len(names) == 7 * int(c.get("n_layers", c.get("num_hidden_layers"))), len(names)
        out["beside"] = run(adapted, tokens).numpy()
        out["merged"] = run(adapted.merge_and_unload(), tokens).numpy()
        model, run = build(c)
        model.load_state_dict(weights, strict=False)
        out["bf16"] = run(model.to(torch.bfloat16).eval(), tokens).float().numpy()
    np.savez(folder / "torch.npz", **out)


main()
