import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid.comm import CommPlan, HookState, average_bucket
from lightning_hybrid.comm.hook import from_wire, split_divisor, to_wire
from tests.comm.layouts import engine_over
from tests.toy import error_of

LAYOUTS = {1: ((0,),), 2: ((0, 1),), 3: ((0, 2), (1,)), 4: ((0, 2), (1, 3))}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 40)
        self.second = nn.Linear(40, 40, bias=False)
        self.norm = nn.BatchNorm1d(40)
        self.last = nn.Linear(40, 3)

    def forward(self, x):
        return self.last(self.norm(self.second(self.first(x).tanh())))


def engine_of(algorithm, timeout_s=20.0, *, check_order=True):
    plan = CommPlan(algorithm=algorithm, hierarchical_below_bytes=4000, check_order=check_order)
    return engine_over(LAYOUTS[dist.get_world_size()], plan, timeout_s=timeout_s)


def wrapped(network, engine, comm_dtype=None, **options):
    model = DistributedDataParallel(network, **options)
    model.register_comm_hook(HookState(engine=engine, comm_dtype=comm_dtype), average_bucket)
    return model


def two_models(engine, comm_dtype=None):
    torch.manual_seed(0)
    network = Network()
    plain = DistributedDataParallel(copy.deepcopy(network), bucket_cap_mb=0.0005)
    return plain, wrapped(copy.deepcopy(network), engine, comm_dtype, bucket_cap_mb=0.0005)


def train_both(algorithm, comm_dtype, check_order):
    """Return the gradients of plain DDP and of our hook in every step. Both models train with plain DDP's gradients."""
    engine = engine_of(algorithm, check_order=check_order)
    plain, ours = two_models(engine, comm_dtype)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    steps = []
    for _ in range(4):
        batch = torch.randn(8, 16, generator=generator)
        for model in (plain, ours):
            model.zero_grad()
            model(batch).square().sum().backward()
        named = list(zip(plain.named_parameters(), ours.parameters(), strict=True))
        steps.append([(name, p.grad.clone(), q.grad.clone()) for (name, p), q in named])
        with torch.no_grad():
            for (_, p), q in named:
                p -= 0.01 * p.grad
                q.copy_(p)
    summary = engine.trace.drain()
    engine.close()
    return steps, summary


def assert_like_plain(per_rank, *, roundings, unit_roundoff):
    """Assert equal bits on all ranks, and errors that are small relative to the largest gradient of each tensor."""
    steps_of_rank_0, _ = per_rank[0]
    for rank, (steps, _) in enumerate(per_rank):
        for step, step_of_rank_0 in zip(steps, steps_of_rank_0, strict=True):
            for (name, plain, ours), (_, _, on_rank_0) in zip(step, step_of_rank_0, strict=True):
                assert torch.equal(ours, on_rank_0), f"{name} on rank {rank}"
                bound = roundings * unit_roundoff * plain.abs().max()
                assert (ours - plain).abs().max() <= bound, f"{name} on rank {rank}"


# Rounding of 4 addends and a division, in another order. Gradients of different ranks cancel, so the largest mean may
# be several times smaller than the addends. The bound is 64 unit roundoffs, and at most 8 were observed.
ROUNDINGS = 64


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "algorithm", ["auto", "flat", "parallel_flat", "hierarchical", "two_level"]
)
def test_gradients_are_those_of_plain_ddp(rank_pool, world_size, algorithm):
    if algorithm == "two_level" and world_size == 3:
        algorithm = "auto"  # uneven nodes
    per_rank = rank_pool.ranks(world_size).run(train_both, algorithm, None, True)
    assert_like_plain(per_rank, roundings=ROUNDINGS, unit_roundoff=2**-24)
    summary = per_rank[0][1]
    num_parameter_bytes = 4 * sum(parameter.numel() for parameter in Network().parameters())
    assert summary.num_steps == 4
    assert summary.num_bytes == 4 * num_parameter_bytes
    # DDP rebuilt its buckets after the first step, which has one bucket
    assert summary.num_buckets > 8


@pytest.mark.parametrize("world_size", [2, 4])
def test_flat_is_plain_ddp_bit_for_bit_where_dividing_is_exact(rank_pool, world_size):
    results = rank_pool.ranks(world_size).run(train_both, "flat", None, False)
    for rank, (steps, _) in enumerate(results):
        for step in steps:
            for name, plain, ours in step:
                assert torch.equal(plain, ours), f"{name} on rank {rank}"


