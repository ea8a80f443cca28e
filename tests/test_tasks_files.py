"""Data files in the published formats, good and bad, and the settings of a task."""

import dataclasses
import os

import numpy as np
import pytest

from dmpo_jax.errors import UserError
from dmpo_jax.tasks import TASKS, TaskConfig, files, get_task, task
from dmpo_jax.tasks.splits import mix

PUZZLE, SOLUTION = "1030300200430001", "1234341221434321"
SUDOKU, COUNTDOWN = get_task("sudoku"), get_task("countdown")


def write(tmp_path, content):
    path = tmp_path / "data"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


# ---- sudoku


@pytest.mark.parametrize(
    "content",
    [
        f"Puzzle,Solution\n{PUZZLE},{SOLUTION}\n",
        f"puzzle, solution\r\n{PUZZLE}, {SOLUTION}\r\n\r\n",
        f'\ufeff"Puzzle","Solution"\n"{PUZZLE}","{SOLUTION}"',
    ],
)
def test_sudoku_file(tmp_path, content):
    path = write(tmp_path, content)
    (example,) = SUDOKU.read(path, TaskConfig())
    assert example.prompt == f"{PUZZLE}="
    assert example.truth == SOLUTION
    assert example.features["puzzle"].tolist() == [int(digit) for digit in PUZZLE]
    assert SUDOKU.examples(TaskConfig(test_file=path), "test")[0].truth == SOLUTION
    (instructed,) = SUDOKU.read(path, TaskConfig(prompt="instruct", careless=1.0))
    assert PUZZLE in instructed.prompt
    assert instructed.demonstration != f"<answer>{SOLUTION}</answer>"


def test_sudoku_file_may_hold_puzzles_with_several_solutions(tmp_path):
    path = write(tmp_path, f"Puzzle,Solution\n0034340000434300,{SOLUTION}\n")
    assert SUDOKU.read(path, TaskConfig())[0].truth == SOLUTION


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: found '', expected the header Puzzle,Solution"),
        (f"{PUZZLE},{SOLUTION}\n", "line 1: .*expected the header Puzzle,Solution"),
        ("Puzzle,Solution\n", "holds no puzzles"),
        (f"Puzzle,Solution\n\n{PUZZLE}\n", "line 3: .*expected two fields"),
        (f"Puzzle,Solution\n{PUZZLE},{SOLUTION},1\n", "line 2: .*expected two fields"),
        (
            f"Puzzle,Solution\n30300200430001,{SOLUTION}\n",
            "line 2: .*14 characters; .*leading zeros.*as text",
        ),
        (f"Puzzle,Solution\n{PUZZLE},1234341221434320\n", "line 2: .*from 1 to 4; .*15 digits.*as text"),
        (f"Puzzle,Solution\n1.03030020043E+15,{SOLUTION}\n", "line 2: .*16 digits from 0 to 4"),
        (f"Puzzle,Solution\n{PUZZLE}0,{SOLUTION}\n", "line 2: .*not 17 characters"),
        (f"Puzzle,Solution\n103030020043000x,{SOLUTION}\n", "line 2: .*16 digits from 0 to 4"),
        (f"Puzzle,Solution\n1030300200430005,{SOLUTION}\n", "line 2: .*16 digits from 0 to 4"),
        (f"Puzzle,Solution\n١030300200430001,{SOLUTION}\n", "line 2: .*16 digits from 0 to 4"),
        (
            f"Puzzle,Solution\n{PUZZLE},1234123412341234\n",
            "line 2: found '1234123412341234', expected a solution",
        ),
        (
            f"Puzzle,Solution\n{PUZZLE},2143432112343412\n",
            f"line 2: found '{PUZZLE}', expected a puzzle whose clues",
        ),
        (f"Puzzle,Solution\n{SOLUTION},{SOLUTION}\n", "line 2: .*at least one blank"),
        (f'Puzzle,Solution\n"{PUZZLE},{SOLUTION}\n', "line 2: .*expected comma-separated values"),
        (f"Puzzle,Solution\n{PUZZLE},{SOLUTION}\n".encode() + b"\xff\n", "line 3: .*expected UTF-8"),
    ],
)
def test_bad_sudoku_file(tmp_path, content, message):
    with pytest.raises(UserError, match=f"data, {message}" if message.startswith("line") else message):
        SUDOKU.read(write(tmp_path, content), TaskConfig())


