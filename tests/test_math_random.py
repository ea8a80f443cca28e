r"""Hostile and random answers to MATH: refused quickly, never raising, and numbers against exact fractions."""

import random
import time
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from test_math_grader import TABLES

from dmpo_jax.grading.math_equal import equal
from dmpo_jax.grading.math_grader import grade, preload

pytest.importorskip("math_verify", reason="the optional dependency of the task math")

# ---- hostile answers

WRITTEN = r"""
9^{9^{9^9}}
9^9^9^9
2^{99999}
(2^{60000})^{60000}
(((2^{16})^{16})^{16})^{16}
1.0000001^{9999999}
\pi^{\pi^{\pi^\pi}}
e^{e^{e^e}}
\sqrt[100]{5000!+1}
5!!!!!!!!
((5!)!)!
\binom{99999}{50000}
(x+1)^{5000}+(y+1)^{5000}+(z+1)^{5000}
\log_{\log_{2}2}2
\sum_{n=1}^{10^9} n
\int_0^1 x dx
\clock
\dollar
\begin 3 \end
\end{pmatrix}\begin{pmatrix}
٣
²
3٧
"""
REPEATED = r"""
( [ { } \{ | - + ! ^ _ ' % \ $ ` \frac \frac{ \sqrt \sqrt{ \pm \cup \ln \sin \tan \exp \text{ \text{a} \word{a} \degree
\begin{pmatrix} x x^- x^{ x+ x! 1, (1, 1= x< 1: 1& [1,2]\cup \sqrt{x} \sqrt[99]{5000!} \binom{5000}{2500} ½ 9 \_ \\ \left(
"""
NESTED = (
    ("(", ")"),
    ("[", "]"),
    ("{", "}"),
    (r"\{", r"\}"),
    (r"\sqrt{", "}"),
    ("x^{", "}"),
    ("(1,", ")"),
    (r"\frac{1}{", "}"),
)
COMPUTED = (
    "+".join(f"{4999 - i}!" for i in range(40)),
    "*".join(f"{4999 - i}!" for i in range(40)),
    "+".join(f"1/{4999 - i}!" for i in range(36)),
    "+".join(f"1/{prime}^{{9999}}" for prime in (3, 5, 7, 11, 13, 17, 19, 23)),
    "+".join(f"{letter}!" for letter in "abcdjklmnopq" * 9),
    r"0.\overline{" + "9" * 200 + "}",
    "\ud800",
    "(" * 300 + "9" + ")" * 300,
)
HOSTILE = (
    *WRITTEN.strip().splitlines(),
    *(part * (250 // len(part)) + end for part in REPEATED.split() for end in ("", "2", "x")),
    *(left * n + "x" + right * n for left, right in NESTED for n in (13, 25, 250 // len(left + right))),
    *COMPUTED,
)
TRUTHS = ("9", r"\frac{\sqrt{3}}{2}", "1,2,3", "(1,2)", "y=2x+1", r"\max(3, 5)")


def test_hostile_answers_are_refused_quickly():
    preload()
    for answer in HOSTILE:
        start = time.process_time()
        for truth in TRUTHS:
            assert not equal(truth, answer), (answer, truth)
        assert grade(f"<answer>{answer}</answer>", "8")["correct"] == 0
        assert time.process_time() - start < 2, answer


# ---- random answers


def terminating(value):
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def rendered(rng, value):
    """A fraction in one of the ways to write it."""
    sign, above, below = "-" if value < 0 else "", abs(value.numerator), value.denominator
    k = rng.choice((1, 2, 3))
    forms = [
        rf"{sign}\frac{{{above}}}{{{below}}}",
        rf"\dfrac{{{sign}{above * k}}}{{{below * k}}}",
        f"{sign}{above * k}/{below * k}",
        f"x = {sign}({above})/({below})",
        rf"{sign}{above}\cdot {below}^{{-1}}",
        rf"${sign}{above} \div {below}$",
        rf"\text{{{sign}{above}/{below}}}",
    ]
    if above < 10 and below < 10:
        forms += [rf"{sign}\frac{above}{below}", rf"{sign}\frac {above} {{{below}}}"]
    if above > below > 1:
        forms += [
            rf"{sign}{above // below}\frac{{{above % below}}}{{{below}}}",
            f"{sign}{above // below} {above % below}/{below}",
        ]
    if terminating(value):
        with localcontext() as context:
            context.prec = 60
            decimal = f"{Decimal(above) / Decimal(below):f}"
        forms += [sign + decimal, f"{sign}0{decimal}", sign + decimal + ("0" if "." in decimal else ".0")]
    if below == 1:
        forms += [f"{sign}{above:,}", f"{sign}{above:,}".replace(",", r",\!"), rf"{sign}{above}\text{{ cm}}"]
    return rng.choice(forms)


def agrees_with_fractions(seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        below = rng.choice((1, 1, 2, 3, 4, 5, 7, 8, 12, 100))
        true = Fraction(rng.randrange(*rng.choice(((-20, 20), (-3000, 3000), (-(10**9), 10**9)))), below)
        near = (
            -true,
            true + 1,
            true + Fraction(1, 10**9),
            true * 10,
            Fraction(true.numerator),
            1 / true if true else true,
        )
        given = true if rng.random() < 0.5 else rng.choice(near)
        truth, answer = rendered(rng, true), rendered(rng, given)
        assert equal(truth, answer) == (true == given), (truth, answer)


PIECES = r"""
\frac \frac{1}{2} \sqrt \sqrt{2} \pi \pm \cup \cdot \text{ \left( \right) \{ \} \% % \$ $ \! \, ^\circ \infty \in \le \ln
\sin \begin{pmatrix} \end{pmatrix} \\ & \boxed{ <answer> </answer> <|eot_id|> \overline{3} \log_ { } ( ) [ ] | , ; : = < >
+ - * / ^ _ ! ' . 0 1 2 12 007 1,234 0.5 .5 1e9 x y e i f( abc Tuesday percent cm and ½ √ × − ٣ é ^{ _{ 10^ !! 999999
\word{ \max \sum
"""
BLANKS = (" ", "\n", "\0", "\ud800", r"\text{ cm}", r"\text{ or }")


def never_raises(seed, count):
    rng, pieces = random.Random(seed), (*PIECES.split(), *BLANKS)
    seeds = [
        part
        for table in TABLES.values()
        for line in table.strip().splitlines()
        for part in line.replace("!=", "==").split(" == ")
    ]
    for _ in range(count):
        truth = rng.choice(seeds)
        answer = rng.choice((truth, rng.choice(seeds), ""))
        for _ in range(rng.choice((0, 1, 1, 2, 4, 12))):
            at = rng.randrange(len(answer) + 1)
            cut = at + rng.choice((0, 0, 1, 3))
            answer = answer[:at] + rng.choice(pieces) + answer[cut:]
        frame = rng.choice(("\\boxed{%s}", "<answer>%s</answer>", "<answer>\\boxed{%s}</answer>", "%s"))
        start = time.process_time()
        graded = grade(frame.replace("%s", answer), truth)
        assert set(graded.values()) <= {0.0, 1.0} and graded["correct"] <= graded["format"]
        assert time.process_time() - start < 2, (truth, answer)


def test_random_answers():
    preload()
    agrees_with_fractions(0, 1000)
    never_raises(0, 2000)


@pytest.mark.slow
def test_many_random_answers():
    preload()
    agrees_with_fractions(1, 50_000)
    never_raises(1, 100_000)
