from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_hybrid.comm.engine.process_groups import CommGroups
from lightning_hybrid.comm.topology import Topology


def facts_of_groups():
    """What a rank sees of groups over nodes (0, 1) and (2, 3); names of the default groups before and after."""
    before = len(dist.distributed_c10d._world.pg_map)
    topology = Topology.from_ranks_per_node(rank=dist.get_rank(), world_size=4, ranks_per_node=2)
    scopes = {"a": "node", "b": "node", "c": "leaders", "d": "world"}
    groups = CommGroups(topology=topology, timeout=timedelta(seconds=3))
    groups.add(scopes)
    members = {name: group and dist.get_process_group_ranks(group) for name, group in groups.by_stage.items()}
    timeouts = {
        group._get_backend(torch.device("cpu")).options._timeout
        for group in groups.by_stage.values()
        if group is not None
    }
    used = {id(group) for group in groups.by_stage.values() if group is not None}
    groups.destroy()
    groups.destroy()
    shared = CommGroups(topology=topology, timeout=timedelta(seconds=3), share=True)
    shared.add(scopes)
    is_shared = shared.by_stage["a"] is shared.by_stage["b"]
    shared.destroy()
    return members, timeouts, len(used), is_shared, len(dist.distributed_c10d._world.pg_map) - before


def test_every_stage_has_its_own_group_with_the_users_timeout(four_ranks):
    for rank, (members, timeouts, num_groups, is_shared, num_left) in enumerate(four_ranks.run(facts_of_groups)):
        node = [0, 1] if rank < 2 else [2, 3]
        leaders = [0, 2] if rank in (0, 2) else None
        assert members == {"a": node, "b": node, "c": leaders, "d": [0, 1, 2, 3]}
        assert timeouts == {timedelta(seconds=3)}
        assert num_groups == sum(group is not None for group in members.values())
        assert is_shared
        assert num_left == 0


def destroy_after_the_default_group():
    topology = Topology.from_ranks_per_node(rank=dist.get_rank(), world_size=2, ranks_per_node=2)
    groups = CommGroups(topology=topology, timeout=timedelta(seconds=3))
    groups.add({"a": "world"})
    dist.destroy_process_group()
    groups.destroy()


def test_groups_may_be_destroyed_after_the_default_group(two_ranks):
    two_ranks.run(destroy_after_the_default_group)


def test_ranks_alone_in_a_stage_get_no_group():
    """Nothing is built, so no process group needs to exist."""
    topology = Topology(rank=0, nodes=((0,),))
    groups = CommGroups(topology=topology, timeout=timedelta(seconds=1))
    groups.add({"a": "node", "b": "world"})
    assert (groups.by_stage["a"], groups.by_stage["b"]) == (None, None)
    groups.destroy()
