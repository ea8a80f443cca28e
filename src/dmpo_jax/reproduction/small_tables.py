"""What `--scale small` ends in: methods and variants compared, and the paper's claims with their verdicts."""

from pathlib import Path

from dmpo_jax.errors import UserError
from dmpo_jax.evaluation import comparison
from dmpo_jax.evaluation.report import write_report
from dmpo_jax.inputs import json_or_none
from dmpo_jax.reproduction import claims
from dmpo_jax.reproduction.document import Table, markdown
from dmpo_jax.reproduction.manifest import Manifest
from dmpo_jax.reproduction.page import write_page
from dmpo_jax.reproduction.results import at
from dmpo_jax.training.metrics import write_text

CLAIM_COLUMNS = ("claim", "source", "verdict", "figures", "items")


def write_small(manifest: Manifest, out: Path, seeds: tuple[int, ...], about: list[str]) -> list[Path]:
    """Writes tables.md, tables.csv, claims.csv, comparison.png, report.html (these) and runs.html (curves and answers).

    Returns the files; none where no run is finished yet. `about`: lines on command, versions and duration.
    """
    trained = [run for run in manifest.runs if run.kind == "train"]
    folders = [out / f"{run.name}-{seed}" for run in trained for seed in seeds]
    folders = [folder for folder in folders if (folder / "metrics.jsonl").is_file()]
    try:
        found = comparison.recipes(folders) if folders else []
    except UserError:  # none is finished
        found = []
    if not found:
        return []
    lines = [recipe.figures() for recipe in found]
    seconds = {
        run.name: spent for run in manifest.runs if run.kind == "bench" and (spent := rollout_seconds(out, run.name))
    }
    by_name = {recipe.name: recipe for recipe in found}
    verdicts = [claims.judge(claim, by_name, seconds) for claim in manifest.claims]
    unfinished = [run.name for run in trained if not _finished(out, run.name, seeds)]
    tables = [
        claims.table_of(verdicts),
        Table(
            "Methods and variants on one rollout budget",
            comparison.HEAD,
            tuple(map(comparison.cells, lines)),
            notes=(comparison.NOTE, *_protocol(found)),
        ),
        Table(
            "About this run",
            (),
            (),
            notes=(*about, *([f"Not finished: {', '.join(unfinished)}."] if unfinished else [])),
        ),
    ]
    picture = comparison.drawn(found, lines)
    files = {name: out / name for name in ("tables.md", "tables.csv", "claims.csv", "comparison.png")}
    try:
        write_text(files["tables.md"], markdown(tables))
        write_text(files["tables.csv"], comparison.comma_separated(comparison.COLUMNS, lines))
        rows = [(v.claim.text, v.claim.source, v.verdict, v.figures, v.items or "") for v in verdicts]
        lines_of_claims = [dict(zip(CLAIM_COLUMNS, row, strict=True)) for row in rows]
        write_text(files["claims.csv"], comparison.comma_separated(CLAIM_COLUMNS, lines_of_claims))
        files["comparison.png"].write_bytes(picture)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); give another --out") from None
    report = write_page(out / "report.html", "Reproduction, small scale", tables, picture, "comparison.png")
    write_report(folders, out / "runs.html")
    return [*files.values(), report, out / "runs.html"]


def _finished(out: Path, name: str, seeds: tuple[int, ...]) -> bool:
    return all((out / f"{name}-{seed}" / "summary.json").is_file() for seed in seeds)


def rollout_seconds(out: Path, bench: str) -> float | None:
    """The median seconds of a rollout that a bench measured; None where it has not."""
    value = at(json_or_none(out / f"{bench}.json"), ("phases", "rollout", "seconds"))
    return float(value) if type(value) in (int, float) and value > 0 else None


def _protocol(found: list[comparison.Recipe]) -> tuple[str, ...]:
    """How the test items were decoded, where all recipes agree on it, and else by recipe."""
    said: dict[str, list[str]] = {}
    for recipe in found:
        settings = recipe.runs[0].after.settings
        sampler = settings.get("sampler")
        sampler = sampler if isinstance(sampler, dict) else {}
        text = ", ".join(
            f"{key} {sampler[key]}"
            for key in ("algorithm", "steps", "block_length", "cache", "temperature")
            if key in sampler
        )
        length = settings.get("completion_length")
        said.setdefault(text + (f", {length} tokens" if length else ""), []).append(recipe.name)
    if len(said) == 1:
        return (f"Decoding of the test items: {next(iter(said))}.",)
    return tuple(f"Decoding of the test items ({', '.join(names)}): {text}." for text, names in said.items())
