"""The denoiser again, in NumPy float64, one row at a time and in reading order: slow and obvious."""

import numpy as np


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, theta):
    """x [S, E]: component j is turned with component j + E/2 by position * theta^(-2j/E)."""
    size = x.shape[-1]
    angle = np.arange(len(x))[:, None] * theta ** (-np.arange(0, size, 2) / size)
    first, second = x[:, : size // 2], x[:, size // 2 :]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=1
    )


def forward(params, tokens, config):
    """float64 logits [S, V] of one row of tokens [S] without padding."""
    p = {k: np.asarray(v, np.float64) for k, v in params.items() if k != "blocks"}
    blocks = {k: np.asarray(v, np.float64) for k, v in params["blocks"].items()}
    h = p["embed"][np.asarray(tokens)]
    for n in range(config.n_layers):
        w = {k: v[n] for k, v in blocks.items()}
        a = rms_norm(h, w["ln1"], config.norm_eps)
        attended = np.zeros_like(h)
        for head in range(config.n_heads):
            kv = head // (config.n_heads // config.kv_heads)
            q, k, v = a @ w["wq"][:, head], a @ w["wk"][:, kv], a @ w["wv"][:, kv]
            if config.qkv_bias:
                q, k, v = q + w["bq"][head], k + w["bk"][kv], v + w["bv"][kv]
            if config.qk_norm:
                q, k = rms_norm(q, w["q_norm"], config.norm_eps), rms_norm(k, w["k_norm"], config.norm_eps)
            scores = rotate(q, config.rope_theta) @ rotate(k, config.rope_theta).T / np.sqrt(config.head_size)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            attended += (weights / weights.sum(-1, keepdims=True)) @ v @ w["wo"][head]
        h = h + attended
        a = rms_norm(h, w["ln2"], config.norm_eps)
        gate = a @ w["w_gate"]
        h = h + (gate / (1 + np.exp(-gate)) * (a @ w["w_up"])) @ w["w_down"]
    h = rms_norm(h, p["ln_f"], config.norm_eps)
    return h @ (p["embed"].T if config.tied_head else p["head"])


def log_softmax(logits):
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def masked_log_prob(params, prompt, completion, masked, mask_id, config, forbidden=()):
    """Sum of log-probabilities of the completion's tokens at the positions in `masked`, all of which are hidden."""
    shown = [mask_id if i in masked else t for i, t in enumerate(completion)]
    logits = forward(params, [*prompt, *shown], config)[len(prompt) :]
    logits[:, list(forbidden)] = -np.inf
    log_probs = log_softmax(logits)
    return sum(log_probs[i, completion[i]] for i in masked)
