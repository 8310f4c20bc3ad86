"""Table of options that cannot be combined: every row raises its error, and the options page shows it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import callbacks
from torch import nn

from lightning_hybrid import (
    Adasum,
    Comm,
    HybridAllReduceStrategy,
    HybridPipelineStrategy,
    LocalSteps,
    Mean,
)
from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.contrastive import InfoNCE
from lightning_hybrid.flavours import fabric
from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.pipeline.options import refuse_in_pipeline
from lightning_hybrid.strategy import compatibility as table
from lightning_hybrid.strategy.feedback_state import refuse_unknown_outcomes

README = Path(__file__).resolve().parents[2] / "lightning_hybrid" / "strategy" / "README.md"


class Plans:
    def plan_for(self, numels, topology, *, itemsize, on_cuda):
        return CommPlan()


OPTIONS = {
    "adasum": {"between_nodes": Adasum()},
    "local steps": {"between_nodes": LocalSteps(every=4)},
    "codec": {"between_nodes": Mean(dtype="int8")},
    "error feedback": {"between_nodes": Mean(dtype="int8", error_feedback=True)},
    "shard update": {"shard_update": "node"},
    "world update": {"shard_update": "world"},
    "algorithm": {"comm": Comm(plan=CommPlan(algorithm="two_level"))},
    "planner": {"comm": Comm(plan=Plans())},
    "extensions": {"extensions": [object]},
    "unused parameters": {"find_unused_parameters": True},
    "ranks per node": {"ranks_per_node": 1},
    "exact evaluation": {"exact_evaluation": True},
    "uneven batches": {"uneven_batches": "join"},
}
KINDS = {"pipeline": HybridPipelineStrategy, "Fabric": fabric.HybridAllReduceStrategy}
LAYER = nn.Linear(2, 2)
PRUNING = callbacks.ModelPruning("l1_unstructured", parameters_to_prune=[(LAYER, "weight")])


def precision(name, **attributes):
    return SimpleNamespace(precision=name, **attributes)


def adam_of_the_users():
    return [type("Adam", (torch.optim.Adam,), {})(LAYER.parameters())]


IN_THE_FIT = {
    "unequal nodes": lambda: table.in_nodes(Topology(rank=0, nodes=((0, 1), (2,)))),
    "precision": lambda: table.in_precision(precision("bf16-mixed")),
    "double precision": lambda: table.in_precision(precision("64-true")),
    "gradient scaler": lambda: table.in_precision(precision("16-mixed", scaler=object())),
    "SyncBatchNorm": lambda: table.in_module(nn.Sequential(LAYER, nn.SyncBatchNorm(2))),
    "global batch": lambda: table.in_module(nn.Sequential(LAYER, InfoNCE())),
    "ModelPruning": lambda: table.in_callbacks([PRUNING]),
    "StochasticWeightAveraging": lambda: table.in_callbacks(
        [callbacks.StochasticWeightAveraging(0.1)]
    ),
    "BaseFinetuning": lambda: table.in_callbacks([callbacks.BaseFinetuning()]),
    "GradientAccumulationScheduler": lambda: table.in_callbacks(
        [callbacks.GradientAccumulationScheduler({1: 2})]
    ),
    "whole tensors": lambda: table.in_optimizers(adam_of_the_users()),
    "two owners": lambda: table.in_optimizers([torch.optim.SGD(LAYER.parameters(), lr=0.1)] * 2),
}
OF_A_PIPELINE = {
    "accumulation": {"accumulate_grad_batches": 4},
    "manual optimization": {"automatic_optimization": False},
    "SyncBatchNorm": {"_layer_sync": object()},
    "precision": {"precision": "16-mixed"},
    "norm of all": {"optimizers": [LAMB(LAYER.parameters(), lr=0.1, max_grad_norm=1.0)]},
    "line search": {"optimizers": [torch.optim.LBFGS(LAYER.parameters())]},
}


def in_a_pipeline(name):
    defaults = {
        "accumulate_grad_batches": 1,
        "automatic_optimization": True,
        "_layer_sync": None,
        "precision": "32-true",
        "optimizers": [],
    }
    # One object serves as strategy, trainer and module.
    fit = SimpleNamespace(**defaults | OF_A_PIPELINE[name])
    fit.strategy = fit
    refuse_in_pipeline(fit, fit, fit)


def by_hand(is_automatic=False):
    module = SimpleNamespace(automatic_optimization=is_automatic)
    refuse_unknown_outcomes(precision("16-true"), module, may_skip=True)


def use_both(pair):
    """Use both features of a row in the way that a user or a fit does."""
    names = {pair.feature, pair.conflict}
    if names <= {*OPTIONS, *KINDS}:
        kind = HybridAllReduceStrategy
        options = {}
        for name in sorted(names):
            kind = KINDS.get(name, kind)
            options |= OPTIONS.get(name, {})
        kind(**options)
    elif pair.conflict == "pipeline" and pair.feature in OF_A_PIPELINE:
        in_a_pipeline(pair.feature)
    elif pair.feature == "manual steps":
        by_hand()
    else:
        features = {}
        for name in names:
            if name in IN_THE_FIT:
                features |= IN_THE_FIT[name]()
            else:
                features[name] = f"`{name}`"
        table.refuse_excluded(features)


@pytest.mark.parametrize(
    "pair", table.EXCLUDED, ids=lambda pair: f"{pair.feature}, {pair.conflict}"
)
def test_every_row_raises_its_error_with_both_names_the_reason_and_both_cures(pair):
    with pytest.raises(Exception, match="cannot be combined: ") as caught:
        use_both(pair)
    kind = "ValueError"
    if pair.conflict == "pipeline" and pair.feature in OF_A_PIPELINE:
        kind = "MisconfigurationException"
    assert type(caught.value).__name__ == kind
    names, _, explanation = str(caught.value).partition(" cannot be combined: ")
    assert " and " in names
    cures = f"{table.CURES[pair.feature]}, or {table.CURES[pair.conflict]}."
    assert explanation.lower().startswith(f"{pair.reason}. {cures}".lower())


def test_a_run_without_excluded_features_is_accepted():
    features = [
        table.in_nodes(Topology(rank=0, nodes=((0,), (1,)))),
        table.in_precision(precision("16-true")),
        table.in_module(nn.Sequential(nn.BatchNorm2d(4), LAYER)),
        table.in_callbacks([callbacks.EarlyStopping("loss")]),
        table.in_optimizers(
            [LARS(LAYER.parameters(), lr=0.1), torch.optim.SGD([nn.Parameter(torch.zeros(1))])]
        ),
        table.in_optimizers(adam_of_the_users(), of={id(nn.Parameter())}),
    ]
    assert not any(features)
    orthogonal = LARS(LAYER.parameters(), lr=0.1, direction="orthogonal")
    assert "whole tensors" in table.in_optimizers([orthogonal])
    by_hand(is_automatic=True)
    for options in OPTIONS.values():
        HybridAllReduceStrategy(**options)
    for name in ("algorithm", "unused parameters", "shard update", "world update"):
        HybridPipelineStrategy(**OPTIONS[name])


def test_the_page_shows_every_row_of_the_table():
    """The page has one line per option, with everything that it excludes."""
    text = (
        README.read_text().partition("## Options that cannot be combined")[2].partition("\n## ")[0]
    )
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    shown = set()
    for conflict, *cells in rows[2:]:
        for cell in cells:
            shown |= {(feature.strip(), conflict.strip()) for feature in cell.split(",")}
    assert shown == {(pair.feature, pair.conflict) for pair in table.EXCLUDED}
