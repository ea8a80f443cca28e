"""Post-training of masked-diffusion language models in JAX."""

__all__ = ["load_pretrained"]


def __getattr__(name: str):
    # Not imported above: `dmpo --help` should not wait for JAX.
    if name == "load_pretrained":
        from dmpo_jax.model.pretrained import load_pretrained

        return load_pretrained
    raise AttributeError(f"module 'dmpo_jax' has no attribute {name!r}")
