"""Groups of an elastic view on CUDA, with mock NCCL groups that record calls, and its engine before the first view."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.comm.engine import view_groups
from lightning_hybrid.comm.engine.view_engine import ViewEngine
from lightning_hybrid.comm.engine.view_groups import ViewGroups

torch_groups = dist.distributed_c10d
SCOPES = {
    "all_reduce": "world",
    "scatter_reduce": "node",
    "shard_all_reduce": "across",
    "gather": "node",
}
LIMIT = timedelta(seconds=20)


@pytest.fixture
def happened(monkeypatch):
    """Record the events of groups and device in order. `device` completes the work of the device."""
    seen = SimpleNamespace(calls=[], device=lambda: None, connect=lambda: None)

    class Group:
        def __init__(self, name, backend):
            self.name = name.split(", ")[1]
            self.backend = backend

        def abort(self):
            seen.calls.append(("abort", self.name))

        def rank(self):
            return 0

        def size(self):
            return 2

        def recv(self, *_):
            seen.calls.append(("end", self.name))
            raise RuntimeError("its connections are closed")

    def make(
        size, rank, ranks, backend, store, *, group_name, backend_options=None, device_id=None, **_
    ):
        # With a bound device but without `lazy_init`, torch would split the host's group and wait for its other ranks.
        assert (backend == "nccl") == (device_id == torch.device("cuda:0")) == bool(backend_options)
        assert backend != "nccl" or backend_options.lazy_init
        seen.connect()
        seen.calls.append((backend, group_name.split(", ")[1], size))
        return Group(group_name, backend), store

    def synchronize():
        seen.device()
        seen.calls.append(("synchronize", ""))

    monkeypatch.setattr(torch_groups, "_new_process_group_helper", make)
    monkeypatch.setattr(
        torch_groups,
        "_abort_process_group",
        lambda group: seen.calls.append(("forget", group.name)),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(view_groups, "ABORT_LIMIT_S", 0.5)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    for name, value in {"get_rank": 0, "get_world_size": 4, "is_initialized": True}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(
        torch_groups, "_get_default_group", lambda: pytest.fail("that of a host outlives the view")
    )
    yield seen
    for group in list(torch_groups._world.pg_group_ranks):
        if isinstance(group, Group):
            del torch_groups._world.pg_group_ranks[group]


def open_view(do=lambda groups: None):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    topology = Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=2)
    groups = ViewGroups(
        topology=topology,
        store=f"127.0.0.1:{server.port}",
        number=7,
        timeout=LIMIT,
        device=torch.device("cuda:0"),
    )
    do(groups)
    groups.open()
    groups.add(SCOPES)
    return groups, server


def test_stages_have_a_communicator_for_each_set_of_ranks_and_plans_and_state_have_gloo(happened):
    groups, _ = open_view()
    assert happened.calls == [
        ("gloo", "view", 4),
        ("nccl", "lightning_hybrid.all_reduce", 4),
        ("nccl", "lightning_hybrid.scatter_reduce", 2),
        ("nccl", "lightning_hybrid.shard_all_reduce", 2),
    ]
    assert groups.world.backend == "gloo"
    assert groups.by_stage["scatter_reduce"] is groups.by_stage["gather"]


def test_a_cut_aborts_the_views_communicators_once_and_what_they_left_on_the_device_ends_before_the_next(
    happened,
):
    groups, _ = open_view()
    del happened.calls[:]
    threads = [threading.Thread(target=groups.cut) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    groups.destroy()
    assert ("end", "view") in happened.calls  # Gloo's group, by each rank that cuts
    assert groups.world is None  # its threads end with the last reference
    calls = [call for call in happened.calls if call[0] != "end"]
    aborted = calls[:3]
    after_aborts = calls[3:]
    stages = ("all_reduce", "scatter_reduce", "shard_all_reduce")
    nccl = {f"lightning_hybrid.{stage}" for stage in stages}
    assert set(aborted) == {("abort", name) for name in nccl}
    assert after_aborts[0] == ("synchronize", "")
    assert set(after_aborts[1:]) == {("forget", name) for name in nccl | {"view"}}


def test_a_device_that_does_not_end_is_an_error_and_no_wait(happened):
    groups, _ = open_view()
    may_end = threading.Event()
    happened.device = lambda: may_end.wait(60)
    groups.cut()
    with pytest.raises(RuntimeError, match="on cuda:0 are still waiting for a failed host"):
        groups.destroy()
    may_end.set()


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_host_that_leaves_while_groups_connect_is_an_error_and_no_wait(happened, backend):
    may_end = threading.Event()
    cut = []

    def connect():
        if backend == "gloo" or happened.calls:
            cut[0].cut()
            may_end.wait(60)

    happened.connect = connect
    with pytest.raises(RuntimeError, match="on cuda:0 are still waiting for a failed host"):
        open_view(cut.append)
    may_end.set()
    backends = [call[0] for call in happened.calls if call[0] in ("gloo", "nccl")]
    assert len(backends) == (backend == "nccl")


def forget_to_end(limit):
    time.sleep(limit.total_seconds())
    raise RuntimeError("Operation timed out!")


def test_a_wait_that_gloo_forgets_is_left_behind_when_the_view_has_ended(happened):
    groups, _ = open_view()
    groups.world.allreduce = lambda tensors: SimpleNamespace(
        wait=forget_to_end, is_completed=lambda: False
    )
    threading.Timer(0.3, groups.cut).start()
    with pytest.raises(RuntimeError, match="comm: the group of hosts has changed"):
        groups.add_up(torch.zeros(1))
    world = groups.world
    groups.destroy()
    assert view_groups._STUCK_GROUPS.pop() == [world]  # freeing it would block


def test_an_engine_that_has_no_view_yet_takes_errors_and_is_closed():
    topology = Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=2)
    engine = ViewEngine(
        topology=topology, plan=CommPlan(), timeout=LIMIT, device=torch.device("cpu")
    )
    engine.abort("a host was refused")
    engine.cut("a view has ended")
    assert engine.failure == ""
    assert engine.close() == []
