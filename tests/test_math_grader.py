r"""Grading MATH: where the answer is, which answers are equal, and what math-verify is asked.

Tables hold `true answer == answer` or `!=`, one a line.
"""

import subprocess
import sys

import pytest

from dmpo_jax.errors import UserError
from dmpo_jax.grading import math_library
from dmpo_jax.grading.math_answer import MAX_CHARACTERS, final_answer, last_box
from dmpo_jax.grading.math_equal import equal
from dmpo_jax.grading.math_grader import grade, preload

pytest.importorskip("math_verify", reason="the optional dependency of the task math")

# ---- where the answer is

PLACES = [
    # completion, answer
    (r"<answer>\boxed{37}</answer>", "37"),
    (r"<answer>36 + 1 gives \boxed{37}</answer>", "37"),
    (r"<answer>\frac{3}{7}</answer>", r"\frac{3}{7}"),
    ("<reasoning>\n36 + 1\n</reasoning>\n<answer>\n37\n</answer>\n", "37"),
    ("<answer>36</answer> no, <answer>37</answer>", "37"),
    ("<answer>37</answer> then <answer>36", "37"),
    ("<answer>37</answer><|eot_id|><answer>36</answer>", "37"),
    (r"\boxed{36} <answer>37</answer>", "37"),
    (r"\boxed{37} <answer></answer>", ""),
    (r"<answer>\boxed{\frac{3}{7}</answer>", r"\frac{3}{7}"),
    (r"so it is \boxed{37}.", "37"),
    (r"\boxed{36}, no: \boxed{37}", "37"),
    (r"so\boxed{61}.,and once more\n\n**Final**\n\boxed{61}", "61"),
    (r"\boxed{\boxed{37}}", "37"),
    (r"\fbox{37}", "37"),
    (r"\boxed {37}", "37"),
    (r"\\boxed{37}", "37"),
    (r"$$\begin{aligned} x &= 36 + 1 \\\boxed{37} \end{aligned}$$", "37"),
    (r"put it in \boxed, then: \boxed{37}", "37"),
    (r"\boxed{37} is what goes into \boxed", "37"),
    (r"\boxed{\frac{1}{\sqrt{\frac{2}{3}}}} }", r"\frac{1}{\sqrt{\frac{2}{3}}}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left\{ x \right.} and }", r"\left\{ x \right."),
    (r"\boxed{37} and then \boxed{\frac{1}{2}", "37"),
    (r"so the value is \boxed{37", ""),
    (r"\boxed{}", ""),
    ("It could be 36 or 37.", ""),
    ("The answer is 37", ""),
    ("#### 37", ""),
    ("", ""),
    (r"\boxed{" + "1" * MAX_CHARACTERS + "}", "1" * MAX_CHARACTERS),
    (r"\boxed{" + "1" * (MAX_CHARACTERS + 1) + "}", ""),
    ("\\boxed{\ud8003}", "?3"),
]


@pytest.mark.parametrize(("completion", "answer"), PLACES)
def test_where_the_answer_is(completion, answer):
    assert final_answer(completion) == answer


def test_the_last_box_of_a_solution():
    assert last_box(r"First $\boxed{2}$, then $x = \boxed{\text{no } \{3\}}$.") == r"\text{no } \{3\}"
    assert last_box(r"no box, \boxed 3, { \boxed{4") is None


# ---- which answers are equal

