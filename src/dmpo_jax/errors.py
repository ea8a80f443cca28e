"""The one error a user can cause, and how the line about it is written."""

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """Bad usage, configuration or data; the command line prints it as one line and exits with 2."""


def ending(error: BaseException) -> tuple[int, str] | None:
    """The exit code and the line with which an error ends a command; None for what is a crash."""
    if isinstance(error, UserError):
        return 2, str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return 2, f"{error.filename}: {error.strerror}; check the path and its permissions"
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted; the same command goes on from the newest checkpoint"
    return None


def one_line(text: object) -> str:
    """`text` with all but printable characters spelled as escapes, so that no name or value steers a terminal.

    Of a very long text the middle is left out.
    """
    text = str(text)
    if len(text) > 3000:
        text = text[:2000] + " ... " + text[-500:]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(value: Any) -> str:
    """A value of any kind and size in an error, cut short."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python spells no number that long
        return "a number of thousands of digits"
    return text if len(text) <= 100 else text[:100] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the known one nearest to it, or some of them all."""
    known = list(known)
    close = difflib.get_close_matches(name[:80], known, 1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(known[:40])}{', ...' if len(known) > 40 else ''}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = 80