# ---- countdown


@pytest.mark.parametrize(
    ("content", "numbers", "target"),
    [
        ('{"input": "30,100,93", "output": "23"}', [30, 100, 93], 23),
        ('{"input": "30, 100, 93", "output": 23}', [30, 100, 93], 23),
        ('{"input": "15,44,79,50", "output": "44-15=29,79-29=50"}', [15, 44, 79], 50),
        ('{"nums": [44, 19, 35], "target": 98}', [44, 19, 35], 98),
        ('nums,target\n"[44, 19, 35]",98', [44, 19, 35], 98),
        ("target,nums\n98,44 19 35", [44, 19, 35], 98),
        ('\ufeffid,nums,target\r\n0,"44,19,35",98\r\n', [44, 19, 35], 98),
        ('{"nums": [1, 81, 1, 1], "target": 81}', [1, 81, 1, 1], 81),
    ],
)
def test_countdown_file(tmp_path, content, numbers, target):
    path = write(tmp_path, content)
    (example,) = COUNTDOWN.read(path, TaskConfig(name="countdown"))
    assert example.features["numbers"].tolist() == numbers
    assert example.features["count"] == len(numbers)
    assert example.features["target"] == target
    assert example.prompt == f"{','.join(map(str, numbers))}:{target}="
    assert COUNTDOWN.grade_text(example.demonstration, example.features)["reward"] == 1
    config = TaskConfig(name="countdown", validation_file=path)
    assert COUNTDOWN.examples(config, "validation")[0].prompt == example.prompt


def test_numbers_are_padded_to_one_width(tmp_path):
    path = write(tmp_path, '{"nums": [3, 4], "target": 7}\n{"nums": [1, 2, 3, 4], "target": 10}')
    first, second = COUNTDOWN.read(path, TaskConfig(name="countdown"))
    assert first.features["numbers"].tolist() == [3, 4, 0, 0]
    assert (first.features["count"], second.features["count"]) == (2, 4)


GOOD = '{"nums": [3, 4], "target": 7}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no items"),
        ("nums,target\n", "holds no items"),
        (GOOD + "{", "line 2: .*expected one JSON object"),
        (GOOD + '{"nums": ' + "[" * 30_000, "line 2: .*expected one JSON object"),
        (GOOD + '{"nums": [' + "9" * 5000 + '], "target": 7}', "line 2: .*expected"),
        (GOOD + "[3, 4, 7]", "line 2: .*expected"),
        (GOOD + '{"nums": [3, 4]}', "line 2: .*expected"),
        (GOOD + '{"nums": [3, 4.0], "target": 7}', "line 2: .*expected"),
        (GOOD + '{"nums": [3, true], "target": 4}', "line 2: .*expected"),
        (GOOD + '{"nums": "3,4", "target": 7}', "line 2: .*expected"),
        (
            GOOD + '{"input": "3,4", "output": "7"}',
            "line 2: .*expected the nums form of line 1, not the d1 form",
        ),
        (
            '{"input": "3,4", "output": "7"}\n{"input": "3,4,7", "output": "3+4=7"}',
            "line 2: .*expected the d1 form of line 1, not the Dream form",
        ),
        ('{"input": "3,4", "output": "seven"}', "line 1: .*expected"),
        ('{"input": "3;4", "output": "7"}', "line 1: .*expected"),
        ('{"input": "3,4,7", "output": "3+4="}', "line 1: .*expected"),
        ('{"input": "٣,4", "output": "7"}', "line 1: .*expected"),
        ('{"nums": [7], "target": 7}', "line 1: .*2 to 4 numbers"),
        ('{"nums": [1, 2, 3, 4, 5], "target": 15}', "line 1: .*2 to 4 numbers"),
        ('{"nums": [0, 7], "target": 7}', "line 1: found 0, expected whole numbers from 1"),
        ('{"nums": [-3, 10], "target": 7}', "line 1: found -3, expected whole numbers from 1"),
        ('{"nums": [3, 4], "target": 0}', "line 1: found 0, expected whole numbers from 1"),
        ('{"nums": [70000, 70000], "target": 1}', r"line 1: numbers .*2\^31"),
        ('{"nums": [1, 1], "target": 50}', r"line 1: found '\[1, 1\] for 50', expected numbers that reach"),
        ("3,4,7\n", "line 1: .*expected a CSV header"),
        ("nums,target\n3 4\n", "line 2: .*expected 2 fields"),
        ("nums,target\n3,4,7\n", "line 2: .*expected 2 fields as in the header; put lists in quotes"),
        ("nums,target\n3 x,7\n", "line 2: .*expected a row"),
        ("nums,target\n3 4,7 8\n", "line 2: .*expected a row"),
        ('nums,target\n"[3, 4],7\n', "line 2: .*expected comma-separated values"),
    ],
)
def test_bad_countdown_file(tmp_path, content, message):
    with pytest.raises(UserError, match=f"data, {message}" if message.startswith("line") else message):
        COUNTDOWN.read(write(tmp_path, content), TaskConfig(name="countdown"))


