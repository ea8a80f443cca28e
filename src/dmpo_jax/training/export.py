"""`dmpo export`: a run's newest policy in the layout of the Hugging Face world."""

from pathlib import Path

import jax

from dmpo_jax.errors import UserError
from dmpo_jax.model.adapter_folder import write_adapter
from dmpo_jax.model.checkpoint_folder import TOKENIZER_KEY
from dmpo_jax.model.lora import policy_of
from dmpo_jax.model.pretrained import export_checkpoint
from dmpo_jax.parallel.mesh import make_mesh
from dmpo_jax.training import run_folder
from dmpo_jax.training.initial import policy_of_run
from dmpo_jax.training.setup import make_setup


def export_run(run_dir: Path, out: Path, adapter: bool, dtype: str) -> None:
    """Writes merged weights, or with `adapter` the PEFT adapter alone. Raises UserError when there is nothing to write."""
    config = run_folder.read_config(run_dir)
    if adapter and not config.lora.rank:
        raise UserError(f"--adapter: {run_dir} trained all parameters (lora.rank = 0); leave the flag out")
    setup = make_setup(config)
    mesh = make_mesh((1, jax.device_count(), 1))
    with jax.set_mesh(mesh):
        base, params = policy_of_run(run_dir, mesh)
        if adapter:
            write_adapter(params, config.lora, setup.model, config.model.pretrained or config.run.start_from, out)
            return
        kind = config.tokenizer.kind
        extra = {} if kind == "pretrained" else {TOKENIZER_KEY: kind}
        policy = policy_of(params, base, config.lora)
        export_checkpoint(policy, setup.model, setup.tokenizer.ids, out, dtype, extra)
