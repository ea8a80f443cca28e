"""`dmpo bench sample`: every sampler on one model with random weights, side by side."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmpo_jax.config import Config
from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.diffusion.masking import row_keys
from dmpo_jax.diffusion.sampler import SamplerConfig, Trace, sample
from dmpo_jax.errors import UserError
from dmpo_jax.model.denoiser import Cache, cached_hidden_states, head_logits, hidden_states
from dmpo_jax.model.parameters import ModelConfig, init_params
from dmpo_jax.training.flops import decoding_flops, forward_sizes, matmul_peak, scored_positions

COLUMNS = (
    "sampler", "seconds", "relative", "nfe", "tokens_per_second", "tokens_per_forward", "full_s", "cached_s", "head_s",
    "overhead", "share_of_peak", "compile_s",
)  # fmt: skip
FULL_FORWARDS = 3  # timed after every run of a sampler
PIECE_REPEATS = 5  # of a forward or a head timed by itself, in turn with full forwards


def samplers_for(base: SamplerConfig, model: ModelConfig) -> dict[str, SamplerConfig]:
    """Every sampler that suits a family of models, with the block length, steps and temperature of `base`."""
    shape = {"block_length": base.block_length, "stop_at_eos": False}
    fixed = shape | {"steps": base.steps, "temperature": base.temperature}
    free = shape | {"temperature": base.temperature}
    drafted = shape | {"steps": base.steps, "drafts": 4}
    if model.block_size:
        return {
            "static, no cache": SamplerConfig(**fixed),
            "static": SamplerConfig(cache="block", **fixed),
            "dynamic": SamplerConfig(cache="block", commit="dynamic", level=0.9, **fixed),
            "sequential": SamplerConfig(cache="block", algorithm="left_to_right", **fixed),
            "entropy bounded": SamplerConfig(
                cache="block", algorithm="entropy", commit="entropy_sum", level=0.35, **free
            ),
            "drafts": SamplerConfig(cache="block", **drafted),
        }
    found = {
        "low_confidence": SamplerConfig(**fixed),
        "prefix cache": SamplerConfig(cache="prefix", **fixed),
        "dual cache": SamplerConfig(cache="dual", **fixed),
        "dual, vicinity 16": SamplerConfig(cache="dual", vicinity=16, **fixed),
        "prefix, window 32": SamplerConfig(cache="prefix", suffix_window=32, **fixed),
        "random": SamplerConfig(algorithm="random", **fixed),
        "margin": SamplerConfig(algorithm="margin", **fixed),
        "entropy": SamplerConfig(algorithm="entropy", **fixed),
        "origin": SamplerConfig(algorithm="origin", **fixed),
        "guidance": SamplerConfig(cfg_scale=1.0, **fixed),
        "top-p 0.9": SamplerConfig(top_p=0.9, **fixed) if base.temperature else None,
        "threshold, dual": SamplerConfig(cache="dual", commit="threshold", level=0.9, **free),
        "factor, dual": SamplerConfig(cache="dual", commit="factor", level=1.0, **free),
        "frechet, dual": SamplerConfig(cache="dual", commit="frechet", level=0.25, **free),
        "entropy bound, dual": SamplerConfig(
            cache="dual", algorithm="entropy", commit="entropy_bound", level=0.4, **free
        ),
        "drafts, dual": SamplerConfig(cache="dual", **drafted),
    }
    if not model.logits_shift:
        found["wino"] = SamplerConfig(algorithm="wino", level=0.6, revoke=0.9, **shape)
    return {
        name: sampler
        for name, sampler in (found | {"roar": SamplerConfig(algorithm="roar", **free)}).items()
        if sampler
    }


def table(
    config: Config,
    repeats: int,
    prompt_width: int = 128,
    only: tuple[str, ...] = (),
    show: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Figures of every sampler (or of those named in `only`), as rows with the keys of COLUMNS.

    `nfe` counts the forwards of the whole batch; `tokens_per_forward` the tokens pushed through the network by each, per
    row. full_s, cached_s and head_s are so many forwards and heads timed by themselves; `overhead` is the share of the
    seconds that they do not explain. Each sampler is timed in turn with full forwards, the unit in which `relative` (its
    tokens/s over the first one's) and full_s are counted, so that they do not move with what else the machine does. `show`
    is given each line of the table as soon as it is known. Raises UserError on a name that there is none of.
    """
    if not config.model.vocab_size:
        raise UserError("model.vocab_size = 0: dmpo bench sample makes up its tokens; set a size")
    model, length = config.model, config.rollout.completion_length
    rows = config.rollout.prompts * config.rollout.group
    samplers = samplers_for(config.sampler, model)
    for name in only:
        if name not in samplers:
            raise UserError(f'--only "{name}": no such sampler; there are {", ".join(samplers)}')
    chosen = {name: s for name, s in samplers.items() if not only or name in only}
    params = jax.jit(init_params, static_argnums=1)(jax.random.key(0), model)
    mask_id, eos_id = model.vocab_size - 1, model.vocab_size - 2
    tokens = jax.random.randint(jax.random.key(1), (rows, prompt_width), 0, eos_id)
    inputs = (params, Prompts(tokens, jnp.full((rows,), prompt_width)), row_keys(jax.random.key(2), jnp.arange(rows)))
    pieces = _Pieces(params, model, rows, prompt_width, length)
    peak, out, first = matmul_peak(), [], None
    widths = [max(len(column), 12) for column in COLUMNS]
    widths[0] = max(map(len, chosen))
    line = lambda cells: "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip()  # noqa: E731
    show(line(COLUMNS))
    for name, sampler in chosen.items():
        sampler.validate(length)
        sampler.validate_model(model)
        program = jax.jit(
            lambda p, q, k, sampler=sampler: sample(
                p, q, k, length=length, mask_id=mask_id, eos_id=eos_id, sampler=sampler, config=model
            )
        )
        start = time.perf_counter()
        compiled = program.lower(*inputs).compile()
        compile_s = time.perf_counter() - start
        traces: list[Trace] = []
        run = lambda compiled=compiled, traces=traces: traces.append(jax.block_until_ready(compiled(*inputs)))  # noqa: E731
        seconds, forwards_s = _in_turn(run, pieces.full_forwards(), repeats)
        forward_s = forwards_s / FULL_FORWARDS
        first = first or seconds / forward_s
        trace = jax.device_get(traces[0])
        figures = _explained(pieces, trace, sampler, prompt_width, length, forward_s)
        spent = sum(figures[key] for key in ("full_s", "cached_s", "head_s"))
        flops = figures.pop("flops")
        out.append({
            "sampler": name,
            "seconds": seconds,
            "relative": first * forward_s / seconds,
            "nfe": int(trace.passes[0]),
            "tokens_per_second": rows * length / seconds,
            "tokens_per_forward": float(trace.processed.sum() / trace.forwards.sum()),
            **figures,
            "overhead": 1 - spent / seconds,
            "share_of_peak": flops / seconds / peak,
            "compile_s": compile_s,
        })  # fmt: skip
        show(line([name] + [f"{out[-1][key]:.4g}" for key in COLUMNS[1:]]))
    return {
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "rows": rows,
        "prompt_width": prompt_width,
        "completion_length": length,
        "base": dataclasses.asdict(config.sampler),
        "matmul_peak_flops": peak,
        "samplers": out,
    }


