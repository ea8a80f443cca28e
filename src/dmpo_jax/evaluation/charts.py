"""Training curves as inline SVG whose colours are the page's own."""

import io
import math
import re
from dataclasses import dataclass

MAX_POINTS = 300
SERIES_COLOURS = 6
# SVG dash patterns; with six colours they tell twelve runs apart, and fewer without any colour.
DASHES = ("", "6 2", "2 1.5", "7 2 2 2")
# Matplotlib knows no CSS colours: it draws in these, and they are replaced in its output.
_INK = "#010203"
_GRID = "#010204"

Records = list[dict[str, float]]


@dataclass(frozen=True)
class Panel:
    """One chart: the metric `key` over cycles, shaded by `spread` on both sides or down to `floor`."""

    title: str
    key: str
    note: str = ""
    spread: str | None = None
    floor: str | None = None


_LOSS = (Panel("Loss", "loss"), Panel("Gradient norm", "grad_norm"))
_EVALUATION = (
    Panel("Validation accuracy", "eval/accuracy", "fraction; points are evaluations"),
    Panel("Validation exact solves", "eval/exact", "fraction; points are evaluations"),
)
_SPEED = (
    Panel("Completion length", "completion_length", "tokens"),
    Panel("Forward passes an answer", "nfe/mean"),
    Panel("Tokens per second", "tokens_per_second"),
    Panel("Seconds a cycle", "time/cycle_s"),
)
_REWARD = Panel(
    "Reward", "reward/mean", "mean of training answers; shaded: one standard deviation", spread="reward/std"
)
_GROUPS = (
    Panel("Effective sample size", "ess/mean", "mean; shaded down to the lowest group", floor="ess/min"),
    Panel("Log-ratio spread", "log_ratio/std", "standard deviation, nats"),
    Panel("Groups with equal rewards", "reward/zero_std_groups", "share; they carry no signal"),
)


def panels(runs: list[Records]) -> list[Panel]:
    """The charts that at least one of the runs has data for, in reading order."""
    keys = {key for records in runs for record in records for key in record}
    fixed = {"reward/mean", "reward/std", "reward/zero_std_groups"}
    components = tuple(
        Panel(f"Reward: {key.removeprefix('reward/')}", key, "mean of training answers")
        for key in sorted(keys)
        if key.startswith("reward/") and key not in fixed
    )
    wanted = (_REWARD, *_EVALUATION, *components, *_GROUPS, *_LOSS, *_SPEED)
    return [panel for panel in wanted if panel.key in keys]


def colour(series: int) -> str:
    """The CSS colour of a run."""
    return f"var(--series-{series % SERIES_COLOURS})"


def dash(series: int) -> str:
    """The SVG dash pattern of a run, empty for a solid line."""
    return DASHES[series % len(DASHES)]


def draw(panel: Panel, runs: list[Records], salt: str) -> str:
    """An `<svg>` of the panel, one line for each run that has it; equal inputs give equal text.

    No text from the data is drawn. `salt` keeps the ids of several charts on one page apart.
    """
    import matplotlib.style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    settings = {
        "svg.hashsalt": salt,
        "svg.fonttype": "none",
        "font.size": 10,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "grid.color": _GRID,
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "lines.scale_dashes": False,
    }
    with matplotlib.style.context(["default", settings]):
        figure = Figure(figsize=(5, 2.7), facecolor="none", layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot(facecolor="none")
        for series, records in enumerate(runs):
            _line(axes, panel, series, _thin([record for record in records if panel.key in record]))
        axes.set_xlabel("cycle")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        text = io.StringIO()
        figure.canvas.print_svg(text, metadata={"Date": None})
    return _inline(text.getvalue(), len(runs))


def _thin(records: Records) -> Records:
    """At most about MAX_POINTS records, evenly spaced, the last kept."""
    stride = math.ceil(len(records) / MAX_POINTS) or 1
    kept = records[::stride]
    return kept if not records or kept[-1] is records[-1] else [*kept, records[-1]]


def _line(axes, panel: Panel, series: int, records: Records) -> None:
    ink = _series_ink(series)
    cycles = [record["cycle"] for record in records]
    values = [record[panel.key] for record in records]
    pattern = tuple(float(part) for part in dash(series).split())
    axes.plot(
        cycles,
        values,
        color=ink,
        linewidth=1.6,
        linestyle=(0, pattern) if pattern else "solid",
        marker="o" if len(records) <= 40 else None,
        markersize=3.5,
    )
    if panel.spread:
        spread = [record.get(panel.spread, math.nan) for record in records]
        low = [value - width for value, width in zip(values, spread, strict=True)]
        high = [value + width for value, width in zip(values, spread, strict=True)]
    elif panel.floor:
        low, high = [record.get(panel.floor, math.nan) for record in records], values
    else:
        return
    axes.fill_between(cycles, low, high, color=ink, alpha=0.13, linewidth=0)


def _series_ink(series: int) -> str:
    return f"#0103{series % SERIES_COLOURS:02x}"


def _inline(svg: str, series: int) -> str:
    """Make a stand-alone SVG file part of a page: no prologue, namespaces, styles or unused ids."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    head, body = svg.split(">", 1)
    view = re.search(r'viewBox="[^"]*"', head).group()
    # Two decimals of a point are enough for a path; tick labels are text and stay as they are.
    body = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path.group()), body)
    body = body.replace(_INK, "currentColor").replace(_GRID, "var(--grid)")
    for one in range(min(series, SERIES_COLOURS)):
        body = body.replace(_series_ink(one), colour(one))
    return f'<svg {view} aria-hidden="true">{body.strip()}'
