"""The quickstart's claim, from random parameters to the test split: about four minutes a seed on two idle cores."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_exact_solves_rise_by_35_points(seed):
    subprocess.run([ROOT / "launch" / "quickstart"], check=True, env={**os.environ, "SEED": str(seed)}, timeout=3600)
    folder = ROOT / "runs" / ("quickstart" if seed == 0 else f"quickstart-{seed}")
    summary = json.loads((folder / "dmpo" / "summary.json").read_text())
    assert summary["test_after"]["exact"] - summary["test_before"]["exact"] >= 0.35
    assert (folder / "report.html").stat().st_size > 50_000