@pytest.mark.parametrize("comm_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_wire_dtype_costs_its_own_roundings_and_no_more(four_ranks, comm_dtype):
    unit_roundoff = torch.finfo(comm_dtype).eps / 2
    per_rank = four_ranks.run(train_both, "auto", comm_dtype, True)
    assert_like_plain(per_rank, roundings=ROUNDINGS, unit_roundoff=unit_roundoff)
    num_parameters = sum(parameter.numel() for parameter in Network().parameters())
    assert per_rank[0][1].num_bytes == 4 * num_parameters * comm_dtype.itemsize


def average_large_singles():
    engine = engine_over(((0,), (1,), (2,), (3,)), CommPlan(), dtype_across_nodes=torch.float16)
    model = wrapped(nn.Linear(1, 5, bias=False), engine)
    model(torch.full((1, 1), 30016.0 + 64 * dist.get_rank())).sum().backward()
    engine.close()
    return model.module.weight.grad


def test_a_sum_that_is_in_halves_between_nodes_alone_does_not_overflow_either(four_ranks):
    """Four times 30,000 exceeds fp16, but the sum of their halves does not. All values are exact in fp16."""
    for rank, grad in enumerate(four_ranks.run(average_large_singles)):
        assert torch.equal(grad, torch.full((5, 1), 30112.0)), f"rank {rank}"


def test_the_divisor_is_split_near_its_root_and_its_first_part_is_a_power_of_two():
    for world_size in (*range(1, 70), 1000, 1024, 2048, 4096):
        before, after = split_divisor(world_size, is_fp16=True)
        assert before * after == world_size
        assert split_divisor(world_size, is_fp16=False) == (1, world_size)
        assert before & (before - 1) == 0
        assert 0.5 <= after / before <= 2


def average_of_equals(value, world_size, *, before):
    """Return the average of ``world_size`` (a power of two) equal fp16 gradients, added pairwise as in a tree."""
    buffer = torch.full((3,), value, dtype=torch.float16)
    wire = to_wire(buffer, None, before=before)
    for _ in range(world_size.bit_length() - 1):
        wire = wire + wire
    return from_wire(wire, buffer=wire, after=world_size / before)


def test_halves_survive_2048_ranks():
    before, _ = split_divisor(2048, is_fp16=True)
    for value in (2.0**-18, 2.0**-17, 1.0, 1000.0, 1023.5):
        assert average_of_equals(value, 2048, before=before).tolist() == [value] * 3
    # This is why the division is split. A single division before or after the sum would lose one end of the range.
    assert average_of_equals(1000.0, 2048, before=1).tolist() == [float("inf")] * 3
    assert average_of_equals(2.0**-18, 2048, before=2048).tolist() == [0.0] * 3


def test_the_division_is_rounded_once_in_the_wider_dtype():
    """Rounding 1 / 3 to fp16 before widening it would be off by 8e-5."""
    buffer = torch.zeros(1)
    assert (
        from_wire(torch.ones(1, dtype=torch.float16), buffer=buffer, after=3.0).item()
        == torch.tensor(1 / 3).item()
    )
    buffer = torch.zeros(1, dtype=torch.float16)
    # The value only fits after the division.
    from_wire(torch.full((1,), 3 * 65504.0), buffer=buffer, after=3.0)
    assert buffer.item() == 65504.0


@pytest.mark.parametrize("comm_dtype", [torch.float64, torch.int32, "float16"])
def test_a_wire_dtype_that_is_none_is_refused(comm_dtype):
    with pytest.raises(
        ValueError, match=r"^`comm_dtype` \(=.*must be None or one of float32, float16, bfloat16"
    ):
        HookState(engine=None, comm_dtype=comm_dtype)


def backward_of_sparse_gradients():
    engine = engine_of("auto")
    model = wrapped(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)), engine)
    with pytest.raises(TypeError, match=r"Bucket \d \(layout torch.sparse_coo.*contains sparse"):
        model(torch.tensor([1, 2])).sum().backward()
    engine.close()


def test_sparse_gradients_are_refused(two_ranks):
    two_ranks.run(backward_of_sparse_gradients)


def average_complex():
    """The expected value of d/dW of Re(sum(W x)) is conj(x), here (1 + rank) - 2i (1 + rank)."""
    engine = engine_of("auto")
    model = wrapped(nn.Linear(4, 2, bias=False, dtype=torch.complex64), engine)
    model(torch.full((1, 4), (1 + dist.get_rank()) * (1 + 2j))).sum().real.backward()
    engine.close()
    return model.module.weight.grad


def test_complex_gradients_are_averaged_as_pairs_of_reals(two_ranks):
    for rank, grad in enumerate(two_ranks.run(average_complex)):
        assert torch.equal(grad, torch.full((2, 4), 1.5 - 3j)), f"rank {rank}"


def backward_with_an_absent_rank():
    """Return rank 0's error and waiting time in backward when rank 1 never enters backward."""
    engine = engine_of("flat", timeout_s=1.0)
    _, ours = two_models(engine)
    loss = ours(torch.ones(4, 16)).sum()
    error = ""
    began_s = time.monotonic()
    if dist.get_rank() == 0:
        error = error_of(loss.backward)
        engine.close()  # rank 0 waits here until the other rank has read the error
    waited_s = time.monotonic() - began_s
    dist.barrier()
    engine.close()
    return error, waited_s


def test_a_failed_sum_fails_backward_with_the_engines_words_after_the_users_time_limit(two_ranks):
    rank_0, _ = two_ranks.run(backward_with_an_absent_rank)
    error, waited_s = rank_0
    assert "comm: rank 1 is behind: it has submitted 0 of 1 buckets" in error
    assert "rank 0 failed on bucket 0 in stage `all_reduce` of the flat all-reduce: " in error
    assert 0.9 < waited_s < 20  # the default group's timeout is 45 s
