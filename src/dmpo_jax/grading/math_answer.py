r"""Where the answer to a mathematical question stands in a text.

The text ends before the first end token written out in it. Then, in this order:
- inside the last complete `<answer>...</answer>`, if there is one: the last complete box, else all that stands there;
- where there is no such tag, the last complete box of the text;
- otherwise there is no answer: a number named in passing is none. Nor is one of more than `MAX_CHARACTERS` characters.

A box is `\boxed{...}` or `\fbox{...}`, complete when its braces balance (`\{` and `\}` are no braces). The one that opens
last counts, so of boxes in each other the inner one. `\boxed` without braces is a word like others.
"""

import re

from dmpo_jax.tasks.text import readable, tagged

MAX_CHARACTERS = 256

# A backslash takes the next character with it (\{ is no brace, \\ no beginning), unless a box was written \\boxed.
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\(?!\\(?:boxed|fbox)).|[{}]", re.DOTALL)
_CUT_OFF = re.compile(r"\s*\$*\s*\\(?:boxed|fbox)\s*\{")


def final_answer(completion: str) -> str:
    """What a completion gives as its answer, stripped; "" where it gives none. Linear time."""
    text = readable(completion)
    inside = tagged(text)
    text = (text if inside is None else inside).decode()
    answer = last_box(text)
    if answer is None:
        # The tag is closed, so the answer is there even where its box is not.
        answer = "" if inside is None else _CUT_OFF.sub("", text, count=1)
    answer = answer.strip()
    return answer if len(answer) <= MAX_CHARACTERS else ""


def last_box(text: str) -> str | None:
    """The content of the complete box that opens last; None where there is no complete box. Linear time."""
    found, opened = (0, 0), []
    for brace in _BRACES.finditer(text):
        if brace[0] == "}":
            if opened:
                found = max(found, (opened.pop(), brace.start()))
        elif brace[0] == "{":
            opened.append(0)
        elif len(brace[0]) > 2:
            opened.append(brace.end())
    return text[slice(*found)] if found[0] else None
