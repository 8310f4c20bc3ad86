"""Declared dependencies of all imports, and the small set of dependencies of the core."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement

from tests.checkout import ROOT, tracked_files
from tests.without import environment_without

OURS = {"lightning_hybrid", "recipes", "tests", "_path"}
# Lightning under its other package name, which only programs that import that name need, and a synthetic one of a test.
OTHERS = {"pytorch_lightning", "lightning_fabric", "strange_lightning"}
# Distributions of modules that may not be installed here.
NAMES = {"simplejpeg": "simplejpeg", "triton": "triton", "optuna": "optuna"}
NAMES |= {"transformers": "transformers", "tokenizers": "tokenizers"}


DISTRIBUTIONS = packages_distributions()

# Packages that the library imports but the core does not install. They are imported when a user calls the feature.
WITH_AN_EXTRA = {"matplotlib": "report"}
# CUDA builds of torch include triton. Without it the fused kernels warn and are not used.
WITH_TORCH = {"triton"}

IMPORT_ALL_PUBLIC_NAMES = """
import sys
from importlib import import_module

import lightning_hybrid

for package in ("", ".optim", ".callbacks", ".data", ".contrastive", ".fabric", ".models"):
    module = import_module("lightning_hybrid" + package)
    for name in getattr(module, "__all__", ()):
        getattr(module, name)
print(*sys.modules)
"""

LOCKED = (
    "recipes",
    "report",
    "jpeg",
    "search",
    "study",
    "tensorboard",
    "text",
    "test",
    "dev",
    "docs",
)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> dict[str, set[str]]:
    """Return the declared distributions by extra. The empty key holds those that are always installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {
        extra: {canonical(re.match(r"[\w.-]+", requirement)[0]) for requirement in requirements}
        for extra, requirements in groups.items()
    }


def imported(*folders: str) -> dict[str, str]:
    """Return all imported top-level names, each with one file that imports it."""
    paths = {}
    for file in (file for folder in folders for file in tracked_files(f"{folder}/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                paths[name.partition(".")[0]] = str(file.relative_to(ROOT))
    undeclarable = {*OURS, *OTHERS, *sys.stdlib_module_names}
    return {name: path for name, path in paths.items() if name not in undeclarable}


def missing(names: dict[str, str], declared: set[str]) -> dict[str, str]:
    def is_declared(name: str) -> bool:
        if name in NAMES:
            providers = [NAMES[name]]
        else:
            providers = DISTRIBUTIONS.get(name, [name])
        return any(canonical(provider) in declared for provider in providers)

    return {name: path for name, path in names.items() if not is_declared(name)}


def test_every_import_is_declared():
    groups = declared()
    assert not missing(
        imported("lightning_hybrid", "recipes", "tests"),
        set().union(*groups.values()) - groups["dev"],
    )


def test_the_lock_of_ci_has_a_version_and_a_hash_for_every_declared_dependency():
    lines = (ROOT / ".ci" / "requirements.lock").read_text().splitlines()
    rows = [
        re.fullmatch(r"([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
        for line in lines
        if line[:1] != "#"
    ]
    assert all(rows)
    locked = {canonical(row[1]): row[2] for row in rows}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = list(project["dependencies"])
    for extra in LOCKED:
        declared += extras[extra]
    for requirement in map(Requirement, declared):
        if requirement.name != "lightning-hybrid":
            assert locked[canonical(requirement.name)] in requirement.specifier, requirement


def test_the_package_imports_only_what_its_core_installs():
    """Packages that only the recipes need, such as Hydra and W&B, are installed with an extra."""
    groups = declared()
    undeclared = missing(imported("lightning_hybrid"), groups[""])
    assert set(undeclared) == {*WITH_AN_EXTRA, *WITH_TORCH}
    for name, extra in WITH_AN_EXTRA.items():
        assert canonical(name) in groups[extra]
    assert not groups[""] & {"hydra-core", "omegaconf", "wandb"}
    assert {"hydra-core", "omegaconf", "wandb"} <= groups["recipes"]


def test_every_dependency_of_the_core_is_imported_by_the_package():
    providers = set()
    for name in imported("lightning_hybrid"):
        providers |= {canonical(provider) for provider in DISTRIBUTIONS.get(name, [name])}
    assert declared()[""] <= providers


def installed_with(requirements: set[str]) -> set[str]:
    """Return the distributions that these requirements install, directly or indirectly, in this environment."""
    waiting = [Requirement(text) for text in requirements]
    visited = set()
    while waiting:
        parent = waiting.pop()
        key = (canonical(parent.name), frozenset(parent.extras))
        if key in visited:
            continue
        visited.add(key)
        try:
            texts = metadata.requires(parent.name) or []
        except metadata.PackageNotFoundError:  # a requirement of another platform
            continue
        for requirement in map(Requirement, texts):
            marker = requirement.marker
            if marker is None or any(
                marker.evaluate({"extra": extra}) for extra in ("", *parent.extras)
            ):
                waiting.append(requirement)
    return {name for name, _ in visited}


def test_every_public_name_can_be_imported_where_only_the_core_is_installed(tmp_path):
    installed = installed_with(declared()[""])
    # matplotlib and rich are not blocked: torchmetrics and Lightning find their metadata and import them.
    blocked = ("hydra", "omegaconf", "wandb", "pydantic")
    providers = [provider for name in blocked for provider in DISTRIBUTIONS[name]]
    assert not installed & {canonical(provider) for provider in providers}
    environment = environment_without(tmp_path, blocked)
    command = [sys.executable, "-c", IMPORT_ALL_PUBLIC_NAMES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "lightning_hybrid.elastic.strategy" in done.stdout.split()


@pytest.mark.long
def test_the_gpu_tests_can_be_collected_without_hydra_wandb_and_simplejpeg(tmp_path):
    """GPU tests can be collected on a machine that lacks the packages of the recipes' command line."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_timeout",  # pyproject.toml sets its option, and plugin autoload is disabled
    ]
    environment = environment_without(tmp_path)
    no_hydra = subprocess.run(
        [sys.executable, "-c", "import hydra"], capture_output=True, env=environment
    )
    assert no_hydra.returncode == 1
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(tests) >= 30
    files = {test.partition("::")[0] for test in tests}
    assert {"tests/optim/fused/cuda/test_kernels.py", "tests/checkpoint/test_io.py"} <= files
