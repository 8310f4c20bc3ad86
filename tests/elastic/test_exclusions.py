"""Options and runs that an elastic strategy rejects: every row raises its error, and the page lists all rows."""

from types import SimpleNamespace

import pytest
from lightning.pytorch import callbacks
from torch import nn

from lightning_hybrid import Adasum, HybridElasticStrategy, LocalSteps
from lightning_hybrid.contrastive import InfoNCE
from lightning_hybrid.elastic.exclusions import (
    CURES_OF_ELASTIC,
    EXCLUDED_BY_ELASTIC,
    features_of_run,
)
from lightning_hybrid.elastic.strategy import MAX_HOSTS_VARIABLE, MEET_VARIABLE
from lightning_hybrid.strategy.compatibility import refuse_excluded
from tests.checkout import ROOT

HOSTS = {"max_hosts": 2, "meet": "127.0.0.1:29400"}

OPTIONS = {
    "adasum": {"between_nodes": Adasum()},
    "local steps": {"between_nodes": LocalSteps(every=4)},
    "unused parameters": {"find_unused_parameters": True},
    "world update": {"shard_update": "world"},
    "extensions": {"extensions": [object]},
    "ranks per node": {"ranks_per_node": 1},
    "uneven batches": {"uneven_batches": "join"},
}

TRAINER = {
    "accumulate_grad_batches": 1,
    "callbacks": [],
    "num_nodes": 1,
    "reload_dataloaders_every_n_epochs": 0,
}


def module(*layers, is_automatic=True, **of_trainer):
    """Return a module with the attributes that the check reads."""
    network = nn.Sequential(nn.Linear(2, 2), *layers)
    network.automatic_optimization = is_automatic
    network.trainer = SimpleNamespace(**{**TRAINER, **of_trainer})
    return network


def sliced():
    layer = nn.Linear(2, 2)
    layer.node_slices = (("0",),)
    return layer


RUNS = {
    "node slices": lambda: module(sliced()),
    "several nodes": lambda: module(num_nodes=2),
    "reloaded loaders": lambda: module(reload_dataloaders_every_n_epochs=1),
    "inexact resume": module,
    "manual optimization": lambda: module(is_automatic=False),
    "accumulation": lambda: module(accumulate_grad_batches=4),
    "global batch": lambda: module(InfoNCE()),
    "SyncBatchNorm": lambda: module(nn.SyncBatchNorm(2)),
    "GradientAccumulationScheduler": lambda: module(
        callbacks=[callbacks.GradientAccumulationScheduler({1: 2})]
    ),
}


def refuse(name):
    """Request from an elastic strategy a feature that a row excludes."""
    if name in OPTIONS:
        HybridElasticStrategy(**HOSTS, **OPTIONS[name])
    features = features_of_run(RUNS[name](), has_exact_resume=name != "inexact resume")
    features["elastic"] = "`strategy` (='hybrid_elastic')"
    refuse_excluded(features, rows=EXCLUDED_BY_ELASTIC, cures=CURES_OF_ELASTIC)


@pytest.mark.parametrize("row", EXCLUDED_BY_ELASTIC, ids=lambda row: row.feature)
def test_every_row_raises_its_error_with_the_reason_and_both_cures(row):
    with pytest.raises(ValueError, match="cannot be combined: ") as raised:
        refuse(row.feature)
    names, _, explanation = str(raised.value).partition(" cannot be combined: ")
    assert "`strategy` (='hybrid_elastic')" in names
    cures = f"{CURES_OF_ELASTIC[row.feature]}, or {CURES_OF_ELASTIC['elastic']}"
    assert explanation.lower() == f"{row.reason}. {cures}.".lower()


def test_a_plain_run_is_accepted():
    assert features_of_run(module(), has_exact_resume=True) == {}
    HybridElasticStrategy(**HOSTS, shard_update="node", find_unused_parameters=False)


@pytest.mark.parametrize("name", ["broadcast_buffers", "forward_sync_buffers"])
def test_buffers_that_differ_between_ranks_are_refused(name):
    with pytest.raises(ValueError, match=rf"`{name}` \(=False\) cannot be combined"):
        HybridElasticStrategy(**HOSTS, **{name: False})
    HybridElasticStrategy(**HOSTS, **{name: True})


def test_a_misspelt_option_is_answered_with_the_strategys_own():
    with pytest.raises(
        ValueError, match=r"option of strategy='hybrid_elastic' .* Did you mean `silent_s`\?"
    ):
        HybridElasticStrategy(**HOSTS, silent=3)
    with pytest.raises(ValueError, match=r"Did you mean `ranks_per_node`\?"):
        HybridElasticStrategy(**HOSTS, rank_per_node=2)


def test_the_page_names_all_that_is_excluded():
    page = (ROOT / "lightning_hybrid" / "elastic" / "README.md").read_text()
    section = page.partition("## What it excludes\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    listed = [row.split("|")[1].strip() for row in rows[1:]]
    assert listed == [row.feature for row in EXCLUDED_BY_ELASTIC]


def test_the_name_alone_takes_hosts_from_the_environment(monkeypatch):
    monkeypatch.setenv(MAX_HOSTS_VARIABLE, "4")
    monkeypatch.setenv(MEET_VARIABLE, "10.0.0.1:29400,10.0.0.2:29400")
    elastic = HybridElasticStrategy()._elastic
    assert elastic.max_hosts == 4
    assert elastic.meeting_points == ("10.0.0.1:29400", "10.0.0.2:29400")


def test_without_hosts_the_error_names_the_argument_and_the_variable(monkeypatch):
    monkeypatch.delenv(MAX_HOSTS_VARIABLE, raising=False)
    monkeypatch.delenv(MEET_VARIABLE, raising=False)
    with pytest.raises(ValueError, match=rf"`max_hosts` \(=None\) .*{MAX_HOSTS_VARIABLE}"):
        HybridElasticStrategy()
    with pytest.raises(ValueError, match=rf"`meet` \(=None\) .*{MEET_VARIABLE}"):
        HybridElasticStrategy(max_hosts=2)
