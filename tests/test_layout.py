"""Layout of the package: allowed imports by folder, unique public names, and no definition that only tests use."""

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.checkout import ROOT, tracked_files, tracked_in

PACKAGE = ROOT / "lightning_hybrid"
MODULES = tracked_files("lightning_hybrid/*.py")
PROGRAMS = [*tracked_files("recipes/*.py"), *tracked_files("tests/evidence/*.py")]

# Each folder, with our modules that it may import in addition to itself. A name includes all modules below it.
OF_DATA = {
    f"data.{name}"
    for name in ("prefetch", "exact_loader", "exact_resume", "batch_counters", "place")
}
OF_DATA |= {"data.shard_loader", "data.random_streams", "data.exact_evaluation"}
OF_NETWORKS = {"pipeline.cuts", "pipeline.shapes", "precision.half_window"}
OF_COMM = {"comm.plan", "comm.bucket_sizes", "comm.message_pattern", "comm.topology"}
OF_COMM |= {"comm.collective_names"}
ARROWS = {
    "": {"strategy", "precision", "checkpoint", "flavours"},
    "flavours": {"elastic", "fabric", "strategy", "pipeline", "precision", "checkpoint"},
    "fabric": {"strategy", "precision", "checkpoint", "comm"},
    "strategy": {"run_status", "precision", "checkpoint", "comm"} | OF_DATA,
    "elastic": {"run_status", "strategy", "precision", "comm", "data"},
    "elastic.membership": set(),
    "pipeline": {"run_status", "strategy", "precision", "comm", "models.activation_checkpointing"},
    "contrastive": {"data.random_streams", "models.activation_checkpointing"},
    "callbacks": {"comm.stats", "comm.health", "comm.topology", "precision", "optim", "run_status"},
    "planning": set(),
    "planning.model": {"comm.codec"} | OF_COMM,
    "planning.estimates": OF_NETWORKS
    | {"planning.model", "comm.codec", "comm.stats.trace"}
    | OF_COMM,
    "planning.calibration": {"planning.model", "comm.codec", "comm.engine.engine"} | OF_COMM,
    "planning.report": {
        "planning.model",
        "planning.estimates",
        "planning.calibration",
        "callbacks.run_report.figure",
    }
    | OF_COMM,
    "comm": set(),
    "comm.engine": {"comm.adasum.combine", "comm.codec", "comm.health", "comm.stats"} | OF_COMM,
    "comm.adasum": {"comm.engine", "comm.hook", "comm.codec.padded_bucket"} | OF_COMM,
    "comm.codec": OF_COMM,
    "comm.health": OF_COMM,
    "comm.stats": OF_COMM,
    "run_status": {"comm.health", "comm.stats", "optim.dtensor", "precision"},
    "precision": set(),
    "checkpoint": set(),
    "optim": set(),
    "data": set(),
    "models": set(),
}
FOR_ALL = {
    "averaged_models",
    "checks",
    "atomic_file",
    "batch_rows",
    "cpp.library",
    "lightning_names",
    "module_state",
}
FOR_ALL |= {"formatting", "placement"}
NEVER_IN_THE_LIBRARY = {"hydra", "omegaconf", "wandb", "recipes", "torchvision", "timm", "litdata"}
NEVER_IN_THE_PLANNER = {
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "torchmetrics",
    "pydantic",
}
MOST_MODULES = 20


def part_of(path: Path) -> str:
    """Return the dotted name of a module relative to the package."""
    return (
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        .removesuffix("__init__")
        .rstrip(".")
    )


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def ours(names: set[str]) -> set[str]:
    """Return our modules behind imported names, for example `comm.plan` for `lightning_hybrid.comm.plan.CommPlan`."""
    result = set()
    for name in names:
        package, *parts = name.split(".")
        while parts and not (
            PACKAGE.joinpath(*parts).with_suffix(".py").exists()
            or PACKAGE.joinpath(*parts).is_dir()
        ):
            parts.pop()
        if package == "lightning_hybrid":
            result.add(".".join(parts))
    return result


def is_allowed(source: str, target: str) -> bool:
    """Return whether the table allows this import. Imports within a folder are always allowed."""
    if source in ARROWS:
        folder = source
    else:
        folder = source.rpartition(".")[0]
    while folder not in ARROWS:
        folder = folder.rpartition(".")[0]
    if target in FOR_ALL or (folder and f"{target}.".startswith(f"{folder}.")):
        return True
    return any(f"{target}.".startswith(f"{allowed}.") for allowed in ARROWS[folder])


