"""DTensor parameters on real ranks: shards move like whole tensors, with few collectives, and errors."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_hybrid.optim import LAMB, LARS, param_groups
from tests.optim.makers import (
    FUSED,
    LR,
    OptimizerPair,
    Shards,
    Whole,
    distance,
    mesh_of,
    normals,
    set_grads,
)
from tests.optim.test_contract import SHARDED
from tests.toy import error_of


@dataclass(frozen=True)
class Mixed(Whole):
    """Layout that gives each tensor one of the placements, depending on its shape. None leaves it plain."""

    mesh: object
    placements: list

    def cut(self, tensor):
        placements = self.placements[sum(tensor.shape) % len(self.placements)]
        if placements is None:
            return tensor
        return Shards(self.mesh, placements).cut(tensor)


def distance_on_rank(placements, rule, options, path):
    layout = Mixed(mesh_of(2, 2), placements)
    both = OptimizerPair(layout, path, rule, shapes=SHARDED, whole_path=path, **options)
    return both.steps(3).distance()


# The sums of squares of small tensors are float64. In another order they give the same float32 ratio, and so the same
# bits. The fused passes add 128 squares at a time in float32, so another cut differs by rounding, by 6e-8 per step.
@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", [{}, FUSED], ids=["lists", "fused"])
@pytest.mark.parametrize("rule", [LARS, LAMB])
def test_two_dimensions_of_a_mesh_are_added_up_where_they_shard(rule, path, four_ranks):
    """Hybrid sharding has replicas. Adding over them as well would count every element twice."""
    placements = [
        [Shard(0), Shard(0)],
        [Replicate(), Shard(0)],
        [Shard(0), Shard(1)],
        [Shard(1), Replicate()],
    ]
    # A common factor would cancel in a quotient of two norms. These options make it visible.
    options = {LARS: {"eps": 0.5}, LAMB: {"max_grad_norm": 0.5}}[rule]
    bound = 2e-6 if path == FUSED else 0.0
    distances = four_ranks.run(distance_on_rank, placements, rule, options, path)
    for rank, distance_of_rank in enumerate(distances):
        assert distance_of_rank <= bound, f"rank {rank}"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 20)
        self.down = nn.Linear(20, 12)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def block_net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(Block(), Block(), nn.Linear(12, 3))


def engines_on_rank(rule, path):
    """Return the distance from one process on the whole batch, and facts about the last step."""
    mesh = mesh_of(2, 2, names=("data", "tensor"))
    reference = block_net()
    sharded = block_net()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in list(sharded)[:2]:
        parallelize_module(block, mesh["tensor"], plan)
    for block in (*sharded, sharded):
        fully_shard(block, mesh=mesh["data"])
    lr = LR[rule.__name__]
    reference_optimizer = rule(param_groups(reference, 0.01), lr=lr, **path)
    optimizer = rule(param_groups(sharded, 0.01), lr=lr, **path)
    rank = mesh.get_local_rank("data")
    for step in range(5):
        x = normals(8, 12, seed=step, dtype=torch.float32)
        reference(x).square().mean().backward()
        sharded(x[4 * rank : 4 * rank + 4]).square().mean().backward()
        with Collectives() as collectives:
            optimizer.step()
        reference_optimizer.step()
        optimizer.zero_grad()
        reference_optimizer.zero_grad()

    kinds = set()
    are_states_sharded = set()
    for param in sharded.parameters():
        if isinstance(param, DTensor):
            kinds.update(type(placement).__name__ for placement in param.placements)
            for key, value in optimizer.state[param].items():
                if key != "step":
                    are_states_sharded.add(isinstance(value, DTensor))
    return Engines(
        distance=distance(list(reference.parameters()), list(sharded.parameters())),
        kinds=kinds,
        num_collectives=collectives.count,
        are_states_sharded=are_states_sharded,
    )


@dataclass(frozen=True)
class Engines:
    """Distance from the reference, kinds of placements, collectives of a step, and whether states are sharded."""

    distance: float
    kinds: set[str]
    num_collectives: int
    are_states_sharded: set[bool]


class Collectives:
    def __enter__(self):
        self.count = 0
        self._real = dist.all_reduce
        self._debug = CommDebugMode()

        def counting(*args, **kwargs):
            self.count += 1
            return self._real(*args, **kwargs)

        self._mode = self._debug.__enter__()
        dist.all_reduce = counting
        return self

    def __exit__(self, *error):
        dist.all_reduce = self._real
        self._debug.__exit__(*error)
        for operation, number in self._debug.get_comm_counts().items():
            if "c10d_functional" in str(operation):  # of DTensors
                self.count += number


# Float32 gradients are added in another order than in the whole batch. LAMB divides by roots of their squares, which
# amplifies the difference for small gradients.
@pytest.mark.parametrize(("rule", "path", "bound"), [(LARS, {}, 5e-6), (LAMB, FUSED, 5e-5)])
def test_fully_shard_with_tensor_parallelism_trains_as_one_process_on_the_whole_batch(
    rule, path, bound, four_ranks
):
    """`tests/strategy/test_model_parallel.py` tests sharding and tensor parallelism separately."""
    for rank, result in enumerate(four_ranks.run(engines_on_rank, rule, path)):
        assert result.distance <= bound, f"rank {rank}"
        assert result.kinds >= {"Shard", "_StridedShard"}, f"rank {rank}"
        assert result.are_states_sharded == {True}, f"rank {rank}: checkpoints cannot gather them"
        assert result.num_collectives <= 5, f"rank {rank}"


def sequence_on_rank():
    """Normalize half of the rows on each rank. Return the distance, and which gradients were partial."""
    mesh = mesh_of(2)
    rank = dist.get_rank()
    ours = nn.Sequential(*block_net()[0].children())
    theirs = nn.Sequential(*block_net()[0].children())
    plan = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(),
    }
    parallelize_module(theirs, mesh, plan)
    optimizers = [LARS(list(net.parameters()), lr=4.0) for net in (ours, theirs)]
    for step in range(3):
        x = normals(8, 12, seed=step, dtype=torch.float32)
        for net, rows in ((ours, x), (theirs, x[4 * rank : 4 * rank + 4])):
            net.zero_grad()
            net(rows).square().mean().backward()
        norm_grads = [parameter.grad for parameter in theirs[0].parameters()]
        are_partial = [grad.placements[0].is_partial() for grad in norm_grads]
        for optimizer in optimizers:
            optimizer.step()
    return distance(list(ours.parameters()), list(theirs.parameters())), are_partial


def test_gradients_that_are_sums_yet_to_be_made_are_added_up(two_ranks):
    """Without this, sequence parallelism would give the normalization's weights gradients of half of the batch."""
    for rank, (distance_of_rank, are_partial) in enumerate(two_ranks.run(sequence_on_rank)):
        assert are_partial == [True, True], f"rank {rank}"
        assert distance_of_rank <= 5e-6, f"rank {rank}"


