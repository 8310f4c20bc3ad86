"""DTensor parameters, on real ranks: each moves its shards as the whole tensors move; few collectives; refusals."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
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
from tests.optim.makers import FUSED, LOOP, LR, Beside, Shards, distance, mesh_of
from tests.optim.test_lars import normals, set_grads
from tests.toy import error_of

EVERY = {"default": {}, "loop": LOOP, "fused": FUSED}
every_path = pytest.mark.parametrize("path", EVERY.values(), ids=EVERY)
every_rule = pytest.mark.parametrize("rule", [LARS, LAMB])
# Rows that ranks share evenly, unevenly, and of which only one rank has any; a chunk of the fused passes and a rest.
SHAPES = [(8, 5), (5, 7), (1, 6), (3,), (4, 5000), (2, 3, 2, 2)]


@dataclass(frozen=True)
class Mixed:
    """Each tensor has one of the placements, by its shape; None leaves it plain."""

    mesh: object
    placements: list

    def cut(self, tensor):
        own = self.placements[sum(tensor.shape) % len(self.placements)]
        return tensor if own is None else Shards(self.mesh, own).cut(tensor)

    def lend(self, optimizer, params, wholes):
        pass


def distance_on_rank(mesh_shape, placements, rule, options, path, shapes=SHAPES):
    place = Mixed(mesh_of(*mesh_shape), placements)
    return Beside(place, path, rule, shapes=shapes, whole_path=path, **options).steps(3).distance()


# The sums of squares of small tensors are float64: in another order they give the same float32 ratio, and so the same
# bits. The fused passes add 128 squares at a time in float32, so another cut rounds otherwise, by 6e-8 a step.
@pytest.mark.sampled(2)
@every_path
@every_rule
def test_two_dimensions_of_a_mesh_are_added_up_where_they_shard(rule, path, four_ranks):
    """Hybrid sharding has replicas: to add over them too would count every element twice."""
    placements = [[Shard(0), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Replicate()]]
    # In a quotient of two norms a factor of both would not be seen.
    options = {LARS: {"eps": 0.5}, LAMB: {"max_grad_norm": 0.5}}[rule]
    for found in four_ranks.run(distance_on_rank, (2, 2), placements, rule, options, path):
        assert found <= (2e-6 if path == FUSED else 0)


# ---- torch's own engines ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pair of matrices, for columns and rows, after a normalisation."""

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


def engines_on_rank(data_size, tensor_size, rule, path):
    """The distance from one process on the whole batch, the kinds of placements and the collectives of a step."""
    mesh = mesh_of(data_size, tensor_size, names=("data", "tensor"))
    ours, theirs = block_net(), block_net()
    if tensor_size > 1:
        for block in list(theirs)[:2]:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if data_size > 1:
        for block in (*theirs, theirs):
            fully_shard(block, mesh=mesh["data"])
    whole, optimizer = (rule(param_groups(net, 0.01), lr=LR[rule.__name__], **path) for net in (ours, theirs))
    own = mesh.get_local_rank("data")
    for step in range(5):
        x = normals(4 * data_size, 12, seed=step, dtype=torch.float32)
        ours(x).square().mean().backward()
        theirs(x[4 * own : 4 * own + 4]).square().mean().backward()
        with Collectives() as collectives:
            optimizer.step()
        whole.step()
        for one in (whole, optimizer):
            one.zero_grad()
    sharded = [param for param in theirs.parameters() if isinstance(param, DTensor)]
    kinds = {type(one).__name__ for param in sharded for one in param.placements}
    states = [value for param in sharded for key, value in optimizer.state[param].items() if key != "step"]
    found = distance(list(ours.parameters()), list(theirs.parameters()))
    return found, kinds, collectives.count, {isinstance(value, DTensor) for value in states}


