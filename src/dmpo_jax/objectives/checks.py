"""Settings that several methods have, checked. Each function raises UserError with the key, the value and what was expected."""

from collections.abc import Collection

from dmpo_jax.diffusion.masking import LAWS
from dmpo_jax.errors import UserError


def as_toml(value: str | bool | float) -> str:
    """A setting as TOML writes it."""
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def one_of(key: str, value: str, known: Collection[str]) -> None:
    """A name among those known."""
    if value not in known:
        raise UserError(f'objective.{key} = "{value}": expected one of {", ".join(known)}')


def updates(config) -> None:
    """`updates`, a sensible number of gradient steps per rollout."""
    if not 1 <= config.updates <= 10_000:
        raise UserError(f"objective.updates = {config.updates}: expected 1 to 10,000")


def compared_group(config, group_size: int) -> None:
    """A group in which there is something to compare, and `updates`."""
    if group_size < 2:
        raise UserError(
            f"rollout.group = {group_size}: {config.name} compares the completions of a prompt, set 2 or more"
        )
    updates(config)


def masks(key: str, count: int, law: str) -> None:
    """So many mask replicates, in antithetic pairs under a known law."""
    if count < 2 or count % 2:
        raise UserError(f"objective.{key} = {count}: masks come in antithetic pairs, expected 2, 4, 6, ...")
    one_of("mask_law", law, LAWS)


def reference_sync(config) -> None:
    """`reference_sync`, in cycles."""
    if not 0 <= config.reference_sync < 2**31:
        raise UserError(f"objective.reference_sync = {config.reference_sync}: expected 0 (never) or a number of cycles")


def clip_and_kl(config, zero_epsilon: bool = False) -> None:
    """`epsilon` of a clipped surrogate, `beta` of a KL term, and `reference_sync` where there is a reference to sync.

    With `zero_epsilon`, 0 is a setting of the method: no gradient once a ratio has moved in favour of its advantage.
    """
    if not (0 <= config.epsilon < 1 if zero_epsilon else 0 < config.epsilon <= 1):
        expected = "0 or more, below 1" if zero_epsilon else "above 0 and at most 1"
        raise UserError(f"objective.epsilon = {config.epsilon}: expected {expected}")
    if not config.beta >= 0:
        raise UserError(f"objective.beta = {config.beta}: expected 0 (no KL term) or a positive number")
    reference_sync(config)
    if config.reference_sync and not config.beta:
        raise UserError(
            f"objective.reference_sync = {config.reference_sync} has no effect with objective.beta = 0, which uses no "
            "reference; set beta, or leave reference_sync out"
        )


def prompt_mask(config) -> None:
    """`prompt_mask`, a share of prompt tokens that leaves some of them."""
    if not 0 <= config.prompt_mask < 1:
        raise UserError(f"objective.prompt_mask = {config.prompt_mask}: expected 0 (off) or a share below 1")
