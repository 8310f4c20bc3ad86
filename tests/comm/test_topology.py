import os
import socket

import pytest
import torch.distributed as dist

from lightning_hybrid.comm import topology as topology_module
from lightning_hybrid.comm.topology import Topology, host_identity, validate_ranks_per_node


def discover_with(hosts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology_module, "host_identity", lambda: (hosts[dist.get_rank()],))
        return Topology.discover()


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        ("aabb", ((0, 1), (2, 3))),
        ("abab", ((0, 2), (1, 3))),
        ("baab", ((0, 3), (1, 2))),
        ("aaba", ((0, 1, 3), (2,))),
        ("abcd", ((0,), (1,), (2,), (3,))),
    ],
)
def test_ranks_with_one_identity_share_a_node_whatever_their_order(four_ranks, hosts, nodes):
    for rank, topology in enumerate(four_ranks.run(discover_with, hosts)):
        assert topology == Topology(rank=rank, nodes=nodes)


def test_real_processes_of_one_machine_share_a_node(one_rank, three_ranks):
    assert three_ranks.run(Topology.discover) == [Topology(rank=rank, nodes=((0, 1, 2),)) for rank in range(3)]
    assert one_rank.run(Topology.discover) == [Topology(rank=0, nodes=((0,),))]


def test_the_identity_of_this_host_says_more_than_its_name():
    name, boot_id, network_namespace = host_identity()
    assert name == socket.gethostname()
    assert len(boot_id) == 36
    assert network_namespace.startswith("net:[")


def test_an_unreadable_proc_leaves_the_host_name(monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(os, "readlink", refuse)
    assert host_identity() == (socket.gethostname(), "", "")


def test_uneven_nodes_have_leaders_but_no_equal_local_ranks():
    topology = Topology(rank=2, nodes=((0, 1), (2,)))
    assert topology.ranks_per_node is None
    assert topology.partition("leaders") == ((0, 2),)
    with pytest.raises(ValueError, match=r"^`nodes` \(=\(\(0, 1\), \(2,\)\)\) must be of equal size"):
        topology.partition("across")


def test_a_node_size_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"^`ranks_per_node` \(=8\) must divide `world_size` \(=12\): "):
        validate_ranks_per_node(world_size=12, ranks_per_node=8)


@pytest.mark.parametrize("ranks_per_node", [0, -1, 2.0, "2", True])
def test_a_node_size_that_is_no_count_is_refused(ranks_per_node):
    with pytest.raises(ValueError, match=r"^`ranks_per_node` \(=.*must be a whole number"):
        Topology.from_ranks_per_node(rank=0, world_size=4, ranks_per_node=ranks_per_node)


NO_PARTITION, OUT_OF_ORDER = r"^`nodes` .*exactly once", r"^`nodes` .*ascending"


@pytest.mark.parametrize(
    ("rank", "nodes", "message"),
    [
        *((0, nodes, NO_PARTITION) for nodes in [(), ((),), ((0,), ()), ((0, 1), (1, 2)), ((1, 2),), ((0, 2),)]),
        *((0, nodes, OUT_OF_ORDER) for nodes in [((1, 0),), ((1,), (0,))]),
        *((rank, ((0, 1),), rf"^`rank` \(={rank}\)") for rank in (-1, 2)),
    ],
)
def test_what_is_no_topology_is_refused(rank, nodes, message):
    with pytest.raises(ValueError, match=message):
        Topology(rank=rank, nodes=nodes)
