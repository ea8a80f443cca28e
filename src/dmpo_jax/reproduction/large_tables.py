"""What `--scale 8b` ends in: our numbers beside the published ones, cell by cell. What was not run is empty."""

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dmpo_jax.errors import UserError
from dmpo_jax.evaluation.comparison import comma_separated
from dmpo_jax.reproduction.document import Table, interval, markdown
from dmpo_jax.reproduction.manifest import Manifest, Run
from dmpo_jax.reproduction.page import write_page
from dmpo_jax.reproduction.published import ACCURACY, TASKS, Published, Row
from dmpo_jax.reproduction.published import Table as PublishedTable
from dmpo_jax.reproduction.results import GRADINGS, Cell, cell_of
from dmpo_jax.training.metrics import write_text

LENGTHS = ("128", "256", "512")
COLUMNS = (
    "model", "method", "task", "length", "who", "name", "percent", "low", "high", "n", "seeds", "protocol", "grading",
    "settings", "source", "note",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Ours:
    """Our cells of one method on one model under one protocol and grading, by task and length."""

    model: str
    method: str
    protocol: str
    grading: str
    runs: dict[str, Run]
    cells: dict[tuple[str, str], Cell | None]


def write_large(
    manifest: Manifest, published: Published, out: Path, seeds: tuple[int, ...], about: list[str]
) -> list[Path]:
    """Writes tables.md, tables.csv, comparison.png and report.html; returns them."""
    ours = _our_cells(manifest, out, seeds)
    tables = [
        _side_by_side(manifest, published, ours),
        _cells_run(manifest, published, ours),
        _others(manifest, published),
        _otherwise(published, [model.title for model in manifest.models.values()]),
        *_notes(published),
        Table("About this run", (), (), notes=tuple(about)),
    ]
    picture = drawn(manifest, published, ours)
    files = [out / "tables.md", out / "tables.csv", out / "comparison.png"]
    try:
        write_text(files[0], markdown(tables))
        write_text(files[1], comma_separated(COLUMNS, list(_lines(manifest, published, ours))))
        files[2].write_bytes(picture)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); give another --out") from None
    return [
        *files,
        write_page(out / "report.html", "Reproduction, models of 7 and 8 billion", tables, picture, "comparison.png"),
    ]


def _our_cells(manifest: Manifest, out: Path, seeds: tuple[int, ...]) -> list[_Ours]:
    by_line: dict[tuple[str, str], dict[str, Run]] = {}
    for run in manifest.runs:
        by_line.setdefault((run.model, run.method), {})[run.task] = run
    found = []
    for (model, method), runs in by_line.items():
        for protocol in dict.fromkeys(p for run in runs.values() for p in run.protocols):
            for grading in GRADINGS:
                cells = {
                    (task, str(length)): cell_of(manifest, out, run, seeds, protocol, length, grading)
                    for task, run in runs.items()
                    for length in manifest.protocols[protocol].lengths
                    if protocol in run.protocols
                }
                found.append(_Ours(manifest.models[model].title, method, protocol, grading, runs, cells))
    return found


def _places(manifest: Manifest) -> list[tuple[str, str]]:
    return [(task, length) for task in manifest.tasks for length in LENGTHS]


def _head(manifest: Manifest) -> tuple[str, ...]:
    return ("model", "method", "row", *(f"{manifest.tasks[task].title} {length}" for task, length in _places(manifest)))


def _name(table: PublishedTable, row: Row) -> str:
    after = ", after SFT" if row.start == "sft" else ""
    return f"published: {row.name}{after} ({table.paper}, {table.number})"


def _published_cells(manifest: Manifest, row: Row) -> tuple[str, ...]:
    return tuple("" if place not in row.values else f"{row.values[place]:g}" for place in _places(manifest))


def _side_by_side(manifest: Manifest, published: Published, ours: list[_Ours]) -> Table:
    rows = []
    for model, method in dict.fromkeys((line.model, line.method) for line in ours):
        for line in (line for line in ours if (line.model, line.method) == (model, method)):
            cells = (line.cells.get(place) for place in _places(manifest))
            label = f"ours: {manifest.protocols[line.protocol].title}, {line.grading} grading"
            rows.append((model, method, label, *("" if c is None else interval(c.value, c.interval) for c in cells)))
        for table, row in published.rows(model, method):
            shown = _published_cells(manifest, row)
            if any(shown):
                rows.append((model, method, _name(table, row), *shown))
    note = (
        "Accuracy in percent by task and tokens of the completion; ours with intervals of 95 % (Wilson's, over the items of "
        "all seeds). An empty cell of ours was not run; one of a published row is not published there. Sudoku's published "
        "accuracy is that of cells; its strict one counts solved puzzles."
    )
    return Table("Ours beside the published numbers", _head(manifest), tuple(rows), 3, (note,))


def _cells_run(manifest: Manifest, published: Published, ours: list[_Ours]) -> Table:
    rows = []
    for line in ours:
        for (task, length), cell in line.cells.items():
            if cell is None:
                continue
            beside = [
                (f"{row.values[task, length]:g}", _cited(table, row))
                for table, row in published.rows(line.model, line.method)
                if (task, length) in row.values
            ]
            rows.append(
                (
                    line.model, line.method, manifest.tasks[task].title, length, manifest.protocols[line.protocol].title,
                    line.grading, interval(cell.value, cell.interval), str(cell.items), " ".join(map(str, cell.seeds)),
                    "; ".join(value for value, _ in beside), "; ".join(source for _, source in beside),
                    line.runs[task].config,
                )
            )  # fmt: skip
    head = (
        "model", "method", "task", "tokens", "protocol", "grading", "ours, % [95 %]", "n", "seeds", "published",
        "published source", "settings",
    )  # fmt: skip
    notes = () if rows else ("No evaluation has been run yet.",)
    return Table("Every cell of ours", head, tuple(rows), 6, notes)