class _Pieces:
    """Forwards of a window of tokens against the whole canvas, and heads, each timed by itself, in full forwards."""

    def __init__(self, params: dict, model: ModelConfig, rows: int, prompt_width: int, length: int):
        self._params, self.model, self.rows = params, model, rows
        self.width = prompt_width + length
        self._cost: dict[tuple[str, int], float] = {}
        self._full = self._forward(self.width)
        jax.block_until_ready(self._full())

    def _timed(self, kind: str, size: int, make: Callable[[], Callable]) -> float:
        if (kind, size) not in self._cost:
            run = make()
            jax.block_until_ready(run())
            seconds, full = _in_turn(run, self._full, PIECE_REPEATS)
            self._cost[kind, size] = seconds / full
        return self._cost[kind, size]

    def full_forwards(self) -> Callable:
        """Runs FULL_FORWARDS forwards of the whole canvas."""
        return lambda: [self._full() for _ in range(FULL_FORWARDS)]

    def forward(self, size: int) -> float:
        """Time of one forward of `size` slots of every row."""
        return self._timed("forward", size, lambda: self._forward(size))

    def _forward(self, size: int) -> Callable:
        slots = max(size, self.width)
        positions = jnp.broadcast_to(jnp.arange(slots), (self.rows, slots))
        rest = (positions, jnp.full((self.rows,), slots))
        tokens = jnp.zeros((self.rows, size), jnp.int32)

        m = self.model
        if size >= self.width:
            whole = jax.jit(hidden_states, static_argnums=4)
            return lambda: whole(self._params, tokens, *rest, m)
        shape = (m.n_layers, self.rows, m.kv_heads, self.width, m.head_size)
        cache = Cache(*(jnp.zeros(shape, jnp.dtype(m.dtype)) for _ in range(2)))
        window = jax.jit(lambda p, t, positions, lengths, c: cached_hidden_states(p, t, 0, positions, lengths, c, m)[0])
        return lambda: window(self._params, tokens, *rest, cache)

    def head(self, size: int) -> float:
        """Time of the head at `size` positions of every row."""
        hidden = jnp.ones((self.rows, size, self.model.d_model), jnp.dtype(self.model.dtype))
        call = jax.jit(head_logits, static_argnums=2)
        return self._timed("head", size, lambda: lambda: call(self._params, hidden, self.model))


def _explained(
    pieces: _Pieces,
    trace: Trace,
    sampler: SamplerConfig,
    prompt_width: int,
    length: int,
    forward_s: float,
) -> dict[str, float]:
    """Seconds that a run's forwards and heads take by themselves where a full forward takes `forward_s`, and their FLOPs."""
    block, passes = sampler.block_length or length, int(trace.passes[0])
    blocks, copies, model = length // block, 2 if sampler.cfg_scale else 1, pieces.model
    if sampler.cache == "prefix":  # passes of each block, from the steps at which its tokens were committed
        last = trace.step.reshape(len(trace.step), blocks, block).max(axis=2)
        again = (np.diff(last, axis=1, prepend=-1).max(axis=0) - 1).tolist()
    else:  # all blocks alike, so only their sum matters
        again = [(passes - (sampler.cache == "block")) / blocks - 1] * blocks
    sizes = forward_sizes(sampler, model, prompt_width, length, again)
    whole = pieces.width + (block if sampler.algorithm == "wino" else 0)
    full = sizes.pop(whole, 0.0)
    return {
        "full_s": forward_s * copies * full * (1 if whole == pieces.width else pieces.forward(whole)),
        "cached_s": forward_s * copies * sum(count * pieces.forward(size) for size, count in sizes.items() if count),
        "head_s": forward_s * copies * passes * pieces.head(scored_positions(sampler, length)),
        "flops": decoding_flops(sampler, model, pieces.rows, prompt_width, length, again),
    }


def _in_turn(one: Callable, other: Callable, repeats: int) -> tuple[float, float]:
    """Median seconds of both, run alternately."""
    timed: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for run, into in zip((one, other), timed, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run())
            into.append(time.perf_counter() - start)
    return statistics.median(timed[0]), statistics.median(timed[1])
