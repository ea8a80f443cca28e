"""Runs that differ in their seed alone, taken together: one line of a table and one place of a figure for each recipe."""

import csv
import dataclasses
import io
import json
import re
import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path

from dmpo_jax.errors import UserError
from dmpo_jax.evaluation.intervals import newcombe, wilson
from dmpo_jax.evaluation.run_folder import RunFolder, read_runs
from dmpo_jax.training.metrics import write_text

# What may differ between runs of one recipe: seeds, and where they start from.
APART = {"run": ("seed", "start_from"), "task": ("seed",), "objective": ("teacher",)}
COLUMNS = (
    "recipe", "runs", "seeds", "n", "exact_before", "exact_after", "exact_after_low", "exact_after_high", "gain", "gain_low",
    "gain_high", "lowest_run", "highest_run", "accuracy_before", "accuracy_after", "cycles", "updates_a_cycle", "cycle_s",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Finished runs of one configuration but for their seeds; counts of exact solves over all their test items."""

    name: str
    runs: tuple[RunFolder, ...]
    settings: dict  # but for the seeds
    seeds: str = ""  # of the runs, in their order

    @property
    def items(self) -> int:
        """Test items of all runs together."""
        return sum(run.after.n for run in self.runs)

    def solved(self, when: str) -> float:
        """Exact solves of all runs `before` or `after` training."""
        return sum(getattr(run, when).exact * getattr(run, when).n for run in self.runs)

    def figures(self) -> dict[str, str | float | int]:
        """The line of the table, by COLUMNS; shares in [0, 1], intervals of 95 % over the pooled items."""
        n, before, after = self.items, self.solved("before"), self.solved("after")
        low, high = wilson(after, n)
        gain = newcombe(after, n, before, n)
        each = [run.after.exact for run in self.runs]
        seconds = [r["time/cycle_s"] for run in self.runs for r in run.metrics if "time/cycle_s" in r]
        mean = lambda when: statistics.mean(getattr(run, when).accuracy for run in self.runs)  # noqa: E731
        values = (
            self.name, len(self.runs), self.seeds, n, before / n, after / n, low, high, (after - before) / n, *gain,
            min(each), max(each), mean("before"), mean("after"), self.settings["run"]["cycles"],
            self.settings["objective"]["updates"], statistics.median(seconds) if seconds else float("nan"),
        )  # fmt: skip
        return dict(zip(COLUMNS, values, strict=True))


def recipes(run_dirs: list[Path]) -> list[Recipe]:
    """Finished, tested runs by recipe, in the order in which they are given. Raises UserError where there are none."""
    found: dict[str, list[tuple[RunFolder, dict, str]]] = {}
    for run in read_runs(run_dirs):
        tested = run.before and run.after and run.config and None not in (run.before.exact, run.after.exact)
        if (
            run.pretraining
            or not tested
            or run.before.n != run.after.n
            or None in (run.before.accuracy, run.after.accuracy)
        ):
            continue
        try:
            settings = tomllib.loads(run.config)
            settings["run"]["cycles"], settings["objective"]["updates"]
        except (ValueError, KeyError, TypeError):
            continue
        seed = str(settings["run"].get("seed", "?"))
        for section, keys in APART.items():
            for key in keys:
                settings.get(section, {}).pop(key, None)
        found.setdefault(json.dumps(settings, sort_keys=True), []).append((run, settings, seed))
    if not found:
        raise UserError(
            "--tables: none of these runs is finished and tested before and after; give those of dmpo train"
        )
    return [
        Recipe(
            _name(members[0][0].label),
            tuple(run for run, _, _ in members),
            members[0][1],
            " ".join(seed for _, _, seed in members),
        )
        for members in found.values()
    ]


def _name(label: str) -> str:
    return re.sub(r"[-_]\d+$", "", label) or label


HEAD = (
    "recipe", "seeds", "n", "exact solves before, %", "after, % [95 %]", "gain, points [95 %]", "lowest, highest run",
    "accuracy before, after, %", "cycles x updates", "s a cycle",
)  # fmt: skip
NOTE = (
    "Intervals are Wilson's (Newcombe's for gains) over the test items of all runs of a recipe taken together; they do not "
    "cover how runs of other seeds would differ, for which see the lowest and the highest run."
)


def write_tables(run_dirs: list[Path], folder: Path) -> str:
    """Writes tables.md (returned), tables.csv and comparison.png.

    Raises UserError where no run is finished or nothing can be written.
    """
    found = recipes(run_dirs)
    lines = [recipe.figures() for recipe in found]
    rule = "|---|" + "--:|" * (len(HEAD) - 1)
    table = "\n".join([_row(HEAD), rule, *(_row(cells(line)) for line in lines), "", NOTE, ""])
    try:
        write_text(folder / "tables.csv", comma_separated(COLUMNS, lines))
        write_text(folder / "tables.md", table)
        (folder / "comparison.png").write_bytes(drawn(found, lines))
    except OSError as error:
        raise UserError(f"--tables {folder}: cannot be written ({error.strerror}); give another folder") from None
    return table


def _row(values: tuple[str, ...]) -> str:
    return f"| {' | '.join(values)} |"


def comma_separated(columns: Sequence[str], lines: Sequence[dict]) -> str:
    """A CSV file; what a line lacks is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def cells(line: dict) -> tuple[str, ...]:
    """The figures of a recipe as they are shown under HEAD."""
    share = {name: f"{100 * value:.1f}" for name, value in line.items() if isinstance(value, float)}
    return (
        line["recipe"],
        line["seeds"],
        str(line["n"]),
        share["exact_before"],
        f"{share['exact_after']} [{share['exact_after_low']}, {share['exact_after_high']}]",
        f"{100 * line['gain']:+.1f} [{share['gain_low']}, {share['gain_high']}]",
        f"{share['lowest_run']}, {share['highest_run']}",
        f"{share['accuracy_before']}, {share['accuracy_after']}",
        f"{line['cycles']} x {line['updates_a_cycle']}",
        f"{line['cycle_s']:.2f}",
    )


def drawn(found: list[Recipe], lines: list[dict]) -> bytes:
    """Left: exact solves before and after, every run a dot. Right: the mean training reward over the rollouts used."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 1.6 + 0.34 * len(found)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    solves, curves = figure.subplots(1, 2)
    for place, (recipe, line) in enumerate(zip(found, lines, strict=True)):
        ends = [[line["exact_after"] - line["exact_after_low"]], [line["exact_after_high"] - line["exact_after"]]]
        solves.errorbar(
            [100 * line["exact_after"]],
            [place],
            xerr=[[100 * e[0]] for e in ends],
            fmt="D",
            color="C0",
            capsize=3,
            zorder=3,
        )
        solves.scatter(
            [100 * run.after.exact for run in recipe.runs], [place] * len(recipe.runs), s=14, color="C0", alpha=0.5
        )
        solves.scatter([100 * line["exact_before"]], [place], marker="|", s=120, color="0.4")
        cycles = sorted(
            set.intersection(*({r["cycle"] for r in run.metrics if "reward/mean" in r} for run in recipe.runs))
        )
        by_cycle = [{r["cycle"]: r["reward/mean"] for r in run.metrics if "reward/mean" in r} for run in recipe.runs]
        mean = [statistics.mean(values[cycle] for values in by_cycle) for cycle in cycles]
        style = ("-", "--", ":", "-.")[place // 10 % 4]
        curves.plot(cycles, mean, style, color=f"C{place % 10}", linewidth=1.4, label=recipe.name)
    solves.set_yticks(range(len(found)), [recipe.name for recipe in found])
    solves.invert_yaxis()
    solves.set_xlabel("exact solves of held-out items, %: before (bar), after (pooled, 95 %), every run (dots)")
    solves.grid(axis="x", alpha=0.3)
    curves.set_xlabel("cycle")
    curves.set_title("mean reward of training answers", fontsize=10)
    curves.grid(alpha=0.3)
    figure.legend(*curves.get_legend_handles_labels(), fontsize=7, ncols=10, loc="outside lower center")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", metadata={"Software": None})
    return picture.getvalue()
