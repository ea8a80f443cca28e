"""Strict reading of the data files of this room: every key known, every value of its kind, every error one line."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from dmpo_jax.errors import UserError, nearest, shown

_REQUIRED = object()
_PLACE = re.compile(r"\{([^{}]*)\}")
NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")  # of runs, models, ...: a file name and no option


class Fields:
    """Typed access to one table of a file; `end` raises UserError where a key is left that nobody asked for."""

    def __init__(self, table: Any, where: str):
        """`where`: file and place, as errors name them. Raises UserError unless it is a table."""
        if not isinstance(table, dict):
            raise UserError(f"{where}: expected a table, found {shown(table)}")
        self.where, self._left, self._known = where, dict(table), []

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = _REQUIRED) -> Any:
        """The value of a key, of one of the kinds; the default where the key is absent. Raises UserError."""
        self._known.append(key)
        if key not in self._left:
            if default is _REQUIRED:
                raise UserError(f"{self.where}: {key} is missing; add it")
            return default
        value = self._left.pop(key)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if type(value) not in kinds and not (float in kinds and type(value) is int):
            wanted = " or ".join(k.__name__ for k in kinds)
            raise UserError(f"{self.where}: {key} = {shown(value)}: expected {wanted}, found {type(value).__name__}")
        return float(value) if kinds == (float,) else value

    def names(self, key: str, known: Iterable[str] | None = None, default: Any = _REQUIRED) -> tuple[str, ...]:
        """A list of names, of those `known` if given. Raises UserError with the nearest one."""
        values = self.take(key, list, default)
        for value in values:
            if type(value) is not str:
                raise UserError(f"{self.where}: {key} = {shown(values)}: expected a list of names")
            if known is not None:
                check_known(f"{self.where}: {key}", value, known)
        return tuple(values)

    def tables(self, key: str) -> dict[str, Any]:
        """Tables by name, in order; none where the key is absent. Raises UserError on a name that is none."""
        found = self.take(key, dict, {})
        for name in found:
            if not NAME.fullmatch(name):
                raise UserError(f"{self.where}: {key}.{shown(name)}: expected a name of letters, digits, _ . + -")
        return found

    def end(self) -> None:
        """Raises UserError on a key that is not known, with the nearest one that is."""
        for key in self._left:
            raise UserError(f"{self.where}: {key}: no such key{nearest(key, self._known)}")


def check_known(where: str, name: str, known: Iterable[str]) -> None:
    """Raises UserError with the nearest known name unless the name is known."""
    known = list(known)
    if name not in known:
        raise UserError(f"{where}: {shown(name)} is not known{nearest(name, known)}")


def settings_of(table: Any, where: str) -> tuple[tuple[str, Any], ...]:
    """(`section.key`, value) pairs of tables as in a configuration. Raises UserError where it is no table of tables."""
    found = []
    for section, keys in Fields(table, where)._left.items():
        if not isinstance(keys, dict):
            raise UserError(f"{where}: {section} = {shown(keys)}: expected section.key = value")
        found += [(f"{section}.{key}", value) for key, value in keys.items()]
    return tuple(found)


def places_of(settings: Iterable[tuple[str, Any]]) -> set[str]:
    """Names in braces in the text values of settings."""
    return {name for _, value in settings if isinstance(value, str) for name in _PLACE.findall(value)}


def filled(settings: Iterable[tuple[str, Any]], values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The settings with `{name}` in text replaced by `values[name]`; a text that is nothing else takes the value itself."""
    result = []
    for key, value in settings:
        if isinstance(value, str):
            whole = _PLACE.fullmatch(value)
            value = values[whole[1]] if whole else _PLACE.sub(lambda m: str(values[m[1]]), value)
        result.append((key, value))
    return tuple(result)


def as_options(settings: Iterable[tuple[str, Any]]) -> list[str]:
    """`--set section.key=value` for the command line, values as TOML writes them."""
    return [word for key, value in settings for word in ("--set", f"{key}={json.dumps(value, ensure_ascii=False)}")]