NUMBERS = r"""
\frac{3}{8} == 0.375
\frac{3}{8} == .375
\frac{3}{8} == 3/8
\frac{3}{8} == \dfrac38
\frac{3}{8} == \tfrac 3 8
\frac{3}{8} == \frac3{8}
\frac{3}{8} == \frac{3}8
\frac{3}{8} == \frac{15}{40}
\frac{3}{8} == 37.5\%
\frac{3}{8} != 0.38
\frac{0}{1} == \frac01
\frac{1}{3} != 0.33
\frac{1}{3} != 0.333333333333
\frac{1}{3} == 0.\overline{3}
\frac{7}{12} == 0.58\overline{3}
\frac{7}{12} == .58\bar3
\pi != 3.14159
3.14159 != \pi
9 == 09
9 == +9
9 == 9.00
9 == 9.
9 != -9
-9 != 9
-9 == −9
-9 == (-9)
-\frac{5}{4} == \frac{-5}{4}
-\frac{5}{4} == \frac{5}{-4}
-\frac{5}{4} == -1.25
-\frac{5}{4} != 1.25
259 != 2
2 != 259
7 != 777777
9 != 1 9
19 != 1 9
40 != 4{0}
40 != 4{10}
2.5\times 10^3 == 2500
2.5 \cdot 10^{-3} == 0.0025
2^{11} == 2048
2^{11} == 2048.0
6! == 720
\binom{6}{2} == 15
|{-4}| == 4
\lfloor 3.7 \rfloor == 3
\lceil -3.2 \rceil == -3
5 != x5
1 != 1/0
1/0 == 1/0
1/0 != 2/0
"""

GROUPS = r"""
23456 == 23,456
23456 == 23{,}456
23456 == 23\,456
23456 == 23,\!456
23,\!456 == 23456
23,\!456 == 23,456
1{,}234{,}567 == 1,234,567
23456 != 23,45,6
23456 != 23 456
23456 != 456
23,456 == 23, 456
100, 200 == 100,200
100, 200 == 200,100
300 != 100,200
"""

MIXED = r"""
\frac{31}{6} == 5 1/6
\frac{31}{6} == 5\frac{1}{6}
\frac{31}{6} == 5 \frac16
\frac{31}{6} == 5\ 1/6
\frac{31}{6} == 5⅙
-\frac{31}{6} == -5\frac16
5\frac16 == 31/6
3\frac{1}{4} == 3.25
3\frac{1}{4} != \frac{3}{4}
\frac{3}{4} != 3\frac{1}{4}
5 != 5 1/6
5 != 5\frac16
51/6 != 5 1/6
x+3\frac{1}{4} == x+\frac{13}{4}
1 == 3\left(\frac13\right)
1 == 3\cdot\frac13
\frac{10}{3} != 3(\frac13)
"""

TINY = r"""
\frac{1}{1203!} != \frac{1}{1201!}
\frac{1}{1203!} != 0
0 != \frac{1}{3^{500}}
\frac{1}{7^{60}} != \frac{1}{7^{61}}
10^{-20} != 10^{-21}
10^{-20} == \frac{1}{10^{20}}
1 != 1.0000000000000000001
0.1 != 0.10000000000000001
\frac{3^{1000}+1}{2\cdot 3^{1000}} != \frac{1}{2}
\frac{1}{5 \cdot 3^{1203}} != \frac{3^{1202}+1}{5 \cdot 3^{1203}}
\frac{\sqrt{2}}{2^{200}} != \frac{\sqrt{2}}{2^{201}}
\frac{\sqrt{2}}{2^{200}} == \frac{1}{2^{199}\sqrt{2}}
\sqrt{2} != \sqrt{2}+10^{-300}
x != x+10^{-20}
\frac{x}{10^{60}} != \frac{x}{10^{61}}
\frac{\sqrt{x}}{10^{30}} != \frac{\sqrt{x}}{10^{31}}
"""

ROOTS = r"""
6\sqrt{3} == \sqrt{108}
6\sqrt{3} == 6\sqrt3
6\sqrt{3} == 6√3
6\sqrt{3} == 6\sqrt(3)
6\sqrt{3} == 6 \cdot 3^{1/2}
6\sqrt{3} != 6
6 != 6\sqrt{3}
6 != 6\sqrt(3)
6 != 6\sqrt
2 != \sqrt
\sqrt[3]{2} == 2^{1/3}
-2 == \sqrt[3]{-8}
\frac{\sqrt{5}}{5} == \sqrt{5}/5
\frac{\sqrt{5}}{5} == \frac{1}{\sqrt{5}}
\frac{\pi}{3} == \pi/3
25\pi == \pi\cdot 5^2
e^2 == \mathrm{e}^{2}
2 - \frac{1}{\mathrm{e}} != 2 + \frac{1}{\mathrm{e}}
\ln 4 == 2\ln 2
\ln 2 != \log 2
\log_2 8 == 3
\log_{3}(81) == 4
\sin 30^\circ == 0.5
\sin 30^\circ != \sin 30
\tan\frac{\pi}{4} == 1
\cos^2 1 == 1 - \sin^2 1
"""

