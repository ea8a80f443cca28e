"""Tables as plain values, and the same ones as Markdown and HTML."""

import dataclasses
import html
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells as they are shown; the first `words` columns hold words, the others numbers. `notes` stand below."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    notes: tuple[str, ...] = ()


def markdown(tables: Sequence[Table]) -> str:
    """All tables with their titles."""
    return "\n".join(_markdown(table) for table in tables)


def _markdown(table: Table) -> str:
    line = lambda cells: "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"  # noqa: E731
    rule = "|" + "|".join("---" if i < table.words else "--:" for i in range(len(table.head))) + "|"
    body = [line(table.head), rule, *(line(row) for row in table.rows)] if table.rows else []
    notes = [f"- {note}" for note in table.notes] if len(table.notes) > 1 else list(table.notes)
    parts = [f"## {table.title}", "\n".join(body), "\n".join(notes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def as_html(table: Table) -> str:
    """A section of a page; every cell is text."""
    cells = lambda row, tag: "".join(  # noqa: E731
        f"<{tag}{' class=word' if i < table.words else ''}>{html.escape(cell)}</{tag}>" for i, cell in enumerate(row)
    )
    body = ""
    if table.rows:
        rows = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in table.rows)
        body = (
            f'<div class="scroll"><table class="numbers"><thead><tr>{cells(table.head, "th")}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    return f"<section><h2>{html.escape(table.title)}</h2>{body}{f'<ul class=small>{notes}</ul>' if notes else ''}</section>"


def interval(value: float, ends: tuple[float, float] | None) -> str:
    """A share in percent with its interval."""
    shown = f"{100 * value:.1f}"
    return shown if ends is None else f"{shown} [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"


def points(value: float, ends: tuple[float, float] | None = None) -> str:
    """A difference of shares in percentage points with its interval."""
    shown = f"{100 * value:+.1f}"
    return shown if ends is None else f"{shown} [{100 * ends[0]:+.1f}, {100 * ends[1]:+.1f}]"
