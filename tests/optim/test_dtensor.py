"""DTensor parameters, on real ranks: each moves its shards as the whole tensors move; few collectives; refusals."""

from __future__ import annotations

import copy
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lightning_hybrid.optim import LAMB, LARS, param_groups
from lightning_hybrid.optim.diagnostics import trust_ratios
from lightning_hybrid.optim.lars import Denominator, MomentumForm
from tests.optim.test_lars import copies_of, normals, parameters, set_grads

PATHS = {"default": {}, "loop": {"foreach": False}, "fused": {"fused": True}}
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
every_rule = pytest.mark.parametrize("rule", [LARS, LAMB])
LR = {LARS: 4.0, LAMB: 0.1}
# Rows that ranks share evenly, unevenly, and of which only one rank has any; a chunk of the fused passes and a rest.
SHAPES = [(8, 5), (5, 7), (1, 6), (3,), (4, 5000), (2, 3, 2, 2)]


def mesh_of(shape, names=None):
    """A mesh, without what torch remembers of one in an earlier world of the pool.

    torch 2.11 holds meshes of equal shape for equal, and gives out one whose process groups have ended.
    """
    _clear_sharding_prop_cache()
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shards(params, mesh, placements):
    """The same parameters on a mesh; each takes the next of the `placements`, and None leaves it plain."""
    found = []
    for index, param in enumerate(params):
        own = placements[index % len(placements)]
        whole = param.detach().clone()
        found.append(nn.Parameter(whole if own is None else distribute_tensor(whole, mesh, fitting(own, whole.dim()))))
    return found


def fitting(placements, num_dims):
    """Without dimensions that the tensor does not have."""
    return [Replicate() if isinstance(one, Shard) and one.dim >= num_dims else one for one in placements]


def give_grads(params, others, seed, *, scale=1.0):
    """To `params`, and to `others` their shards."""
    set_grads(params, seed, scale)
    for param, other in zip(params, others, strict=True):
        grad = param.grad.clone()
        other.grad = distribute_tensor(grad, other.device_mesh, other.placements) if is_dtensor(other) else grad


def is_dtensor(tensor):
    return isinstance(tensor, DTensor)


def whole(tensor):
    return tensor.detach().full_tensor() if is_dtensor(tensor) else tensor.detach()


def groups_of(params):
    return [{"params": params[:-2]}, {"params": params[-2:], "trust_ratio": False, "weight_decay": 0.0}]


def distance(params, others):
    """The largest relative distance of a tensor of `others` from that of `params`."""
    pairs = [(one.double(), whole(other).double()) for one, other in zip(params, others, strict=True)]
    return max(((other - one).norm() / one.norm()).item() for one, other in pairs)


def steps_on_rank(mesh_shape, placements, rule, options, path, num_steps=3, shapes=SHAPES):
    """The distance from whole tensors on the same path."""
    mesh = mesh_of(mesh_shape)
    ours = parameters(*shapes)
    theirs = shards(ours, mesh, placements)
    common = {"lr": LR[rule], "weight_decay": 0.01, **options}
    optimizers = rule(groups_of(ours), **common, **path), rule(groups_of(theirs), **common, **path)
    for step in range(num_steps):
        give_grads(ours, theirs, step)
        for optimizer in optimizers:
            optimizer.step()
    return distance(ours, theirs)


# The sums of squares of small tensors are float64: in another order they give the same float32 ratio, and so the same
# bits. The fused passes add 128 squares at a time in float32, so another cut rounds otherwise, by 6e-8 a step.
BOUND = {"default": 0.0, "loop": 0.0, "fused": 2e-6}

FAMILIES = [
    *({"momentum_form": form, "denominator": one} for form in get_args(MomentumForm) for one in get_args(Denominator)),
    {"nesterov": True, "trust_clip": 1.0, "lr": 0.01},
    {"momentum": 0.0},
]


@pytest.mark.parametrize("path", PATHS)
def test_every_family_of_lars_moves_shards_as_it_moves_whole_tensors(path, two_ranks):
    cases = [([[Shard(0)]], options) for options in FAMILIES] + [([[Shard(1)], [Replicate()], None], FAMILIES[0])]
    for found in two_ranks.run(distances_on_rank, LARS, cases, PATHS[path]):
        assert max(found) <= BOUND[path], found