SYMBOLS = r"""
-5 + 4i == 4i - 5
-5 + 4i != -5 - 4i
2i == (1+i)^2
\frac{x-3}{4} == \frac{x}{4}-\frac{3}{4}
x^2-6x+9 == (x-3)^2
x^2-6x+9 != (x+3)^2
x^2-6x+9 != x^2-6x
\frac{x}{2} == \frac12 x
\frac{x}{2} != \frac{1}{2x}
x(x+1) == x^2+x
xy == yx
ab^2 == b^2a
x != y
x != |x|
\sqrt{x^2} == |x|
60x\sqrt{5x} == 60\sqrt{5x^3}
\sin^2 x + \cos^2 x == 1
a_1+a_2 == a_{2}+a_1
a_1 != a_2
f(x+1) == f(x+1)
f(x+1) != f(x)+f(1)
\frac{n!}{2} == \frac12 n!
"""

LISTS = r"""
8, 27 == 27, 8
8, 27 == \{27, 8\}
8, 27 == 8 \text{ and } 27
8, 27 == 8 or 27
8, 27 == x=8 \text{ or } x=27
8, 27 == x = 8, 27
8, 27 == 8; 27
1, 2, \text{ and } 3 == 1, 2, 3
8, 27 != 8
8, 27 != 27
8, 27 != 8, 27, 64
8, 27 != 8, 28
8, 27 != 8, 8
8 != 8, 27
1, \frac{1}{2} == 0.5, 1
\pm 3 == 3, -3
\pm 3 == x = \pm 3
\pm 3 != 3
3 != \pm 3
\pm 1776 != 1776
1776 != \pm 1776
1776 != +-1776
1 \pm \sqrt{2} == 1-\sqrt2, 1+\sqrt2
\emptyset == \varnothing
"""

BRACKETS = r"""
(4, 7) == \left( 4,7 \right)
(4, 7) == 4, 7
(4, 7) == (x,y) = (4,7)
(4, 7) == \langle 4, 7 \rangle
(4, 7) != (7, 4)
(4, 7) != 7, 4
(4, 7) != [4, 7]
(1,2),(3,4) == (3,4), (1,2)
(1,2),(3,4) != (1,2)
[3,8) == [3, 8)
[3,8) == 3 \le x < 8
[3,8) == x \in [3,8)
[3,8) != (3,8)
[3,8) != [3,8]
(3,\infty) == x > 3
(3,\infty) == (3,+\infty)
(3,\infty) != x \ge 3
(3,\infty) != x < 3
(3,\infty) != (-\infty,3)
(-\infty,2) \cup (3,\infty) == (3,\infty)\cup(-\infty,2)
(-\infty,2) \cup (3,\infty) != (-\infty,2)
(-\infty,\infty) == \mathbb{R}
\begin{pmatrix} 3 \\ 4 \end{pmatrix} == \begin{pmatrix}3\\4\end{pmatrix}
\begin{pmatrix} 3 \\ 4 \end{pmatrix} == \begin{bmatrix}3\\[2pt]4\end{bmatrix}
\begin{pmatrix} 3 \\ 4 \end{pmatrix} != \begin{pmatrix}4\\3\end{pmatrix}
\begin{pmatrix} 3 \\ 4 \end{pmatrix} != \begin{pmatrix}3 & 4\end{pmatrix}
\begin{pmatrix} 1/2 & 3 \\ 2 & 4 \end{pmatrix} == \begin{pmatrix} 0.5 & 3 \\ 2 & \sqrt{16} \end{pmatrix}
\begin{pmatrix} 1/2 \\ 3/2 \end{pmatrix} == \frac12\begin{pmatrix} 1 \\ 3 \end{pmatrix}
"""

