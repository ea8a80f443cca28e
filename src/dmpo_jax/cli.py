"""The command line."""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from dmpo_jax.errors import UserError, ending, one_line
from dmpo_jax.inputs import regular_size


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; bad usage, configuration or data gives one line on stderr and exit code 2."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args)
    except (UserError, OSError, KeyboardInterrupt) as error:
        ended = ending(error)
        if ended is None:
            raise
        code, text = ended
        print(f"dmpo: {one_line(text)}", file=sys.stderr)
        return code


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        see = f"see dmpo {self.prog.partition(' ')[2]} --help".replace("  ", " ")
        print(f"dmpo: {one_line(message)}; {see}", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dmpo", description="Post-train masked-diffusion language models with DMPO, in JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, run, text: str, config: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        if config:
            with_settings(sub)
        return sub

    def with_settings(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("config", metavar="CONFIG.toml")
        sub.add_argument("--set", action="append", default=[], metavar="section.key=value", help="override one setting")

    train = command("train", _train, "Train, or go on where the run folder's newest checkpoint is.")
    train.add_argument("--run-dir", type=Path, help="default: runs/<name of the configuration>")
    train.add_argument(
        "--distributed",
        default="auto",
        metavar="auto|off|HOST:PORT",
        help="run as one of several processes: as the environment says (default), not, or meeting at process 0's HOST:PORT",
    )
    train.add_argument("--processes", type=int, metavar="N", help="with HOST:PORT: how many processes there are")
    train.add_argument("--process", type=int, metavar="I", help="with HOST:PORT: which of them this is, from 0")

    evaluate = command("eval", _eval, "Decode and grade held-out examples; writes FILE.json and FILE.jsonl.")
    source = evaluate.add_mutually_exclusive_group(required=True)
    source.add_argument("--run-dir", type=Path, help="run folder whose newest parameters answer")
    source.add_argument("--model", help="checkpoint folder or hub id whose weights answer, in place of a run")
    source.add_argument(
        "--generations",
        nargs="+",
        metavar="FILE",
        help="grade the answers in these files anew, by the published rules too",
    )
    evaluate.add_argument("--data", default="", help="data file in a published format; default: the task's test split")
    evaluate.add_argument("--out", type=Path, required=True, metavar="FILE.json")

    sampling = command("sample", _sample, "Answer prompts; JSON lines where there are several.")
    source = sampling.add_mutually_exclusive_group(required=True)
    source.add_argument("--run-dir", type=Path, help="run folder whose newest parameters answer")
    source.add_argument("--model", help="checkpoint folder or hub id whose weights answer, in place of a run")
    sampling.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    sampling.add_argument("--file", type=Path, help="a text file with a prompt a line")
    sampling.add_argument("--watch", action="store_true", help="draw every denoising step on stderr")

    importer = command("import", _import, "Check a checkpoint's every name and shape, and copy it.", config=False)
    importer.add_argument(
        "source", metavar="SRC", help="folder with config.json and *.safetensors, or a hub id owner/name"
    )
    importer.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder, for model.pretrained")
    importer.add_argument("--dtype", choices=("float32", "bfloat16"), default="", help="default: the source's")

    export = command("export", _export, "Write a run's newest policy in the Hugging Face layout.", config=False)
    export.add_argument("--run-dir", type=Path, required=True, help="run folder whose newest parameters are written")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder")
    export.add_argument("--adapter", action="store_true", help="the PEFT adapter alone, not merged into the weights")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of merged weights")

    report = command("report", _report, "One self-contained HTML page on one or several runs.", config=False)
    report.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    report.add_argument("--out", type=Path, default=Path("report.html"))
    report.add_argument(
        "--tables",
        type=Path,
        metavar="DIR",
        help="tables.md, tables.csv and comparison.png too, runs of other seeds together",
    )

    planning = command(
        "plan", _plan, "Compile a run for devices that are not here: does it fit, what does it exchange?"
    )
    planning.add_argument(
        "--topology",
        action="append",
        required=True,
        metavar="NAME",
        help="as v5p:2x2x4 or h100:8; may be given several times",
    )
    planning.add_argument(
        "--quick", action="store_true", help="low compiler effort: a fifth of the time, memory within 13 %%"
    )
    planning.add_argument(
        "--cycle-only",
        action="store_true",
        help="the whole cycle, the largest program, without its parts: half the time",
    )
    planning.add_argument("--out", type=Path, metavar="FILE.json")

    bench = command("bench", _bench, "Seconds by phase of a cycle, or (sample) of every sampler.", config=False)
    bench.add_argument("what", nargs="?", choices=("sample",), help="compare samplers instead")
    with_settings(bench)
    bench.add_argument(
        "--prompt-width", type=int, metavar="N", help="sample: tokens of its made-up prompts; default: 128"
    )
    bench.add_argument("--only", metavar="NAME[;NAME]", help="sample: these samplers instead of all")
    bench.add_argument("--repeats", type=_positive, default=5, help="timed runs of each phase; the median is reported")
    bench.add_argument("--out", type=Path, metavar="FILE.json")

    diagnose = command("doctor", _doctor, "What this machine has, what is installed and what is wrong.", config=False)
    diagnose.add_argument("config", metavar="CONFIG.toml", nargs="?", help="say too whether this one fits")
    diagnose.add_argument("--set", action="append", default=[], metavar="section.key=value", help="one setting")
    diagnose.add_argument("--json", action="store_true", help="one JSON object in place of lines")
    return parser


def _prepare_jax(config) -> None:
    import jax

    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or os.path.expanduser(config.run.compilation_cache)
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _stopped_early(*_) -> None:
    # Not an exception: whatever is being imported, traced or printed might catch it, or show a traceback.
    text = "stopped by SIGTERM with nothing unsaved; run the same command to go on"
    joined = sys.modules.get("dmpo_jax.parallel.distributed")
    if joined and joined.count() > 1:
        joined.end(128 + signal.SIGTERM, text)
    os.write(2, f"dmpo: {text}\n".encode())
    os._exit(128 + signal.SIGTERM)


def _train(args) -> int:
    previous = signal.signal(signal.SIGTERM, _stopped_early)  # until the run has its own, which saves
    try:
        from dmpo_jax.config import load_config
        from dmpo_jax.parallel import distributed
        from dmpo_jax.training.loggers import check_loggers
        from dmpo_jax.training.loop import train
        from dmpo_jax.training.memory import check_memory

        cluster = distributed.find(args.distributed, args.processes, args.process)
        config = load_config(args.config, args.set)
        check_loggers(config.logging)
        _prepare_jax(config)
        with distributed.ending_together():
            if cluster:
                distributed.start(cluster, config.run.start_timeout, config.run.heartbeat)
            check_memory(config)
            code = train(config, args.run_dir or Path("runs") / Path(args.config).stem)
            distributed.stop()
        return code
    finally:
        signal.signal(signal.SIGTERM, previous)


def _answering_config(args, command: str, used: tuple[str, ...]):
    """The configuration of a command that takes its weights from --run-dir or --model, with --data or without."""
    from dmpo_jax.config import load_config
    from dmpo_jax.evaluation.command import check_settings

    model = [f"model.pretrained={json.dumps(args.model)}"] if args.model else []
    config = load_config(args.config, [*args.set, *model])
    given = {"--run-dir": args.run_dir, "--model": args.model, "--data": getattr(args, "data", "")}
    check_settings(config, args.set, command, used, [option for option, value in given.items() if value])
    return config


def _eval(args) -> int:
    if args.generations:
        from dmpo_jax.evaluation.regrade import regrade

        result = regrade(Path(args.config), args.set, args.generations, args.out, args.data)
        print(json.dumps({key: result[key] for key in ("task", "n", "published", "strict", "differences", "reasons")}))
        return 0
    from dmpo_jax.evaluation.command import EVAL_SETTINGS, evaluate_run
    from dmpo_jax.training.memory import check_memory

    config = _answering_config(args, "eval", EVAL_SETTINGS)
    _prepare_jax(config)
    check_memory(config, config.evaluation.batch)
    result = evaluate_run(config, args.run_dir, args.data, args.out)
    print(json.dumps({key: result[key] for key in ("task", "n", "exact", "exact_ci95", "accuracy", "mean_nfe")}))
    return 0


def _sample(args) -> int:
    from dmpo_jax.evaluation.command import SAMPLE_SETTINGS
    from dmpo_jax.evaluation.sample import read_prompts, sample_prompts
    from dmpo_jax.training.memory import check_memory

    if args.file:
        regular_size(args.file, 100_000_000)
    prompts = [*args.prompt, *(read_prompts(args.file) if args.file else [])]
    if not prompts:
        raise UserError("dmpo sample needs --prompt TEXT or --file FILE")
    config = _answering_config(args, "sample", SAMPLE_SETTINGS)
    _prepare_jax(config)
    check_memory(config, min(len(prompts), config.evaluation.batch))
    answers = sample_prompts(config, args.run_dir, prompts, args.watch)
    for answer in answers:
        print(json.dumps(answer, ensure_ascii=False) if len(answers) > 1 else answer["completion"])
    return 0


def _import(args) -> int:
    from dmpo_jax.model.checkpoint_folder import check_folder
    from dmpo_jax.model.parameters import count_params
    from dmpo_jax.model.pretrained import import_checkpoint

    check_folder(args.out)
    config, dtype = import_checkpoint(args.source, args.out, args.dtype)
    print(f"{args.out}: {config.family}, {count_params(config):,} parameters in {dtype}")
    return 0


def _export(args) -> int:
    from dmpo_jax.model.checkpoint_folder import check_folder
    from dmpo_jax.training.export import export_run

    check_folder(args.out)
    export_run(args.run_dir, args.out, args.adapter, args.dtype)
    print(args.out)
    return 0


def _report(args) -> int:
    from dmpo_jax.evaluation.comparison import write_tables
    from dmpo_jax.evaluation.report import write_report

    write_report(args.run_dirs, args.out)
    print(args.out)
    if args.tables:
        print(write_tables(args.run_dirs, args.tables))
    return 0


def _plan(args) -> int:
    from dmpo_jax.config import load_config
    from dmpo_jax.planning.plan import as_text, plan
    from dmpo_jax.training.metrics import check_output

    config = load_config(args.config, args.set)
    if args.out:
        check_output(args.out, ".json")
    found = plan(config, args.topology, args.quick, lambda one: print(as_text(one), flush=True), args.cycle_only)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _bench(args) -> int:
    from dmpo_jax.config import load_config
    from dmpo_jax.evaluation import sampler_table
    from dmpo_jax.training.bench import bench
    from dmpo_jax.training.memory import check_memory
    from dmpo_jax.training.metrics import check_output

    if args.what is None and (args.prompt_width is not None or args.only is not None):
        raise UserError("--prompt-width and --only belong to dmpo bench sample")
    if args.prompt_width is not None and args.prompt_width < 1:
        raise UserError(f"--prompt-width {args.prompt_width}: expected a positive number")
    config = load_config(args.config, args.set)
    if args.out:
        check_output(args.out, ".json")
    _prepare_jax(config)
    check_memory(config, config.rollout.prompts * config.rollout.group if args.what == "sample" else 0)
    if args.what == "sample":
        only = tuple(args.only.split(";")) if args.only else ()
        show = lambda line: print(line, flush=True)  # noqa: E731
        result = sampler_table.table(config, args.repeats, args.prompt_width or 128, only, show)
    else:
        result = bench(config, args.repeats)
        print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def _doctor(args) -> int:
    from dmpo_jax.doctor import doctor

    if args.set and not args.config:
        raise UserError("--set overrides settings of a CONFIG.toml; name one")
    return doctor(args.config, args.set, args.json)
