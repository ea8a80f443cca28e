"""Worker processes: verdicts in order, limits of time and memory, a user's mistakes counted and named."""

import textwrap
import time

import pytest

from dmpo_jax.errors import UserError
from dmpo_jax.grading.pool import GraderPool, ask_once

FILE = """
import time

def examples(split):
    if split == "validation":
        return None
    if split == "test":
        return ({"prompt": f"{i}?", "answer": i} for i in range(3))
    return [{"prompt": "odd", "answer": {"set": {1, 2}}}]

def reward(completion, example):
    print("prints are not verdicts")
    if completion == "loop":
        while True:
            pass
    if completion == "sleep":
        time.sleep(60)
    if completion == "memory":
        return len([0] * (1 << 34))
    if completion == "power":
        return 9 ** 9 ** 9
    if completion == "exit":
        import os
        os._exit(3)
    if completion == "text":
        return "many"
    if completion == "infinite":
        return float("inf")
    if completion == "nan":
        return float("nan")
    if completion == "unnamed":
        return {"score": 1.0}
    return {"reward": float(completion == example["answer"]), "length": len(completion)}
"""


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "task.py"
    file.write_text(textwrap.dedent(FILE))
    return ("own", str(file))


def asked(*completions):
    return [{"completion": text, "example": {"prompt": "?", "answer": "four"}} for text in completions]


def test_verdicts_come_in_the_order_of_the_requests(task):
    with GraderPool(task, seconds=20, workers=2) as pool:
        for _ in range(2):
            verdicts = pool.grade(asked(*["four", "five", ""] * 5))
            assert [v.values for v in verdicts] == [
                {"reward": 1.0, "length": 4.0},
                {"reward": 0.0, "length": 4.0},
                {"reward": 0.0, "length": 0.0},
            ] * 5
            assert not any(v.failure for v in verdicts)


def test_what_hangs_or_dies_costs_its_own_verdict_alone(task):
    with GraderPool(task, seconds=2, workers=2) as pool:
        pool.grade(asked("four"))
        verdicts = pool.grade(asked("loop", "four", "sleep", "exit", "four", "power", "memory", "four"))
    values = [v.values and v.values["reward"] for v in verdicts]
    assert values == [None, 1.0, None, None, 1.0, None, None, 1.0]
    why = [v.failure for v in verdicts]
    assert why[0] == why[2] == "no verdict within 2 s"
    assert why[3] == "its process died (exit code 3)"
    assert "MemoryError" in why[6]
    assert verdicts[0].seconds >= 2


def test_ten_that_hang_leave_the_pool_as_fast_as_before(task):
    with GraderPool(task, seconds=0.5, workers=2) as pool:
        pool.grade(asked("four", "four"))
        start = time.monotonic()
        pool.grade(asked(*["four"] * 50))
        before = time.monotonic() - start
        assert all(v.failure for v in pool.grade(asked(*["loop"] * 10)))
        pool.grade(asked("four", "four"))  # workers start again
        start = time.monotonic()
        assert not any(v.failure for v in pool.grade(asked(*["four"] * 50)))
        assert time.monotonic() - start < 10 * before + 1


@pytest.mark.parametrize(
    ("completion", "words"),
    [
        ("text", "reward returned 'reward': 'many', expected a finite number"),
        ("infinite", "expected a finite number"),
        ("unnamed", "reward returned ['score']: expected a number, or a dictionary with \"reward\" in it"),
    ],
)
def test_returned_values_that_are_no_rewards_are_named(task, completion, words):
    with GraderPool(task, seconds=20, workers=1) as pool:
        (verdict,) = pool.grade(asked(completion))
    assert verdict.values is None and words in verdict.failure


def test_a_missing_number_is_passed_on(task):
    with GraderPool(task, seconds=20, workers=1) as pool:
        (verdict,) = pool.grade(asked("nan"))
    assert verdict.values["reward"] != verdict.values["reward"]


def test_an_exception_is_named_with_its_line(task, tmp_path):
    (tmp_path / "task.py").write_text("def examples(split):\n    return []\n\ndef reward(c, e):\n    return 1 / 0\n")
    with GraderPool(task, seconds=20, workers=1) as pool:
        (verdict,) = pool.grade(asked("x"))
    assert verdict.failure == "ZeroDivisionError: division by zero (line 5 of task.py)"


def test_examples_of_a_split_come_from_a_worker_too(task):
    rows = ask_once(task, {"split": "test"}, 20)["rows"]
    assert rows == [{"prompt": f"{i}?", "answer": i} for i in range(3)]
    assert ask_once(task, {"split": "validation"}, 20) == {"rows": None}
    failure = ask_once(task, {"split": "train"}, 20)["failure"]
    assert "examples('train'), example 0" in failure and "set" in failure


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def examples(split):\n    return []\n", "has no function reward(completion, example); define it"),
        ("import nothing_like_this\n", "ModuleNotFoundError: No module named 'nothing_like_this' (line 1 of task.py)"),
        ("def f(:\n", "SyntaxError"),
    ],
)
def test_a_file_that_is_no_task_is_refused_when_the_workers_start(task, tmp_path, text, words):
    (tmp_path / "task.py").write_text(text)
    with GraderPool(task, seconds=20, workers=1) as pool, pytest.raises(UserError) as error:
        pool.grade(asked("x"))
    assert words in str(error.value)


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="expected a Python file"):
        ask_once(("own", str(tmp_path / "none.py")), {"split": "test"}, 20)
