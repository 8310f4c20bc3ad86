"""Check that runs the test suite's GPU tests with pytest in a separate process."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

from recipes.gpu.runner import ROOT, CheckRequest, Details, NotHere

MARK = re.compile(
    r"^pytestmark = .*mark\.gpu|^@pytest\.mark\.gpu|marks=pytest\.mark\.gpu", re.MULTILINE
)


def files_with_gpu_tests() -> list[str]:
    """Return the paths of the test files that contain tests marked `gpu`.

    Collecting all tests with pytest would take as long as running the marked tests, and would need Hydra.
    """
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if MARK.search(path.read_text())]


def gpu_tests(request: CheckRequest) -> Details:
    """Run all tests that are marked `gpu` with pytest, and raise if one fails."""
    if not request.on_cuda:
        raise NotHere("The tests that `-m gpu` selects need a GPU.")
    if not (ROOT / "tests").is_dir():
        raise NotHere(
            "The tests are not part of the installed package. Run this check in a checkout of the "
            "repository."
        )
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    assert not missing, (
        f"The tests need {' and '.join(missing)}. Run `pip install {' '.join(missing)}`."
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, *files_with_gpu_tests()], capture_output=True, text=True, cwd=ROOT, check=False
    )
    print(done.stdout, done.stderr, sep="\n")
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    assert done.returncode == 0, f"{lines[-1]}: {'; '.join(failed)[:250]}"
    return {"message": lines[-1].strip("= ")}
