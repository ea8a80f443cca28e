"""Data files read line by line with bounds on their size; each error names the file and the line."""

from collections.abc import Iterator

from dmpo_jax.errors import UserError
from dmpo_jax.inputs import regular_size

MAX_FILE_BYTES = 256 * 2**20
MAX_LINE_BYTES = 64 * 2**10


def read_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text) of each line of a UTF-8 file that is not blank.

    Raises `UserError` where the file cannot be read, is not a regular file, exceeds `MAX_FILE_BYTES`, has a
    line over `MAX_LINE_BYTES`, or is not UTF-8.
    """
    try:
        regular_size(path, MAX_FILE_BYTES)
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise wrong(path, number, line, f"a line of at most {MAX_LINE_BYTES} bytes", "check its format")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError:
                    raise wrong(path, number, line, "UTF-8 text", "save the file as UTF-8") from None
                if text:
                    yield number, text
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path!r}: cannot be read ({reason}); name an existing data file") from None


def wrong(path: str, line: int, found: object, expected: str, remedy: str) -> UserError:
    """The error for one line: where, what was found (cut short), what was expected, and the remedy."""
    shown = repr(found[:80] if isinstance(found, str | bytes) else found)
    shown = shown if len(shown) <= 100 else shown[:100] + "..."
    return UserError(f"{path}, line {line}: found {shown}, expected {expected}; {remedy}")