# ---- bounds on any file


@pytest.mark.parametrize("reader", [SUDOKU.read, COUNTDOWN.read])
def test_unreadable_files(tmp_path, reader, monkeypatch):
    with pytest.raises(UserError, match="No such file"):
        reader(str(tmp_path / "missing"), TaskConfig())
    with pytest.raises(UserError, match="directory"):
        reader(str(tmp_path), TaskConfig())
    with pytest.raises(UserError, match="null"):
        reader("a\0b", TaskConfig())
    with pytest.raises(UserError, match="regular file"):
        reader(os.devnull, TaskConfig())
    with pytest.raises(UserError, match=r"line 1: .*at most 65536 bytes"):
        reader(write(tmp_path, b"{" * 70_000), TaskConfig())
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10)
    with pytest.raises(UserError, match="14 bytes, expected at most 10"):
        reader(write(tmp_path, b"Puzzle,Solutio"), TaskConfig())


def test_errors_are_one_short_line(tmp_path):
    with pytest.raises(UserError) as caught:
        COUNTDOWN.read(write(tmp_path, '{"a": "\x01' + "é" * 10_000 + '"}'), TaskConfig())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


# ---- settings


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"name": "sudku"}, r"task\.name = 'sudku'.*sudoku"),
        ({"prompt": "long"}, r"task\.prompt = 'long'.*compact, rows, instruct"),
        ({"train_file": 3}, r"task\.train_file = 3"),
        ({"train_size": 0}, r"task\.train_size = 0.*from 1 to 200000"),
        ({"test_size": 20_001}, r"task\.test_size = 20001.*from 1 to 20000"),
        ({"validation_size": True}, r"task\.validation_size = True"),
        ({"train_size": 10.0}, r"task\.train_size = 10\.0"),
        ({"seed": -1}, r"task\.seed = -1"),
        ({"seed": 1.5}, r"task\.seed = 1\.5"),
        ({"careless": 1.01}, r"task\.careless = 1\.01"),
        ({"careless": float("nan")}, r"task\.careless = nan"),
        ({"careless": "0.5"}, r"task\.careless = '0\.5'"),
    ],
)
def test_settings_out_of_range(setting, message):
    with pytest.raises(UserError, match=message):
        TaskConfig(**setting).validate()


def test_settings_in_range():
    TaskConfig().validate()
    TaskConfig(name="countdown", prompt="instruct", careless=1, train_size=1, seed=2**62).validate()
    assert {field.name for field in dataclasses.fields(TaskConfig)} >= {
        "train_file",
        "validation_file",
        "test_file",
    }


def test_get_task_names_the_nearest():
    assert get_task("sudoku").name == "sudoku"
    assert tuple(TASKS) == task.NAMES
    for item in TASKS.values():
        assert item.components[0] == "reward"
    with pytest.raises(UserError, match="did you mean 'countdown'"):
        get_task("count-down")


def test_mix_is_one_to_one_on_a_range():
    assert len(np.unique(mix(np.arange(100_000)))) == 100_000
