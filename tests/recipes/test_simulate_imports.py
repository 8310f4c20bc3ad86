"""Start-up time of a simulation: it does not import modules that are slow to import and not needed."""

import subprocess
import sys

import pytest

from tests.checkout import ROOT, tracked_in

SLOW_MODULES = (
    "lightning",
    "lightning_fabric",
    "matplotlib",
    "optuna",
    "pandas",
    "pytorch_lightning",
    "scipy",
    "sklearn",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torchmetrics",
    "transformers",
    "triton",
    "wandb",
)
PROGRAM = f"""
import atexit, runpy, sys

def say():
    print("imported:", *[name for name in {SLOW_MODULES} if name in sys.modules])

atexit.register(say)
sys.argv = sys.argv[1:]
sys.path.insert(0, {str(ROOT / "recipes")!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
CLUSTERS = ",".join(sorted(path.stem for path in tracked_in(ROOT / "conf" / "cluster", "*.yaml")))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["num_nodes=2"], id="one"),
        pytest.param(["--multirun", f"cluster={CLUSTERS}"], id="all", marks=pytest.mark.long),
    ],
)
def test_a_simulation_imports_nothing_that_takes_seconds_but_torch(words, tmp_path):
    """Mutations to detect: torch computes a convolution's shape, pictures are always drawn, FSDP2 computes blocks."""
    quick = ["search=null", "scaling_ranks=[]", "hydra.run.dir=run", "hydra.sweep.dir=runs"]
    program = [sys.executable, "-c", PROGRAM, str(ROOT / "recipes" / "simulate.py"), *words, *quick]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Written to ") == (
        len(CLUSTERS.split(",")) if "--multirun" in words else 1
    )
    assert done.stdout.splitlines()[-1] == "imported:"
