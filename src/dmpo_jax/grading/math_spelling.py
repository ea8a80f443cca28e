r"""Repairs of how an answer is written, before math-verify reads it.

    2 2/3                          2\frac{2}{3}: a mixed number, of which math-verify 0.9 reads the last part
    3(\frac13)                     3 \cdot (\frac13), which it takes for a mixed number
    10,\!080  10{,}080  10\,080    10080
    0.1\overline{6}                \frac{15}{90}
    6√3  6\sqrt(3)  ½  −5  40°     6\sqrt{3}  \frac{1}{2}  -5  40^\circ
    \sin 30^\circ                  \sin(\frac{30\pi}{180}): elsewhere a degree sign is a unit (`math_units.py`)
    \langle 1, 2 \rangle           (1, 2)
    $5$  \(5\)  **5**  5.          5

Time linear in an answer of bounded length, but for the braces of texts.
"""

import re
import unicodedata

_FRACTIONS = {
    letter: r" \frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", letter).split("⁄"))
    for letter in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
_UNICODE = str.maketrans(
    dict.fromkeys("−–—‐‑", "-")
    | dict.fromkeys("·⋅∙", r"\cdot ")
    | dict.fromkeys("~\u00a0\u2002\u2003\u2009\u200a\u202f\t\r\n\v\f", " ")
    | dict.fromkeys('\u200b\ufeff`"“”', "")
    | {"×": r"\times ", "÷": r"\div ", "∕": "/", "⁄": "/", "∞": r"\infty ", "π": r"\pi ", "°": r"^\circ "}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset "}
    | {"ℝ": r"\mathbb{R}", "’": "'", "′": "'", "％": "%", "，": ",", "（": "(", "）": ")"}
    | {power: f"^{digit}" for digit, power in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
    | _FRACTIONS
)
_SIMILAR = (
    (r"\\(?:left|right)\s*\.(?![0-9])", ""),
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])", ""),
    (r"\\(?:mbox|hbox|textbf|textit|textrm|mathrm|mathbf|mathit)\s*\{", r"\\text{"),
    (r"\{\s*\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}"),
    (r"\\text\s*\{\s*([ei]|[^{}A-Za-z]*)\s*\}", r"\1"),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
    (r"\\mathbb\s*(?:\{\s*R\s*\}|R\b)", r"(-\\infty,\\infty)"),
    (r"\\(?:langle|lparen)(?![A-Za-z])", "("),
    (r"\\(?:rangle|rparen)(?![A-Za-z])", ")"),
    (r"(?<=\\\\)\s*\[[0-9.]+\s*[a-z]{2}\]", ""),
    (r"(?<=[0-9])(?:,\s*\\!|\\!\s*,|\{,\}|\\,)\s*(?=[0-9]{3}(?![0-9]))", ""),
    (r"\\[()\[\]]|(?<!\\)\$|\*\*", ""),
    (r"(?<!\\)\\[,;:! ]|\\q?quad(?![A-Za-z])", " "),
    (r"\\[dtc]?frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
    (r"√\s*([0-9]+(?:\.[0-9]+)?|[A-Za-z])", r"\\sqrt{\1}"),
    (r"√", r"\\sqrt"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(\\(?:sin|cos|tan|cot|sec|csc))\s*\{?\(?\s*([0-9.]+)\s*\^\s*\{?\\circ\}?\s*\)?\}?", r"\1(\\frac{\2\\pi}{180})"),
    (r"(?<![0-9.,/^_\\])([0-9]+) +([0-9]+) */ *([0-9]+)(?![0-9.])", r"\1\\frac{\2}{\3}"),
    (r"(?<![0-9.A-Za-z_^])([0-9]+)\s*(?=\()", r"\1 \\cdot "),
)
_SPELLINGS = tuple((re.compile(pattern), plain) for pattern, plain in _SIMILAR)
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))")
_GROUPS = re.compile(r"(?<![0-9.])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])")


def spelled(text: str) -> str:
    """An answer as math-verify reads it rightly."""
    text = text.translate(_UNICODE)
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    return _REPEATING.sub(_repeating, text).strip().rstrip(".,;: ").lstrip(":= ")


def readings(text: str) -> tuple[str, ...]:
    """What a text may mean where its commas may either group thousands or part members, as in 100,200; else itself."""
    if not _GROUPS.search(text):
        return (text,)
    return (_GROUPS.sub(lambda number: number[0].replace(",", ""), text), text.replace(",", ", "))


def _repeating(number: re.Match[str]) -> str:
    whole, fixed, repeated = number[1], number[2], number[3] or number[4]
    above = int(whole + fixed + repeated) - int(f"0{whole}{fixed}")
    return rf"\frac{{{above}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"
