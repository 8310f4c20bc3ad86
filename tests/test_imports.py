"""The arrows of the architecture: who may import whom, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_hybrid"

# For each part: the parts of ours that it may import. What is not listed may import nothing of ours.
ALLOWED: dict[str, set[str]] = {
    "__init__": {"checkpoint_io", "precision", "strategy"},
    "checkpoint_io": {"background", "checkpoint_copy", "checkpoint_file"},
    "options": {"comm", "comm.choose", "comm.cluster", "comm.ddp_buckets"},
    "rendezvous": set(),
    "interruption": set(),
    "strategy": {
        "checkpoint_io",
        "precision",
        "rendezvous",
        "options",
        "comm",
        "comm.cluster",
        "data.prefetch",
        "failures",
        "tuning",
    },
    "failures": {
        "interruption",
        "precision",
        "comm",
        "comm.links",
        "comm.topology",
        "comm.verdict",
        "comm.watch",
        "options",
    },
    "tuning": {"comm", "comm.tune", "comm.tune_cache", "comm.tuning"},
    "precision": {"precision"},
    "callbacks.__init__": {f"callbacks.{n}" for n in ("ema", "progress", "report", "seed")}
    | {f"callbacks.{n}" for n in ("epoch_metrics", "numbers", "replicas", "stop", "time_to_accuracy", "training")}
    | {"callbacks.step_checkpoint"},
    "callbacks.curves": set(),
    "callbacks.ema": {"precision"},
    "callbacks.environment": set(),
    "callbacks.epoch_metrics": set(),
    "callbacks.page": set(),
    "callbacks.progress": {"metrics", "callbacks.training"},
    "callbacks.evidence": set(),
    "callbacks.numbers": {"callbacks.evidence", "callbacks.training", "comm.topology", "comm.watch", "precision"},
    "callbacks.data_order": set(),
    "callbacks.replicas": {"callbacks.data_order", "comm.topology", "comm.verdict", "fingerprint"},
    "callbacks.report": {"metrics", "communication", "comm.summary", "comm.trace"}
    | {
        f"callbacks.{name}"
        for name in ("curves", "environment", "page", "report_parts", "time_to_accuracy", "training")
    },
    "callbacks.report_parts": {"metrics", "communication", "comm.summary", "callbacks.page"},
    "callbacks.seed": set(),
    "callbacks.step_checkpoint": set(),
    "callbacks.slurm": set(),
    "callbacks.stop": {"callbacks.slurm"},
    "callbacks.time_to_accuracy": {"metrics"},
    "callbacks.training": {"metrics", "communication", "comm.summary", "comm.trace", "optim"},
    "communication": {"metrics", "comm.summary"},
    "comm.__init__": {"comm.topology", "comm.plan", "comm.engine", "comm.hook", "comm.trace"}
    | {"comm.summary", "comm.traffic"},
    "comm.hook": {"comm.engine", "comm.plan"},
    "comm.engine": {
        "comm.agreement",
        "comm.allreduce",
        "comm.chunks",
        "comm.cuda_streams",
        "comm.lanes",
        "comm.plan",
        "comm.topology",
        "comm.trace",
        "comm.traffic",
        "comm.verdict",
        "comm.watch",
    },
    "comm.race": set(),
    "comm.drift": set(),
    "comm.tune": {"comm.plan", "comm.race"},
    "comm.tune_cache": {"comm.drift", "comm.plan", "comm.topology"},
    "comm.tuning": {"comm.agreement", "comm.drift", "comm.engine", "comm.plan", "comm.race", "comm.tune"}
    | {"comm.tune_cache"},
    "comm.units": set(),
    "comm.cost": {"comm.units"},
    "comm.cost_gloo": {"comm.cost", "comm.units"},
    "comm.cost_nccl": {"comm.cost", "comm.units"},
    "comm.cluster": {"comm.cost", "comm.cost_gloo", "comm.cost_nccl", "comm.units"},
    "comm.timeline": {"comm.cluster"},
    "comm.pieces": {"comm.cluster", "comm.plan", "comm.timeline"},
    "comm.fit": set(),
    "comm.probes": {"comm.engine", "comm.plan", "comm.topology", "comm.units"},
    "comm.software": {"comm.cluster", "comm.cost_nccl", "comm.pieces", "comm.plan", "comm.simulate"},
    "comm.calibrate": {f"comm.{name}" for name in ("cluster", "cost", "cost_gloo", "cost_nccl", "fit", "probes")}
    | {"comm.software"},
    "comm.choose": {"comm.cluster", "comm.pieces", "comm.plan", "comm.simulate"},
    "comm.simulate": {"comm.cluster", "comm.pieces", "comm.plan", "comm.timeline", "comm.trace", "comm.units"},
    "comm.agreement": {"comm.links", "comm.plan", "comm.seal", "comm.topology", "comm.verdict"},
    "comm.lanes": {f"comm.{n}" for n in ("agreement", "allreduce", "chunks", "plan", "topology", "trace")},
    "comm.cuda_streams": {f"comm.{n}" for n in ("abort", "agreement", "allreduce", "chunks", "plan", "seal")}
    | {"comm.topology", "comm.trace"},
    "comm.abort": set(),
    "comm.chunks": {"comm.allreduce", "comm.plan", "comm.seal", "comm.traffic"},
    "comm.seal": set(),
    "comm.watch": {"comm.links", "comm.presence", "comm.verdict"},
    "comm.presence": {"comm.verdict"},
    "comm.verdict": {"comm.links"},
    "comm.links": set(),
    "comm.allreduce": {"comm.direct", "comm.plan", "comm.topology"},
    "comm.direct": set(),
    "comm.topology": {"comm.abort"},
    "comm.ddp_buckets": set(),
    "comm.plan": {"comm.ddp_buckets"},
    "comm.trace": {"comm.summary", "comm.traffic"},
    "comm.summary": {"comm.traffic"},
    "comm.traffic": {"comm.plan", "comm.topology"},
    "optim": {"optim"},
    "data": {"data"},
    "models": {"models"},
}
FOLDERS = {"optim", "data", "models", "comm", "precision"}
NEVER_IN_THE_LIBRARY = {"hydra", "omegaconf", "wandb", "recipes", "torchvision", "timm", "litdata"}


def part_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def ours(names: set[str]) -> set[str]:
    """Modules of ours behind imported names: ``lightning_hybrid.comm.plan.CommPlan`` -> ``comm.plan``."""
    found = set()
    for name in names:
        if name.split(".")[0] != "lightning_hybrid":
            continue
        parts = name.split(".")[1:]
        while parts and not (
            (PACKAGE.joinpath(*parts).with_suffix(".py")).exists() or PACKAGE.joinpath(*parts).is_dir()
        ):
            parts.pop()
        found.add(".".join(parts) or "__init__")
    return found


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=part_of)
def test_arrows_run_one_way(path):
    part = part_of(path)
    family = part.split(".")[0]
    allowed = ALLOWED.get(part, ALLOWED.get(family, set()))
    for imported in ours(imports_of(path)):
        assert imported in allowed or imported.split(".")[0] in allowed & {
            "optim",
            "data",
            "models",
            "comm",
            "precision",
        }, f"{part} imports {imported}"


@pytest.mark.parametrize("path", MODULES, ids=part_of)
def test_the_library_knows_no_configuration_system_and_no_tracker(path):
    assert not {name.split(".")[0] for name in imports_of(path)} & NEVER_IN_THE_LIBRARY


def test_the_walk_sees_what_it_should():
    """Guards the guard: the strategy's imports are found, and a wrong one would be."""
    found = ours(imports_of(PACKAGE / "strategy.py"))
    assert {"precision", "comm", "data.prefetch"} <= found
    assert ours({"lightning_hybrid.strategy.hybrid_allreduce.HybridAllReduceStrategy"}) == {"strategy"}


def test_no_module_is_two_concepts_long():
    """About 300 lines; past 380 a file asks to be split."""
    long = {part_of(path): n for path in MODULES if (n := len(path.read_text().splitlines())) > 380}
    assert not long
