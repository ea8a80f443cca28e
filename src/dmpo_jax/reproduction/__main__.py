"""`launch/reproduce`: the paper's tables, from lists of runs to tables.md, tables.csv and report.html.

Examples: launch/reproduce --scale small --jobs 2; launch/reproduce --scale 8b --target slurm --only '*-dmpo-*' --dry-run
"""

import argparse
import importlib.metadata
import os
import platform
import shlex
import sys
import time
from pathlib import Path

from dmpo_jax.errors import UserError, ending, one_line
from dmpo_jax.reproduction.execute import Outcome, execute, locked, shares_of
from dmpo_jax.reproduction.listing import listing, totals
from dmpo_jax.reproduction.manifest import Manifest, check_seed, read_manifest
from dmpo_jax.reproduction.reading import check_known
from dmpo_jax.reproduction.steps import Step, Wanted, select, steps_of
from dmpo_jax.reproduction.targets import DEFAULT_HARDWARE, TARGETS, Target, child_variables, make_target

LISTS = Path("configs/reproduce")
PUBLISHED = Path("configs/published")
PLANS = LISTS / "plan.json"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        print(f"reproduce: {one_line(message)}; see launch/reproduce --help", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="launch/reproduce", description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--scale", choices=("small", "8b"), required=True)
    parser.add_argument("--target", choices=TARGETS, help="8b: where; default: local")
    parser.add_argument("--hardware", action="append", metavar="NAME", help="8b: of configs/reproduce/8b.toml")
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="runs of that name, and their needs"
    )
    parser.add_argument("--seeds", metavar="S[,S]", help="default: those of the list")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time, each on its share of the cores"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: runs/reproduce/SCALE")
    parser.add_argument("--data", default="data", metavar="DIR", help="8b: folder of the tasks' files; default: data")
    parser.add_argument("--dry-run", action="store_true", help="list every run, start nothing")
    parser.add_argument("--resume", action="store_true", help="go on where an earlier start stopped (always so)")
    parser.add_argument("--tables", action="store_true", help="write the tables of what is there, run nothing")
    parser.add_argument("--refresh-plan", action="store_true", help="8b: dmpo plan for what plan.json lacks")
    parser.add_argument("--list", type=Path, metavar="FILE.toml", help="another list of runs than the scale's own")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 when all is finished, 1 when something failed, 2 for bad usage, 128 + N after signal N."""
    args = _parser().parse_args(arguments)
    args.words = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(args)
    except (UserError, OSError, KeyboardInterrupt) as error:
        ended = ending(error)
        if ended is None:
            raise
        code, text = ended
        print(f"reproduce: {one_line(text)}", file=sys.stderr)
        return code


def _run(args: argparse.Namespace) -> int:
    manifest = read_manifest(args.list or LISTS / f"{args.scale}.toml")
    large = args.scale == "8b"
    for key in ("target", "hardware", "refresh_plan"):
        if getattr(args, key) and not large:
            raise UserError(f"--{key.replace('_', '-')} belongs to --scale 8b; leave it out")
    for name in args.hardware or ():
        check_known("--hardware", name, manifest.hardware)
    place = args.target or "local"
    if args.jobs < 1 or (args.jobs > 1 and large and place != "slurm"):
        raise UserError(f"--jobs {args.jobs}: expected 1 or more, and 1 for 8b on anything but slurm")
    if args.refresh_plan:
        return _refresh(args, manifest)
    names = args.hardware or ([DEFAULT_HARDWARE[place]] if large else [])
    if len(names) > 1:
        raise UserError(f"--hardware {' '.join(names)}: expected one; several are for --refresh-plan")
    hardware = manifest.hardware[names[0]] if names else None
    target = make_target(place, hardware, os.environ, args.dry_run or args.tables)
    wanted = Wanted(
        args.out or Path(manifest.out), _seeds(args.seeds, manifest), tuple(args.only), args.data,
        hardware.mesh if hardware else (),
    )  # fmt: skip
    if target.marks and wanted.out.is_absolute():
        raise UserError(
            f"--out {wanted.out}: expected a folder of the bucket, such as {manifest.out}, for --target {place}"
        )
    steps = steps_of(manifest, wanted, target)
    if args.dry_run:
        return _dry_run(args, manifest, wanted, steps, target)
    started = time.monotonic()
    outcome = Outcome({})
    if not args.tables:
        if large:
            _check_recipes(manifest, wanted)
            _check_files(manifest, steps, target)
        lock = locked(wanted.out)
        shares = [None] * args.jobs if large else shares_of(args.jobs)
        outcome = execute(steps, shares, wanted.out / "logs", child_variables(), lock)
    if not outcome.stopped:
        _write_tables(args, manifest, wanted, large, time.monotonic() - started)
    if target.marks and not outcome.code:
        again = f"launch/reproduce --scale 8b --target local --out {target.seen(wanted.out)}"
        print(f"evaluate where the run folders are seen, with dmpo: {again}")
    for name, reason in outcome.failed.items():
        print(f"failed: {name}: {reason}", file=sys.stderr)
    return outcome.code


def _seeds(text: str | None, manifest: Manifest) -> tuple[int, ...]:
    if text is None:
        return manifest.seeds
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and len(word) < 12 for word in words) or len(set(words)) < len(words):
        raise UserError(f"--seeds {text[:80]}: expected whole numbers such as 0,1,2, each once")
    for word in words:
        check_seed("--seeds", int(word))
    return tuple(map(int, words))


def _check_recipes(manifest: Manifest, wanted: Wanted) -> None:
    """Every recipe is loaded before the first run starts, so that a wrong one is found at once."""
    from dmpo_jax.config import load_config

    for run in select(manifest, wanted.only):
        load_config(run.config)


def _check_files(manifest: Manifest, steps: list[Step], target: Target) -> None:
    if target.marks:  # the files lie elsewhere
        return
    for step in steps:
        for file in step.files:
            if not Path(file).is_file():
                source = manifest.tasks[step.run.task].source
                raise UserError(f"{file}: no such file, which {step.name} reads; put there {source}, or give --data")


def _dry_run(args: argparse.Namespace, manifest: Manifest, wanted: Wanted, steps: list[Step], target: Target) -> int:
    texts: dict[str, dict[str, str]] = {}
    hours: dict[str, dict[str, float | None]] = {}
    if manifest.hardware:
        from dmpo_jax.config import load_config
        from dmpo_jax.reproduction.estimate import estimate, read_plans, shown

        plans = read_plans(PLANS)
        for run in select(manifest, wanted.only):
            config = load_config(run.config)
            found = {
                name: estimate(plans, config, kind, manifest.share_of_peak) for name, kind in manifest.hardware.items()
            }
            texts[run.config] = {manifest.hardware[name].title: shown(one) for name, one in found.items()}
            hours[run.config] = {name: one.hours for name, one in found.items()}
    variables = {} if manifest.hardware else child_variables()
    place = target.hardware.title if target.hardware else manifest.hardware_note
    print(f"{manifest.path}: {len(steps)} steps in {wanted.out}, {args.jobs} at a time; target {target.name}, {place}")
    for line in listing(steps, texts, variables):
        print(line)
    for line in totals(manifest, steps, hours):
        print(line)
    return 0


def _refresh(args: argparse.Namespace, manifest: Manifest) -> int:
    from dmpo_jax.reproduction.refresh import refresh

    dmpo = make_target("local", None, os.environ, True).dmpo
    names = args.hardware or list(manifest.hardware)
    failed = refresh(manifest, select(manifest, args.only), names, PLANS, dmpo, lambda text: print(text, flush=True))
    return int(bool(failed))


def _write_tables(args: argparse.Namespace, manifest: Manifest, wanted: Wanted, large: bool, seconds: float) -> None:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("dmpo_jax", "jax"))
    about = [
        f"Command: launch/reproduce {shlex.join(args.words)}",
        f"List of runs: {manifest.path}; seeds {' '.join(map(str, wanted.seeds))}.",
        f"Written with {versions}, Python {platform.python_version()}, on {os.cpu_count()} cores of {platform.machine()}.",
    ]
    if not args.tables:
        about.append(f"This start took {seconds / 60:.1f} minutes; runs that were finished before it are not in that.")
    if large:
        from dmpo_jax.reproduction.large_tables import write_large
        from dmpo_jax.reproduction.published import read_published

        files = write_large(manifest, read_published(PUBLISHED), wanted.out, wanted.seeds, about)
    else:
        from dmpo_jax.reproduction.small_tables import write_small

        files = write_small(manifest, wanted.out, wanted.seeds, about)
    print("\n".join(map(str, files)) if files else "no run is finished yet: no tables")


if __name__ == "__main__":
    sys.exit(main())