@pytest.mark.parametrize("path", PATHS)
def test_lamb_moves_shards_as_it_moves_whole_tensors(path, two_ranks):
    options = [{}, {"max_grad_norm": 0.5}, {"bias_correction": False, "trust_clip": 0.1}]
    cases = [([[Shard(0)]], one) for one in options] + [([[Shard(1)], [Replicate()], None], options[1])]
    for found in two_ranks.run(distances_on_rank, LAMB, cases, PATHS[path]):
        assert max(found) <= BOUND[path], found


def distances_on_rank(rule, cases, path):
    return [steps_on_rank((dist.get_world_size(),), one, rule, options, path) for one, options in cases]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", PATHS)
@every_rule
def test_two_dimensions_of_a_mesh_are_added_up_where_they_shard(rule, path, four_ranks):
    """Hybrid sharding has replicas: to add over them too would count every element twice."""
    placements = [[Shard(0), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Replicate()]]
    # In a quotient of two norms a factor of both would not be seen.
    options = {LARS: {"eps": 0.5}, LAMB: {"max_grad_norm": 0.5}}[rule]
    for found in four_ranks.run(steps_on_rank, (2, 2), placements, rule, options, PATHS[path]):
        assert found <= BOUND[path]


@settings(max_examples=12)
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=3, max_size=5),
    placements=st.lists(
        st.one_of(
            st.none(),
            st.tuples(st.sampled_from([Shard(0), Shard(1), Replicate()]), st.sampled_from([Shard(0), Replicate()])),
        ),
        min_size=1,
        max_size=4,
    ),
    rule=st.sampled_from([LARS, LAMB]),
    path=st.sampled_from(sorted(PATHS)),
)
def test_any_shapes_and_placements(four_ranks, shapes, placements, rule, path):
    for found in four_ranks.run(steps_on_rank, (2, 2), placements, rule, {}, PATHS[path], 3, shapes):
        assert found <= max(1e-6, BOUND[path])


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
    mesh = mesh_of((data_size, tensor_size), names=("data", "tensor"))
    ours, theirs = block_net(), block_net()
    if tensor_size > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in list(theirs)[:2]:
            parallelize_module(block, mesh["tensor"], plan)
    if data_size > 1:
        for block in theirs:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(theirs, mesh=mesh["data"])
    optimizers = [rule(param_groups(net, 0.01), lr=LR[rule], **path) for net in (ours, theirs)]
    own = mesh.get_local_rank("data")
    counts = []
    for step in range(5):
        x = normals(4 * data_size, 12, seed=step, dtype=torch.float32)
        ours(x).square().mean().backward()
        theirs(x[4 * own : 4 * own + 4]).square().mean().backward()
        with Collectives() as collectives:
            optimizers[1].step()
        counts.append(collectives.count)
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    params = list(ours.parameters()), list(theirs.parameters())
    kinds = {type(one).__name__ for param in params[1] if is_dtensor(param) for one in param.placements}
    state = {is_dtensor(optimizers[1].state[param][key]) for param in params[1] if is_dtensor(param)
             for key in optimizers[1].state[param] if key != "step"}  # fmt: skip
    return distance(*params), kinds, counts[-1], state


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
ENGINES = {"fsdp": (2, 1, {"Shard"}), "tensor parallel": (1, 2, {"Shard", "Replicate"})}


@pytest.mark.sampled(5)
@every_path
@every_rule
@pytest.mark.parametrize("engine", ENGINES)
def test_fully_shard_and_tensor_parallelism_train_as_one_process_on_the_whole_batch(engine, rule, path, two_ranks):
    data_size, tensor_size, expected = ENGINES[engine]
    for found, kinds, num_collectives, state in two_ranks.run(engines_on_rank, data_size, tensor_size, rule, path):
        assert found <= ENGINE_BOUND[rule]
        assert kinds == expected
        assert state == {True}  # so that checkpoints can gather it
        assert num_collectives <= (5 if path != PATHS["loop"] else 20)


@pytest.mark.sampled(5)
@every_rule
@every_path
def test_fully_shard_over_tensor_parallelism_on_two_by_two_ranks(rule, path, four_ranks):
    for found, kinds, num_collectives, _ in four_ranks.run(engines_on_rank, 2, 2, rule, path):
        assert found <= ENGINE_BOUND[rule]
        assert "_StridedShard" in kinds
        assert num_collectives <= (5 if path != PATHS["loop"] else 20)


