"""What the compiler says about a run's programs on a topology: memory, collectives, FLOPs, and a time that they allow."""

import re
import time
from typing import Any

import jax

from dmpo_jax.config import Config
from dmpo_jax.errors import one_line
from dmpo_jax.model.parameters import count_params
from dmpo_jax.parallel.mesh import make_mesh, row_shards
from dmpo_jax.planning.chips import Chip, Topology, devices_of
from dmpo_jax.planning.hlo import Walked, walk
from dmpo_jax.planning.programs import PHASES, denoising_steps, lowered
from dmpo_jax.training.flops import phase_flops
from dmpo_jax.training.setup import Setup, make_setup
from dmpo_jax.training.teacher import with_teacher

QUICK = {"exec_time_optimization_effort": -1.0}  # libtpu: a fifth of the time, memory within some 13 %


def examine(config: Config, topology: Topology, quick: bool, cycle_only: bool) -> dict[str, Any]:
    """Findings on every program of a run, or on its cycle; all figures are of one device.

    Raises UserError where the configuration does not suit.
    """
    setup = with_teacher(make_setup(config))
    devices = devices_of(topology)
    shape = config.mesh.shape(len(devices))
    mesh = make_mesh(shape, devices)
    config.validate_mesh(row_shards(mesh), shape)
    programs = {}
    for name, program in lowered(setup, mesh, cycle_only).items():
        programs[name] = _compiled(program, setup, topology, quick)
    width = max(config.rollout.prompt_buckets, default=0)
    counted = {k: v / len(devices) for k, v in phase_flops(setup, width).items()} if width else {}
    return {
        "topology": topology.name,
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "effort": "quick" if quick else "full",
        "jax": jax.__version__,
        "parameters": count_params(setup.model),
        "memory_limit": topology.chip.memory,
        "programs": programs,
        "analytic_flops": counted,
    }


def _compiled(program: jax.stages.Lowered, setup: Setup, topology: Topology, quick: bool) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        compiled = program.compile(QUICK if quick and topology.is_tpu else None)
    except jax.errors.JaxRuntimeError as error:
        needed = re.search(r"total memory required .*?\(([\d.]+)G\)|Used ([\d.]+)G of", str(error))
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        peak = float(needed[1] or needed[2]) * 2**30 if needed else None
        return {"fits": False, "compile_s": time.perf_counter() - start, "peak": peak, "error": one_line(error)[:300]}
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    steps = denoising_steps(setup)
    walked = walk(compiled.as_text(), lambda place: steps, PHASES)
    return {
        "fits": memory.peak_memory_in_bytes <= topology.chip.memory,
        "compile_s": seconds,
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "reused": memory.alias_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
        "flops": walked.flops,
        "collectives": summary(walked),
        "roofline": roofline(walked, topology.chip),
    }


def summary(walked: Walked) -> list[dict[str, Any]]:
    """Collectives by kind, phase and whether they lie in a loop: how many run, and the bytes that they bring."""
    found: dict[tuple[str, str, bool], list[float]] = {}
    for c in walked.collectives:
        count, size = found.get((c.kind, c.scope, c.loop), (0.0, 0.0))
        found[c.kind, c.scope, c.loop] = [count + c.count, size + c.bytes]
    return [
        {"kind": kind, "phase": phase, "in_loop": loop, "count": count, "bytes": size}
        for (kind, phase, loop), (count, size) in sorted(found.items())
    ]


def roofline(walked: Walked, chip: Chip) -> dict[str, float]:
    """Seconds that each phase takes at least: its products at the chip's peak or its memory's speed, then its exchanges.

    An estimate from published figures, not a measurement: nothing overlaps, and only products touch memory.
    """
    seconds = {name: max(f / chip.flops, walked.traffic[name] / chip.bandwidth) for name, f in walked.flops.items()}
    for collective in walked.collectives:
        seconds[collective.scope] += collective.bytes / chip.link
    return {name: spent for name, spent in seconds.items() if spent}
