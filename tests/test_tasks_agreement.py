"""Host grader, device grader and a slow oracle agree on 100,000 random and mutated texts per task."""

import random
import re
from fractions import Fraction

import jax
import numpy as np
import pytest
from test_tasks_bytes import pack

from dmpo_jax.tasks import TASKS
from dmpo_jax.tasks.sudoku_grids import draw_puzzles

TEXTS = 100_000
BATCH = 10_000
WIDTH = 384

SNIPPETS = [
    *(
        rb"\times",
        rb"\cdot",
        rb"\div",
        rb"\left(",
        rb"\right)",
        rb"\left",
        rb"\,",
        b"\\ ",
        b"\\",
        rb"\boxed{",
        b"}",
    ),
    *(
        "×".encode(),
        "÷".encode(),
        "−".encode(),
        "·".encode(),
        "٣".encode(),
        "½".encode(),
        b"\xc3",
        b"\xe2\x88",
        b"\xff",
    ),
    *(
        b"<answer>",
        b"</answer>",
        b"<answer>",
        b"</answer>",
        b"<|eot_id|>",
        b"<|endoftext|>",
        b"<|im_end|>",
        b"<|eot",
    ),
    *(
        b"(",
        b")",
        b"+",
        b"-",
        b"*",
        b"/",
        b"=",
        b"**",
        b"//",
        b"--",
        b"0",
        b"1",
        b"7",
        b" ",
        b"\n",
        b",",
        b".",
        b"|",
    ),
    *(
        b"$",
        b"$$",
        b"n",
        b"x",
        b"\0",
        b"9" * 9,
        b"9" * 10,
        b"(" * 17,
        b")" * 17,
        b"0/0",
        b"=7",
        b"= -3",
        b" " * 60,
    ),
]


def mutate(rng, raw):
    """Insert, delete, replace or swap up to three pieces of the text."""
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(raw) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            raw = raw[:at] + rng.choice(SNIPPETS) + raw[at:]
        elif kind == 1:
            raw = raw[:at] + raw[at + rng.randrange(1, 4) :]
        elif kind == 2:
            raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
        else:
            raw = raw[at:] + raw[:at] if rng.random() < 0.2 else raw[:at] + raw[at - 1 : at + 1] + raw[at:]
    return raw


def complete(rng, answer):
    """A completion round an answer, in one of the ways that models write it."""
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        left, right = rng.choice(((rb"\boxed{", b"}"), (b"$", b"$"), (rb"\(", rb"\)"), (rb"\[", rb"\]"), (b"\n", b" ")))
        answer = left + answer + right
    before = rng.choice(
        (b"", b"so ", b"<answer>1</answer>", b"<reasoning>3+4</reasoning>\n", b"</answer>", b"<answer>")
    )
    after = rng.choice((b"", b"<|eot_id|>", b"<|endoftext|><answer>0</answer>", b"</answer>", b" <answer>", b" done"))
    raw = before + b"<answer>" + answer + b"</answer>" + after
    return (mutate(rng, raw) if rng.random() < 0.5 else raw)[:WIDTH]


def oracle_answer(raw):
    """The answer by regular expressions over the decoded text; None where there is none."""
    content = re.split(r"<\|(?:eot_id|endoftext|im_end|end_of_text)\|>", raw.decode("utf-8", "replace"))[0]
    found = re.match(r".*<answer>(.*?)</answer>", content, re.DOTALL)
    if not found or len(found[1].encode()) > 256:
        return None
    answer = found[1].strip(" \t\n\r\v\f")
    layers = [r"\$\$(.*)\$\$", r"\$(.*)\$", r"\\\((.*)\\\)", r"\\\[(.*)\\\]"]
    for layer in [*layers, r"\\boxed\{(.*)\}", *layers]:
        wrapped = re.fullmatch(layer, answer, re.DOTALL)
        answer = wrapped[1].strip(" \t\n\r\v\f") if wrapped else answer
    return answer


class Malformed(Exception):
    pass


