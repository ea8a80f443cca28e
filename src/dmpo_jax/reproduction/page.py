"""report.html: one self-contained page of tables and a figure, that asks for nothing from anywhere."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from dmpo_jax.errors import UserError
from dmpo_jax.evaluation.report_style import CSS
from dmpo_jax.reproduction.document import Table, as_html
from dmpo_jax.training.metrics import write_text

# Even if text escaped its quoting, the page may run and request nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_MORE = """
table.numbers .word { text-align: left; white-space: normal; min-width: 6rem; }
table.numbers td.word, table.numbers td.word:first-child { overflow-wrap: break-word; }
table.numbers th.word { white-space: nowrap; overflow-wrap: normal; }
table.numbers td { vertical-align: top; }
body { max-width: 84rem; }
figure img { display: block; max-width: 100%; background: #fff; border: 1px solid var(--line); border-radius: .4rem; }
"""


def write_page(out: Path, title: str, tables: Sequence[Table], picture: bytes | None = None, caption: str = "") -> Path:
    """Writes the page and returns its path. Raises UserError where it cannot be written."""
    figure = ""
    if picture:
        data = base64.b64encode(picture).decode()
        figure = (
            f'<figure><img src="data:image/png;base64,{data}" alt="{html.escape(caption)}">'
            f"<figcaption class=small>{html.escape(caption)}</figcaption></figure>"
        )
    sections = [as_html(table) for table in tables]
    sections.insert(min(2, len(sections)), figure)
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>{CSS}{_MORE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{html.escape(title)}</h1>\n"
        + "\n".join(part for part in sections if part)
        + "\n</main>\n</body>\n</html>\n"
    )
    try:
        write_text(out, page)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); give another --out") from None
    return out
