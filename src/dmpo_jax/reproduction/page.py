"""report.html: one self-contained page of tables and a figure, that asks for nothing from anywhere."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from dmpo_jax.errors import UserError
from dmpo_jax.evaluation.report_page import document
from dmpo_jax.reproduction.document import Table, as_html
from dmpo_jax.training.metrics import write_text

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
    page = document(title, [f"<h1>{html.escape(title)}</h1>", *sections], css=_MORE)
    try:
        write_text(out, page)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); give another --out") from None
    return out