EQUATIONS = r"""
6 == x=6
x=6 == 6
x=6 != y=6
6 == x = 2+4 = 6
6 == 2+4=6
6 != 2+5=6
7 != 2+5=6
6 == AB = 6
6 == \text{Area} = 6
6 == \angle ABC = 6^\circ
36\pi == A = \pi r^2 = 36\pi
2x+1 == f(x) = 2x+1
y = 2x+1 == 2x+1
y = 2x+1 == 2x - y + 1 = 0
4x-2y=5 == y = 2x - \frac{5}{2}
4x-2y=5 != y = 2x + \frac{5}{2}
2x+5y+3=0 != 2x-y+9=0
2x+5y+3=0 != 0
0 != 2x+5y+3=0
x^2+y^2=4 == y^2 = 4 - x^2
x \ge 3 == 3 \le x
x \ge 3 != 3
3 != x \ge 3
2x < 4 != x > 2
-x < 4 == x > -4
"""

UNITS = r"""
35\% == 35
35\% == 35%
35\% == 35 percent
35\% == 35 percentage
35\% == 35\text{ percent}
35\% == 0.35
35\% != 0.35\%
35\% != 3.5
6.25\% == 6.25\%
35 == 35\%
21\mbox{ cm}^2 == 21
21\mbox{ cm}^2 == 21\text{ square centimeters}
21\mbox{ cm}^2 == 21 cm^2
21\mbox{ cm}^2 != 21\text{ m}^2
21\mbox{ cm}^2 != 21\text{ cm}
21\mbox{ cm}^2 != 22
96 \mbox{ inches}^3 == 96
21\text{ cm} != 21\text{ m}
21\mathrm{~cm} == 21
21\text{ m} == 21
21 == 21\,\text{m/s}
21 == 21 {\rm cm}
21 == 21 apples
21 == 21\text{ ways}
21 != 21\text{ million}
21000000 == 21\text{ million}
21 != 21 squared
21 != 21\text{ hundredths}
\$21 == 21
\$21 == 21.00
21 == \$21
\$1{,}200 == 1200
\$5 != 5\text{ cents}
40^\circ == 40
40^\circ == 40°
40^{\circ} == 40\text{ degrees}
40^\circ == \frac{2\pi}{9}
40^\circ != 41
40^\circ != \$40
40^\circ != 40\%
35\% != 35\text{ km}
8:15 == 08:15
8:15 != 8:16
6:00 != 2:00
8:15\text{ a.m.} == 8:15
8:15\text{ a.m.} != 8:15 p.m.
2:7 == \frac{2}{7}
2:7 != 7:2
2:3:5 == 2 : 3 : 5
2013_5 == 2013_{5}
2013_5 == 2013
2013_5 != 2013_6
"""

TRICKS = r"""
5 != 5t
5 != 5 t
2 != 2g
10 != 10x
10 != 10xyzw
5 != 5 \text{ or more}
6 != 6\sqrt{}
0 != 1-1=0=5
5 != x+y=5
1, 2 != 1, 2, 3
1 != 1 \text{ or } 2
"""

WORDS = r"""
26 == \text{26}
26 == \textbf{26}
26 == \mathbf{26}
\text{26} == 26
26 == **26**
26 == \(26\)
\text{(D)} == D
\text{(D)} == (D)
D == \textbf{(D)}
D != B
\text{Friday} == Friday
\text{Friday} == \text{friday}
\text{Friday} != Monday
\text{even} != neve
\text{odd} == odd
\text{no solution} == No solution
"""

TABLES = {
    name: table
    for name, table in globals().items()
    if name.isupper() and isinstance(table, str) and (" == " in table or " != " in table)
}


@pytest.mark.parametrize("name", TABLES)
def test_equal_and_different_answers(name):
    wrong = []
    for line in TABLES[name].strip().splitlines():
        sign = " == " if " == " in line else " != "
        truth, answer = line.split(sign)
        if equal(truth, answer) != (sign == " == "):
            wrong.append(line)
    assert not wrong