class Collectives:
    """Counts collectives: those of c10d that are called by name, and those that DTensors do by themselves."""

    def __enter__(self):
        self.count, self._real, self._debug = 0, dist.all_reduce, CommDebugMode()

        def counting(*args, **kwargs):
            self.count += 1
            return self._real(*args, **kwargs)

        self._mode = self._debug.__enter__()
        dist.all_reduce = counting
        return self

    def __exit__(self, *error):
        dist.all_reduce = self._real
        self._debug.__exit__(*error)
        by_dtensors = {op: n for op, n in self._debug.get_comm_counts().items() if "c10d_functional" in str(op)}
        self.count += sum(by_dtensors.values())


# Float32 gradients are added in another order than those of the whole batch; LAMB divides by roots of their squares,
# which amplifies that in small ones. What the optimizer itself does in another way is in the tests above.
ENGINE_BOUND = {LARS: 5e-6, LAMB: 5e-5}
ENGINES = {
    "fsdp": (2, 1, {"Shard"}),
    "tensor parallel": (1, 2, {"Shard", "Replicate"}),
    "both": (2, 2, {"Shard", "_StridedShard"}),
}


@pytest.mark.sampled(5)
@every_path
@every_rule
@pytest.mark.parametrize("engine", ENGINES)
def test_fully_shard_and_tensor_parallelism_train_as_one_process_on_the_whole_batch(engine, rule, path, rank_pool):
    data_size, tensor_size, expected = ENGINES[engine]
    ranks = rank_pool.ranks(data_size * tensor_size)
    for found, kinds, num_collectives, state in ranks.run(engines_on_rank, data_size, tensor_size, rule, path):
        assert found <= ENGINE_BOUND[rule]
        assert kinds >= expected
        assert state == {True}  # so that checkpoints can gather it
        assert num_collectives <= (5 if path != LOOP else 20)


def sequence_on_rank(path):
    """Each rank normalises a half of the rows; the distance, and whether such gradients were there."""
    mesh, rank = mesh_of(2), dist.get_rank()
    ours, theirs = (nn.Sequential(*block_net()[0].children()) for _ in range(2))
    plan = {"0": SequenceParallel(sequence_dim=0), "1": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel()}
    parallelize_module(theirs, mesh, plan)
    optimizers = [LARS(list(net.parameters()), lr=4.0, **path) for net in (ours, theirs)]
    for step in range(3):
        x = normals(8, 12, seed=step, dtype=torch.float32)
        for net, rows in ((ours, x), (theirs, x[4 * rank : 4 * rank + 4])):
            net.zero_grad()
            net(rows).square().mean().backward()
        are_partial = [one.grad.placements[0].is_partial() for one in theirs[0].parameters()]
        for optimizer in optimizers:
            optimizer.step()
    return distance(list(ours.parameters()), list(theirs.parameters())), are_partial


@every_path
def test_gradients_that_are_sums_yet_to_be_made_are_added_up(path, two_ranks):
    """Sequence parallelism; without it the weights of the normalisation would see half of the batch."""
    for found, are_partial in two_ranks.run(sequence_on_rank, path):
        assert are_partial == [True, True]
        assert found <= 5e-6


# ---- collectives -----------------------------------------------------------------------------------------------------


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
        (LARS, {"fused": True}, 1),
        (LARS, {"foreach": False}, 20),  # one for each tensor that is adapted
        (LAMB, {}, 1),
        (LAMB, {"fused": True}, 1),
        (LAMB, {"max_grad_norm": 1.0}, 2),
        (LAMB, {"max_grad_norm": 1.0, "fused": True}, 2),
    ],
)
def test_a_step_is_one_collective_and_one_more_for_a_bound(rule, options, expected, two_ranks):
    assert two_ranks.run(collectives_on_rank, (2,), rule, options) == [expected] * 2


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_a_step_on_a_mesh_of_two_dimensions_is_two_collectives(options, four_ranks):
    assert four_ranks.run(collectives_on_rank, (2, 2), LARS, options) == [2] * 4


# ---- overflow, state, autograd ---------------------------------------------------------------------------------------