def sequence_on_rank(path):
    """Each rank normalises a half of the rows; the distance, and whether such gradients were there."""
    mesh, rank = mesh_of((2,)), dist.get_rank()
    ours, theirs = (nn.Sequential(*block_net()[0].children()) for _ in range(2))
    plan = {"0": SequenceParallel(sequence_dim=0), "1": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel()}
    parallelize_module(theirs, mesh, plan)
    optimizers = [LARS(list(net.parameters()), lr=4.0, **path) for net in (ours, theirs)]
    for step in range(3):
        x = normals(8, 12, seed=step, dtype=torch.float32)
        ours(x).square().mean().backward()
        theirs(x[4 * rank : 4 * rank + 4]).square().mean().backward()
        are_partial = [one.grad.placements[0].is_partial() for one in theirs[0].parameters()]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return distance(list(ours.parameters()), list(theirs.parameters())), are_partial


@every_path
def test_gradients_that_are_sums_yet_to_be_made_are_added_up(path, two_ranks):
    """Sequence parallelism; without it the weights of the normalisation would see half of the batch."""
    for found, are_partial in two_ranks.run(sequence_on_rank, path):
        assert are_partial == [True, True]
        assert found <= 5e-6


# ---- collectives -----------------------------------------------------------------------------------------------------


def collectives_on_rank(mesh_shape, rule, options):
    mesh = mesh_of(mesh_shape)
    whole_params = parameters(*[(4, 3)] * 20)
    params = shards(whole_params, mesh, [[Shard(0)] * len(mesh_shape)])
    optimizer = rule(params, lr=LR[rule], weight_decay=0.01, **options)
    for step in range(2):
        give_grads(whole_params, params, step)
        with Collectives() as collectives:
            optimizer.step()
    return collectives.count


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        (LARS, {}, 1),
        (LARS, {"fused": True}, 1),
        (LARS, {"foreach": False}, 20),  # one for each tensor
        (LAMB, {}, 1),
        (LAMB, {"fused": True}, 1),
        (LAMB, {"max_grad_norm": 1.0}, 2),
        (LAMB, {"max_grad_norm": 1.0, "fused": True}, 2),
    ],
)
def test_a_step_on_twenty_tensors_is_one_collective_and_one_more_for_a_bound(rule, options, expected, two_ranks):
    assert two_ranks.run(collectives_on_rank, (2,), rule, options) == [expected] * 2


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_a_step_on_a_mesh_of_two_dimensions_is_two_collectives(options, four_ranks):
    assert four_ranks.run(collectives_on_rank, (2, 2), LARS, options) == [2] * 4


def test_the_counter_of_collectives_counts(two_ranks):
    assert two_ranks.run(counted_on_rank) == [2, 2]


def counted_on_rank():
    mesh = mesh_of((2,))
    tensor = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    with Collectives() as collectives:
        tensor.full_tensor()
        dist.all_reduce(torch.ones(1))
    return collectives.count


# ---- overflow, state, autograd ---------------------------------------------------------------------------------------


def overflow_on_rank(rule, path):
    """Whether an inf in rank one's shard alone left every bit on this rank; the distance after two good steps."""
    mesh = mesh_of((2,))
    ours = parameters(*SHAPES)
    theirs = shards(ours, mesh, [[Shard(0)], [Replicate()]])
    optimizers = [rule(groups_of(some), lr=LR[rule], **path) for some in (ours, theirs)]
    flags, kept = [], None
    for step in range(3):
        give_grads(ours, theirs, step, scale=1024.0)
        if step == 1:
            before, state = copies_of([param.to_local() for param in theirs]), copy.deepcopy(optimizers[1].state_dict())
            if dist.get_rank() == 1:
                theirs[0].grad.to_local()[-1, -1] = torch.inf
        for optimizer in optimizers[step == 1 :]:
            optimizer.grad_scale = torch.tensor(1024.0)
            optimizer.step()
        flags.append(optimizers[1].last_found_inf.item())
        if step == 1:
            kept = all(torch.equal(a, b.to_local()) for a, b in zip(before, theirs, strict=True))
            now = optimizers[1].state_dict()["state"]
            kept = kept and all(
                torch.equal(local(value), local(now[index][key]))
                for index, entries in state["state"].items()
                for key, value in entries.items()
            )
    return flags, kept, distance(ours, theirs)


