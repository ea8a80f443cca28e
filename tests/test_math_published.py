r"""The published MATH rules: what counts as the answer, the string normaliser with its faults, rewards and evaluation."""

import random

import pytest

from dmpo_jax.grading import math_published
from dmpo_jax.grading.math_published import boxed, correct, equivalent, grade

BOXED = [
    # text, what the published code takes for the answer
    (r"so $x = \boxed{\frac{3}{7}}$.", r"\frac{3}{7}"),
    (r"\boxed{2} or \boxed{5}", "5"),
    (r"\boxed{2}, or \boxed 5$ in short", "5"),
    (r"\boxed is needed: \boxed{5}", r"is needed: \boxed{5}"),
    (r"\fbox{5}", r"\fbox{5}"),
    (r"\fbox{4} \boxed{5}", "5"),
    (r"\boxed5 and {6}", r"\boxed5 and {6}"),
    (r"\boxed{\{5}", None),
    (r"\boxed{5", None),
    (r"\boxed{}", ""),
    (r"\boxed", None),
    ("no box, 5", "no box, 5"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "answer"), BOXED)
def test_what_is_taken_for_the_answer(text, answer):
    assert boxed(text) == answer


EQUAL = [
    (r"\frac{3}{7}", r"\frac37"),
    (r"\frac{3}{72}", r"\frac3{72}"),
    (r"\frac{3}{7}", r"\dfrac{3}{7}"),
    (r"\frac{3}{7}", r"\tfrac{3}{7}"),
    (r"\frac{3}{7}", "3/7"),
    (r"\frac{-3}{7}", "-3/7"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", ".5"),
    ("0.25", ".25"),
    ("{0.25}", "{.25}"),
    (r"\sqrt{7}", r"\sqrt7"),
    (r"2\sqrt{7}+\sqrt{2}", r"2\sqrt7 + \sqrt2"),
    ("12,345", r"12,\!345"),
    ("(1,2)", r"\left(1,2\right)"),
    ("40", r"40^\circ"),
    ("40", r"40^{\circ}"),
    ("36", r"\$36"),
    ("36", r"36\%"),
    ("36", r"36\text{ cm}"),
    ("36", "x=36"),
    ("36", "k = 36"),
    ("a b", "ab"),
    ("1\n2", "12"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\2\end{pmatrix}"),
    # a fault in both leaves the texts as they are
    ("a/b", "a/b"),
    (r"\sqrt", r"\sqrt"),
    (r"1\text{ cm}\text{ or so}", r"1\text{ cm}\text{ or so}"),
]
DIFFERENT = [
    (r"\frac{3}{7}", r"\frac{6}{14}"),
    (r"\frac{1}{4}", "0.25"),
    ("1000", "1,000"),
    ("3", "3.0"),
    ("1, 2", "2, 1"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("Tuesday", r"\text{Tuesday}"),
    (r"36\text{cm}", "36"),
    ("36", "36%"),
    ("36", "abc=36"),
    ("36", "x=y=36"),
    (r"\sqrt{7}", r"\sqrt 7"),
    (r"\frac{1_0}{3}", "1_0/3"),
    ("3", r"\sqrt"),
    ("3", r"\frac"),
    (r"\frac{a}{b}", "a/b"),
    ("a/b", "a /b"),
    (r"1\text{ cm}\text{ or so}", "1"),
    ("None", None),
    (None, "None"),
    (None, None),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equivalent(one, other):
    assert equivalent(one, other) and equivalent(other, one)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_not_equivalent(one, other):
    assert not equivalent(one, other) and not equivalent(other, one)


REWARDS = [
    # completion, for the true answer 37: equivalent, boxed_in_answer, correct
    (r"<reasoning>36 + 1</reasoning><answer>\boxed{37}</answer>", 2, 1, 1),
    (r"<answer>\boxed{36}</answer>", 0, 1, 0),
    ("<answer>37</answer>", 0, 0.75, 0),
    (r"<answer>37</answer> \boxed{37}", 2, 0.75, 1),
    (r"<answer>37</answer> \boxed{}", 0, 0.75, 1),
    (r"<answer>\boxed{37", 0, 1, 0),
    (r"<answer>37</answer> \boxed{36", 0, 0.75, 1),
    (r"<answer>36</answer><answer>37</answer> \boxed{", 0, 0.75, 0),
    (r"<answer>1</answer><answer>\boxed{37}</answer>", 2, 0.75, 1),
    (r"so \boxed{37}", 2, 0.5, 1),
    (r"so \boxed{37", 0, 0.5, 0),
    (r"\boxed{36}, \boxed{37}<|eot_id|><|endoftext|>", 2, 0.5, 1),
    (r"\boxed{37}<|eot_id|>\boxed{36}", 2, 0.5, 1),
    ("37", 2, 0.25, 1),
    ("it is 37", 0, 0.25, 0),
    ("", 0, 0.25, 0),
]


@pytest.mark.parametrize(("completion", "equal", "formed", "right"), REWARDS)
def test_rewards(completion, equal, formed, right):
    found = grade(completion, "37")
    assert tuple(found) == math_published.COMPONENTS
    assert found == {"reward": equal + formed, "correct": right, "equivalent": equal, "boxed_in_answer": formed}


def test_evaluation_of_a_text():
    assert correct(r"<answer>\boxed{\frac{1}{2}}</answer>", "0.5")
    assert not correct(r"<answer>\boxed{\frac{2}{4}}</answer>", "0.5")
    assert correct("x\n<answer>\n37\n</answer> and \\boxed{", "37")


def test_random_texts_never_raise():
    rng = random.Random(3)
    pieces = [
        *(
            r"\boxed{",
            r"\boxed ",
            r"\boxed",
            r"\fbox{",
            "<answer>",
            "</answer>",
            r"\frac",
            r"\sqrt",
            r"\text{ ",
            r"\left",
            "<|eot_id|>",
        ),
        *(
            "{",
            "}",
            "/",
            "=",
            " ",
            ".",
            " .",
            "{.",
            "\n",
            "\\",
            r"\\",
            r"\!",
            r"\%",
            "$",
            "0.5",
            "12",
            "x",
            "-",
            "\ud800",
            "٣",
        ),
        "9" * 5000,
    ]
    for _ in range(3000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randrange(12)))
        truth = "".join(rng.choice(pieces) for _ in range(rng.randrange(4)))
        found = grade(text, truth)
        assert (
            found["equivalent"] in (0, 2)
            and found["boxed_in_answer"] in (0.25, 0.5, 0.75, 1)
            and found["correct"] in (0, 1)
        )
