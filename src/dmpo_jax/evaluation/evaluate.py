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
from jax.sharding import NamedSharding, PartitionSpec

from dmpo_jax.diffusion.canvas import live_positions
from dmpo_jax.evaluation import pass_at_k
from dmpo_jax.evaluation.intervals import wilson
from dmpo_jax.evaluation.protocol import counted, for_evaluation, prefill_for, task_for
from dmpo_jax.evaluation.verdicts import Verdicts, answer_key, columns, compared, judge_all, solved
from dmpo_jax.parallel.mesh import readable
from dmpo_jax.tasks.task import Example
from dmpo_jax.training.cycle import decode, grade
from dmpo_jax.training.data import Batch, encoded, place, take
from dmpo_jax.training.host_grading import HostGrader
from dmpo_jax.training.metrics import write_text
from dmpo_jax.training.setup import Setup

EVALUATION_STREAM = 7


def load_examples(setup: Setup, split: str, file: str = "") -> list[Example]:
    """Examples of a split, or of a data file in one of the task's published formats.

    Those of validation and test are asked as the evaluation's protocol asks.
    """
    task = setup.config.task if split == "train" else task_for(setup.config.task, setup.config.evaluation)
    return setup.task.read(file, task) if file else setup.task.examples(task, split)


class Evaluator:
    """A set of examples, ready to be answered by any parameters of one model; compiles once per prompt width."""

    def __init__(
        self, setup: Setup, examples: list[Example], mesh: jax.sharding.Mesh, grader: HostGrader | None = None
    ):
        """Encodes the examples; `grader` for a task that no device grades. Raises UserError where an example does not fit."""
        config = for_evaluation(setup.config)
        self._setup, self._mesh, self._grader = dataclasses.replace(setup, config=config), mesh, grader
        self._sampler, self._questions = config.evaluation_sampler, len(examples)
        self._examples = examples * config.evaluation.samples  # one sample of each after the other
        self._data = encoded(examples, self._setup, prefill_for(config.evaluation))
        self._seed = jax.device_put(np.uint32(config.run.seed), NamedSharding(mesh, PartitionSpec()))
        self._answer = jax.jit(self._answer_batch)

    def _answer_batch(self, params, batch: Batch, rows: jax.Array, seed: jax.Array):
        key = jax.random.fold_in(jax.random.key(seed), jnp.uint32(2**32 - EVALUATION_STREAM))
        trace = decode(params, batch.prompts, key, rows, self._setup, self._sampler)
        graded = grade(trace.completion, batch.features, self._setup)
        live = live_positions(trace.completion, self._setup.tokenizer.eos_id)
        entropy = jnp.zeros(live.shape) if trace.entropy is None else trace.entropy
        entropy = jnp.sum(jnp.where(live, entropy, 0.0), axis=1) / jnp.sum(live, axis=1)
        return readable((trace.completion, trace.forwards, graded["reward"], entropy))

    def run(
        self, params: Any, after_batch: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """(result, one row per answer). Host grades count; `grader_disagreements` counts items the device graded otherwise, and
        `no_verdict` items of a task for worker processes that have none: they count as wrong.

        Of several processes all must call it; all get the same.
        """
        size, buckets = self._setup.config.evaluation.batch, self._setup.config.rollout.prompt_buckets
        count, start = len(self._examples), time.monotonic()
        answers = []
        for first in range(0, count, size):
            index = np.arange(first, first + size) % count  # the last batch is filled up with items seen before
            batch = take(self._data, index % self._questions, buckets)
            rows = place(index.astype(np.int32), self._mesh)
            answers.append(jax.device_get(self._answer(params, place(batch, self._mesh), rows, self._seed)))
            after_batch()
        seconds = time.monotonic() - start
        completion, forwards, device, entropy = (np.concatenate(parts)[:count] for parts in zip(*answers, strict=True))

        texts = [self._setup.tokenizer.decode(ids) for ids in completion]
        ended = np.isin(completion, self._setup.tokenizer.end_ids).any(axis=1)
        components = self._graded(texts, device)
        verdicts = self._verdicts(texts, ended, components)
        items = []
        for example, text, nfe, graded, end, verdict in zip(
            self._examples, texts, forwards, components, ended, verdicts, strict=True
        ):
            items.append(
                {"prompt": example.prompt, "completion": text, "truth": example.truth, "score": graded["reward"]}
                | {name: value for name, value in graded.items() if name != "reward"}
                | (columns(verdict) if verdict else {})
                | {"nfe": int(nfe), "ended": bool(end)}
            )
        return self._result(items, verdicts, completion, forwards, entropy, seconds), items

    def _graded(self, texts: list[str], device: np.ndarray) -> list[dict[str, Any]]:
        """The host's components of every text and whether the device's reward is the same, or why there are none."""
        if not self._grader:
            graded = [self._setup.task.grade_text(t, e.features) for t, e in zip(texts, self._examples, strict=True)]
            same = [bool(abs(g["reward"] - float(r)) < 1e-6) for g, r in zip(graded, device, strict=True)]
            return [g | {"graders_agree": agree} for g, agree in zip(graded, same, strict=True)]
        names = self._examples[0].features
        found = self._grader.grade(
            texts, {name: np.stack([e.features[name] for e in self._examples]) for name in names}
        )
        components = {name: np.nan_to_num(value) for name, value in found.components.items()}
        return [
            {name: float(value[i]) for name, value in components.items()} | ({"no_verdict": why} if why else {})
            for i, why in enumerate(found.failures)
        ]

    def _verdicts(self, texts: list[str], ended: np.ndarray, components: list[dict[str, Any]]) -> list[Verdicts | None]:
        """Both verdicts on every text; the strict one anew where the components are of another reward."""
        task, features = self._setup.task.name, [example.features for example in self._examples]
        exact = self._setup.config.task.reward == "exact"
        return judge_all(task, texts, ended, features, components if exact else [None] * len(texts))

    def _result(
        self, items: list[dict], verdicts: list[Verdicts | None], completion, forwards, entropy, seconds: float
    ) -> dict[str, Any]:
        count, config = self._questions, self._setup.config
        figures = self._setup.task.summarize(items, self._examples) | compared(verdicts, count)
        figures = counted(config.evaluation, config.task.reward, figures)
        if config.evaluation.samples > 1:
            figures |= self._variety(items) | {"rollout_entropy": float(np.mean(entropy))}
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
            "grader_disagreements": sum(not item.get("graders_agree", True) for item in items),
            **({"no_verdict": sum("no_verdict" in item for item in items)} if self._grader else {}),
            **figures,
            "sampler": dataclasses.asdict(self._sampler),
            "completion_length": completion.shape[1],
            "seed": config.run.seed,
            "protocol": config.evaluation.protocol,
        }

    def _variety(self, items: list[dict]) -> dict[str, Any]:
        by_question = [items[first :: self._questions] for first in range(self._questions)]
        keys = [[answer_key(self._setup.task.name, item["completion"]) for item in row] for row in by_question]
        right = [[solved(item | {"reward": item["score"]}) for item in row] for row in by_question]
        return pass_at_k.figures(keys, right)


def write_items(path: Path, items: list[dict[str, Any]]) -> None:
    """One JSON object per line."""
    write_text(path, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items))
