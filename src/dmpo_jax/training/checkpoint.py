"""Checkpoints at cycle boundaries: asynchronous, restored into whatever sharding the run now has."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from dmpo_jax.config import CheckpointConfig
from dmpo_jax.errors import UserError
from dmpo_jax.training.state import State

FOLDER = "checkpoints"


class Checkpoints:
    """The checkpoints of one run folder. Parameters are an item of their own, so they can be read without the rest.

    A frozen base and a teacher are not saved: the run makes them again from where they came, and their digests in the
    meta data tell.
    """

    def __init__(
        self, run_dir: Path, config: CheckpointConfig = CheckpointConfig(), *, best: bool = False, make: bool = True
    ):
        """Opens `run_dir/checkpoints`, and makes it unless told not to. Only `save` writes or deletes anything in it.

        With `best`, the checkpoint with the best validation stays beside the newest ones, and is the selected one.
        """
        keep = LatestN(config.keep)
        if best:
            ranked = BestN(get_metric_fn=_rank, n=1, keep_checkpoints_without_metrics=False)
            keep = AnyPreservationPolicy([keep, ranked])
        self._best = best
        options = ocp.CheckpointManagerOptions(preservation_policy=keep, create=make, best_fn=_rank if best else None)
        self._manager = ocp.CheckpointManager((run_dir / FOLDER).absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """Cycles finished at the newest complete checkpoint."""
        return self._manager.latest_step()

    @property
    def selected(self) -> int | None:
        """Cycles finished at the checkpoint whose policy is the run's result: the newest, or the best validated."""
        return self._manager.best_step() if self._best else self.latest

    def save(self, cycle: int, state: State, meta: dict[str, Any], validation: dict[str, float] | None = None) -> None:
        """Copies the state off the devices now and writes it in the background.

        `validation` with `exact` and `accuracy` makes it one that may be selected.
        """
        self._manager.save(
            cycle,
            metrics=None if validation is None else {**validation, "cycle": cycle},
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                rest=ocp.args.StandardSave(_rest(state)),
                meta=ocp.args.JsonSave(meta),
            ),
            force=True,
        )

    def restore(self, like: State) -> tuple[State, dict[str, Any]]:
        """The newest state, with the shapes, shardings, base and teacher of `like`, and its meta data."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like.replace(base=None, teacher=None))
        saved = self._read(
            self.latest,
            params=ocp.args.StandardRestore(abstract.params),
            rest=ocp.args.StandardRestore(_rest(abstract)),
            meta=ocp.args.JsonRestore(),
        )
        return like.replace(params=saved.params, **saved.rest), saved.meta

    def restore_params(self, shapes: Any, shardings: Any) -> Any:
        """The selected parameters alone, in the given layout."""
        self._manager.wait_until_finished()
        abstract = jax.tree.map(
            lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, shardings
        )
        return self._read(self.selected, params=ocp.args.StandardRestore(abstract)).params

    def _read(self, cycle: int | None, **items) -> Any:
        try:
            return self._manager.restore(cycle, args=ocp.args.Composite(**items))
        except (KeyError, ValueError, OSError) as error:  # what orbax raises for missing, odd and cut files
            folder = self._manager.directory / str(cycle)
            raise UserError(
                f"{folder}: cannot be restored ({' '.join(str(error).split())[:160]}); remove that folder to go on from the "
                "checkpoint before it"
            ) from error

    def close(self) -> None:
        """Waits until everything is written. Raises what went wrong in the background."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        self._manager.close()


def _rest(state: State) -> dict[str, Any]:
    rest = {"reference": state.reference, "optimizer": state.optimizer, "cycle": state.cycle}
    return rest | ({} if state.replay is None else {"replay": state.replay})


def _rank(validation: dict[str, float]) -> tuple[float, ...]:
    """Higher is better; of equals, the one that took fewer cycles."""
    return validation["exact"], validation["accuracy"], -validation["cycle"]


def load_params(run_dir: Path, shapes: Any, shardings: Any, *, best: bool = False) -> Any:
    """Parameters of the newest checkpoint of a run folder, or of the `best`. Raises UserError when it has none."""
    if not (run_dir / FOLDER).is_dir():
        raise UserError(f"{run_dir}: no {FOLDER} folder; give the folder of a run that has saved one")
    checkpoints = Checkpoints(run_dir, best=best, make=False)
    try:
        if checkpoints.selected is None:
            raise UserError(f"{run_dir / FOLDER}: holds no complete checkpoint; let that run reach one first")
        return checkpoints.restore_params(shapes, shardings)
    finally:
        checkpoints.close()