def local(tensor):
    return tensor.to_local() if is_dtensor(tensor) else tensor


@every_path
@every_rule
def test_an_overflow_in_the_shard_of_one_rank_skips_the_step_on_all(rule, path, two_ranks):
    for flags, kept, found in two_ranks.run(overflow_on_rank, rule, path):
        assert flags == [0.0, 1.0, 0.0]
        assert kept
        assert found <= 2e-6


def resumed_on_rank(rule, path):
    """Three steps, saved whole, loaded into whole tensors and into shards; two more steps of all three."""
    mesh = mesh_of((2,))
    ours, net, other = block_net(), block_net(), block_net()
    for sharded in (net, other):
        for block in sharded:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
    nets = ours, net, other
    optimizers = [rule(param_groups(one, 0.01), lr=LR[rule], **path) for one in nets]

    def step(index, seed):
        for param, one in zip(ours.parameters(), nets[index].parameters(), strict=True):
            grad = normals(*param.shape, seed=seed, dtype=torch.float32)
            one.grad = distribute_tensor(grad, one.device_mesh, one.placements) if is_dtensor(one) else grad
        optimizers[index].step()

    for seed in range(3):
        step(1, seed)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = get_optimizer_state_dict(net, optimizers[1], options=options)
    weights = [whole(param) for param in net.parameters()]
    with torch.no_grad():
        for index in (0, 2):
            for param, weight in zip(nets[index].parameters(), weights, strict=True):
                param.copy_(distribute_tensor(weight, param.device_mesh, param.placements) if index else weight)
    everywhere = [saved]
    dist.broadcast_object_list(everywhere, src=0)  # torch gathers on rank zero only
    for index in (0, 2):
        set_optimizer_state_dict(
            nets[index], optimizers[index], copy.deepcopy(everywhere[0]), options=StateDictOptions(full_state_dict=True)
        )
    for seed in range(3, 5):
        for index in range(3):
            step(index, seed)
    expected = [whole(param) for param in net.parameters()]
    return [distance(expected, list(one.parameters())) for one in (ours, other)]


@pytest.mark.sampled(4)
@every_path
@every_rule
def test_state_is_saved_whole_and_goes_on_as_whole_tensors_and_as_shards(rule, path, two_ranks):
    for from_whole, from_shards in two_ranks.run(resumed_on_rank, rule, path):
        assert from_shards == 0
        assert from_whole <= (2e-6 if path == PATHS["fused"] else 0)


def verdicts_on_rank():
    """A step that finds an inf by itself, then one that is given a verdict, then one with neither."""
    params = shards(parameters(*SHAPES), mesh_of((2,)), [[Shard(0)]])
    optimizer = LARS(groups_of(params), lr=1.0)
    found = []
    for attributes in ({"grad_scale": torch.tensor(2.0)}, {"found_inf": torch.tensor(0.0)}, {}):
        for param in params:
            param.grad = torch.full_like(param, float("inf") if "grad_scale" in attributes else 1.0)
        vars(optimizer).update(attributes)
        optimizer.step()
        found.append(None if optimizer.last_found_inf is None else float(optimizer.last_found_inf))
        for name in attributes:
            delattr(optimizer, name)
    return found


def test_the_verdict_of_a_step_is_its_own(two_ranks):
    assert two_ranks.run(verdicts_on_rank) == [[1.0, 0.0, None]] * 2


def written_on_rank(path):
    mesh = mesh_of((2,))
    (weight,) = shards(parameters((4, 3)), mesh, [[Shard(0)]])
    out = (weight * weight).sum()
    weight.grad = torch.ones_like(weight)
    LARS([weight], lr=1.0, **path).step()
    try:
        out.full_tensor().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@every_path
def test_autograd_sees_that_the_step_wrote(path, two_ranks):
    for message in two_ranks.run(written_on_rank, path):
        assert "modified by an inplace operation" in message


def ratios_on_rank():
    mesh = mesh_of((2,))
    ours = parameters(*SHAPES)
    theirs = shards(ours, mesh, [[Shard(0)]])
    give_grads(ours, theirs, 1)
    found = []
    for params in (ours, theirs):
        of_adapted, of_excluded = trust_ratios(LARS(groups_of(params), lr=1.0))
        assert not of_excluded
        found.append([of_adapted[param].item() for param in params[:-2]])
    return found


