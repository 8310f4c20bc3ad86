"""Tests that need a GPU, by pytest in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

from recipes.gpu.runner import ROOT, Details, Given, NotHere

# The files with tests of `-m gpu`: collecting all tests takes as long as these, and asks for Hydra.
TESTS = (
    "tests/callbacks/test_tensor_hash.py",
    "tests/checkpoint/test_host_copy.py",
    "tests/comm/codec/test_triton.py",
    "tests/comm/engine/test_engine.py",
    "tests/recipes/datasets/test_dali.py",
    "tests/data/images/test_decode_threads.py",
    "tests/data/test_prefetch.py",
    "tests/optim/fused/cuda/test_kernels.py",
    "tests/optim/fused/cuda/test_on_gpu.py",
    "tests/precision/test_optimizer_protocol.py",
)


def gpu_tests(given: Given) -> Details:
    """Run `pytest -m gpu`; none may fail."""
    if not given.on_cuda:
        raise NotHere("the tests of `-m gpu` need one")
    if not (ROOT / "tests").is_dir():
        raise NotHere("the tests are not in an installed package: run this in a checkout of the repository")
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    assert not missing, f"the tests need {' and '.join(missing)}: `pip install {' '.join(missing)}`"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--tb=short", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    print(done.stdout, done.stderr, sep="\n")
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    assert done.returncode == 0, f"{lines[-1]}: {'; '.join(failed)[:250]}"
    return {"message": lines[-1].strip("= ")}
