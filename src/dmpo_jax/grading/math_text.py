r"""An answer as a tuple of tokens in one spelling, so that ways to write the same thing become the same tokens.

    \dfrac12, \left( \frac 1 2 \right)   tokens of \frac12, of ( \frac 1 2 ): arguments are read in `math_expression.py`
    10,\!080  10{,}080  10,080           one number 10080; with `grouped=False` a comma parts two numbers
    016  2.50  .5                        16  2.5  0.5
    2 2/3                                2 \frac{2}{3}
    0.1\overline{6}                      \frac{15}{90}
    28\%  28 percent  28%                28 %
    30^\circ  30°                        30 \degree
    15\mbox{ cm}  15 cm                  15 \word{cm}; every word of a text is a \word{} of its own
    \text{13}  \mathrm{e}                13  e; a text without a word is what it holds
    1, 2, \text{ and } 3;  x=1 or x=2    commas
    $5$  \(5\)  **5**  5.                5
    \$5                                  \dollar 5
    12:00                                12 \clock 0

Runs of letters without a backslash are products of variables, unless they are a function's name, a unit or a longer word of
their own. Linear time but for the braces of texts, in an answer of bounded length.
"""

import re
import unicodedata

from dmpo_jax.grading import math_units

_UNICODE = str.maketrans(
    dict.fromkeys("−–—‐‑", "-")
    | dict.fromkeys("·⋅∙", r"\cdot ")
    | dict.fromkeys("~\u00a0\u2002\u2003\u2009\u200a\u202f\t\r\n\v\f", " ")
    | dict.fromkeys('\u200b\ufeff`"“”$', "")
    | dict.fromkeys("€£¥₹", r"\dollar ")  # no answer tells them apart
    | {"×": r"\times ", "÷": r"\div ", "∕": "/", "⁄": "/", "√": r"\sqrt ", "∞": r"\infty ", "π": r"\pi ", "∗": "*"}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∓": r"\mp ", "≈": r"\approx ", "°": r"^\circ "}
    | {"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "→": r"\to "}
    | {"’": "'", "′": "'", "％": "%", "，": ",", "（": "(", "）": ")"}
    | {power: f"^{digit}" for digit, power in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
    | {low: f"_{digit}" for digit, low in enumerate("₀₁₂₃₄₅₆₇₈₉")}
    | {letter: f"\\{name} " for letter, name in zip("αβγδεθλμφω", math_units.GREEK, strict=True)}
    | {
        fraction: r" \frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", fraction).split("⁄"))
        for fraction in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
    }
)

_SPACES = r"\, \; \: \> \quad \qquad \thinspace \enspace"
_WITHOUT_MEANING = (
    r"\! \( \) \[ \] \left \right \middle \limits \null \big \Big \bigg \Bigg \bigl \bigr \Bigl \Bigr \biggl \biggr "
    r"\displaystyle \textstyle \rm \bf \it \hline \boldmath \allowbreak"
)
_TEXTS = (
    r"\text \mbox \hbox \textbf \textit \textrm \textsf \texttt \textnormal \mathrm \mathbf \mathit \mathsf \operatorname "
    r"\boldsymbol \bm"
)
_COMMANDS = (
    dict.fromkeys((*_SPACES.split(), "\\ "), " ")
    | dict.fromkeys(_WITHOUT_MEANING.split(), "")
    | dict.fromkeys(_TEXTS.split(), r"\text")
    | dict.fromkeys((r"\dfrac", r"\tfrac", r"\cfrac"), r"\frac ")
    | dict.fromkeys((r"\dbinom", r"\tbinom"), r"\binom ")
    | dict.fromkeys((r"\leq", r"\leqslant", r"\leqq"), r"\le ")
    | dict.fromkeys((r"\geq", r"\geqslant", r"\geqq"), r"\ge ")
    | dict.fromkeys((r"\lvert", r"\rvert", r"\vert", r"\mid"), "|")
    | dict.fromkeys((r"\cdots", r"\dots", r"\dotsc"), r"\ldots ")
    | {r"\neq": r"\ne ", r"\lt": "<", r"\gt": ">", r"\ast": "*", r"\colon": ":", r"\%": "%", r"\infin": r"\infty "}
    | {r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]", r"\varnothing": r"\emptyset "}
    | {r"\varphi": r"\phi ", r"\varepsilon": r"\epsilon ", r"\degree": r"^\circ ", r"\bigcup": r"\cup ", r"\land": ","}
)

