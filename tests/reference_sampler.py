"""Decoding again, in NumPy float64, one row at a time and in reading order: slow and obvious."""

import numpy as np
from reference_model import log_softmax, rms_norm
from test_sampler_selection import slow_rule


def double(params):
    """Parameters in float64."""
    return {k: double(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in params.items()}


def rotate(x, positions, theta):
    """x [S, H, E] at positions [S]: component j is turned with component j + E/2."""
    size = x.shape[-1]
    angle = (np.asarray(positions)[:, None] * theta ** (-np.arange(0, size, 2) / size))[:, None]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1
    )


def forward(params, tokens, positions, config, visible, rows, memory=None):
    """(logits [rows, V], keys and values of every layer): slots outside `rows` are seen as `memory` holds them."""
    w, kept, rows = params["blocks"], [], np.asarray(rows)
    h = params["embed"][np.asarray(tokens)[rows]]
    for n in range(config.n_layers):
        a = rms_norm(h, w["ln1"][n], config.norm_eps)
        q, k, v = (np.einsum("sd,dhe->she", a, w[name][n]) for name in ("wq", "wk", "wv"))
        if config.qkv_bias:
            q, k, v = q + w["bq"][n], k + w["bk"][n], v + w["bv"][n]
        if config.qk_norm:
            q, k = (rms_norm(x, w[name][n], config.norm_eps) for x, name in ((q, "q_norm"), (k, "k_norm")))
        q, k = (rotate(x, np.asarray(positions)[rows], config.rope_theta) for x in (q, k))
        if memory is not None:
            own, (k, v) = (k, v), (x.copy() for x in memory[n])
            k[rows], v[rows] = own
        kept.append((k, v))
        scores = np.einsum("qhe,khe->hqk", q, k) / np.sqrt(config.head_size)
        scores = np.where(visible[rows], scores, -np.inf)
        read = np.einsum("hqk,khe->qhe", np.exp(log_softmax(scores)), v)
        h = h + np.einsum("qhe,hed->qd", read, w["wo"][n])
        a = rms_norm(h, w["ln2"][n], config.norm_eps)
        gate = a @ w["w_gate"][n]
        h = h + (gate / (1 + np.exp(-gate)) * (a @ w["w_up"][n])) @ w["w_down"][n]
    return rms_norm(h, params["ln_f"], config.norm_eps) @ params["head"], kept