def collectives_on_rank(mesh_shape, rule, options):
    layout = Shards(mesh_of(*mesh_shape), (Shard(0),) * len(mesh_shape))
    both = OptimizerPair(layout, options, rule, shapes=[(4, 3)] * 40).steps(1)
    both.give_grads(2)
    with Collectives() as collectives:
        both.optimizer.step()
    return collectives.count


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        (LARS, {}, 1),
        (LARS, FUSED, 1),
        (LAMB, {"max_grad_norm": 1.0}, 2),
        (LAMB, {"max_grad_norm": 1.0, **FUSED}, 2),
    ],
)
def test_a_step_is_one_collective_and_one_more_for_a_bound(rule, options, expected, two_ranks):
    assert two_ranks.run(collectives_on_rank, (2,), rule, options) == [expected] * 2


def test_a_step_on_a_mesh_of_two_dimensions_is_two_collectives(four_ranks):
    assert four_ranks.run(collectives_on_rank, (2, 2), LARS, {}) == [2] * 4


def refusals_on_rank():
    mesh = mesh_of(2)
    ones = torch.ones(4, 3)
    partial = nn.Parameter(DTensor.from_local(ones, mesh, [Partial()]))
    sharded = nn.Parameter(distribute_tensor(ones, mesh, [Shard(0)]))
    replicated = nn.Parameter(distribute_tensor(ones, mesh, [Replicate()]))
    messages = [
        error_of(LARS, [partial], lr=1.0),
        error_of(LARS, [sharded], lr=1.0, direction="orthogonal"),
    ]
    whole = nn.Parameter(ones.clone())
    set_grads([whole], 1)
    replicated.grad = distribute_tensor(whole.grad, mesh, [Replicate()])
    LARS([whole], lr=1.0, direction="orthogonal").step()
    LARS([replicated], lr=1.0, direction="orthogonal").step()
    return messages, distance([whole], [replicated])


def test_partial_parameters_and_singular_values_of_shards_are_refused(two_ranks):
    """A replicated matrix is whole on every rank, so its singular values are known."""
    rule = "ValueError: `params[0].placements` (=(Partial(sum),)) must contain only Shard and Replicate"
    for rank, (messages, distance_of_rank) in enumerate(two_ranks.run(refusals_on_rank)):
        of_partial, of_sharded = messages
        assert of_partial.startswith(rule), f"rank {rank}"
        assert 'and `direction` (="orthogonal") cannot be combined' in of_sharded, f"rank {rank}"
        assert distance_of_rank == 0, f"rank {rank}"
