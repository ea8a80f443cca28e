"""Training methods, one file each, chosen by `objective.name`."""

from dmpo_jax.objectives import denoise, dmpo

OBJECTIVES = {"denoise": denoise, "dmpo": dmpo}
