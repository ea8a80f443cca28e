"""The published rules of countdown, sudoku and GSM8K: arithmetic as Python has it, training rewards, evaluations."""

import ast
import json
import operator
import random
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from test_tasks_bytes import pack

from dmpo_jax.tasks import countdown, countdown_published, gsm8k, gsm8k_evaluation, sudoku, sudoku_published
from dmpo_jax.tasks.python_arithmetic import MAX_BITS, MAX_CHARACTERS, MAX_DEPTH, evaluate

SHARED = Path(__file__).resolve().parents[2] / "shared"


def tag(answer):
    return f"<answer>{answer}</answer>"


def box(answer):
    return f"\\boxed{{{answer}}}"


# ---- Python's arithmetic

VALUES = [
    ("7", 7),
    (" 2+3*4 ", 14),
    ("(2+3)*4", 20),
    ("7/2", 3.5),
    ("7//2", 3),
    ("-7//2", -4),
    ("7.//2", 3.0),
    ("2**3**2", 512),
    ("-2**2", -4),
    ("2**-1", 0.5),
    ("2**-2**2", 0.0625),
    ("8/4/2", 1.0),
    ("8-4-2", 2),
    ("2*-3", -6),
    ("--5", 5),
    ("+5", 5),
    ("5-+-5", 10),
    (".5*4.", 2.0),
    ("07.5", 7.5),
    ("0", 0),
    ("000", 0),
    ("(1\n+\r2)", 3),
    ("(\t1 \f+2)", 3),
    ("((-4)**.5)**2", ((-4) ** 0.5) ** 2),
    ("0.1+0.2", 0.1 + 0.2),
]


def test_values():
    for text, value in VALUES:
        found = evaluate(text)
        assert (found, type(found)) == (value, type(value)), text


NOTHING = [
    "", " ", "+", "1+", "*1", "1*/2", "1* *2", "1***2", "1///2", "(1", "1)", "()", "(1)(2)", "3(4)", "1 2", "1\n+2", "07",
    "1.2.3", "1..2", "...", ".", "1/0", "1//0", "0**-1", "1%2", "1e5", "1_0", "0x1", "1,2", "a", "×", "٣", "1\v+2",
    "1\u00a0+2", "(-4)**.5//1", "9**9**9**9", "99**98**97", "2.**9999", "(((", "1" * 5000,
]  # fmt: skip


def test_what_has_no_value():
    for text in NOTHING:
        assert evaluate(text) is None, text