_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z])")
_EMPTY_DELIMITER = re.compile(r"\\(?:left|right)\s*\.(?![0-9])")
_SPACING = re.compile(
    r"\\(?:hspace|vspace|tag|label|color)\*?\s*\{[^{}]*\}|\\[hv]?phantom\s*(?:\{[^{}]*\}|\S)|(?<=\\\\)\s*\[[0-9.]+\s*[a-z]{2}\]"
)
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,\s*\\!|\\!\s*,|\{,\}|\\,)\s*(?=[0-9]{3}(?![0-9]))")
_ALL_REALS = re.compile(r"\\mathbb\s*(?:\{\s*R\s*\}|R\b)")
_DAY_HALF = re.compile(r"(?<![A-Za-z])([AaPp])\.\s*[Mm]\.?(?![A-Za-z])")
_DEGREE = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})")
_CLOCK = re.compile(r"(?<![0-9:.])([0-9]{1,2})\s*:\s*([0-5][0-9])(?![0-9:.])")
_MIXED = re.compile(r"(?<![0-9.,/^_\\])([0-9]+)[ ]+([0-9]+) */ *([0-9]+)(?![0-9.])")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))")
_TEXT = re.compile(r"\\text\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_TEXT_RUN = re.compile(r"\\word\{[^{}]*\}|\\?[A-Za-z]+")
_RUN = re.compile(r"(\\(?:word|begin|end)\{[^{}]*\}|\\[A-Za-z]+)|[A-Za-z]{2,}")
_TOKEN = (
    r"\\(?:begin|end)\{[A-Za-z]+\*?\}|\\word\{[^{}]*\}|\\[A-Za-z]+|\\.|"
    r"%s[0-9]+(?:\.(?![0-9])|\.[0-9]+)?|\.[0-9]+|[^\s]"
)
_TOKENS = {
    True: re.compile(_TOKEN % r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|", re.DOTALL),
    False: re.compile(_TOKEN % "", re.DOTALL),
}
_NUMBER = re.compile(r"[0-9.,]*[0-9][0-9.,]*")
_GROUPS = re.compile(r"[1-9][0-9]{0,2},[0-9]{3}(?![0-9])")
_ENDS = (".", ",", ";", ":")


def is_number(token: str) -> bool:
    """Whether a token is a number."""
    return token[0] in "0123456789"


def is_ambiguous(text: str) -> bool:
    """Whether commas may either group thousands or part the members of a list, as in 100,200."""
    return bool(_GROUPS.search(text))


def tokens(text: str, grouped: bool = True) -> tuple[str, ...]:
    """The tokens of an answer; with `grouped`, commas before three digits group thousands."""
    found = _TOKENS[grouped].findall(_plain(text))
    before = ["", *found]
    # Of \frac01 every digit is an argument; "1, 2, and 3" has a comma for the comma and one for the word.
    found = [
        _number(token) if _NUMBER.fullmatch(token) and last not in (r"\frac", r"\binom") else token
        for last, token in zip(before, found, strict=False)
        if (last, token) != (",", ",")
    ]
    while found and found[-1] in (*_ENDS, "*"):
        found.pop()
    start = 0
    while start < len(found) and found[start] in ("*", ":", ",", "="):
        start += 1
    return tuple(found[start:])


def _number(token: str) -> str:
    whole, _, fraction = token.replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    return f"{whole}.{fraction}" if fraction else whole


def _plain(text: str) -> str:
    text = text.replace("\\$", r"\dollar ").translate(_UNICODE)
    if r"\begin" not in text:
        text = _DOUBLED.sub(r"\\", text)
    text = _SPACING.sub("", _EMPTY_DELIMITER.sub("", text))
    text = _ALL_REALS.sub(r"(-\\infty,\\infty)", _THOUSANDS.sub(",", text))
    text = _COMMAND.sub(lambda command: _COMMANDS.get(command[0], command[0]), text)
    text = _DEGREE.sub(r" \\degree ", _DAY_HALF.sub(r"\1m", text))
    for _ in range(2):  # a text may stand in a text
        text = _TEXT.sub(_words, text)
    text = _RUN.sub(_run, text)
    text = _REPEATING.sub(_repeating, text)
    text = _CLOCK.sub(r"\1 \\clock \2", text)
    return _MIXED.sub(r"\1 \\frac{\2}{\3}", text)


def _words(text: re.Match[str]) -> str:
    """A text's words, each marked; what has no word in it, as it is."""
    content = text[1].strip()
    before = text.string[: text.start()].rstrip()[-1:]
    is_unit = before and before in "0123456789})" and math_units.is_letters(content)
    if content in math_units.FUNCTIONS:
        return f"\\{content} "
    if not is_unit and not re.search(r"[A-Za-z]{2}", content):
        return f" {content} "
    return _TEXT_RUN.sub(lambda run: _marked(run[0]), content)


def _run(run: re.Match[str]) -> str:
    """A run of letters that no text holds."""
    word = run[0]
    if run[1]:
        return word
    if (word in math_units.FUNCTIONS and word != "sec") or word in math_units.GREEK:
        return f"\\{word} "
    if word.lower() in ("infinity", "infty", "inf"):
        return r"\infty "
    separate = not run.string[: run.start()].strip() or run.string[run.start() - 1] == " "
    known = math_units.is_word(word) or word.lower() in ("and", "or")
    return _marked(word) if known or (separate and len(word) > 3) else word


def _marked(word: str) -> str:
    if word[0] == "\\":
        return word
    if word.lower() in ("and", "or"):
        return ","
    return "%" if word.lower() in math_units.PERCENT else f" \\word{{{word}}} "


def _repeating(number: re.Match[str]) -> str:
    whole, fixed, repeated = number[1], number[2], number[3] or number[4]
    above = int(whole + fixed + repeated) - int(f"0{whole}{fixed}")
    return rf" \frac{{{above}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"
