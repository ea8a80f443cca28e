"""One self-contained HTML page about one or several runs."""

import html
import json
from pathlib import Path

from dmpo_jax.errors import UserError
from dmpo_jax.evaluation.charts import colour, dash, draw, panels
from dmpo_jax.evaluation.gallery import gallery, visible
from dmpo_jax.evaluation.intervals import newcombe, wilson
from dmpo_jax.evaluation.report_page import document
from dmpo_jax.evaluation.run_folder import Result, RunFolder, number, read_runs


def write_report(run_dirs: list[Path], out: Path) -> None:
    """Write one HTML file about the given run folders: verdict, table, curves, answers, configs.

    Unfinished runs are reported as far as they got, with a line on what is missing. Raises UserError for a
    folder without metrics.jsonl and for a path that cannot be written.
    """
    page = _page(read_runs(run_dirs))
    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the report to {out} ({error.strerror}); give a writable file") from None


def _page(runs: list[RunFolder]) -> str:
    policy = [run for run in runs if not run.pretraining]
    pretraining = [run for run in runs if run.pretraining]
    tasks = sorted({run.task for run in runs if run.task})
    title = f"Report: {', '.join(tasks)}" if tasks else "Report"
    galleries = [(run, gallery(run)) for run in runs]
    parts = [
        f"<h1>{visible(title)}</h1>",
        _verdict(runs),
        _missing(runs),
        _section("Before and after", _table(runs)),
        _section("Training curves", _curves(policy, "train")),
        _section("Pretraining curves (denoising loss)", _curves(pretraining, "pretrain")),
        _section(
            "Answers",
            "".join(
                _collapsed(run, body, open_=i == 0) for i, (run, body) in enumerate((r, b) for r, b in galleries if b)
            ),
        ),
        _section("Configuration", "".join(_configuration(run) for run in runs)),
        _section("Versions", _versions(runs)),
    ]
    return document("Training report", parts)


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}\u00a0%"


def _points(fraction: float) -> str:
    return f"{100 * fraction:+.1f}".replace("-", "−")


def _interval(ends: tuple[float, float]) -> str:
    return f"{100 * ends[0]:.1f} to {100 * ends[1]:.1f}\u00a0%"


def _exact(result: Result | None) -> tuple[float, int] | None:
    """Number of exact solves and of items, where both are known."""
    if result is None or result.exact is None or result.n is None:
        return None
    return result.exact * result.n, result.n


def _verdict(runs: list[RunFolder]) -> str:
    changes = [
        (after[0] / after[1], before[0] / before[1])
        for run in runs
        if not run.pretraining and (before := _exact(run.before)) and (after := _exact(run.after))
    ]
    sentences = [_run_verdict(run) for run in runs]
    if len(runs) == 1:
        return f'<p class="verdict">{sentences[0]}</p>'
    lead = ""
    if len(changes) > 1:
        mean_after, mean_before = (sum(column) / len(changes) for column in zip(*changes, strict=True))
        gains = [after - before for after, before in changes]
        lead = (
            f"Mean of {len(changes)} runs: exact solves {_percent(mean_before)} before, "
            f"{_percent(mean_after)} after, {_points(mean_after - mean_before)} points "
            f"(lowest run {_points(min(gains))}, highest {_points(max(gains))}). "
        )
    items = "".join(f"<li>{sentence}</li>" for sentence in sentences)
    return (f'<p class="verdict">{lead}</p>' if lead else "") + f"<ul>{items}</ul>"


def _run_verdict(run: RunFolder) -> str:
    name = f"<b>{visible(run.label)}</b>" + (" (pretraining)" if run.pretraining else "")
    seconds = number(run.summary.get("seconds"))
    cycles = f"{len(run.metrics)} cycle{'s' * (len(run.metrics) != 1)}"
    length = f" {cycles} on file" + ("." if seconds is None else f"; the run took {seconds:.0f} s.")
    before, after = _exact(run.before), _exact(run.after)
    task = f"{visible(run.task)} test items" if run.task else "test items"
    if before and after:
        shares = [s / n for s, n in (before, after)]
        low, high = newcombe(*after, *before)
        change = shares[1] - shares[0]
        items = f"{after[1]}" if before[1] == after[1] else f"{before[1]} (before) and {after[1]} (after)"
        if low <= 0 <= high:
            meaning = " The interval includes 0: this test shows no difference."
        else:
            meaning = "" if change > 0 else " The policy got worse."
        return (
            f"{name}: on {items} {task}, exact solves went from {_percent(shares[0])} (95 % interval "
            f"{_interval(wilson(*before))}) to {_percent(shares[1])} ({_interval(wilson(*after))}): "
            f"{_points(change)} points (95 % interval {_points(low)} to {_points(high)}).{meaning}"
            f"{_flips(run)}{length}"
        )
    for known, when in ((after, "after"), (before, "before")):
        if known:
            return (
                f"{name}: on {known[1]} {task}, exact solves {when} training are "
                f"{_percent(known[0] / known[1])} (95 % interval {_interval(wilson(*known))}); "
                f"there is no other test to compare with.{length}"
            )
    rewards = [record["reward/mean"] for record in run.metrics if "reward/mean" in record]
    losses = [record["loss"] for record in run.metrics if "loss" in record]
    if rewards:
        progress = f" Mean reward on training prompts: {rewards[0]:.3f} first, {rewards[-1]:.3f} last."
    elif losses:
        progress = f" Loss: {losses[0]:.3f} first, {losses[-1]:.3f} last."
    else:
        progress = ""
    return f"{name}: no test results.{progress}{length}"