def test_bounds():
    start = time.monotonic()
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == 1
    assert evaluate("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1)) is None
    assert evaluate("-" * (MAX_CHARACTERS - 1) + "1") == -1
    assert evaluate("-" * MAX_CHARACTERS + "1") is None
    assert evaluate(f"2**{MAX_BITS // 2 - 1}") == 2 ** (MAX_BITS // 2 - 1)
    assert evaluate(f"2**{MAX_BITS}") is None
    assert evaluate("*".join(["9**3000"] * 500)) is None
    assert evaluate("/".join(["9**3000"] * 500)) is None
    assert evaluate("1**99999999") == 1
    assert time.monotonic() - start < 2


_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


def by_python(text):
    """The value by Python's own parser and a walk over its tree."""

    def walk(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.UnaryOp):
            return -walk(node.operand) if isinstance(node.op, ast.USub) else +walk(node.operand)
        if isinstance(node, ast.BinOp):
            return _BINARY[type(node.op)](walk(node.left), walk(node.right))
        raise TypeError(ast.dump(node))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return walk(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ArithmeticError):
        return None


def test_agrees_with_pythons_parser():
    rng = random.Random(0)
    symbols = [
        "1",
        "2",
        "3",
        "12",
        "0",
        "07",
        "1.5",
        ".5",
        "3.",
        "+",
        "-",
        "*",
        "/",
        "//",
        "**",
        "(",
        ")",
        " ",
        "\n",
        "-",
        "4",
    ]

    def grow(depth):
        kind = rng.random() if depth else 0
        if kind < 0.2:
            return rng.choice(["1", "2", "3", "7", "10", "1.5", ".5", "8.", "0", "05.5"])
        if kind < 0.35:
            return f"({grow(depth - 1)})"
        if kind < 0.5:
            return rng.choice(["+", "-", "- "]) + grow(depth - 1)
        return grow(depth - 1) + rng.choice(["+", "-", "*", "/", "//", "**", " - "]) + grow(depth - 1)

    valued = 0
    for index in range(4000):
        text = grow(3) if index % 2 else "".join(rng.choices(symbols, k=rng.randint(1, 9)))
        if text.count("**") > 1:  # Python itself might not come back
            continue
        expected, found = by_python(text), evaluate(text)
        if isinstance(expected, int) and expected.bit_length() > MAX_BITS:
            expected = None
        assert found == expected, text
        assert type(found) is type(expected), text
        valued += found is not None
    assert valued > 1500


# ---- countdown

COUNTDOWN = [
    # text, numbers, target, training reward, evaluation
    (tag("5+6"), [5, 6], 11, 1, 0),  # without a box the whole text counts, tags and all
    (tag(box("5+6")), [5, 6], 11, 0.1, 1),
    (box("5+6"), [5, 6], 11, 0, 1),
    ("5+6", [5, 6], 11, 0, 1),
    (tag("5+6 = 11"), [5, 6], 11, 0.1, 1),
    (tag("5+6=-11"), [5, 6], 11, 0.1, 0),
    (tag(box("5+6 = 12")), [5, 6], 11, 0.1, 1),  # only the left side counts
    ("as 5+6 = 11 holds " + tag("6-5"), [5, 6], 11, 0.1, 1),  # an equation in the working
    ("as 6-5 = 1 and 5+6 = 11 " + tag("5+6"), [5, 6], 11, 1, 0),  # but the first one only
    (box("5+6") + box("6-5"), [5, 6], 11, 0, 0),  # the last box
    (box("6-5") + box("5+6"), [5, 6], 11, 0, 1),
    (tag("6-5") + tag("5+6"), [5, 6], 11, 1, 0),
    (tag("5+6") + tag("6-5"), [5, 6], 11, 0.1, 0),
    ("<answer>6-5<answer>5+6</answer>", [5, 6], 11, 0.1, 0),  # from the first of two opening tags
    ("<answer>5+6", [5, 6], 11, 0, 0),
    # a box that is cut off: the first answer, else the whole text
    (tag("5+6") + tag("6-5") + r"\boxed{", [5, 6], 11, 0.1, 1),
    (r"5+6 = 11 \boxed{", [5, 6], 11, 0, 1),
    (r"\boxed{5+6 <|eot_id|>", [5, 6], 11, 0, 0),
    # boxes of other kinds
    (r"\boxed 5+6$ so", [5, 6], 11, 0, 1),
    (box("6-5") + r"\boxed 5+6", [5, 6], 11, 0, 1),
    (r"\fbox{5+6}", [5, 6], 11, 0, 0),  # the frame stays round it
    (r"\fbox{5+6 = 11}", [5, 6], 11, 0, 1),
    (r"\boxed5+6=11{}", [5, 6], 11, 0, 1),
    (r"\boxed{\text{5+6}}", [5, 6], 11, 0, 0),
    # spellings
    (box(r"5 \times 6"), [5, 6], 30, 0, 1),
    (box(r"6 \div 5 \cdot 5"), [6, 5, 5], 6, 0, 1),
    (box(r"\left(5+6\right)"), [5, 6], 11, 0, 0),
    (box("5×6"), [5, 6], 30, 0, 0),
    (tag("05+6"), [5, 6], 11, 0.1, 0),
    (tag("5.+6"), [5, 6], 11, 1, 0),
    # what Python takes
    (tag("2**5"), [2, 5], 32, 1, 0),
    (tag("9//4"), [9, 4], 2, 1, 0),
    (tag("2.5*4"), [2, 5, 4], 10, 1, 0),
    (box("--5+6"), [5, 6], 11, 0, 1),
    (tag("((-4)**.5)**2"), [4, 5, 2], -4, 1, 0),
    (tag("1/3*3"), [1, 3, 3], 1, 1, 0),
    (tag("9/4"), [9, 4], 2, 0.1, 0),
    (tag("5/(6-6)"), [5, 6, 6], 5, 0.1, 0),
    (tag("5 6"), [5, 6], 11, 0.1, 0),
    (tag("5(6)"), [5, 6], 30, 0.1, 0),
    (tag("9**9**9**9"), [9, 9, 9, 9], 9, 0.1, 0),
    (tag("__import__('os')"), [5, 6], 11, 0.1, 0),
    (tag(""), [5, 6], 11, 0.1, 0),
    ("", [5, 6], 11, 0, 0),
    # numbers as a multiset
    (tag("5+5+6"), [5, 6], 16, 0.1, 0),
    (tag("5+6"), [5, 5, 6], 11, 0.1, 0),
    (tag("56"), [5, 6], 56, 0.1, 0),
    # near the target is enough
    (tag("1/99999.9"), [1, 99999, 9], 0, 0.1, 0),
    (tag("1/999999"), [1, 999999], 0, 1, 0),
    # training ends at an end token, the evaluation does not
    (tag("6-5") + "<|eot_id|>" + tag("5+6") + box("5+6"), [5, 6], 11, 0.1, 1),
]


def test_countdown():
    for text, numbers, target, reward, right in COUNTDOWN:
        features = countdown.features({"numbers": numbers, "target": target})
        assert countdown_published.grade_text(text, features)["reward"] == reward, text
        assert countdown_published.evaluate(text, features) == bool(right), (text, countdown_published.graded(text))


# ---- sudoku

PUZZLE, SOLUTION = "1030300200430001", "1234341221434321"  # nine blanks
FENCE = "```"

SUDOKU = [
    # text, right blanks in training, in the evaluation
    (tag(SOLUTION), 9, 9),
    (tag("1234 3412\n2143 4321"), 9, 9),
    (tag("1,2,3,4,3,4,1,2,2,1,4,3,4,3,2,1"), 9, 1),  # commas take the places of cells
    (tag(box(SOLUTION)), 9, 3),
    (tag(SOLUTION + "99"), 9, 9),
    (tag("2234341221434321"), 9, 9),  # a clue overwritten
    (tag("12343412"), 4, 4),
    (tag(""), 0, 0),
    (SOLUTION, 0, 9),  # 16 digits that stand alone
    (f"x{SOLUTION}", 0, 0),
    (f"{SOLUTION}1", 0, 0),
    (f"it is {SOLUTION}.", 0, 9),
    (f"x{SOLUTION}</answer>", 0, 9),
    (f"x{SOLUTION} \n</answer>", 0, 9),
    (f"x9{SOLUTION}</answer>", 0, 9),  # the last 16 digits before the tag
    (f"<answer>{SOLUTION}", 0, 9),  # alone
    (f"<answer>{SOLUTION[:8]}", 0, 0),
    (f"<answer>{SOLUTION[:8]}<|eot_id|>", 0, 4),
    (f"<answer>{SOLUTION[:8]}<|endoftext|>", 0, 4),
    (f"<answer>{SOLUTION[:8]}<|im_end|>", 0, 0),
    (f"<answer>it is {SOLUTION}</answer>", 9, 0),
    (tag("") + f" {SOLUTION}<|eot_id|> 1", 0, 9),  # after the tag
    (tag(" ") + f" {SOLUTION} 1", 0, 9),
    (f"</answer>\n{SOLUTION[:4]}\n{SOLUTION[4:]}", 0, 9),
    (f"{SOLUTION}</answer> no", 0, 0),  # what follows the tag comes first
    (tag("11") + tag(SOLUTION), 9, 0),
    (tag(SOLUTION) + tag("11"), 0, 9),
    (f"<answer>12<answer>{SOLUTION[2:]}</answer>", 9, 1),
    (f"<answer>no {FENCE}\n{SOLUTION}\n{FENCE} 12</answer>", 9, 9),
    (f"<answer>1 {FENCE}text {SOLUTION}{FENCE}</answer>", 1, 0),
    (f"<answer>{FENCE}1{FENCE}{SOLUTION}{FENCE}</answer>", 1, 0),  # the first fence
    (f"<answer>{FENCE} \n{FENCE}{SOLUTION}{FENCE}</answer>", 9, 2),  # a blank one is no reason to look on
    (f"{FENCE}{SOLUTION}{FENCE}<answer>12</answer>", 1, 1),
    (f"<answer>{FENCE}{FENCE[0]}{SOLUTION}{FENCE}", 0, 9),
    (tag("11") + "<|eot_id|>" + FENCE + SOLUTION + FENCE, 0, 9),  # the evaluation reads on
    ("", 0, 0),
]
SUDOKU_TEXT = {"puzzle": PUZZLE, "solution": SOLUTION}


def test_sudoku():
    features = sudoku.features(SUDOKU_TEXT)
    for text, trained, evaluated in SUDOKU:
        assert sudoku_published.grade_text(text, features)["reward"] == pytest.approx(trained / 9), text
        assert sudoku_published.evaluate(text, features) == evaluated, (text, sudoku_published.graded(text))


def test_sudoku_reward_agrees_on_device():
    rng = random.Random(1)
    pieces = ["<answer>", "</answer>", "<|eot_id|>", SOLUTION, "12", " ", "\n", "é", "0", "²", "<answer"]
    texts = [text for text, _, _ in SUDOKU] + ["".join(rng.choices(pieces, k=rng.randint(1, 10))) for _ in range(300)]
    raw = [text.encode() for text in texts]
    features = sudoku.features(SUDOKU_TEXT)
    host = [sudoku_published.grade_text(text, features)["reward"] for text in texts]
    stacked = {key: np.stack([value] * len(texts)) for key, value in features.items()}
    device = jax.jit(sudoku_published.grade_bytes)(*pack(raw, 192), stacked)["reward"]
    np.testing.assert_array_equal(np.asarray(device), np.float32(host))
    assert len(set(host)) > 3


# ---- GSM8K

GSM8K = [
    # text, what the published evaluation reads
    (box("37"), 37.0),
    (box("70,000"), 70.0),
    (box(r"\frac{1}{2}"), 1.0),
    (box("...") + box("") + box(".") + box("n") + box("37"), 37.0),
    ("\\boxed{37\n} " + box("38"), 38.0),
    (r"\boxed{\boxed{37} 38}", 37.0),
    (box("2.5e1"), 25.0),
    (box("1_000"), 1000.0),
    (box("inf") + box("5"), float("inf")),
    (box("a-.5"), 5.0),
    (tag("5 + 6 = 11."), 11.0),
    (tag("5") + tag("6"), 5.0),
    (tag("5-3"), -3.0),
    (box("none") + tag("7"), 7.0),
    ("\\boxed{5" + tag("7"), 7.0),
    ("<|eot_id|>" + box("7"), 7.0),
    (tag("none"), None),
    ("<answer>7", None),
    ("#### 7", None),
    ("", None),
]


def test_gsm8k():
    for text, number in GSM8K:
        assert gsm8k_evaluation.read(text).number == number, text
    for written, text, right in (
        ("1,234", box("1234"), True),
        ("1,234", box("1,234"), False),
        ("-2.50", tag("-2.5"), True),
        ("0", tag("0.0"), True),
        ("18", box("18.00000000000000000001"), True),  # compared as floats
        ("18", box("nan"), False),
    ):
        assert gsm8k_evaluation.evaluate(text, gsm8k.features(written)) == right, (written, text)


# ---- all

HOSTILE = {
    "tags": "<answer>" * 8000,
    "closing tags": "</answer>" * 7000,
    "boxes": r"\boxed{" * 8000,
    "box words": r"\boxed " * 8000,
    "closed boxes": r"\boxed{}" * 8000,
    "equals signs": "1=" * 30_000,
    "a long left side": "1+" * 30_000 + "=x",
    "digits": "1" * 60_000,
    "blanks": "<answer>" + " " * 60_000,
    "fences": "<answer>" + "```1 " * 12_000,
    "fenced blanks": "<answer>```" + " \n" * 30_000,
    "braces": r"\boxed" + "{" * 30_000 + "}" * 29_999,
    "numbers": r"\boxed{" + "1 " * 30_000 + "}",
    "digits before tags": ("1" * 16 + " " * 30) * 1200,
    "dots": r"\boxed{" + "." * 60_000 + "}",
    "minus signs": tag("-" * 60_000 + "1"),
    "brackets": tag("(" * 30_000 + ")" * 30_000),
}


def test_hostile_texts_are_read_quickly():
    features = countdown.features({"numbers": [3, 4], "target": 7}), sudoku.features(SUDOKU_TEXT), gsm8k.features("7")
    for name, text in HOSTILE.items():
        start = time.monotonic()
        countdown_published.evaluate(text, features[0])
        countdown_published.grade_text(text, features[0])
        sudoku_published.evaluate(text, features[1])
        sudoku_published.grade_text(text, features[1])
        gsm8k_evaluation.evaluate(text, features[2])
        assert time.monotonic() - start < 2, name


def test_published_prompts():
    asked = countdown_published.PROMPT.format(numbers=[2, 7], target=9)
    assert "Using only the numbers [2, 7], create" in asked
    assert "evaluates to exactly 9." in asked
    assert asked.endswith("<answer>\n2*4-3\n</answer>")
    asked = countdown_published.PROMPT_EVALUATION.format(numbers=[2, 7], target=9)
    assert asked.endswith("\\boxed{...}\n</answer>\n\nNumbers: [2, 7]\nTarget: 9")
    assert "inside \\boxed{} tags" in asked
    asked = sudoku_published.PROMPT.format(puzzle=PUZZLE)
    assert asked.endswith(f"</answer>\n\n\nSolve the following Sudoku puzzle: {PUZZLE}\n")


def generations(task):
    paths = sorted((SHARED / "data" / "generations").glob(f"{task}_*.json"))
    if not paths:
        pytest.skip("../shared/data/generations is absent")
    return [item for path in paths for item in json.loads(path.read_text())["generations"]]


def test_published_countdown_generations():
    """d1's own parser finds 50 right of these 256."""
    right = 0
    for item in generations("countdown"):
        features = countdown.features(dict(zip(("numbers", "target"), item["ground_truth"], strict=True)))
        right += countdown_published.evaluate(item["generations"], features)
    assert right == 50


def test_published_sudoku_generations():
    """d1's own parser finds 137 right of these 2,048 blank cells."""
    right = blanks = 0
    for item in generations("sudoku"):
        features = sudoku.features({"puzzle": item["question"].split()[-1], "solution": item["ground_truth"]})
        right += sudoku_published.evaluate(item["generations"], features)
        blanks += int((features["puzzle"] == 0).sum())
    assert (right, blanks) == (137, 2048)


def test_published_gsm8k_generations():
    """d1's own parser finds 863 right of these 1,130."""
    items = generations("gsm8k")
    found = [gsm8k_evaluation.read(item["generations"]).number for item in items]
    right = [
        item["ground_truth"] is not None and item["ground_truth"] == number
        for item, number in zip(items, found, strict=True)
    ]
    assert (sum(right), len(items)) == (863, 1130)
