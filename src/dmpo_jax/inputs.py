"""Files that a user names. Only regular ones of a bounded size are opened: a fifo would hang, a device might never end."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from dmpo_jax.errors import UserError

_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def regular_size(path: str | Path, most: int | None = None) -> int:
    """Bytes of a regular file. Raises UserError on anything else and on more than `most`, OSError where nothing can be had."""
    try:
        status = os.stat(path)
    except ValueError:
        raise UserError(f"{path}: a null character is in no file name") from None
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "special file")
        raise UserError(f"{path}: is a {kind}: expected a regular file; copy what you mean to one")
    if most is not None and status.st_size > most:
        raise UserError(f"{path}: {status.st_size} bytes, expected at most {most}; give a smaller file")
    return status.st_size


def read_regular(path: str | Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes. Raises as `regular_size` does."""
    regular_size(path, most)
    return Path(path).read_bytes()


def json_or_none(path: str | Path) -> dict[str, Any] | None:
    """As `read_json`; None where it raises, for files that another program may not have finished."""
    try:
        return read_json(path)
    except UserError:
        return None


def read_json(path: str | Path, remedy: str = "", most: int = 50_000_000) -> dict[str, Any]:
    """An object from a JSON file. Raises UserError, with the remedy, where it is absent, too large or no such thing."""
    after = f"; {remedy}" if remedy else ""
    try:
        value = json.loads(read_regular(path, most).decode("utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}){after}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not valid JSON{after}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object{after}")
    return value
