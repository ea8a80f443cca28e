"""launch/reproduce against a stand-in for dmpo: what is skipped, what goes on, what fails, and that no child is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dmpo_jax.errors import UserError
from dmpo_jax.reproduction.execute import locked, shares_of

ROOT = Path(__file__).parents[1]
LIST = """
out = "out"
seeds = [0]
seeded = ["run.seed"]
[[run]]
name = "first"
config = "recipe.toml"
[[run]]
name = "second"
config = "recipe.toml"
needs = ["first"]
set.run.start_from = "{first}"
[[run]]
name = "third"
config = "recipe.toml"
set.run.cycles = 5
[[run]]
name = "bench"
kind = "bench"
config = "recipe.toml"
"""
# Notes its arguments in `calls`. A file do/NAME holds what to do in place of finishing: `hang`, `deaf` or an exit code.
DMPO = """#!/usr/bin/env bash
here=$(dirname "$0")
echo "$*" >>"$here/calls"
case $1 in
  bench) while [ "$1" != --out ]; do shift; done; echo '{"phases": {}}' >"$2"; exit ;;
esac
dir=$4 seed=0 cycles=2
for word; do
  case $word in run.seed=*) seed=${word#*=} ;; run.cycles=*) cycles=${word#*=} ;; esac
done
mkdir -p "$dir/checkpoints"
printf '[run]\\nseed = %s\\ncycles = %s\\n' "$seed" "$cycles" >"$dir/config.toml"
order=$(cat "$here/do/$(basename "$dir")" 2>/dev/null || true)
case $order in
  hang) trap 'echo saved >"$dir/saved"; exit 17' TERM ;;
  deaf) trap '' TERM ;;
  "") echo '{"status": "done"}' >"$dir/summary.json"; grep Cpus_allowed_list /proc/self/status; exit ;;
  silent) exit 0 ;;
  *) echo "dmpo: some.key = 3: expected 4" >&2; exit "$order" ;;
esac
echo $$ >"$here/pid"
for ((i = 0; i < 600; i++)); do sleep 0.1; done
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "do").mkdir()
    (tmp_path / "list.toml").write_text(LIST)
    (tmp_path / "recipe.toml").write_text("# A recipe.\n[run]\ncycles = 2\n")
    (tmp_path / "dmpo").write_text(DMPO)
    (tmp_path / "dmpo").chmod(0o755)
    yield tmp_path
    pid = child(tmp_path)
    if pid and alive(pid):
        os.kill(pid, signal.SIGKILL)


def start(tree, *options):
    base = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    return subprocess.Popen(
        [sys.executable, "-m", "dmpo_jax.reproduction", "--scale", "small", "--list", "list.toml", *options],
        cwd=tree,
        env=base | {"DMPO": str(tree / "dmpo")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process):
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def trained(tree):
    """Names of the run folders that the stand-in was called for, in order."""
    lines = (tree / "calls").read_text().splitlines() if (tree / "calls").exists() else []
    return [Path(line.split()[3]).name if line.startswith("train") else "bench" for line in lines]


def order(tree, name, text):
    (tree / "do" / name).write_text(text)


def child(tree):
    try:
        return int((tree / "pid").read_text())
    except (OSError, ValueError):
        return 0


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=30):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def hanging(tree):
    """The script once its child hangs, and the child's process id."""
    (tree / "pid").unlink(missing_ok=True)
    process = start(tree)
    wait_for(lambda: child(tree))
    return process, child(tree)


def test_all_runs_end_in_order_and_are_not_run_again(tree):
    code, output = finish(start(tree))
    assert code == 0, output
    assert trained(tree) == ["first-0", "second-0", "third-0", "bench"]
    calls = (tree / "calls").read_text().splitlines()
    assert calls[1] == 'train recipe.toml --run-dir out/second-0 --set run.seed=0 --set run.start_from="out/first-0"'
    assert calls[3].startswith("bench recipe.toml --repeats 3 --out out/bench.json")
    code, output = finish(start(tree, "--resume"))
    assert code == 0 and output.count("finished before") == 4 and len(trained(tree)) == 4
    code, output = finish(start(tree, "--seeds", "0,7", "--only", "second"))
    assert code == 0 and trained(tree)[4:] == ["first-7", "second-7"]


def test_a_failure_stops_what_needs_it_and_nothing_else(tree):
    order(tree, "first-0", "2")
    code, output = finish(start(tree, "--seeds", "0,1"))
    assert code == 1
    assert trained(tree) == ["first-0", "third-0", "first-1", "second-1", "third-1", "bench"]
    last = output.splitlines()[-2:]
    assert last[0] == ("failed: first-0: code 2: dmpo: some.key = 3: expected 4 (out/logs/first-0.log)"), output
    assert last[1] == "failed: second-0: not run, as first-0 failed"
    (tree / "do" / "first-0").unlink()
    code, _ = finish(start(tree, "--seeds", "0,1"))
    assert code == 0 and trained(tree)[6:] == ["first-0", "second-0"]