class Row:
    """One prompt and its completion under way; `noise` has gumbel(step), uniform(step) and order(start) of this row."""

    def __init__(self, params, config, sampler, prompt, length, mask_id, noise):
        self.params, self.config, self.sampler, self.mask_id, self.noise = params, config, sampler, mask_id, noise
        self.block, self.shift, self.begin = sampler.block_length, int(config.logits_shift), len(prompt)
        # Blocks count from the prompt's end; from the text's begin where the model was made for blocks.
        self.base = self.begin - (self.begin % self.block if config.block_size else 0)
        self.end = self.base + -(-(self.begin + length - self.base) // self.block) * self.block
        self.text = list(prompt) + [mask_id] * (self.end - self.begin)
        self.length, self.forwards, self.processed, self.clock, self.revoked = length, 0, 0, 0, 0
        self.step, self.log_prob, self.sampled = (np.full(self.end, -1), *np.zeros((2, self.end)))
        self.schedule = sampler.schedule_of(length)
        if sampler.cache == "block":
            self.forwards, self.processed = 1, self.base

    def masked(self, start):
        return [i for i in range(start, start + self.block) if self.text[i] == self.mask_id]

    def visible(self, start):
        slot = np.arange(self.end)
        if self.config.block_size:
            return slot // self.block <= slot[:, None] // self.block
        near = slot < start + self.block + (self.sampler.suffix_window or self.end)
        return np.broadcast_to(near | (slot == self.end - 1), (self.end, self.end))

    def window(self, start, opening):
        """Slots that a forward recomputes."""
        first = start - self.shift
        if opening or self.sampler.cache in ("none", "block"):
            return range(self.end)
        if self.sampler.cache == "prefix":
            return range(first, min(start + self.block + (self.sampler.suffix_window or self.end), self.end))
        size = min(self.block + self.shift + 2 * self.sampler.vicinity, self.length + self.shift)
        first = min(max(first - self.sampler.vicinity, self.begin - self.shift), self.end - size)
        return range(first, first + size)

    def count(self, start, opening, drafts=1):
        """One forward more, and what it pushes through the network."""
        self.forwards += 1
        pushed = len(self.window(start, opening)) * drafts
        if self.sampler.cache == "block":
            pushed = 2 * self.block if opening else drafts * self.block
        elif self.config.block_size:
            pushed = self.base + self.length + self.block
        self.processed += pushed * (2 if self.sampler.cfg_scale else 1)

    def logits(self, text, start, opening, memories):
        """[block, V] of a text; `memories` (with the prompt, without it) are filled by a block's first forward."""
        found = []
        texts = [text, [self.mask_id] * self.begin + text[self.begin :]] if self.sampler.cfg_scale else [text]
        rows = self.window(start, opening)
        for i, tokens in enumerate(texts):
            memory = None if opening or self.sampler.cache in ("none", "block") else memories[i]
            whole = np.arange(self.end)
            out, kept = forward(self.params, tokens, whole, self.config, self.visible(start), rows, memory)
            if opening:
                memories.append(kept)
            first = start - self.shift - rows[0]
            found.append(out[first : first + self.block])
        out = found[0] if len(found) == 1 else found[1] + (self.sampler.cfg_scale + 1) * (found[0] - found[1])
        out[:, self.mask_id] = -np.inf
        return out

    def propose(self, logits):
        """(token, log_prob, sampled, score, entropy) of each position of the block."""
        s, width = self.sampler, len(logits)
        law, kept, noise = log_softmax(logits), np.isfinite(logits), np.zeros(logits.shape)
        if s.temperature:
            noise = self.noise.gumbel(self.clock, 1 if s.algorithm == "roar" else width)
            tempered = log_softmax(logits / s.temperature)
            for row in range(width if s.top_p < 1 else 0):
                mass = 0.0
                for token in np.argsort(-tempered[row], kind="stable"):
                    if mass > s.top_p:
                        kept[row, token] = False
                    mass += np.exp(tempered[row, token])
        token = np.where(kept, logits + s.temperature * noise, -np.inf).argmax(1)
        each = np.arange(width)
        sampled = np.zeros(width)
        if s.temperature:
            sampled = log_softmax(np.where(kept, logits / s.temperature, -np.inf))[each, token]
        p = np.exp(law)
        entropy = -(p * np.where(p > 0, law, 0)).sum(1)
        top = np.sort(p, axis=1)
        score = {"margin": top[:, -1] - top[:, -2], "entropy": -entropy, "left_to_right": -each}.get(
            s.algorithm, law[each, token]
        )
        if s.algorithm == "random":
            score = self.noise.uniform(self.clock, width)
        return token, law[each, token], sampled, score, entropy

    def choose(self, proposal, start, number, level, text=None):
        """Indices into the block that the step commits."""
        _, log_prob, _, score, entropy = proposal
        text = text or self.text
        allowed = [text[i] == self.mask_id for i in range(start, start + self.block)]
        if self.sampler.algorithm == "origin":
            steps = len(self.schedule)
            levels = np.linspace(1, 1e-3, steps + 1)
            share = 1.0 if number == steps - 1 else 1 - levels[number + 1] / levels[number]
            return {i for i, u in enumerate(self.noise.uniform(self.clock, self.block)) if allowed[i] and u < share}
        count = self.schedule[min(number, len(self.schedule) - 1)]
        if self.sampler.level_decay:  # the share of masks in the block and in what is seen after it
            ahead = min(self.sampler.suffix_window, self.end - start - self.block)
            masks = (sum(allowed) + ahead) / (self.block + ahead)
            level = level * (1 - self.sampler.level_decay * (1 - masks))
        return slow_rule(self.sampler.commit, score, np.exp(log_prob), entropy, allowed, count, level)

    def write(self, start, chosen, proposal):
        for i in chosen:
            self.text[start + i], self.step[start + i] = int(proposal[0][i]), self.clock
            self.log_prob[start + i], self.sampled[start + i] = proposal[1][i], proposal[2][i]
        self.clock += 1

    def decode(self, level=None):
        """Fills everything, block by block; `level` in the place of the sampler's."""
        level = self.sampler.level if level is None else level
        for start in range(self.base, self.end, self.block):
            if self.sampler.algorithm == "wino":
                self.wide_in_narrow_out(start, level)
                continue
            memories, number, opening = [], 0, True
            while self.masked(start):
                self.count(start, opening)
                logits = self.logits(self.text, start, opening, memories)
                opening = False
                if self.sampler.algorithm == "roar":
                    order = self.noise.order(start - self.base)
                    best = max((i - start for i in self.masked(start)), key=lambda i: order[i])
                    proposal = [np.repeat(x, self.block) for x in self.propose(logits[best : best + 1])]
                    self.write(start, {best}, proposal)
                    continue
                proposal = self.propose(logits)
                if self.sampler.drafts:
                    self.draft(start, proposal, memories)
                    break
                self.write(start, self.choose(proposal, start, number, level), proposal)
                number += 1
        return self

    def draft(self, start, proposal, memories):
        """FreeDave, from a block's first proposal on: guess the next states, keep those that step by step follow."""
        number = 0
        while True:
            if len(self.masked(start)) <= self.schedule[min(number, len(self.schedule) - 1)]:
                self.write(start, self.choose(proposal, start, number, 0), proposal)
                return
            guesses, text = [], list(self.text)
            for d in range(self.sampler.drafts):
                chosen = self.choose(proposal, start, number + d, 0, text)
                text = list(text)
                for i in chosen:
                    text[start + i] = int(proposal[0][i])
                guesses.append((chosen, text))
            self.count(start, False, self.sampler.drafts)
            self.write(start, guesses[0][0], proposal)
            number += 1
            for d in range(self.sampler.drafts):
                proposal = self.propose(self.logits(guesses[d][1], start, False, memories))
                if d + 1 == self.sampler.drafts or not self.masked(start):
                    break
                wanted = self.choose(proposal, start, number, 0)
                stands = all(guesses[d + 1][1][start + i] == proposal[0][i] for i in wanted)
                if wanted != guesses[d + 1][0] or not stands:
                    break
                self.write(start, wanted, proposal)
                number += 1
            if not self.masked(start):
                return

    def wide_in_narrow_out(self, start, level):
        """WINO: shadow masks at the block's places, each of which sees all but the token whose place it has."""
        size, block = self.end, self.block
        is_shadow = np.arange(size + block) >= size
        visible = np.where(is_shadow[:, None], True, ~is_shadow)
        for i in range(block):
            visible[size + i, start + i] = False
        places = [*range(size), *range(start, start + block)]
        checked, last = set(), 30
        while masked := self.masked(start):
            self.forwards, self.processed = self.forwards + 1, self.processed + size + block
            tokens = self.text + [self.mask_id] * block
            out, _ = forward(self.params, tokens, places, self.config, visible, range(size + block))
            out[:, self.mask_id] = -np.inf
            proposal, shadow = self.propose(out[start : start + block]), log_softmax(out[size:])
            sure = sorted((i - start for i in masked), key=lambda i: -proposal[1][i])
            above = [i for i in sure if np.exp(proposal[1][i]) > level]
            chosen = above[: min(max(int(0.7 * len(masked) + 1e-9), 5), 20)] or sure[:1]
            doubt = {i: np.exp(shadow[i, self.text[start + i]]) for i in checked}
            back = sorted((i for i in checked if doubt[i] < self.sampler.revoke), key=lambda i: doubt[i])
            back = back[: last - 1] if len(chosen) > 1 else []
            self.write(start, chosen, proposal)
            for i in back:
                self.text[start + i] = self.mask_id
            checked, last = (checked | set(chosen)) - set(back), len(chosen)
            self.revoked += len(back)
