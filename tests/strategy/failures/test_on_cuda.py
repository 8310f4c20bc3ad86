"""Handling of failures on GPUs, as far as it can be tested without a GPU."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_hybrid import Comm, HybridAllReduceStrategy, LocalSteps, Mean
from lightning_hybrid.comm import CommEngine
from lightning_hybrid.comm.engine import process_groups
from lightning_hybrid.comm.engine.in_flight import FailureLatch
from lightning_hybrid.comm.engine.order_check import BucketOrder
from lightning_hybrid.contrastive import InfoNCE
from lightning_hybrid.pipeline import rank_layout
from lightning_hybrid.strategy.comm_setup import CommSetup
from lightning_hybrid.strategy.failures.failure_reports import (
    CLEAN_UP_ONLY,
    ERROR_HANDLING,
    HIGH_PRIORITY,
    LAUNCH_ORDER,
)
from lightning_hybrid.strategy.local_steps import extension as local_steps
from lightning_hybrid.strategy.strategy_options import StrategyOptions

CAUSE = (
    "comm: rank 2 does not answer. The gradients of this step are lost, and the communication engine accepts no more "
    "buckets."
)


def strategy_on(device_type):
    return HybridAllReduceStrategy(parallel_devices=[torch.device(device_type, 0)])


@pytest.mark.parametrize(
    ("name", "device_type", "of_the_user", "expected"),
    [
        # Torch's watchdog aborts communicators but does not end the process.
        (
            ERROR_HANDLING,
            "cuda",
            None,
            CLEAN_UP_ONLY,
        ),
        (ERROR_HANDLING, "cuda", "1", "1"),
        (LAUNCH_ORDER, "cuda", None, None),  # by default there is one communicator
        (HIGH_PRIORITY, "cuda", None, None),
        (ERROR_HANDLING, "cpu", None, None),
    ],
)
def test_variables_of_nccl_are_set_before_any_group_is_created_and_restored_at_the_end(
    monkeypatch, name, device_type, of_the_user, expected
):
    seen = []
    monkeypatch.setattr(
        DDPStrategy, "setup_environment", lambda self: seen.append(os.environ.get(name))
    )
    monkeypatch.setattr(DDPStrategy, "teardown", lambda self: None)
    monkeypatch.delenv(name, raising=False)
    if of_the_user is not None:
        monkeypatch.setenv(name, of_the_user)
    strategy = strategy_on(device_type)
    strategy.setup_environment()
    strategy.teardown()
    assert seen == [expected]
    assert os.environ.get(name) == of_the_user


class Slices(nn.Module):
    node_slices = (("one", "two"),)


@pytest.mark.parametrize(
    ("options", "module", "is_set"),
    [
        ({}, nn.Linear(1, 1), False),
        ({"comm": Comm(algorithm="flat")}, nn.Linear(1, 1), False),
        ({"find_unused_parameters": True}, nn.Linear(1, 1), False),
        ({"comm": Comm(algorithm="hierarchical")}, nn.Linear(1, 1), True),
        ({"comm": Comm(algorithm="two_level")}, nn.Linear(1, 1), True),
        ({"between_nodes": Mean(dtype="int8")}, nn.Linear(1, 1), True),
        ({"shard_update": "node"}, nn.Linear(1, 1), True),
        ({"between_nodes": LocalSteps(every=2)}, nn.Linear(1, 1), True),
        ({}, nn.Sequential(nn.Linear(1, 1), Slices()), True),
        ({}, nn.Sequential(nn.Linear(1, 1), InfoNCE(0.1)), True),
    ],
    ids=str,
)
def test_communicators_take_turns_where_several_may_be_in_use(monkeypatch, options, module, is_set):
    seen = []
    monkeypatch.setattr(
        DDPStrategy,
        "setup_environment",
        lambda self: seen.append([os.environ.get(name) for name in (LAUNCH_ORDER, HIGH_PRIORITY)]),
    )
    monkeypatch.setattr(DDPStrategy, "teardown", lambda self: None)
    for name in (LAUNCH_ORDER, HIGH_PRIORITY):
        monkeypatch.delenv(name, raising=False)
    strategy = HybridAllReduceStrategy(parallel_devices=[torch.device("cuda", 0)], **options)
    strategy._lightning_module = module
    strategy.setup_environment()
    strategy.teardown()
    assert seen == [["1" if is_set else None] * 2]
    assert LAUNCH_ORDER not in os.environ


def failed_engine(device_type):
    engine = CommEngine.__new__(CommEngine)
    engine.device = torch.device(device_type)
    engine._is_closed = False
    engine._carrier = SimpleNamespace(look=lambda: None)
    engine._latch = FailureLatch(BucketOrder())
    engine._latch.error = CAUSE
    return engine


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_after_a_failure_on_a_device_nothing_is_saved(monkeypatch, device_type):
    saved = []
    monkeypatch.setattr(DDPStrategy, "save_checkpoint", lambda self, *args: saved.append(args))
    strategy = strategy_on(device_type)
    strategy._comm.engine = failed_engine(device_type)
    if device_type == "cuda":
        with pytest.raises(RuntimeError, match="rank 2 does not answer"):
            strategy.save_checkpoint({}, "somewhere")
        strategy._comm.engine._latch.error = ""
    strategy.save_checkpoint({}, "somewhere")
    assert saved == [({}, "somewhere")]


def test_an_error_of_the_device_after_a_failure_says_who_is_the_cause(monkeypatch):
    monkeypatch.setattr(DDPStrategy, "on_exception", lambda self, exception: None)
    strategy = strategy_on("cuda")
    strategy._failures.engine = failed_engine("cuda")
    strategy.set_world_ranks = lambda: None
    error = ValueError("an illegal value")
    strategy.on_exception(error)
    assert CAUSE in error.__notes__
    strategy.on_exception(explained := RuntimeError(CAUSE))
    assert CAUSE not in getattr(explained, "__notes__", [])


@pytest.mark.parametrize(("has_failed", "ended"), [(True, "forgotten"), (False, "destroyed")])
def test_after_a_failure_no_group_is_waited_for(monkeypatch, has_failed, ended):
    """After a failure, groups are forgotten instead of destroyed, because destroying an aborted group blocks.

    This applies to the group of shared work and to the groups of a pipeline.
    """
    seen = []
    monkeypatch.setattr(process_groups, "forget", lambda group: seen.append((group, "forgotten")))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(
        dist, "destroy_process_group", lambda group: seen.append((group, "destroyed"))
    )
    comm = CommSetup(StrategyOptions.parse({}, argument_names=()))
    comm.device = torch.device("cuda")
    comm._work_group = "work"
    comm.engine = SimpleNamespace(
        close=lambda: None, failure="comm: rank 1 died" if has_failed else ""
    )
    comm.close([])
    groups = object.__new__(rank_layout.PipelineGroups)
    groups.pipe, groups.agree, groups.data = groups._groups = ["pipe", "agree", "data"]
    groups.destroy(are_aborted=has_failed)
    # Messages are sent over Gloo.
    assert seen == [
        ("work", ended),
        ("pipe", ended),
        ("agree", "destroyed"),
        ("data", ended),
    ]


@pytest.mark.parametrize(
    ("device_type", "failure"), [("cuda", "comm: rank 1 died"), ("cuda", ""), ("cpu", "comm: x")]
)
def test_the_nodes_group_of_local_steps_is_not_waited_for_where_it_was_aborted(
    monkeypatch, device_type, failure
):
    freed = []
    for name in ("forget", "destroy"):
        monkeypatch.setattr(
            process_groups, name, lambda group, name=name: freed.append((name, group))
        )
    engine = SimpleNamespace(failure=failure, close=lambda: None)
    extension = object.__new__(local_steps.LocalStepsExtension)
    extension._nodes = SimpleNamespace(node_engine=engine, group="nodes")
    extension._warning_filter = None
    extension.end(
        SimpleNamespace(engine=SimpleNamespace(failure=""), device=torch.device(device_type)), None
    )
    assert freed == [("forget" if device_type == "cuda" and failure else "destroy", "nodes")]