def test_the_trust_ratios_that_are_logged_are_of_whole_tensors(two_ranks):
    for ours, theirs in two_ranks.run(ratios_on_rank):
        assert theirs == pytest.approx(ours, rel=1e-12)


def half_on_rank(path):
    """bfloat16 parameters whose state is float32; and float32 ones with bfloat16 gradients and copies."""
    mesh = mesh_of((2,))
    halves = parameters((8, 5), (3,), dtype=torch.bfloat16)
    sharded = shards(halves, mesh, [[Shard(0)]])
    optimizers = [LARS(some, lr=4.0, **path) for some in (halves, sharded)]
    for step in range(3):
        give_grads(halves, sharded, step)
        for optimizer in optimizers:
            optimizer.step()
    dtypes = {optimizers[1].state[param]["momentum_buffer"].dtype for param in sharded}
    masters = shards(parameters((8, 5), (3,)), mesh, [[Shard(0)]])
    copies = {param: param.detach().bfloat16() for param in masters}
    optimizer = LARS(masters, lr=4.0, **path)
    optimizer.copies = copies
    for param in masters:
        param.grad_dtype = None
        param.grad = torch.ones_like(param, dtype=torch.bfloat16)
    optimizer.step()
    copied = all(torch.equal(copies[param].to_local(), param.detach().to_local().bfloat16()) for param in masters)
    return distance(halves, sharded), dtypes, copied


@every_path
def test_half_precision_parameters_gradients_and_copies(path, two_ranks):
    for found, dtypes, copied in two_ranks.run(half_on_rank, path):
        assert found <= 4e-3  # one unit of bfloat16 in few elements, where the fused sums round otherwise
        assert dtypes == {torch.float32}
        assert copied


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusals_on_rank():
    mesh = mesh_of((2,))
    partial = nn.Parameter(DTensor.from_local(torch.ones(4, 3), mesh, [Partial()]))
    sharded, replicated = shards(parameters((4, 3), (4, 3)), mesh, [[Shard(0)], [Replicate()]])
    messages = []
    for make in (lambda: LARS([partial], lr=1.0), lambda: LARS([sharded], lr=1.0, direction="orthogonal")):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            make()
        messages.append(str(caught.value))
    optimizer = LARS([replicated], lr=1.0, direction="orthogonal")
    whole_param = nn.Parameter(whole(replicated).clone())
    alone = LARS([whole_param], lr=1.0, direction="orthogonal")
    give_grads([whole_param], [replicated], 1)
    for each in (optimizer, alone):
        each.step()
    return messages, distance([whole_param], [replicated])


def test_partial_parameters_and_singular_values_of_shards_are_refused(two_ranks):
    """A replicated matrix is whole on every rank, so its singular values are known."""
    for (partial, orthogonal), found in two_ranks.run(refusals_on_rank):
        assert partial.startswith("`params[0].placements` (=(Partial(sum),)) must be Shard or Replicate")
        assert "redistribute(placements=[Replicate()])" in partial
        assert 'and `direction` (="orthogonal") exclude each other' in orthogonal
        assert 'direction="momentum"' in orthogonal
        assert found == 0


# ---- the kernels' part, without ranks --------------------------------------------------------------------------------


class TwoEqualHalves:
    """In place of `ShardSums`: the other rank holds the same elements as this one."""

    def add_up_(self, params, table):
        table.mul_(2)

    def norms(self, params, *norms):
        return [norm * 2**0.5 for norm in norms]

    def largest(self, value):
        return value


@every_path
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}], ids=str)
@every_rule
def test_a_half_of_a_tensor_of_two_equal_halves_moves_as_that_half(rule, options, path):
    if rule is LARS and options:
        pytest.skip("is an option of LAMB")
    halves = parameters((33, 7), (5,), (64,))
    wholes = [nn.Parameter(torch.cat([half.detach()] * 2)) for half in halves]
    ours, theirs = rule(halves, lr=LR[rule], **options, **path), rule(wholes, lr=LR[rule], **options, **path)
    ours.shard_sums = TwoEqualHalves()
    for step in range(4):
        set_grads(halves, step)
        for half, one in zip(halves, wholes, strict=True):
            one.grad = torch.cat([half.grad] * 2)
        for optimizer in (ours, theirs):
            optimizer.step()
    for half, one in zip(halves, wholes, strict=True):
        assert (one.chunk(2)[0] - half).norm() <= 2e-6 * half.norm()