class Oracle:
    """Recursive descent with exact fractions; a value of None is a division by zero."""

    def __init__(self, answer):
        for form, symbol in {
            r"\\times|\\cdot|[×·⋅∗]": "*", r"\\div|[÷∕]": "/", "−": "-", r"\\left\(": "(", r"\\right\)": ")",
            r"\\[,;:! ]": " ",
        }.items():  # fmt: skip
            answer = re.sub(form, symbol, answer)
        self.tokens = re.findall(r"[0-9]+|[^ \t\n\r\v\f]", answer)
        self.numbers = []
        self.claim = None
        self.value = self.sum(0)
        if self.next() == "=":
            self.tokens.pop(0)
            sign = -1 if self.next() == "-" else 1
            self.tokens = self.tokens[sign == -1 :]
            self.claim = sign * self.number()
        if self.tokens:
            raise Malformed

    def next(self):
        return self.tokens[0] if self.tokens else ""

    def number(self):
        token = self.tokens.pop(0) if self.tokens else ""
        if not re.fullmatch("[0-9]{1,9}", token):
            raise Malformed
        return int(token)

    def chain(self, operators, operand, depth):
        value = operand(depth)
        while self.next() and self.next() in operators:
            operator, right = self.tokens.pop(0), operand(depth)
            if value is None or right is None or (operator == "/" and right == 0):
                value = None
            elif operator in "+-":
                value = value + right if operator == "+" else value - right
            else:
                value = value * right if operator == "*" else value / right
        return value

    def sum(self, depth):
        return self.chain("+-", lambda deep: self.chain("*/", self.factor, deep), depth)

    def factor(self, depth):
        if self.next() == "-":
            self.tokens.pop(0)
            if self.next() == "-":
                raise Malformed
            value = self.factor(depth)
            return None if value is None else -value
        if self.next() != "(":
            self.numbers.append(self.number())
            return Fraction(self.numbers[-1])
        self.tokens.pop(0)
        if depth == 16:
            raise Malformed
        value = self.sum(depth + 1)
        if not self.tokens or self.tokens.pop(0) != ")":
            raise Malformed
        return value


def oracle_countdown(raw, truth):
    answer = oracle_answer(raw)
    if answer is None:
        return {"reward": 0.0, "format": 0.0}
    try:
        parsed = Oracle(answer)
    except Malformed:
        return {"reward": 0.0, "format": 0.0}
    right = (
        sorted(parsed.numbers) == sorted(truth["numbers"])
        and parsed.value == truth["target"]
        and parsed.claim in (None, truth["target"])
    )
    return {"reward": float(right), "format": 1.0}


def random_expression(rng, numbers):
    """A random expression of the numbers, most often well formed, as bytes."""
    parts = [str(number).encode() for number in numbers]
    rng.shuffle(parts)
    while len(parts) > 1:
        at = rng.randrange(len(parts) - 1)
        operator = rng.choice((b"+", b"-", b"*", b"/", b" + ", b" - ", rb"\times ", "÷".encode(), "−".encode(), b"*-"))
        joined = parts[at] + operator + parts[at + 1]
        if rng.random() < 0.5:
            left, right = rng.choice(
                ((b"(", b")"), (b"( ", b" )"), (rb"\left(", rb"\right)"), (b"-(", b")"), (b"((", b"))"))
            )
            joined = left + joined + right
        parts[at : at + 2] = [joined]
    return parts[0]


def countdown_case(rng):
    numbers = [
        rng.choice((0, 1, 2, 3, 8, 13, 99, 100)) if rng.random() < 0.5 else rng.randrange(1, 101)
        for _ in range(rng.choice((2, 3, 3, 4)))
    ]
    answer = random_expression(rng, numbers)
    try:
        value = Oracle(answer.decode()).value
    except Malformed:
        value = None
    whole = value is not None and value.denominator == 1 and abs(value) < 2**31
    target = int(value) if whole and rng.random() < 0.8 else rng.randrange(-5, 100)
    if rng.random() < 0.2:
        answer += rng.choice((b"=", b" = ", b"= ")) + str(target if rng.random() < 0.7 else 7).encode()
    if rng.random() < 0.1:
        answer = b"".join(rng.choice(SNIPPETS) for _ in range(rng.randrange(12)))
    return complete(rng, answer), {"numbers": numbers, "target": target}


