"""Accelerators that a run can be planned for: their published figures, and their devices as a compiler sees them."""

import dataclasses
import importlib.util
import os
import re
from typing import Any

from dmpo_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Chip:
    """Published figures of one device (a TPU v4 or 7x chip in its usual layout may be two).

    flops: dense bf16 FLOP/s; bandwidth: bytes/s of its memory; link: bytes/s to other devices, all links of one direction
    together; memory: bytes that the compiler grants a program (GPUs: all there are).
    """

    flops: float
    bandwidth: float
    link: float
    memory: float


# cloud.google.com/tpu/docs (v4, v5e, v5p, v6e, tpu7x); memory as libtpu's compiler enforces it.
TPUS = {
    "v4": Chip(137e12, 0.61e12, 150e9, 15.25 * 2**30),
    "v5e": Chip(197e12, 0.82e12, 200e9, 15.75 * 2**30),
    "v5p": Chip(459e12, 2.77e12, 600e9, 95.74 * 2**30),
    "v6e": Chip(918e12, 1.64e12, 448e9, 31.25 * 2**30),
    "tpu7x": Chip(1153e12, 3.69e12, 600e9, 94.75 * 2**30),
}
# NVIDIA's data sheets of the SXM modules: dense bf16, HBM, NVLink in one direction.
GPUS = {
    "h100": Chip(989e12, 3.35e12, 450e9, 84942979072.0),
    "h200": Chip(989e12, 4.8e12, 450e9, 151397597184.0),
}
LARGEST_AXIS = 16  # of a v5e or v6e slice; the TPU compiler ends the process on a larger one
# What the CUDA compiler needs to know of a card that is not there (compute capability 9.0).
_HOPPER = """gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}  l2_cache_size: 52428800  clock_rate_ghz: 1.98  device_memory_size: {memory}
  cuda_compute_capability {{ major: 9  feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  device_vendor: "NVIDIA Corporation"  device_address_bits: 64  pcie_bandwidth: 34359738368  ecc_enabled: true
  name: "NVIDIA {name} 80GB HBM3"  driver_version: "12.9.0"  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9  minor: 10  patch: 0 }}
device_description_str: "NVIDIA {name}"
"""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A named set of devices: `v5p:2x2x4` (chips along each axis of the slice) or `h100:8` (GPUs of one host)."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        """Figures of one device."""
        return (TPUS | GPUS)[self.kind]

    @property
    def is_tpu(self) -> bool:
        """Whether these are TPUs."""
        return self.kind in TPUS


def parse_topology(text: str) -> Topology:
    """Topology of a name. Raises UserError on one that no compiler here can be asked for."""
    found = re.fullmatch(r"([a-z0-9]+):(\d{1,3}(?:x\d{1,3}){0,2})", text)
    kind = found[1] if found else ""
    example = "v5e:4x4, v5p:2x2x1, v6e:2x4, tpu7x:2x2x1, v4:2x2x1, h100:8 or h200:1"
    if kind not in TPUS | GPUS:
        raise UserError(f"--topology {text[:40]}: expected a name like {example}")
    shape = tuple(int(size) for size in found[2].split("x"))
    axes = {"v5e": 2, "v6e": 2, "h100": 1, "h200": 1}.get(kind, 3)
    if len(shape) != axes or min(shape) < 1:
        raise UserError(f"--topology {text}: {kind} has {axes} axes of 1 or more; expected a name like {example}")
    if axes == 2 and max(shape) > LARGEST_AXIS:
        raise UserError(f"--topology {text}: a slice of {kind} has at most {LARGEST_AXIS} chips along an axis")
    if axes == 1 and shape[0] > 8:
        raise UserError(f"--topology {text}: one host has at most 8 GPUs")
    return Topology(text, kind, shape)


def check_compiler(topology: Topology) -> None:
    """Raises UserError when the compiler for these devices is not installed."""
    if topology.is_tpu:
        there, extra = importlib.util.find_spec("libtpu") or "TPU_LIBRARY_PATH" in os.environ, "plan"
    else:
        there, extra = importlib.util.find_spec("jax_cuda12_plugin"), "plan-gpu"
    if not there:
        raise UserError(f"--topology {topology.name}: its compiler is not installed; pip install 'dmpo_jax[{extra}]'")


def devices_of(topology: Topology) -> list[Any]:
    """The devices to compile for, none of which need exist."""
    from jax.experimental import topologies

    if topology.is_tpu:
        options: dict[str, Any] = {}
        if topology.shape == (1,) * len(topology.shape):
            options["chips_per_host_bounds"] = (1, 1, 1)
        description = topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **options)
    else:
        chip = topology.chip
        card = _HOPPER.format(bandwidth=int(chip.bandwidth), memory=int(chip.memory), name=topology.kind.upper())
        description = topologies.get_topology_desc(
            platform="cuda", topology_name=topology.kind, target_config=card, topology=f"1x1x{topology.shape[0]}"
        )
    return list(description.devices)
