"""The published numbers as data: `configs/published/*.toml`, one file a paper, read strictly.

A value stands under its task and the completion's tokens, `gsm8k = {256 = 82.41}`, in percent, or under a word in place of
the tokens where a paper has no such number: `mean` (over lengths), `best` (of lengths or checkpoints), `unstated`, and
`static`, `dynamic` (the two decodings of block-diffusion models). Only tables of accuracy stand beside our own.
"""

import dataclasses
from pathlib import Path
from typing import Any

from dmpo_jax.errors import UserError, shown
from dmpo_jax.reproduction.reading import Fields, check_known
from dmpo_jax.toml_files import read_tables

# sudoku is d1's split, asked without examples but for ESPO's one; numbers on other splits are not comparable with it.
TASKS = {
    "gsm8k": "GSM8K",
    "math": "MATH500",
    "countdown": "Countdown",
    "sudoku": "Sudoku",
    "sudoku_spg": "Sudoku, SPG's split, 3-shot",
    "sudoku_unstated": "Sudoku, split not stated",
    "gsm8k_hard": "GSM8K-hard",
    "math_hard": "MATH-hard",
    "countdown_2_to_6": "Countdown of 2 to 6 numbers",
    "countdown_hard": "Countdown, hard",
    "aime24": "AIME24",
}
LENGTHS = ("128", "256", "512", "mean", "best", "unstated", "static", "dynamic")
STARTS = ("instruct", "sft")
ACCURACY = "accuracy"
VERDICTS = ("right", "right with a caveat", "wrong pairing", "wrong task")


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a table: `values[task, length]` in percent. `start`: sft where the model was fine-tuned before."""

    name: str
    model: str
    method: str
    start: str
    values: dict[tuple[str, str], float]
    note: str


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a paper; `via` names who quotes it where the paper itself was not read."""

    paper: str
    arxiv: str
    number: str
    via: str
    metric: str
    protocol: str
    notes: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def source(self) -> str:
        """The table as a citation."""
        own = f"{self.paper}, {self.number} (arXiv {self.arxiv})"
        return f"{own}, quoted by {self.via}" if self.via else own


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim as it is often quoted, what the source says, and whether they agree."""

    quoted: str
    found: str
    source: str
    verdict: str


@dataclasses.dataclass(frozen=True)
class Note:
    """Something in the literature that does not fit together; `tasks` it is about, none: all."""

    text: str
    source: str
    tasks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Published:
    """All files together, in the order of their names."""

    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]
    notes: tuple[Note, ...]

    def rows(self, model: str, method: str) -> list[tuple[Table, Row]]:
        """Lines of accuracies of a method on a model, with their tables."""
        return [
            (table, row)
            for table in self.tables
            for row in table.rows
            if table.metric == ACCURACY and (row.model, row.method) == (model, method)
        ]


def read_published(folder: Path) -> Published:
    """Reads every file of the folder. Raises UserError naming the file, the line and the key that is wrong."""
    tables, claims, notes = [], [], []
    paths = sorted(folder.glob("*.toml"))
    if not paths:
        raise UserError(f"{folder}: holds no published tables (*.toml); restore configs/published")
    for path in paths:
        fields = Fields(read_tables(path), str(path))
        if path.name == "notes.toml":
            claims += [_claim(entry, f"{path}: claim {i}") for i, entry in enumerate(fields.take("claim", list, []), 1)]
            notes += [_note(entry, f"{path}: note {i}") for i, entry in enumerate(fields.take("note", list, []), 1)]
        else:
            paper, arxiv = fields.take("paper", str), fields.take("arxiv", str)
            for i, entry in enumerate(fields.take("table", list), 1):
                tables.append(_table(entry, f"{path}: table {i}", paper, arxiv))
        fields.end()
    return Published(tuple(tables), tuple(claims), tuple(notes))


def _table(entry: Any, where: str, paper: str, arxiv: str) -> Table:
    fields = Fields(entry, where)
    rows = fields.take("row", list)
    table = Table(
        paper,
        arxiv,
        fields.take("number", str),
        fields.take("via", str, ""),
        fields.take("metric", str, ACCURACY),
        fields.take("protocol", str, ""),
        fields.names("notes", None, []),
        tuple(_row(row, f"{where}, row {i}") for i, row in enumerate(rows, 1)),
    )
    fields.end()
    return table


def _row(entry: Any, where: str) -> Row:
    fields = Fields(entry, where)
    name, model, method = (fields.take(key, str) for key in ("name", "model", "method"))
    fields.where = where = f"{where} ({name[:60]})"
    start, note = fields.take("start", str, "instruct"), fields.take("note", str, "")
    check_known(f"{where}: start", start, STARTS)
    values = {}
    for task in TASKS:
        for length, value in fields.take(task, dict, {}).items():
            check_known(f"{where}: {task}", length, LENGTHS)
            if type(value) not in (int, float) or not 0 <= value <= 100:
                raise UserError(f"{where}: {task}.{length} = {shown(value)}: expected percent, 0 to 100")
            values[task, length] = float(value)
    fields.end()
    if not values:
        raise UserError(f"{where}: has no number; add {', '.join(list(TASKS)[:4])} or remove the row")
    return Row(name, model, method, start, values, note)


def _claim(entry: Any, where: str) -> Claim:
    fields = Fields(entry, where)
    claim = Claim(*(fields.take(key, str) for key in ("quoted", "found", "source", "verdict")))
    fields.end()
    check_known(f"{where}: verdict", claim.verdict, VERDICTS)
    return claim


def _note(entry: Any, where: str) -> Note:
    fields = Fields(entry, where)
    note = Note(fields.take("text", str), fields.take("source", str), fields.names("tasks", TASKS, []))
    fields.end()
    return note
