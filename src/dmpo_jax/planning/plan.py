"""`dmpo plan`: whether a run fits on devices that are not at hand, what they exchange, and what to change if it does not."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from dmpo_jax.config import Config
from dmpo_jax.errors import UserError
from dmpo_jax.planning.chips import Topology, check_compiler, parse_topology

TIMEOUT = 3600.0  # seconds for all of a topology's programs
ENVIRONMENT = {  # of the compiling process: no device is looked for, and several may compile at once
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


def plan(
    config: Config,
    names: list[str],
    quick: bool,
    show: Callable[[dict[str, Any]], None] = lambda found: None,
    cycle_only: bool = False,
) -> list[dict[str, Any]]:
    """Findings for each topology, in turn, and shown as soon as they are known; on the cycle alone if wanted.

    Raises UserError, before anything is compiled, on a name that is not a topology or whose compiler is not installed.
    """
    topologies = [parse_topology(name) for name in names]
    for topology in topologies:
        check_compiler(topology)
    results = []
    for topology in topologies:
        results.append(examined(config, topology, quick, cycle_only))
        show(results[-1])
    return results


def examined(config: Config, topology: Topology, quick: bool, cycle_only: bool) -> dict[str, Any]:
    """One topology's findings, compiled in a process of its own. Raises UserError where the configuration does not suit it."""
    environment = os.environ | ENVIRONMENT
    if topology.is_tpu:  # whose compiler ends the process at flags of others
        environment.pop("XLA_FLAGS", None)
    how = ["quick" if quick else "full", "cycle" if cycle_only else "all"]
    command = [sys.executable, "-m", "dmpo_jax.planning", topology.name, *how]
    try:
        ran = subprocess.run(
            command,
            input=config.to_toml(),
            env=environment,
            text=True,
            capture_output=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"--topology {topology.name}: not compiled within {TIMEOUT:.0f} s; try --quick, or sampler.cache other than prefix"
        ) from None
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        last = " ".join(ran.stderr.strip().splitlines()[-1:])[:300]
        raise UserError(
            f"--topology {topology.name}: its compiler ended with code {ran.returncode} ({last}); try another topology or mesh"
        )
    found = json.loads(lines[-1])
    if "refused" in found:
        raise UserError(f"--topology {topology.name}: {found['refused']}")
    found["suggestions"] = suggestions(config, found)
    return found


def suggestions(config: Config, found: dict[str, Any]) -> list[str]:
    """What to change, the cheapest first, where a program needs more memory than there is."""
    over = {name for name, program in found["programs"].items() if not program["fits"]}
    if not over:
        return []
    mesh, model, rollout, advice = found["mesh"], config.model, config.rollout, []
    shards = mesh["data"] * mesh["fsdp"]
    if over != {"rollout"}:
        if model.remat != "full":
            advice.append(f'model.remat = "full" (now "{model.remat}"): recompute layers in the backward pass')
        most = rollout.prompts // shards
        if rollout.accumulation < most:
            advice.append(f"rollout.accumulation = {most} (now {rollout.accumulation}): smaller micro-batches")
        rows = rollout.group * getattr(config.objective, "masks", 1) * rollout.prompts // rollout.accumulation // shards
        now = min(model.rows_at_once or rows, rows)
        if now > 1:
            advice.append(f"model.rows_at_once = {max(now // 4, 1)} (now {now}): fewer rows pass the network together")
    if config.lora.rank and model.base in ("float32", "bfloat16"):
        advice.append(f'model.base = "int8" (now "{model.base}"): a quantised base; "nf4" is half as large again')
    if not config.lora.rank:
        advice.append("lora.rank above 0: no optimiser state for the base")
    if mesh["data"] > 1:
        advice.append(
            f"mesh.fsdp = {shards} (now {mesh['fsdp']}): weights and optimiser state split over all row shards"
        )
    advice.append("a topology of more devices, or fewer rollout.prompts x group")
    return advice


def as_text(found: dict[str, Any]) -> str:
    """A topology's findings for reading: all figures are of one device."""
    mesh = " x ".join(f"{name} {size}" for name, size in found["mesh"].items())
    lines = [
        f"{found['topology']}: {found['devices']} devices of {found['memory_limit'] / 1e9:.1f} GB, mesh {mesh}; "
        f"{found['parameters']:,} parameters; {found['effort']} compiler effort; figures are of one device",
        f"  {'program':<9}{'fits':<6}{'peak GB':>9}{'spare GB':>10}{'arguments':>11}{'temporary':>11}{'compile s':>11}",
    ]
    for name, p in found["programs"].items():
        gigabytes = lambda key, p=p: f"{p[key] / 1e9:.2f}" if p.get(key) is not None else "?"  # noqa: E731
        spare = "?" if p["peak"] is None else f"{(found['memory_limit'] - p['peak']) / 1e9:.2f}"
        lines.append(
            f"  {name:<9}{'yes' if p['fits'] else 'NO':<6}{gigabytes('peak'):>9}{spare:>10}"
            f"{gigabytes('arguments'):>11}{gigabytes('temporary'):>11}{p['compile_s']:>11.1f}"
        )
    cycle = found["programs"]["cycle"]
    if "collectives" in cycle:
        lines.append("  exchanges of a cycle (GB arriving at one device):")
        for c in cycle["collectives"]:
            where = "in loops" if c["in_loop"] else "once"
            lines.append(
                f"    {c['phase']:<9}{c['kind']:<20}{where:<10}{c['count']:>10,.0f} x {c['bytes'] / 1e9:>12,.3f} GB"
            )
        flops = "  ".join(f"{name} {value / 1e12:,.1f}" for name, value in cycle["flops"].items() if value)
        lines.append(f"  TFLOP of products in a cycle, recomputation included: {flops}")
        if found["analytic_flops"]:
            counted = "  ".join(f"{name} {value / 1e12:,.1f}" for name, value in found["analytic_flops"].items())
            lines.append(f"  the method's own, by formula: {counted}")
        seconds = "  ".join(f"{name} {value:,.1f}" for name, value in cycle["roofline"].items())
        total = sum(cycle["roofline"].values())
        lines.append(f"  roofline estimate of a cycle, not a measurement: {total:,.1f} s ({seconds})")
    elif cycle.get("error"):
        lines.append(f"  {cycle['error'][:160]}")
    lines += [f"  to make it fit: {advice}" for advice in found["suggestions"]]
    return "\n".join(lines)
