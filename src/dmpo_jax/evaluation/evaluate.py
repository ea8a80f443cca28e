"""Decoding and grading a set of held-out examples."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dmpo_jax.evaluation.intervals import wilson
from dmpo_jax.parallel.mesh import replicated
from dmpo_jax.tasks.task import Example
from dmpo_jax.training.cycle import decode, grade
from dmpo_jax.training.data import Batch, encoded, place, take
from dmpo_jax.training.metrics import write_text
from dmpo_jax.training.setup import Setup

EVALUATION_STREAM = 7


def load_examples(setup: Setup, split: str, file: str = "") -> list[Example]:
    """Examples of a split, or of a data file in one of the task's published formats."""
    if file:
        return setup.task.read(file, setup.config.task)
    return setup.task.examples(setup.config.task, split)


class Evaluator:
    """A set of examples, ready to be answered by any parameters of one model; compiles once per prompt width."""

    def __init__(self, setup: Setup, examples: list[Example], mesh: jax.sharding.Mesh):
        """Encodes the examples. Raises UserError where one does not fit."""
        config = setup.config
        self._setup, self._examples, self._mesh = setup, examples, mesh
        self._sampler = config.evaluation_sampler
        self._data = encoded(examples, setup)
        self._answer = jax.jit(self._answer_batch)

    def _answer_batch(self, params, batch: Batch, rows: jax.Array):
        key = jax.random.fold_in(jax.random.key(self._setup.config.run.seed), jnp.uint32(2**32 - EVALUATION_STREAM))
        trace = decode(params, batch.prompts, key, rows, self._setup, self._sampler)
        # Whole on every device, so that every process can read all of it.
        return replicated((trace.completion, trace.forwards, grade(trace.completion, batch.features, self._setup)))

    def run(
        self, params: Any, after_batch: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """(result, one row per item). Host grades count; `grader_disagreements` counts items the device graded otherwise.

        Of several processes all must call it; all get the same.
        """
        size, buckets = self._setup.config.evaluation.batch, self._setup.config.rollout.prompt_buckets
        count, start = len(self._examples), time.monotonic()
        completions, forwards, device = [], [], []
        for first in range(0, count, size):
            index = np.arange(first, first + size) % count  # the last batch is filled up with items seen before
            batch = take(self._data, index, buckets)
            rows = place(index.astype(np.int32), self._mesh)
            answer = jax.device_get(self._answer(params, place(batch, self._mesh), rows))
            completions.append(answer[0])
            forwards.append(answer[1])
            device.append(answer[2]["reward"])
            after_batch()
        seconds = time.monotonic() - start
        flat = lambda parts: np.concatenate(parts)[:count]  # noqa: E731
        completion, forwards, device = flat(completions), flat(forwards), flat(device)

        items = []
        for example, ids, nfe, reward in zip(self._examples, completion, forwards, device, strict=True):
            text = self._setup.tokenizer.decode(ids)
            graded = self._setup.task.grade_text(text, example.features)
            items.append(
                {"prompt": example.prompt, "completion": text, "truth": example.truth, "score": graded["reward"]}
                | {name: value for name, value in graded.items() if name != "reward"}
                | {"nfe": int(nfe), "graders_agree": bool(abs(graded["reward"] - float(reward)) < 1e-6)}
            )
        return self._result(items, completion, forwards, seconds), items

    def _result(self, items: list[dict], completion, forwards, seconds: float) -> dict[str, Any]:
        count = len(items)
        figures = self._setup.task.summarize(items, self._examples)
        accuracy, exact = figures.pop("accuracy"), figures.pop("exact")
        return {
            "task": self._setup.task.name,
            "n": count,
            "accuracy": accuracy,
            # Scores lie in [0, 1], so the binomial interval over items is conservative for a mean of partial credit.
            "accuracy_ci95": list(wilson(accuracy * count, count)),
            "exact": exact,
            "exact_ci95": list(wilson(exact * count, count)),
            "mean_nfe": float(np.mean(forwards)),
            "tokens_per_second": completion.size / seconds,
            "grader_disagreements": sum(not item["graders_agree"] for item in items),
            **figures,
            "sampler": dataclasses.asdict(self._sampler),
            "completion_length": completion.shape[1],
            "seed": self._setup.config.run.seed,
        }


def write_items(path: Path, items: list[dict[str, Any]]) -> None:
    """One JSON object per line."""
    write_text(path, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items))
