"""TOML as users write it: configuration files that extend others, and `section.key=value` on the command line."""

import tomllib
from pathlib import Path
from typing import Any

from dmpo_jax.errors import UserError, shown
from dmpo_jax.inputs import read_regular

MAX_BYTES = 1_000_000
MAX_FILES = 8  # in a chain of files that extend one another


def read_tables(path: Path) -> dict:
    """Parsed TOML. Raises UserError naming the file that cannot be read or is not TOML."""
    try:
        content = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a TOML configuration") from None
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # syntax, encoding, numbers of thousands of digits
        raise UserError(f"{path}: not valid TOML: {str(error)[:200]}") from None


def read_extended(path: Path, depth: int = 1) -> dict:
    """`read_tables`, key by key over those of the file that `extends` names, which may extend another.

    An [objective] of another name takes the place of the extended one: settings belong to their method. Raises UserError
    where a chain has no end.
    """
    tables = read_tables(path)
    base = tables.pop("extends", None)
    if base is None:
        return tables
    if not isinstance(base, str):
        raise UserError(f"{path}: extends = {shown(base)}: expected one file name")
    if depth == MAX_FILES:
        raise UserError(
            f"{path}: extends = {shown(base)}: a chain of more than {MAX_FILES} files; does one extend itself?"
        )
    merged = read_extended(path.parent / base, depth + 1)
    for name, table in tables.items():
        below = merged.get(name)
        renamed = name == "objective" and isinstance(table, dict) and table.get("name") not in (None, _name(below))
        if isinstance(table, dict) and isinstance(below, dict) and not renamed:
            merged[name] = below | table
        else:
            merged[name] = table
    return merged


def _name(objective: Any) -> Any:
    return objective.get("name", "dmpo") if isinstance(objective, dict) else None


def parse_override(text: str) -> tuple[str, str, Any]:
    """(section, key, value) of `section.key=value`; a value that is no TOML is a string. Raises UserError on other forms."""
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise UserError(f"--set {text}: expected section.key=value")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return section, key, value  # a bare word is a string
    if len(parsed) != 1:
        raise UserError(f"--set {text!r}: expected one section.key=value")
    return section, key, parsed["value"]