@pytest.mark.parametrize(
    ("text", "words"), [("silent", "ended without writing out/first-0/summary.json"), ("137", "code 137")]
)
def test_what_ends_without_a_result_has_failed(tree, text, words):
    order(tree, "first-0", text)
    code, output = finish(start(tree, "--only", "first"))
    assert code == 1 and f"failed: first-0: {words}" in output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_the_child_save_and_ends_everything(tree, number, code):
    order(tree, "second-0", "hang")
    process, pid = hanging(tree)
    process.send_signal(number)
    ended, output = finish(process)
    assert ended == code and (tree / "out" / "second-0" / "saved").exists() and not alive(pid)
    assert "stopping second-0" in output and "third-0" not in trained(tree) and "FAILED" not in output


def test_a_second_signal_ends_a_child_that_does_not_listen(tree):
    order(tree, "second-0", "deaf")
    process, pid = hanging(tree)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None and alive(pid)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130 and not alive(pid)


def test_killed_twice_it_goes_on_and_leaves_no_child(tree):
    order(tree, "second-0", "deaf")
    for _ in range(2):
        process, pid = hanging(tree)
        process.kill()
        process.communicate(timeout=30)
        wait_for(lambda pid=pid: not alive(pid), 5)
    (tree / "do" / "second-0").unlink()
    code, output = finish(start(tree))
    assert code == 0, output
    assert trained(tree) == ["first-0", "second-0", "second-0", "second-0", "third-0", "bench"]


def test_a_run_that_was_killed_by_others_is_named(tree):
    order(tree, "second-0", "hang")
    process, pid = hanging(tree)
    os.kill(pid, signal.SIGKILL)
    code, output = finish(process)
    assert code == 1 and "failed: second-0: signal 9" in output and trained(tree)[-2:] == ["third-0", "bench"]


def test_half_written_results_are_not_finished_ones(tree):
    assert finish(start(tree, "--only", "third"))[0] == 0
    (tree / "out" / "third-0" / "summary.json").write_text('{"status": "do')
    assert finish(start(tree, "--only", "third"))[0] == 0 and trained(tree) == ["third-0"] * 2


def test_a_finished_run_of_other_settings_is_refused(tree):
    assert finish(start(tree, "--only", "third"))[0] == 0
    (tree / "list.toml").write_text(LIST.replace("run.cycles = 5", "run.cycles = 6"))
    code, output = finish(start(tree, "--only", "third"))
    assert code == 1 and trained(tree) == ["third-0"]
    assert "failed: third-0: out/third-0: finished with other settings (run.cycles: 5 -> 6); remove it" in output


def test_two_starts_do_not_work_in_one_folder(tree, tmp_path):
    lock = locked(tree / "out")
    with pytest.raises(UserError, match="another launch/reproduce"):
        locked(tree / "out", patience=0.3)
    os.close(lock)
    os.close(locked(tree / "out", patience=0.3))


def test_a_second_start_waits_for_the_first(tree):
    order(tree, "second-0", "hang")
    first, _ = hanging(tree)
    second = start(tree)
    assert "waiting for what an earlier start left running" in second.stdout.readline()
    assert second.poll() is None and trained(tree) == ["first-0", "second-0"]
    (tree / "do" / "second-0").unlink()
    first.send_signal(signal.SIGTERM)
    assert finish(first)[0] == 143
    code, output = finish(second)
    assert code == 0, output
    assert trained(tree) == ["first-0", "second-0", "second-0", "third-0", "bench"]


def test_a_missing_command_is_named(tree):
    (tree / "dmpo").unlink()
    code, output = finish(start(tree))
    assert code == 2 and output.splitlines()[-1].startswith("reproduce: ") and "cannot be started" in output


def test_shares_divide_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 1, 3, 2, 9})
    assert shares_of(1) == [None] and shares_of(2) == [(1, 2), (3, 5, 9)]
    assert shares_of(5) == [(1,), (2,), (3,), (5,), (9,)]
    with pytest.raises(UserError, match="--jobs 6: there are 5 cores"):
        shares_of(6)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_two_jobs_run_side_by_side_each_on_its_core(tree):
    order(tree, "first-0", "hang")
    (tree / "pid").unlink(missing_ok=True)
    process = start(tree, "--jobs", "2", "--seeds", "0,1")
    wait_for(lambda: set(trained(tree)) >= {"first-0", "third-0", "first-1", "second-1", "third-1", "bench"})
    cores = {
        name: (tree / "out" / "logs" / f"{name}.log").read_text().split()[-1]
        for name in ("third-0", "first-1", "second-1", "third-1")
    }
    assert len(set(cores.values())) == 1 and next(iter(cores.values())).isdecimal()  # the other core has first-0
    held = os.sched_getaffinity(child(tree))
    assert len(held) == 1 and str(next(iter(held))) != cores["third-0"]
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143 and "second-0" not in trained(tree)


def test_the_script_takes_the_command_from_its_environment(tree):
    """The script itself, from another folder: a dry run says what it would start, and starts nothing."""
    done = subprocess.run(
        [ROOT / "launch" / "reproduce", "--scale", "small", "--list", tree / "list.toml", "--dry-run", "--jobs", "1"],
        cwd=tree,
        env={"PATH": os.environ["PATH"], "DMPO": "my dmpo", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "$ JAX_NUM_CPU_DEVICES=1 my dmpo train recipe.toml --run-dir out/first-0" in done.stdout
    assert not (tree / "out").exists() and not (tree / "calls").exists()
