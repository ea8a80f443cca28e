"""`dmpo eval CONFIG --generations FILE...`: answers on file graded by the published and the strict rules, without a model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dmpo_jax.config import resolve
from dmpo_jax.errors import UserError
from dmpo_jax.evaluation import reasons
from dmpo_jax.evaluation.generations import Generations, Item, read_generations
from dmpo_jax.evaluation.intervals import wilson
from dmpo_jax.evaluation.verdicts import TASKS, Verdict, Verdicts, columns, compared, judge
from dmpo_jax.grading.pool import GraderPool
from dmpo_jax.tasks import get_task, gsm8k
from dmpo_jax.tasks.gsm8k_files import read_items
from dmpo_jax.tasks.task import Example, TaskConfig
from dmpo_jax.toml_files import parse_override, read_extended
from dmpo_jax.training.metrics import check_output, write_text

SETTINGS = ("task.name", "task.test_file", "task.grading_seconds", "task.grading_workers")


def regrade(config: Path, overrides: Sequence[str], files: Sequence[str], out: Path, data: str = "") -> dict[str, Any]:
    """Grades every answer of the files by both rules. Writes `out` (JSON) and, beside it, one line per answer (`.jsonl`).

    Of the configuration only `[task]` is read: its name, and for gsm8k the file of questions (`data` overrules it) in which
    truths are looked up that the answers' files lack. Raises UserError on a task without both rules and on a malformed file.
    """
    check_output(out, ".json")
    check_output(out.with_suffix(".jsonl"), ".jsonl")
    settings = _task_settings(config, overrides)
    if data and settings.name != "gsm8k":
        raise UserError(f"--data {data}: files of {settings.name} answers hold their truths; leave it out")
    read = [read_generations(file, settings.name) for file in files]
    lacking = any(item.features is None for part in read for item in part.items)
    truths = _truths(data or settings.test_file) if lacking else {}
    items = [_completed(item, truths) for part in read for item in part.items]
    components = _by_workers(settings, [item for item, _ in items])
    verdicts = [_verdicts(settings.name, *row, graded) for row, graded in zip(items, components, strict=True)]
    result = _result(settings.name, [item for item, _ in items], verdicts)
    looked_up = sum(item.features is not None and not known for item, known in items)
    result |= {"truths_looked_up": looked_up, "generations": list(files), **_shared_settings(read)}
    lines = [_line(item, found) for (item, _), found in zip(items, verdicts, strict=True)]
    write_text(out.with_suffix(".jsonl"), "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    write_text(out, json.dumps(result, indent=1) + "\n")
    return result


def _task_settings(path: Path, overrides: Sequence[str]) -> TaskConfig:
    for section, key, _ in map(parse_override, overrides):
        if f"{section}.{key}" not in SETTINGS:
            raise UserError(f"--set {section}.{key}: dmpo eval --generations does not use it; leave it out")
    tables = read_extended(path)
    settings = resolve({"task": tables["task"]} if "task" in tables else {}, overrides).task
    if settings.name not in TASKS:
        known = ", ".join(TASKS)
        raise UserError(f'task.name = "{settings.name}": dmpo eval --generations grades {known}; set one of these')
    return settings


def _truths(path: str) -> dict[str, str]:
    """True answers of GSM8K by question; none without a file."""
    return {item.question: item.truth for _, item in read_items(path)} if path else {}


def _completed(item: Item, truths: dict[str, str]) -> tuple[Item, bool]:
    """The item with its truth looked up where its file lacks it, and whether its file had it."""
    if item.features is not None:
        return item, True
    truth = truths.get(item.question.strip())
    return (item._replace(truth=truth, features=gsm8k.features(truth)) if truth else item), False


def _by_workers(settings: TaskConfig, items: list[Item]) -> list[dict[str, float] | None]:
    """The strict components of a task for worker processes, zero where there is no verdict; None each of other tasks."""
    task = get_task(settings.name, settings)
    if not task.worker:
        return [None] * len(items)
    with GraderPool(task.worker, settings.grading_seconds, settings.grading_workers) as pool:
        found = pool.grade([task.request(item.completion, item.features) for item in items])
    return [verdict.values or dict.fromkeys(task.components, 0.0) for verdict in found]


def _verdicts(task: str, item: Item, known: bool, components: dict[str, float] | None) -> Verdicts:
    if item.features is None:  # what nobody knows is right by neither rule
        nothing = Verdict(0, 1, "")
        return Verdicts(nothing, nothing, dict.fromkeys(TASKS[task].task.components, 0.0), "")
    found = judge(task, item.completion, item.features, components)
    if known:
        return found
    # The published evaluation compares with the truth of the file, so with none.
    reason = reasons.NO_TRUTH if found.strict.right else ""
    return found._replace(published=found.published._replace(right=0), reason=reason)


def _result(task: str, items: list[Item], verdicts: list[Verdicts]) -> dict[str, Any]:
    count = len(items)
    examples = [Example(item.question, "", item.truth, item.features or {}) for item in items]
    figures = TASKS[task].task.summarize([found.components for found in verdicts], examples)
    accuracy, exact = figures.pop("accuracy"), figures.pop("exact")
    return {
        "task": task,
        "n": count,
        "accuracy": accuracy,
        "accuracy_ci95": list(wilson(accuracy * count, count)),
        "exact": exact,
        "exact_ci95": list(wilson(exact * count, count)),
        **compared(verdicts),
        "without_truth": sum(item.features is None for item in items),
        **figures,
    }


def _shared_settings(read: list[Generations]) -> dict[str, int]:
    """What all files say of their decoding."""
    first = read[0].settings
    return {key: value for key, value in first.items() if all(part.settings.get(key) == value for part in read)}


def _line(item: Item, found: Verdicts) -> dict[str, Any]:
    components = {name: value for name, value in found.components.items() if name != "reward"}
    return (
        {
            "prompt": item.question,
            "completion": item.completion,
            "truth": item.truth,
            "score": found.components["reward"],
        }
        | components
        | columns(found)
        | {"file": item.file, "item": item.number}
    )