def test_folders_import_only_what_the_table_allows():
    wrong = [
        f"{source} imports {target}"
        for path in MODULES
        for source in [part_of(path)]
        for target in sorted(ours(imports_of(path)) - {source})
        if not is_allowed(source, target)
    ]
    assert not wrong


def test_imports_have_no_cycle():
    """The import graph has no cycle, including imports for type checkers and imports within functions."""
    imports = {part_of(path): ours(imports_of(path)) - {part_of(path)} for path in MODULES}
    TopologicalSorter(imports).prepare()  # raises if no order exists, and shows the cycle


def test_the_library_knows_no_configuration_system_and_no_tracker():
    wrong = {}
    for path in MODULES:
        packages = {name.split(".")[0] for name in imports_of(path)}
        if packages & NEVER_IN_THE_LIBRARY:
            wrong[part_of(path)] = packages & NEVER_IN_THE_LIBRARY
    assert not wrong


@cache
def imports_by_module() -> dict[str, set[str]]:
    """Return the modules of the package that each module imports, including imports within functions."""
    return {part_of(path): ours(imports_of(path)) for path in MODULES}


def modules_behind(part: str) -> set[str]:
    """Return a module and all modules of the package that it imports, directly or indirectly."""
    imports = imports_by_module()
    reached = set()
    waiting = {part}
    while waiting:
        module = waiting.pop()
        reached.add(module)
        waiting |= imports[module] - reached
    return reached


def packages_behind(part: str) -> set[str]:
    """Return the names of the packages that a module imports, directly or through other modules of ours."""
    reached = modules_behind(part)
    paths = [path for path in MODULES if part_of(path) in reached]
    return {name.split(".")[0] for path in paths for name in imports_of(path)}


def test_the_planner_imports_no_strategy_no_lightning_and_matplotlib_for_pictures_alone():
    """The planner also runs where nobody trains, so its indirect imports count too."""
    planner = [part_of(path) for path in MODULES if path.is_relative_to(PACKAGE / "planning")]
    assert "planning.report.pictures" in planner
    for part in planner:
        assert not {name for name in modules_behind(part) if name.split(".")[0] == "strategy"}, part
        assert not packages_behind(part) & NEVER_IN_THE_PLANNER, part
        assert ("matplotlib" in packages_behind(part)) == (part == "planning.report.pictures"), part


def test_no_test_looks_at_what_git_does_not_track():
    """Tests ignore untracked files, such as environments, outputs and drafts.

    `.ci/run` plants such files and runs all tests.
    """
    constant = r"\b(?:[A-Z][A-Z_]{2,}|__file__)\b"
    walk = re.compile(
        rf"{constant}[^{{}}\n]*\.(?:r?glob|iterdir)\(|\b(?:walk|listdir|scandir)\([^)\n]*{constant}"
    )
    tests = set(tracked_files("tests/*.py")) - {Path(__file__), ROOT / "tests" / "checkout.py"}
    assert not [str(path) for path in tests if walk.search(path.read_text())]


def test_every_folder_says_what_it_is_for_and_has_few_modules():
    for folder in {path.parent for path in [*MODULES, *PROGRAMS]}:
        names = [path.name for path in tracked_in(folder, "*.py") if path.name != "__init__.py"]
        assert len(names) <= MOST_MODULES, f"{folder}: {len(names)} modules"
        if folder != ROOT / "recipes":
            assert ast.get_docstring(tree_of(folder / "__init__.py")), folder


def public_definitions(path: Path) -> list[str]:
    body = tree_of(path).body
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


def test_a_public_name_of_the_package_has_one_meaning():
    modules_of_name = defaultdict(list)
    for path in MODULES:
        # these re-export the same classes for each of Lightning's packages
        if path.parent.name == "flavours":
            continue
        for name in public_definitions(path):
            modules_of_name[name].append(part_of(path))
    assert not {name: modules for name, modules in modules_of_name.items() if len(modules) > 1}


def test_every_public_definition_is_used_outside_of_its_own_tests():
    """Code, a configuration or a README must use each name. Methods that torch or Lightning call are exempt."""
    texts = [path for kind in ("py", "yaml", "md") for path in tracked_files(f"*.{kind}")]
    tests = ROOT / "tests"
    words = Counter()
    for path in texts:
        is_test = path.is_relative_to(tests) and not path.is_relative_to(tests / "netlab")
        if not is_test or path in PROGRAMS:
            words.update(re.findall(r"\w+", path.read_text()))
    unused = [
        f"{part_of(path)}.{name}"
        for path in MODULES
        for name in public_definitions(path)
        if words[name] < 2
    ]
    assert not unused
