"""Sudoku: verdicts, grids, generated puzzles, demonstrations, baselines."""

import itertools
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from test_tasks_bytes import grade_on_device

from dmpo_jax.errors import UserError
from dmpo_jax.tasks import Example, TaskConfig, get_task
from dmpo_jax.tasks.sudoku_baselines import ambiguous, baselines
from dmpo_jax.tasks.sudoku_grids import (
    careless_fill,
    completions,
    draw_puzzles,
    grids,
    is_grid,
    is_unique,
    split_grids,
)

TASK = get_task("sudoku")
SHARED = Path(__file__).resolve().parents[2] / "shared"
TRUTH = {"puzzle": "1030300200430001", "solution": "1234341221434321"}  # nine blanks
TWO = {"puzzle": "0034340000434300", "solution": "1234341221434321"}  # two solutions, eight blanks


def tag(answer):
    return f"<answer>{answer}</answer>"


# (text, truth, cells, exact)
CASES = [
    (tag("1234341221434321"), TRUTH, 1, 1),
    (tag("\n1234341221434321\n") + "<|eot_id|><|endoftext|>", TRUTH, 1, 1),
    (tag("1234 3412 2143 4321"), TRUTH, 1, 1),
    (tag("1234\n3412\n2143\n4321"), TRUTH, 1, 1),
    (tag("1,2,3,4,3,4,1,2,2,1,4,3,4,3,2,1"), TRUTH, 1, 1),
    (tag("1 2 | 3 4\n3 4 | 1 2\n2 1 | 4 3\n4 3 | 2 1"), TRUTH, 1, 1),
    (tag(r"\boxed{1234341221434321}"), TRUTH, 1, 1),
    (tag(r"$1234341221434321$"), TRUTH, 1, 1),
    # short answers: what is there counts
    (tag("12343412"), TRUTH, 4 / 9, 0),
    (tag("1"), TRUTH, 0, 0),
    (tag("12"), TRUTH, 1 / 9, 0),
    (tag("123434122143432"), TRUTH, 1, 0),
    # wrong cells
    (tag("1434341221434321"), TRUTH, 8 / 9, 0),
    (tag("1030300200430001"), TRUTH, 0, 0),
    (tag("1937388266435551"), TRUTH, 0, 0),
    # clues overwritten, also in a grid that obeys the rules
    (tag("2134341221434321"), TRUTH, 0, 0),
    (tag("2143432112343412"), TRUTH, 0, 0),
    (tag("4"), TRUTH, 0, 0),
    # too long, or not digits
    (tag("12343412214343211"), TRUTH, 0, 0),
    (tag("1234341221434321 1234341221434321"), TRUTH, 0, 0),
    (tag("123434122143432l"), TRUTH, 0, 0),
    (tag("1234341221434321."), TRUTH, 0, 0),
    (tag("[1234341221434321]"), TRUTH, 0, 0),
    (tag("The grid is 1234341221434321"), TRUTH, 0, 0),
    (tag("1234-3412-2143-4321"), TRUTH, 0, 0),
    (tag("１234341221434321"), TRUTH, 0, 0),
    (tag("1234341221434321\0"), TRUTH, 0, 0),
    (tag(r"\boxed{1234341221434321"), TRUTH, 0, 0),
    # no answer
    (tag(""), TRUTH, 0, 0),
    (tag(" , | "), TRUTH, 0, 0),
    ("", TRUTH, 0, 0),
    ("1234341221434321", TRUTH, 0, 0),
    ("<answer>1234341221434321", TRUTH, 0, 0),
    ("1234341221434321</answer>", TRUTH, 0, 0),
    ("<|endoftext|>" + tag("1234341221434321"), TRUTH, 0, 0),
    (tag("1234341221434321") + tag("12"), TRUTH, 1 / 9, 0),
    (tag("1234341221434321") + "<|im_end|>" + tag("12"), TRUTH, 1, 1),
    (tag("1234341221434321" + " " * 241), TRUTH, 0, 0),
    # several solutions: any valid grid is exact, though its cells differ from the stored ones
    (tag("1234341221434321"), TWO, 1, 1),
    (tag("2134341212434321"), TWO, 4 / 8, 1),
    (tag("2134341221434321"), TWO, 6 / 8, 0),
]


