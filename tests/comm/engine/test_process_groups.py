from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_hybrid.comm.engine.process_groups import CommGroups
from lightning_hybrid.comm.topology import Topology


def facts_of_groups():
    """Members, timeouts and number of the groups of stages over nodes (0, 1) and (2, 3); how many are left behind."""
    before = len(dist.distributed_c10d._world.pg_map)
    topology = Topology.from_ranks_per_node(rank=dist.get_rank(), world_size=4, ranks_per_node=2)
    found = []
    for share in (False, True):
        groups = CommGroups(topology=topology, timeout=timedelta(seconds=3), share=share)
        groups.add({"a": "node", "b": "node", "c": "leaders", "d": "world"})
        own = {name: group for name, group in groups.by_stage.items() if group is not None}
        members = {name: dist.get_process_group_ranks(group) for name, group in own.items()}
        timeouts = {group._get_backend(torch.device("cpu")).options._timeout for group in own.values()}
        found.append((members, timeouts, len({id(group) for group in own.values()})))
        groups.destroy()
        groups.destroy()
    return *found, len(dist.distributed_c10d._world.pg_map) - before


def test_every_stage_has_its_own_group_with_the_users_timeout(four_ranks):
    for rank, (own, shared, num_left) in enumerate(four_ranks.run(facts_of_groups)):
        node, leaders = [0, 1] if rank < 2 else [2, 3], {"c": [0, 2]} if rank in (0, 2) else {}
        members = {"a": node, "b": node, **leaders, "d": [0, 1, 2, 3]}
        assert own == (members, {timedelta(seconds=3)}, len(members))
        assert shared[0] == members
        assert shared[2] == len(members) - 1  # of one node's stages
        assert num_left == 0


def destroy_after_the_default_group():
    topology = Topology.from_ranks_per_node(rank=dist.get_rank(), world_size=2, ranks_per_node=2)
    groups = CommGroups(topology=topology, timeout=timedelta(seconds=3))
    groups.add({"a": "world"})
    dist.destroy_process_group()
    groups.destroy()


def test_groups_may_be_destroyed_after_the_default_group(two_ranks):
    two_ranks.run(destroy_after_the_default_group)