def oracle_sudoku(raw, truth):
    zero = {"reward": 0.0, "cells": 0.0, "exact": 0.0}
    answer = oracle_answer(raw)
    if answer is None:
        return zero
    answer = re.sub(r"[ \t\n\r\v\f|,]", "", answer)
    if not re.fullmatch(r"[0-9]{0,16}", answer):
        return zero
    right = blanks = 0
    for clue, cell, solution in zip(truth["puzzle"], answer.ljust(16, "?"), truth["solution"], strict=True):
        if clue == "0":
            blanks += 1
            right += cell == solution
        elif cell not in (clue, "?"):
            return zero
    rows = [answer[start : start + 4] for start in (0, 4, 8, 12)]
    exact = len(answer) == 16 and all(
        set(unit) == set("1234")
        for unit in (
            *rows,
            *zip(*rows, strict=True),
            *(a[i : i + 2] + b[i : i + 2] for a, b in (rows[:2], rows[2:]) for i in (0, 2)),
        )
    )
    cells = right / blanks
    return {"reward": max(cells, float(exact)), "cells": cells, "exact": float(exact)}


@pytest.fixture(scope="module")
def puzzles():
    both = np.stack(draw_puzzles("train", 500, np.random.default_rng(0)), axis=1)
    return [{"puzzle": "".join(map(str, p)), "solution": "".join(map(str, s))} for p, s in both]


def sudoku_case(rng, puzzles):
    truth = dict(rng.choice(puzzles))
    if rng.random() < 0.3:  # drop clues, so that other grids may be right too
        truth["puzzle"] = "".join(c if rng.random() < 0.6 else "0" for c in truth["puzzle"])
    answer = rng.choice((truth["solution"], truth["solution"], rng.choice(puzzles)["solution"], truth["puzzle"]))
    kind = rng.randrange(5)
    if kind == 0:
        place = rng.randrange(16)
        answer = answer[:place] + rng.choice("0123456789") + answer[place + 1 :]
    elif kind == 1:
        answer = answer[: rng.randrange(17)]
    elif kind == 2:
        answer = rng.choice((" ", "\n", ",", "|", ", ")).join(answer)
    return complete(rng, answer.encode()), truth


def agree(task, cases, oracle):
    """Assert that all three graders agree; returns the host's rewards."""
    device = jax.jit(task.grade_bytes)
    rewards = []
    for start in range(0, len(cases), BATCH):
        batch = cases[start : start + BATCH]
        features = [task.features(truth) for _, truth in batch]
        if task.name == "countdown":
            for item in features:
                item["numbers"] = np.pad(item["numbers"], (0, 4 - len(item["numbers"])))
        stacked = {key: np.stack([item[key] for item in features]) for key in features[0]}
        graded = device(*pack([raw for raw, _ in batch], WIDTH), stacked)
        host = [
            task.grade_text(raw.decode("utf-8", "replace"), item)
            for (raw, _), item in zip(batch, features, strict=True)
        ]
        slow = [oracle(raw, truth) for raw, truth in batch]
        for key in task.components:
            wanted = np.array([row[key] for row in slow], np.float32)
            for name, found in (
                ("host", np.array([row[key] for row in host], np.float32)),
                ("device", np.array(graded[key])),
            ):
                wrong = np.flatnonzero(wanted != found)
                assert not len(wrong), (name, key, batch[wrong[0]], found[wrong[0]], wanted[wrong[0]])
        rewards += [row["reward"] for row in host]
    return np.array(rewards)


def test_countdown_graders_agree():
    rng = random.Random(0)
    cases = [countdown_case(rng) for _ in range(TEXTS)]
    rewards = agree(TASKS["countdown"], cases, oracle_countdown)
    assert 0.2 < rewards.mean() < 0.8  # both verdicts are well represented


def test_sudoku_graders_agree(puzzles):
    rng = random.Random(1)
    cases = [sudoku_case(rng, puzzles) for _ in range(TEXTS)]
    rewards = agree(TASKS["sudoku"], cases, oracle_sudoku)
    assert 0.2 < rewards.mean() < 0.8
    assert len(np.unique(rewards)) > 20


def test_countdown_short_strings_exhaustively():
    """Every answer of up to five symbols from a small alphabet, numbers 1 and 2, target 1."""
    alphabet = [b"1", b"2", b"+", b"-", b"*", b"/", b"(", b")", b"=", b" "]
    answers = [b""]
    layer = [b""]
    for _ in range(5):
        layer = [head + symbol for head in layer for symbol in alphabet]
        answers += layer
    truth = {"numbers": [1, 2], "target": 1}
    cases = [(b"<answer>" + answer + b"</answer>", truth) for answer in answers]
    cases += [cases[0]] * (-len(cases) % BATCH)
    assert 0 < agree(TASKS["countdown"], cases, oracle_countdown).sum() < 1000