def grade(text, truth):
    return TASK.grade_text(text, TASK.features(truth))


@pytest.mark.parametrize(("text", "truth", "cells", "exact"), CASES)
def test_verdict_on_host(text, truth, cells, exact):
    assert grade(text, truth) == {"reward": max(cells, exact), "cells": cells, "exact": exact}


def test_verdicts_on_device():
    features = [TASK.features(truth) for _, truth, _, _ in CASES]
    graded = grade_on_device(TASK, [case[0].encode() for case in CASES], features, 320)
    for (text, _, cells, exact), got in zip(CASES, graded, strict=True):
        wanted = {"reward": max(cells, exact), "cells": cells, "exact": exact}
        assert got == pytest.approx(wanted, rel=1e-6), text


def test_shared_cases():
    path = SHARED / "cases" / "graders.jsonl"
    if not path.exists():
        pytest.skip("../shared/cases is absent")
    cases = [json.loads(line) for line in path.read_text().splitlines()]
    cases = [case for case in cases if case["task"] == "sudoku"]
    assert cases
    features = [TASK.features(case["truth"]) for case in cases]
    device = grade_on_device(TASK, [case["completion"].encode() for case in cases], features, 512)
    for case, item, on_device in zip(cases, features, device, strict=True):
        assert TASK.grade_text(case["completion"], item)["reward"] == pytest.approx(case["verdict"]), case
        assert on_device["reward"] == pytest.approx(case["verdict"]), case


