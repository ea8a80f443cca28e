"""`dmpo sample`: answers to given prompts, and the denoising as it unfolds."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dmpo_jax.config import Config
from dmpo_jax.diffusion.canvas import Prompts
from dmpo_jax.errors import UserError
from dmpo_jax.evaluation.command import answering_policy
from dmpo_jax.parallel.mesh import make_mesh, row_shards
from dmpo_jax.training.cycle import decode
from dmpo_jax.training.data import place
from dmpo_jax.training.setup import Setup, make_setup

WIDTH_STEP = 32  # prompts are padded to a multiple of it, so that few programs are compiled
UNKNOWN = "\u2591"


def read_prompts(path: Path) -> list[str]:
    """One prompt a line, `\\n` standing for a line break. Raises UserError when there is none or the file cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--file {path}: cannot be read as text ({error})") from None
    prompts = [line.replace("\\n", "\n") for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"--file {path}: no prompt in it; write one a line")
    return prompts


def sample_prompts(
    config: Config, run_dir: Path | None, prompts: Sequence[str], watch: bool = False
) -> list[dict[str, Any]]:
    """One dict a prompt, in their order: prompt, completion, nfe, tokens (of the completion's text), processed.

    Prompts of like length are decoded together. With `watch`, every step of theirs is drawn on stderr; that needs a
    single device. Raises UserError on a prompt that the tokenizer cannot spell, and as `evaluate_run` does.
    """
    setup = make_setup(config)
    encoded = [setup.tokenizer.encode_prompt(text) for text in prompts]
    mesh = make_mesh(config.mesh.shape(jax.device_count()))
    shards = row_shards(mesh)
    if watch and mesh.size > 1:
        raise UserError(f"--watch shows the rows of one device, but the mesh has {mesh.size}; leave it out")
    size = min(config.evaluation.batch, -(-len(prompts) // shards) * shards)
    order = sorted(range(len(prompts)), key=lambda i: len(encoded[i]))
    found: dict[int, dict[str, Any]] = {}
    screen = Screen(setup) if watch else None

    def answer(params, prompts, rows):
        return decode(params, prompts, jax.random.key(config.run.seed), rows, setup, watch=screen)

    program = jax.jit(answer)
    with jax.set_mesh(mesh):
        params = answering_policy(config, run_dir, setup, mesh)
        for first in range(0, len(order), size):
            part = order[first : first + size]
            index = [part[i % len(part)] for i in range(size)]  # the last batch is filled up
            batch = place(_padded([encoded[i] for i in index], setup.tokenizer.pad_id), mesh)
            if screen:
                screen.rows = len(part)
            trace = jax.device_get(program(params, batch, place(np.array(index, np.int32), mesh)))
            for row, i in enumerate(part):
                ids = trace.completion[row]
                ended = np.flatnonzero(ids == setup.tokenizer.eos_id)
                found[i] = {
                    "prompt": prompts[i],
                    "completion": setup.tokenizer.decode(ids),
                    "nfe": int(trace.forwards[row]),
                    "tokens": int(ended[0]) if len(ended) else len(ids),
                    "processed": int(trace.processed[row]),
                }
    return [found[i] for i in range(len(prompts))]


class Screen:
    """Draws completions while they are decoded: in place on a terminal, else a line a step."""

    def __init__(self, setup: Setup, write: Callable[[str], Any] | None = None):
        self._tokenizer = setup.tokenizer
        self._in_place = write is None and sys.stderr.isatty()
        self._write = write or sys.stderr.write
        self._drawn = 0
        self.rows = 1

    def __call__(self, completion: np.ndarray, masked: np.ndarray) -> None:
        """Shows `self.rows` rows of completions `int32[B, L]`; masked `bool[B, L]` are drawn as shaded squares."""
        if self._in_place and self._drawn:
            self._write(f"\x1b[{self._drawn}A\x1b[J")
        lines = [self._line(*row) for row in zip(np.asarray(completion), np.asarray(masked), strict=True)][: self.rows]
        self._write("".join(line + "\n" for line in lines))
        self._drawn = len(lines)
        if self._in_place:
            time.sleep(0.03)  # slow enough to be seen

    def _line(self, ids: np.ndarray, masked: np.ndarray) -> str:
        text, start = "", 0
        for i in range(1, len(ids) + 1):
            if i == len(ids) or masked[i] != masked[start]:
                text += UNKNOWN * (i - start) if masked[start] else self._tokenizer.decode(ids[start:i])
                start = i
        return text.replace("\n", " ").replace("\r", " ").replace("\x1b", "?")


def _padded(ids: list[list[int]], pad_id: int) -> Prompts:
    width = max(-(-max(map(len, ids)) // WIDTH_STEP), 1) * WIDTH_STEP
    tokens = np.full((len(ids), width), pad_id, np.int32)
    for row, prompt in zip(tokens, ids, strict=True):
        row[: len(prompt)] = prompt
    return Prompts(tokens, np.array([len(prompt) for prompt in ids], np.int32))
