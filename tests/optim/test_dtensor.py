"""DTensor parameters, on real ranks: each moves its shards as the whole tensors move. Few collectives. Refusals."""

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
    Beside,
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
    """Each tensor has one of the placements, by its shape. None leaves it plain."""

    mesh: object
    placements: list

    def cut(self, tensor):
        own = self.placements[sum(tensor.shape) % len(self.placements)]
        if own is None:
            return tensor
        return Shards(self.mesh, own).cut(tensor)


def distance_on_rank(placements, rule, options, path):
    place = Mixed(mesh_of(2, 2), placements)
    return Beside(place, path, rule, shapes=SHARDED, whole_path=path, **options).steps(3).distance()


# The sums of squares of small tensors are float64: in another order they give the same float32 ratio, and so the same
# bits. The fused passes add 128 squares at a time in float32, so another cut rounds otherwise, by 6e-8 a step.
@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", [{}, FUSED], ids=["lists", "fused"])
@pytest.mark.parametrize("rule", [LARS, LAMB])
def test_two_dimensions_of_a_mesh_are_added_up_where_they_shard(rule, path, four_ranks):
    """Hybrid sharding has replicas: to add over them too would count every element twice."""
    placements = [
        [Shard(0), Shard(0)],
        [Replicate(), Shard(0)],
        [Shard(0), Shard(1)],
        [Shard(1), Replicate()],
    ]
    # In a quotient of two norms a factor of both would not be seen.
    options = {LARS: {"eps": 0.5}, LAMB: {"max_grad_norm": 0.5}}[rule]
    for result in four_ranks.run(distance_on_rank, placements, rule, options, path):
        assert result <= (2e-6 if path == FUSED else 0)


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
    """The distance from one process on the whole batch, the kinds of placements and the collectives of a step."""
    mesh = mesh_of(2, 2, names=("data", "tensor"))
    ours = block_net()
    theirs = block_net()
    for block in list(theirs)[:2]:
        parallelize_module(
            block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    for block in (*theirs, theirs):
        fully_shard(block, mesh=mesh["data"])
    whole, optimizer = (
        rule(param_groups(net, 0.01), lr=LR[rule.__name__], **path) for net in (ours, theirs)
    )
    own = mesh.get_local_rank("data")
    for step in range(5):
        x = normals(8, 12, seed=step, dtype=torch.float32)
        ours(x).square().mean().backward()
        theirs(x[4 * own : 4 * own + 4]).square().mean().backward()
        with Collectives() as collectives:
            optimizer.step()
        whole.step()
        for one in (whole, optimizer):
            one.zero_grad()
    sharded = [param for param in theirs.parameters() if isinstance(param, DTensor)]
    kinds = {type(one).__name__ for param in sharded for one in param.placements}
    states = [
        value for param in sharded for key, value in optimizer.state[param].items() if key != "step"
    ]
    result = distance(list(ours.parameters()), list(theirs.parameters()))
    return result, kinds, collectives.count, {isinstance(value, DTensor) for value in states}


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
        by_dtensors = {
            op: n for op, n in self._debug.get_comm_counts().items() if "c10d_functional" in str(op)
        }
        self.count += sum(by_dtensors.values())


# Float32 gradients are added in another order than those of the whole batch; LAMB divides by roots of their squares,
# which amplifies that in small ones.
@pytest.mark.parametrize(("rule", "path", "bound"), [(LARS, {}, 5e-6), (LAMB, FUSED, 5e-5)])
def test_fully_shard_with_tensor_parallelism_trains_as_one_process_on_the_whole_batch(
    rule, path, bound, four_ranks
):
    """Each alone: `tests/strategy/test_model_parallel.py`."""
    for result, kinds, num_collectives, state in four_ranks.run(engines_on_rank, rule, path):
        assert result <= bound
        assert kinds >= {"Shard", "_StridedShard"}
        assert state == {True}  # so that checkpoints can gather it
        assert num_collectives <= 5


def sequence_on_rank():
    """Each rank normalises a half of the rows. The distance, and whether such gradients were there."""
    mesh = mesh_of(2)
    rank = dist.get_rank()
    ours, theirs = (nn.Sequential(*block_net()[0].children()) for _ in range(2))
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
        are_partial = [
            parameter.grad.placements[0].is_partial() for parameter in theirs[0].parameters()
        ]
        for optimizer in optimizers:
            optimizer.step()
    return distance(list(ours.parameters()), list(theirs.parameters())), are_partial


def test_gradients_that_are_sums_yet_to_be_made_are_added_up(two_ranks):
    """Sequence parallelism. Without it the weights of the normalisation would see half of the batch."""
    for result, are_partial in two_ranks.run(sequence_on_rank):
        assert are_partial == [True, True]
        assert result <= 5e-6


def collectives_on_rank(mesh_shape, rule, options):
    place = Shards(mesh_of(*mesh_shape), (Shard(0),) * len(mesh_shape))
    both = Beside(place, options, rule, shapes=[(4, 3)] * 40).steps(1)
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
    sharded, replicated = (
        nn.Parameter(distribute_tensor(ones, mesh, [one])) for one in (Shard(0), Replicate())
    )
    messages = [
        error_of(LARS, [partial], lr=1.0),
        error_of(LARS, [sharded], lr=1.0, direction="orthogonal"),
    ]
    whole = nn.Parameter(ones.clone())
    optimizers = [LARS([one], lr=1.0, direction="orthogonal") for one in (whole, replicated)]
    set_grads([whole], 1)
    replicated.grad = distribute_tensor(whole.grad, mesh, [Replicate()])
    for optimizer in optimizers:
        optimizer.step()
    return messages, distance([whole], [replicated])


def test_partial_parameters_and_singular_values_of_shards_are_refused(two_ranks):
    """A replicated matrix is whole on every rank, so its singular values are known."""
    for (partial, orthogonal), result in two_ranks.run(refusals_on_rank):
        assert partial.startswith(
            "ValueError: `params[0].placements` (=(Partial(sum),)) must be Shard or Replicate"
        )
        assert 'and `direction` (="orthogonal") cannot be combined' in orthogonal
        assert result == 0