@pytest.mark.parametrize("piece", ["1", "0 ", "(", "9" * 100, "<answer>", "\\boxed{", "�", "\ud800", "|", "$"])
def test_hostile_text_takes_under_ten_milliseconds(piece):
    item = TASK.features(TRUTH)
    text = piece * (10_000 // len(piece))
    for completion in (text, tag(text), tag(text[:256])):
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            assert TASK.grade_text(completion, item)["exact"] == 0
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.010


# ---- grids and puzzles


def brute_force(puzzle):
    """All completions of a puzzle by search over cells."""
    if 0 not in puzzle:
        return [puzzle]
    cell = puzzle.index(0)
    row, column = divmod(cell, 4)
    taken = {
        puzzle[4 * r + c]
        for r in range(4)
        for c in range(4)
        if r == row or c == column or (r // 2 == row // 2 and c // 2 == column // 2)
    }
    return [
        whole
        for digit in (1, 2, 3, 4)
        if digit not in taken
        for whole in brute_force([*puzzle[:cell], digit, *puzzle[cell + 1 :]])
    ]


def test_there_are_288_grids():
    assert grids().shape == (288, 16)
    assert grids().tolist() == sorted(brute_force([0] * 16))
    assert is_grid(grids()).all()


def test_is_grid_refuses_each_kind_of_fault():
    rows_and_columns_only = [1, 2, 3, 4, 2, 3, 4, 1, 3, 4, 1, 2, 4, 1, 2, 3]
    rows_only = [1, 2, 3, 4] * 4
    columns_only = [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    short = [*grids()[0][:15], -1]
    assert not is_grid(np.array([rows_and_columns_only, rows_only, columns_only, short])).any()


@pytest.mark.parametrize(
    ("blanks", "count"),
    [(1, 4_608), (2, 34_560), (3, 161_280), (4, 522_624), (11, 284_160), (12, 25_728), (13, 0)],
)
def test_number_of_puzzles_with_one_solution(blanks, count):
    """Enumeration over all grids and clue sets (figures counted separately beforehand)."""
    sets = itertools.combinations(range(16), 16 - blanks)
    masks = np.array([sum(1 << cell for cell in clues) for clues in sets], np.uint16)
    assert sum(int(is_unique(np.full(len(masks), grid), masks).sum()) for grid in range(288)) == count


def test_drawn_puzzles_have_one_solution_and_the_published_mix():
    puzzles, solutions = draw_puzzles("train", 4000, np.random.default_rng(0))
    assert puzzles.dtype == solutions.dtype == np.int32
    assert len({puzzle.tobytes() for puzzle in puzzles}) == 4000
    fits = completions(puzzles)
    assert (fits.sum(axis=1) == 1).all()
    assert (grids()[fits.argmax(axis=1)] == solutions).all()
    for puzzle, solution in zip(puzzles[:20].tolist(), solutions[:20].tolist(), strict=True):
        assert brute_force(puzzle) == [solution]
    blanks = (puzzles == 0).sum(axis=1)
    for count, share in {7: 0.32, 8: 0.32, 9: 0.30, 11: 0.05, 12: 0.01}.items():
        assert abs(np.mean(blanks == count) - share) < 0.03
    assert set(blanks) == {7, 8, 9, 11, 12}


def test_splits_share_no_grid_whatever_the_seed():
    parts = [split_grids(split) for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [200, 44, 44]
    assert len(set(np.concatenate(parts).tolist())) == 288
    solutions = {
        split: {example.truth for seed in (0, 1) for example in TASK.examples(TaskConfig(seed=seed), split)}
        for split in ("train", "validation", "test")
    }
    assert [len(found) for found in solutions.values()] == [200, 44, 44]
    assert len(set.union(*solutions.values())) == 288


def test_examples_are_a_function_of_config_and_split():
    def texts(**settings):
        examples = TASK.examples(TaskConfig(careless=0.5, **settings), "train")
        return [(example.prompt, example.demonstration, example.truth) for example in examples]

    assert texts(train_size=50) == texts(train_size=50) == texts(train_size=80)[:50]
    assert texts(train_size=50) != texts(train_size=50, seed=1)
    with pytest.raises(UserError, match="split"):
        TASK.examples(TaskConfig(), "dev")


def test_generation_is_fast():
    start = time.perf_counter()
    assert len(TASK.examples(TaskConfig(), "train")) == 4000
    assert time.perf_counter() - start < 2.0


def test_prompts_and_demonstrations():
    example = TASK.examples(TaskConfig(), "test")[0]
    digits = "".join(map(str, example.features["puzzle"]))
    assert example.prompt == f"{digits}="
    assert example.demonstration == f"<answer>{example.truth}</answer>"
    assert TASK.grade_text(example.demonstration, example.features)["exact"] == 1
    asked = TASK.examples(TaskConfig(prompt="instruct"), "test")[0]
    assert digits in asked.prompt
    assert "<answer>" in asked.prompt
    assert asked.features["puzzle"].tolist() == example.features["puzzle"].tolist()


def test_careless_solver_fills_rows_in_ascending_order():
    puzzle = np.array([1, 0, 3, 0, 3, 0, 0, 2, 0, 0, 4, 3, 0, 0, 0, 1])
    assert careless_fill(puzzle).tolist() == [1, 2, 3, 4, 3, 1, 4, 2, 1, 2, 4, 3, 2, 3, 4, 1]


def test_careless_share_of_demonstrations():
    careless = TASK.examples(TaskConfig(careless=0.55), "train")
    right = TASK.examples(TaskConfig(), "train")
    fills = ["".join(map(str, careless_fill(example.features["puzzle"]))) for example in right]
    for example, fill in zip(careless, fills, strict=True):
        assert example.demonstration in (tag(example.truth), tag(fill))
    differs = np.array([example.truth != fill for example, fill in zip(right, fills, strict=True)])
    wrong = np.array([example.demonstration != tag(example.truth) for example in careless])
    assert differs.mean() > 0.8
    assert abs(wrong[differs].mean() - 0.55) < 0.03


# ---- figures


def example_of(truth):
    return Example("", "", truth["solution"], TASK.features(truth))


def test_baselines_by_hand():
    """The first row of a grid is blank: each of its cells is forced by its column."""
    row = {"puzzle": "0000341221434321", "solution": "1234341221434321"}
    found = TASK.summarize([grade(tag("1234341221434321"), row)], [example_of(row)])
    assert found == {
        "accuracy": 1.0,
        "exact": 1.0,
        "ambiguous": 0.0,
        "baselines": {
            "uniform digit": {"accuracy": 0.25},
            "constant digit": {"accuracy": 0.25},
            "one look": {"accuracy": 1.0},
            "random valid grid": {"accuracy": 1.0, "exact": 1.0},
        },
    }


def test_baselines_against_enumeration():
    rng = np.random.default_rng(0)
    solutions = grids()[rng.integers(0, 288, 40)]
    puzzles = np.where(rng.random((40, 16)) < 0.5, solutions, 0)
    found = baselines(puzzles, solutions)
    blanks = look = valid = stored = several = 0
    for puzzle, solution in zip(puzzles.tolist(), solutions.tolist(), strict=True):
        wholes = brute_force(puzzle)
        stored += 1 / len(wholes)
        several += len(wholes) > 1
        for cell in range(16):
            if puzzle[cell]:
                continue
            blanks += 1
            valid += np.mean([whole[cell] == solution[cell] for whole in wholes])
            row, column = divmod(cell, 4)
            seen = {
                puzzle[4 * r + c]
                for r in range(4)
                for c in range(4)
                if r == row or c == column or (r // 2, c // 2) == (row // 2, column // 2)
            }
            look += 1 / len({1, 2, 3, 4} - seen)
    constant = max(((puzzles == 0) & (solutions == digit)).sum() for digit in (1, 2, 3, 4))
    assert ambiguous(puzzles) == pytest.approx(several / 40)
    assert list(found) == ["uniform digit", "constant digit", "one look", "random valid grid"]
    assert found["uniform digit"]["accuracy"] == 0.25
    assert found["constant digit"]["accuracy"] == pytest.approx(constant / blanks)
    assert found["one look"]["accuracy"] == pytest.approx(look / blanks)
    assert found["random valid grid"] == pytest.approx({"accuracy": valid / blanks, "exact": stored / 40})


def test_summarize_pools_cells_over_items():
    other = {"puzzle": "0234341221434321", "solution": "1234341221434321"}  # one blank
    rows = [grade(tag("12343412"), TRUTH), grade(tag("1234341221434321"), other)]
    found = TASK.summarize(rows, [example_of(TRUTH), example_of(other)])
    assert found["accuracy"] == pytest.approx((4 + 1) / (9 + 1))
    assert found["exact"] == 0.5
    with pytest.raises(UserError, match="graded rows"):
        TASK.summarize([], [])


def test_published_test_file_figures():
    """The 256 items that published results use; figures of a separate count (simulated ones to 1 %)."""
    path = SHARED / "data" / "sudoku" / "d1_test.csv"
    if not path.exists():
        pytest.skip("../shared/data/sudoku is absent")
    examples = TASK.read(str(path), TaskConfig())
    chosen = [examples[index] for index in np.random.RandomState(42).choice(500, 256, replace=False)]
    found = TASK.summarize([TASK.grade_text(tag(e.truth), e.features) for e in chosen], chosen)
    assert found["ambiguous"] == 63 / 256
    known = found["baselines"]
    assert known["random valid grid"] == pytest.approx({"accuracy": 0.9344, "exact": 0.8727}, abs=5e-5)
    assert known["one look"]["accuracy"] == pytest.approx(0.7698, abs=0.01)
    assert 0.24 < known["constant digit"]["accuracy"] < 0.265


def test_published_generations():
    """By d1's parser, which overlooks overwritten clues, 137 of these 2,048 cells are right; 17 here."""
    paths = sorted((SHARED / "data" / "generations").glob("sudoku_*.json"))
    if not paths:
        pytest.skip("../shared/data/generations is absent")
    items = [item for path in paths for item in json.loads(path.read_text())["generations"]]
    puzzles = [re.findall(r"\b[0-4]{16}\b", item["question"])[-1] for item in items]
    features = [
        TASK.features({"puzzle": puzzle, "solution": item["ground_truth"]})
        for puzzle, item in zip(puzzles, items, strict=True)
    ]
    texts = [item["generations"] for item in items]
    host = [TASK.grade_text(text, item) for text, item in zip(texts, features, strict=True)]
    device = grade_on_device(TASK, [text.encode() for text in texts], features, 4096)
    for one, two in zip(host, device, strict=True):
        assert two == pytest.approx(one, rel=1e-6)
    assert len(items) == 256
    assert sum(row["cells"] for row in host) * 8 == 17  # eight blanks in each
