"""Messages over host memory: what is being sent does not change before it is through."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.comm.engine import gloo_p2p
from tests.comm.layouts import integers

COLLECTIVES = ("reduce_to_first_", "broadcast_", "scatter_reduce_", "gather_parts_", "collect_parts_", "exchange_")


def sent_as_it_was(name):
    """Whether each tensor that this rank sends has its first values when the send is waited for; None: it never is."""
    found = []

    class Send:
        def __init__(self, tensor, rank, group):
            self.tensor, self.before, self.place = tensor, tensor.clone(), len(found)
            self.work = group.send([self.before], rank, 0)
            found.append(None)

        def wait(self):
            found[self.place] = torch.equal(self.tensor, self.before)
            self.work.wait()

    with patch.object(gloo_p2p, "_send", Send):
        flat = integers(dist.get_rank(), 100, torch.float32)
        parts = flat.tensor_split(dist.get_world_size())
        getattr(gloo_p2p, name)(parts if name == "collect_parts_" else flat, dist.group.WORLD)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_send_is_through_before_its_memory_changes_or_goes_back_to_the_caller(rank_pool, name, world_size):
    found = rank_pool.ranks(world_size).run(sent_as_it_was, name)
    assert any(found)
    assert all(all(of_rank) for of_rank in found)