def resumed_on_rank(rule, path):
    """Three steps, saved whole, loaded into whole tensors and into shards; two more steps of all three."""
    mesh = mesh_of(2)
    saved, whole, shards = nets = block_net(), block_net(), block_net()
    for sharded in (saved, shards):
        for block in sharded:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
    optimizers = {net: rule(param_groups(net, 0.01), lr=LR[rule.__name__], **path) for net in nets}

    def steps(net, seeds):
        for seed in seeds:
            for param in net.parameters():
                grad = normals(*param.shape, seed=seed, dtype=torch.float32)
                param.grad = place(grad, param)
            optimizers[net].step()

    def place(tensor, like):
        return distribute_tensor(tensor, mesh, like.placements) if isinstance(like, DTensor) else tensor

    steps(saved, range(3))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    # A copy, as on a CPU what is whole already is the state itself, which moves on.
    everywhere = [copy.deepcopy(get_optimizer_state_dict(saved, optimizers[saved], options=options))]
    dist.broadcast_object_list(everywhere, src=0)  # torch gathers on rank zero only
    weights = [param.detach().full_tensor() for param in saved.parameters()]
    steps(saved, range(3, 5))
    expected = [param.detach().full_tensor() for param in saved.parameters()]
    found = []
    for net in (whole, shards):
        with torch.no_grad():
            for param, weight in zip(net.parameters(), weights, strict=True):
                param.copy_(place(weight, param))
        state = copy.deepcopy(everywhere[0])
        set_optimizer_state_dict(net, optimizers[net], state, options=StateDictOptions(full_state_dict=True))
        steps(net, range(3, 5))
        found.append(distance(expected, list(net.parameters())))
    return found


@pytest.mark.sampled(4)
@every_path
@every_rule
def test_state_is_saved_whole_and_goes_on_as_whole_tensors_and_as_shards(rule, path, two_ranks):
    for from_whole, from_shards in two_ranks.run(resumed_on_rank, rule, path):
        assert from_shards == 0
        assert from_whole <= (2e-6 if path == FUSED else 0)


def verdicts_on_rank():
    """A step that finds an inf by itself, then one that is given a verdict, then one with neither."""
    both, found = Beside(Shards(mesh_of(2)), {}, shapes=SHAPES), []
    for name, value in (("grad_scale", 2.0), ("found_inf", 0.0), (None, None)):
        for param in both.own:
            param.grad = torch.full_like(param, float("inf") if name == "grad_scale" else 1.0)
        if name:
            setattr(both.optimizer, name, torch.tensor(value))
        both.optimizer.step()
        found.append(None if both.optimizer.last_found_inf is None else float(both.optimizer.last_found_inf))
        if name:
            delattr(both.optimizer, name)
    return found


def test_the_verdict_of_a_step_is_its_own(two_ranks):
    assert two_ranks.run(verdicts_on_rank) == [[1.0, 0.0, None]] * 2


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusals_on_rank():
    mesh, ones = mesh_of(2), torch.ones(4, 3)
    partial = nn.Parameter(DTensor.from_local(ones, mesh, [Partial()]))
    sharded, replicated = (nn.Parameter(distribute_tensor(ones, mesh, [one])) for one in (Shard(0), Replicate()))
    messages = [
        error_of(LARS, [partial], lr=1.0),
        error_of(LARS, [sharded], lr=1.0, direction="orthogonal"),
    ]
    whole = nn.Parameter(ones.clone())
    optimizers = [LARS([one], lr=1.0, direction="orthogonal") for one in (whole, replicated)]
    set_grads([whole], 1)
    replicated.grad = distribute_tensor(whole.grad, mesh, [Replicate()])
    for each in optimizers:
        each.step()
    return messages, distance([whole], [replicated])


def test_partial_parameters_and_singular_values_of_shards_are_refused(two_ranks):
    """A replicated matrix is whole on every rank, so its singular values are known."""
    for (partial, orthogonal), found in two_ranks.run(refusals_on_rank):
        assert partial.startswith("ValueError: `params[0].placements` (=(Partial(sum),)) must be Shard or Replicate")
        assert 'and `direction` (="orthogonal") exclude each other' in orthogonal
        assert found == 0