LIMITS = r"""
2^{2^3} == 256
\frac{x}{2} == 1/2x
x != X
D != d
(4, 7) == y=7, x=4
(4, 7) != \{4, 7\}
(-\infty,2) \cup (3,\infty) == x<2 \text{ or } x>3
2x < 4 == x < 2
"""


@pytest.mark.parametrize("line", LIMITS.strip().splitlines())
@pytest.mark.xfail(strict=True, reason="math-verify 0.9 decides otherwise")
def test_known_limits(line):
    sign = " == " if " == " in line else " != "
    truth, answer = line.split(sign)
    assert equal(truth, answer) == (sign == " == ")


def test_every_true_answer_equals_itself():
    for table in TABLES.values():
        for line in table.strip().splitlines():
            truth = line.split(" == ")[0].split(" != ")[0]
            assert grade(f"<answer>\\boxed{{{truth}}}</answer>", truth)["correct"] == 1, truth


@pytest.mark.parametrize(
    "truth", [r"\sqrt", "x = ", r"\frac{1}{2", r"\lim", r"1,2,\ldots,9", "5!!", r"\sum_{n=1}^{5} n", "}{"]
)
def test_a_true_answer_that_cannot_be_read_pays_itself_alone(truth):
    for answer in ("1", "x", "15", "0", r"\frac12", "None", truth + "1"):
        assert not equal(truth, answer)
    assert equal(truth, truth)


def test_components():
    right, wrong, bare = r"<answer>\boxed{\frac{1}{2}}</answer>", r"\boxed{1}", "0.5"
    truth = r"\frac12"
    assert grade(right, truth) == {"reward": 1.0, "correct": 1.0, "format": 1.0}
    assert grade(wrong, truth, "exact", 0.25) == {"reward": 0.25, "correct": 0.0, "format": 1.0}
    assert grade(bare, truth, "exact", 0.25) == {"reward": 0.0, "correct": 0.0, "format": 0.0}
    assert grade(right, truth, "published")["reward"] == 3.0


# ---- math-verify


def test_the_library_decides_what_is_no_expression():
    preload()
    assert equal(r"x \in \{1, 2\}", r"x \in \{2, 1\}")
    assert not equal(r"x \equiv 3 \pmod{5}", "3")
    assert not equal(r"\max(3, 5)", "9^9^9^9")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "9 ^ 9 ^ 9",
            "9 ^ { 9 ^ 9 }",
            "2 ^ 23456",
            "( 2 ^ 99 ) ^ 99",
            "( 2 ^ 99 + 1 ) ^ 99 + 2 ^ 99",
            "( 9 ! ) !",
            "5001 !",
            "5!!",
        ),
        *(
            r"\ln \ln \ln \ln \ln x",
            "x " * 121,
            r"\sum x",
            "( " * 9 + ") " * 9,
            r"\sqrt{3^{2001}}",
            r"\sqrt{900! + 1}",
            r"\binom{9999}{5}",
        ),
    ],
)
def test_the_library_is_not_asked_about_costly_things(text):
    assert not math_library.is_tame(text)
    assert math_library.read(text) == []
    assert math_library.is_tame(r"\max(x^{12} + 3! + \frac{1}{2006!}, \sin y, 10^{300})")


def test_the_library_is_missing(monkeypatch):
    math_library.require.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"math-verify is not installed; run pip install 'dmpo_jax\[math\]'"):
        grade(r"\boxed{1}", "1")
    with pytest.raises(UserError, match="math-verify is not installed"):
        preload()
    preload("published")
    assert grade(r"\boxed{1}", "1", "published")["correct"] == 1


def test_graders_do_not_import_jax():
    code = r"""
import sys
from dmpo_jax.grading.math_grader import grade, preload
preload()
assert grade(r'\boxed{\sqrt{12}}', r'2\sqrt{3}')['correct'] == 1
assert 'jax' not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
