"""What tests need that compile for TPUs which are not there."""

import importlib.util
import os

import pytest

needs_libtpu = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu") and "TPU_LIBRARY_PATH" not in os.environ,
    reason="libtpu, the TPU compiler, is not installed; pip install -e '.[plan]' brings it",
)


def environment():
    """For a process that compiles: without XLA_FLAGS, as those of conftest.py are for CPUs and libtpu ends at them."""
    kept = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return kept | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
