"""Training methods, chosen by `objective.name`: each is the module of that name in this folder."""

import importlib

NAMES = (
    "agrpo",
    "coupled_grpo",
    "denoise",
    "diffu_grpo",
    "dmpo",
    "espo",
    "gdpo",
    "spg",
    "topd",
    "tracerl",
    "wd1",
    "wddo",
)
OBJECTIVES = {name: importlib.import_module(f"{__name__}.{name}") for name in NAMES}