def _flips(run: RunFolder) -> str:
    """How many of the same test items changed, where both answer files are complete."""
    before, after = run.before_items, run.after_items
    if not len(before) == len(after) == run.after.n == run.before.n:
        return ""
    pairs = list(zip(before, after, strict=True))
    if any(b.get("prompt") != a.get("prompt") or "exact" not in b or "exact" not in a for b, a in pairs):
        return ""
    won = sum(bool(a["exact"]) and not b["exact"] for b, a in pairs)
    lost = sum(bool(b["exact"]) and not a["exact"] for b, a in pairs)
    return f" Item by item, {won} became exact and {lost} ceased to be."


def _missing(runs: list[RunFolder]) -> str:
    notes = [f"<li><b>{visible(run.label)}</b>: {visible(note)}</li>" for run in runs for note in run.missing]
    if not notes:
        return ""
    return f'<section class="missing"><h2>What is missing</h2><ul>{"".join(notes)}</ul></section>'


def _table(runs: list[RunFolder]) -> str:
    rows: list[str] = []
    baselines: dict[str, tuple[str, str]] = {}
    for run in runs:
        for when, result in (("before", run.before), ("after", run.after)):
            if result is not None:
                rows.append(_row(f"{visible(run.label)}, {when}", result))
                baselines.update({name: _baseline(value) for name, value in result.baselines.items()})
    if not rows:
        return ""
    rows += [
        f'<tr class="baseline"><td>trivial: {visible(name)}</td><td></td><td>{exact}</td><td>{accuracy}</td>'
        "<td></td><td></td></tr>"
        for name, (accuracy, exact) in baselines.items()
    ]
    heads = ("", "items", "exact solves", "accuracy", "forwards an answer", "tokens/s")
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    note = (
        "Intervals are 95 %: of exact solves by Wilson's method, of a difference by Newcombe's, which takes "
        "the two tests as independent and is cautious when they share their items. "
        "A trivial baseline given as one number is an accuracy."
    )
    return (
        f'<div class="scroll"><table class="numbers"><thead><tr>{head}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table></div><p class="small">{note}</p>'
    )


def _row(label: str, result: Result) -> str:
    def cell(value: float | None, text: str, ends: tuple[float, float] | None = None) -> str:
        if value is None:
            return "<td>–</td>"
        below = f'<span class="small">{_interval(ends)}</span>' if ends else ""
        return f"<td>{text}{below}</td>"

    solved = _exact(result)
    accuracy, exact = result.accuracy, result.exact
    return (
        f"<tr><td>{label}</td>{cell(result.n, str(result.n))}"
        + cell(exact, "" if exact is None else _percent(exact), wilson(*solved) if solved else None)
        + cell(accuracy, "" if accuracy is None else _percent(accuracy), result.accuracy_ci95)
        + cell(result.mean_nfe, f"{result.mean_nfe or 0:.1f}")
        + cell(result.tokens_per_second, f"{result.tokens_per_second or 0:,.0f}")
        + "</tr>"
    )


def _baseline(value: object) -> tuple[str, str]:
    pair = (value.get("accuracy"), value.get("exact")) if isinstance(value, dict) else (value, None)
    return tuple("" if number(x) is None else _percent(number(x)) for x in pair)


def _curves(runs: list[RunFolder], salt: str) -> str:
    drawn = [run for run in runs if run.metrics]
    figures = []
    for k, panel in enumerate(panels([run.metrics for run in drawn])):
        note = f'<span class="small"> {html.escape(panel.note)}</span>' if panel.note else ""
        figures.append(
            f"<figure><figcaption>{visible(panel.title)}{note}</figcaption>"
            f"{draw(panel, [run.metrics for run in drawn], f'{salt}-{k}')}</figure>"
        )
    if not figures:
        return ""
    legend = "".join(
        f'<li><svg viewBox="0 0 36 8" aria-hidden="true"><line x1="0" y1="4" x2="36" y2="4" style="stroke: '
        f'{colour(i)}; stroke-width: 2; stroke-dasharray: {dash(i) or "none"}"/></svg>'
        f"{visible(run.label)}</li>"
        for i, run in enumerate(drawn)
    )
    return f'<ul class="legend">{legend}</ul><div class="charts">{"".join(figures)}</div>'


def _collapsed(run: RunFolder, body: str, open_: bool) -> str:
    return f"<details{' open' if open_ else ''}><summary>{visible(run.label)}</summary>{body}</details>"


def _configuration(run: RunFolder) -> str:
    body = f"<pre>{visible(run.config, 100_000)}</pre>" if run.config is not None else "<p>no config.toml</p>"
    settings = {
        f"test {when}": result.settings
        for when, result in (("before", run.before), ("after", run.after))
        if result is not None and result.settings
    }
    if settings:
        body += f"<p>Settings of the tests</p><pre>{visible(json.dumps(settings, indent=1), 20_000)}</pre>"
    return _collapsed(run, f'<p class="small">{visible(str(run.path))}</p>{body}', open_=False)


def _versions(runs: list[RunFolder]) -> str:
    lines: dict[str, list[str]] = {}
    for run in runs:
        versions = run.summary.get("versions")
        if isinstance(versions, dict) and versions:
            text = ", ".join(f"{key} {value}" for key, value in sorted(versions.items()))
            lines.setdefault(text, []).append(run.label)
    return "".join(f"<p>{visible(text)} ({visible(', '.join(labels))})</p>" for text, labels in lines.items())
