"""A worker process of `pool.py`: `python -m dmpo_jax.grading.worker SECONDS math REWARD SHARE`, or `... SECONDS own FILE`.

Reads a request a line from standard input and answers with a line of JSON on standard output: what the grader returned, as
{"values": {name: number}}, or {"failure": why}. It must not import JAX: a device belongs to the run.
"""

import contextlib
import importlib.util
import json
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from dmpo_jax.errors import UserError, one_line

MEMORY = 1 << 30  # bytes beyond what the imports took
GRACE = 1.0  # seconds after which the kernel ends what the pool, if it still lives, has not
MOST_ROWS = 1_000_000

Grader = Callable[[dict[str, Any]], dict[str, Any]]


def main(arguments: list[str]) -> int:
    """Serves requests until its input ends."""
    # What graders print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="ascii")
    os.dup2(2, 1)
    seconds, kind, *rest = arguments
    say = lambda reply: print(json.dumps(reply), file=answers, flush=True)  # noqa: E731
    try:
        grader = {"math": _math, "own": _own}[kind](*rest)
    except Exception as error:
        say({"failure": _described(error, rest[0])})
        return 1
    _bound_memory()
    say({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        # Left to its default, the signal ends the process in the midst of any computation, even as an orphan.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, float(seconds) + GRACE)
        try:
            reply = grader(request)
        except Exception as error:
            reply = {"failure": _described(error, rest[0])}
        signal.setitimer(signal.ITIMER_REAL, 0)
        say(reply)
    return 0


def _bound_memory() -> None:
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _described(error: BaseException, file: str) -> str:
    """An error in one line, with the user's own line of code where it came from there."""
    if isinstance(error, UserError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f.lineno for f in frames if file and Path(f.filename) == Path(file)]
    place = f" (line {own[-1]} of {Path(file).name})" if own else ""
    return one_line(f"{type(error).__name__}: {error}"[:500] + place)


def _math(reward: str, share: str) -> Grader:
    from dmpo_jax.grading.math_grader import grade, preload

    preload(reward)
    return lambda request: {"values": grade(request["completion"], request["truth"], reward, float(share))}


def _own(file: str) -> Grader:
    module = load(file)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "split" in request:
            return {"rows": rows(module, file, request["split"])}
        return {"values": values(module.reward(request["completion"], request["example"]))}

    return answer


def load(file: str) -> ModuleType:
    """The module of a user's task file. Raises UserError where it lacks one of its two functions."""
    path = Path(file)
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location("own_task", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"task.file = {file!r}: expected a Python file (.py); name one")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, form in (("examples", "examples(split)"), ("reward", "reward(completion, example)")):
        if not callable(getattr(module, name, None)):
            raise UserError(f"{file}: has no function {form}; define it")
    return module


def rows(module: ModuleType, file: str, split: str) -> list[dict[str, Any]] | None:
    """The examples of a split: dictionaries with a prompt; None if it has no such split. Raises UserError on the first that is
    something else.
    """
    found: Iterable[Any] | None = module.examples(split)
    if found is None:
        return None
    result = []
    for number, row in enumerate(found):
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(prompt, str) or not prompt:
            expected = 'expected a dictionary with a text under "prompt"'
            raise UserError(f"{file}: examples({split!r}), example {number}: {expected}, found {repr(row)[:80]}")
        if number >= MOST_ROWS:
            raise UserError(f"{file}: examples({split!r}) gives more than {MOST_ROWS:,} examples; give fewer")
        try:
            json.dumps(row)
        except (TypeError, ValueError) as error:
            expected = "expected texts, numbers, lists and dictionaries alone"
            raise UserError(f"{file}: examples({split!r}), example {number}: {error}; {expected}") from None
        result.append(row)
    if not result:
        raise UserError(f"{file}: examples({split!r}) gives no examples, expected one at least; return some")
    return result


def values(returned: Any) -> dict[str, float]:
    """Components of what a reward function returned: a number, or named numbers of which one is the reward."""
    named = returned if isinstance(returned, dict) else {"reward": returned}
    if "reward" not in named:
        raise UserError(
            f'reward returned {sorted(map(str, named))}: expected a number, or a dictionary with "reward" in it'
        )
    result = {}
    for name, value in named.items():
        number = float(value) if isinstance(value, (bool, int, float)) or hasattr(value, "__float__") else None
        if not isinstance(name, str) or number is None or math.isinf(number):
            raise UserError(f"reward returned {name!r}: {repr(value)[:80]}, expected a finite number")
        result[name] = number
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