def _cited(table: PublishedTable, row: Row) -> str:
    after = ", after SFT" if row.start == "sft" else ""
    return f"{row.name}{after}: {table.source}{f' [{table.protocol}]' if table.protocol else ''}"


def _others(manifest: Manifest, published: Published) -> Table:
    titles = {key: model.title for key, model in manifest.models.items()}
    known = {(titles[run.model], run.method) for run in manifest.runs}
    rows = []
    for table in published.tables:
        for row in table.rows:
            shown = _published_cells(manifest, row)
            if (
                table.metric == ACCURACY
                and row.model in titles.values()
                and (row.model, row.method) not in known
                and any(shown)
            ):
                rows.append((row.model, row.method, _name(table, row), *shown))
    return Table("Published numbers of methods that are not run here", _head(manifest), tuple(sorted(rows)), 3)


def _otherwise(published: Published, models: list[str]) -> Table:
    """Numbers that have no place among the lengths and tasks above."""
    rows = []
    for table in published.tables:
        for row in table.rows:
            for (task, length), value in row.values.items():
                placed = table.metric == ACCURACY and row.model in models and length in LENGTHS and _main(task)
                if not placed:
                    metric = "" if table.metric == ACCURACY else table.metric
                    what = (row.model, row.method, row.name, TASKS[task], length, f"{value:g}", metric, table.source)
                    rows.append(what)
    head = ("model", "method", "row", "task", "at", "percent", "metric", "source")
    note = (
        "On other models, splits or metrics, or without one of the three lengths: `mean` over lengths, `best` of lengths or "
        "checkpoints, `static` and `dynamic` decoding. Not comparable with the tables above."
    )
    return Table("Published otherwise", head, tuple(rows), 5, (note,))


def _main(task: str) -> bool:
    return task in ("gsm8k", "math", "countdown", "sudoku")


def _notes(published: Published) -> list[Table]:
    claims = tuple((c.quoted, c.found, c.verdict, c.source) for c in published.claims)
    notes = tuple((n.text, ", ".join(TASKS[task] for task in n.tasks), n.source) for n in published.notes)
    said = tuple(f"{table.paper}, {table.number}: {note}" for table in published.tables for note in table.notes)
    return [
        Table("Claims as they are quoted", ("quoted", "what the source says", "verdict", "source"), claims, 4),
        Table("What does not fit together in the literature", ("note", "tasks", "source"), notes, 3, said),
    ]


def _lines(manifest: Manifest, published: Published, ours: list[_Ours]) -> Iterator[dict[str, Any]]:
    """Lines of the CSV: every cell of ours, run or not, then every published number."""
    for line in ours:
        for (task, length), cell in line.cells.items():
            place = {
                "model": line.model, "method": line.method, "task": task, "length": length, "who": "ours",
                "name": line.runs[task].name, "protocol": manifest.protocols[line.protocol].title, "grading": line.grading,
                "settings": line.runs[task].config,
            }  # fmt: skip
            if cell:
                low, high = cell.interval
                place |= {"percent": f"{100 * cell.value:.2f}", "low": f"{100 * low:.2f}", "high": f"{100 * high:.2f}"}
                place |= {"n": cell.items, "seeds": " ".join(map(str, cell.seeds)), "source": " ".join(cell.files)}
            yield place
    for table in published.tables:
        for row in table.rows:
            for (task, length), value in row.values.items():
                yield {
                    "model": row.model, "method": row.method, "task": task, "length": length, "who": "published",
                    "name": row.name, "percent": f"{value:g}", "protocol": table.protocol,
                    "grading": "" if table.metric == ACCURACY else table.metric, "source": table.source,
                    "note": "; ".join(part for part in ("after SFT" if row.start == "sft" else "", row.note) if part),
                }  # fmt: skip


def drawn(manifest: Manifest, published: Published, ours: list[_Ours]) -> bytes:
    """A panel a task at 256 tokens: published numbers as bars across, ours as dots with their intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = list(dict.fromkeys((line.model, line.method) for line in ours))
    figure = Figure(figsize=(4.2 * len(manifest.tasks), 1.4 + 0.32 * len(lines)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(manifest.tasks), sharey=True, squeeze=False)[0]
    for axes, (task, kind) in zip(panels, manifest.tasks.items(), strict=True):
        for place, (model, method) in enumerate(lines):
            values = [
                row.values[task, "256"] for _, row in published.rows(model, method) if (task, "256") in row.values
            ]
            axes.scatter(values, [place] * len(values), marker="|", s=120, color="0.4")
            for line in ours:
                cell = line.cells.get((task, "256"))
                if (line.model, line.method) == (model, method) and cell and line.grading == "published":
                    low, high = cell.interval
                    ends = [[100 * (cell.value - low)], [100 * (high - cell.value)]]
                    axes.errorbar([100 * cell.value], [place], xerr=ends, fmt="D", color="C0", capsize=3, markersize=4)
        axes.set_title(f"{kind.title}, 256 tokens", fontsize=10)
        axes.set_xlabel("%: published (bar), ours (95 %)")
        axes.set_xlim(0, 100)
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(lines)), [f"{model}, {method}" for model, method in lines], fontsize=8)
    panels[0].set_ylim(len(lines) - 0.5, -0.5)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()
