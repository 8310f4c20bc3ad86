"""LARS and LAMB on parts of tensors, as ranks share an update: the bits of one optimizer that has all of them.

Ranks are threads here, and their sum a stand-in; the last tests are on real processes.
"""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.optim.diagnostics import trust_ratios
from lightning_hybrid.optim.foreach_ops import in_blocks
from lightning_hybrid.optim.sharded_norms import ShardedVector, norms_over_ranks
from lightning_hybrid.optim.trust_ratio import combined_norms, tensor_norms
from lightning_hybrid.placement import BLOCK, Part, is_split, spans
from tests.reference.families import FAMILIES

PATHS = {"loop": {"foreach": False}, "lists": {"foreach": True}, "fused": {"fused": True}}
every_path = pytest.mark.parametrize("path", PATHS)
COMMON = {LARS: {"lr": 2.0, "weight_decay": 0.01, "trust_coefficient": 0.01}, LAMB: {"lr": 0.01, "weight_decay": 0.01}}
EXCLUDED = {"trust_ratio": False, "weight_decay": 0.0, "excluded_lr_mult": 0.1}
RATIOS = {  # of the rules, what enters a ratio
    **{name: (LARS, options) for name, (_, options) in FAMILIES.items()},
    "no momentum": (LARS, {"momentum": 0.0}),
    "lamb": (LAMB, {}),
    "lamb, bounded": (LAMB, {"max_grad_norm": 1.0}),
    "lamb, not corrected, clipped": (LAMB, {"bias_correction": False, "trust_clip": 0.05, "max_grad_norm": 0.5}),
}


@functools.cache
def normals(*shape, seed):
    """Not to be written to."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shapes_for(num_ranks):
    """Around one block, and around the least that is shared; a matrix; the last is an excluded one."""
    numels = [1, BLOCK - 1, BLOCK, BLOCK + 1, *(num_ranks * BLOCK + more for more in (-1, 0, 1))]
    return [*((numel,) for numel in numels), (2 * num_ranks + 1, BLOCK + 17), (num_ranks * BLOCK + 300,)]


@pytest.fixture(autouse=True)
def one_thread():
    """As each rank; tensors are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Run:
    """One optimizer and its tensors: all of them whole, or a rank's parts of those that are shared.

    `half`: masters with copies in this dtype, which also is that of scaled gradients.
    """

    def __init__(self, rule, shapes, options, *, dtype=torch.float32, half=None, rank=0, num_ranks=1, add_up_=None):
        self.shapes, self.half, self.params = shapes, half, []
        wholes = [0.1 * normals(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
        self.spans = [
            spans(whole.numel(), num_ranks)[rank] if is_split(whole.numel(), num_ranks) else None for whole in wholes
        ]
        for whole, span in zip(wholes, self.spans, strict=True):
            self.params.append(nn.Parameter(whole if span is None else whole.flatten()[slice(*span)].clone()))
            self.params[-1].grad_dtype = None
        groups = [{"params": self.params[:-1]}, {"params": self.params[-1:], **EXCLUDED}]
        self.optimizer = rule(groups, **COMMON[rule] | options)
        if half is not None:
            self.optimizer.copies = {param: param.detach().to(half) for param in self.params}
        if num_ranks > 1:
            pairs = zip(self.params, wholes, self.spans, strict=True)
            self.optimizer.parts = {
                param: Part(numel=whole.numel(), begin=span[0], end=span[1]) for param, whole, span in pairs if span
            }
            self.optimizer.add_up_ = add_up_

    def step(self, seed, spoilt=None):
        """One step; `spoilt`: (tensor, element) of the gradient that is inf."""
        scale = 1.0 if self.half is None else 64.0
        for index, (param, shape, span) in enumerate(zip(self.params, self.shapes, self.spans, strict=True)):
            grad = (scale * normals(*shape, seed=1000 * seed + index)).to(self.half or param.dtype)
            if spoilt is not None and spoilt[0] == index:
                grad.view(-1)[spoilt[1]] = torch.inf
            param.grad = None
            param.grad = grad if span is None else grad.flatten()[slice(*span)]
        if self.half is not None:
            self.optimizer.grad_scale = torch.tensor(scale)
        self.optimizer.step()

    def tensors(self):
        """Of each parameter, all that a step writes."""
        copies = self.optimizer.copies
        return [
            {"weight": param.detach(), **self.optimizer.state[param], **({"copy": copies[param]} if copies else {})}
            for param in self.params
        ]


class AllReduce:
    """A sum between threads, of which one runs at a time: each of them gets it, or an error once one has failed."""

    def __init__(self, num_ranks):
        self.turn, self.barrier = threading.Lock(), threading.Barrier(num_ranks, timeout=120)
        self.tables, self.num_calls = [None] * num_ranks, 0

    def of(self, rank):
        def add_up_(table):
            assert table.dtype == torch.float64
            self.num_calls += rank == 0
            self.tables[rank] = table.clone()
            self._wait()
            table.copy_(sum(self.tables[1:], self.tables[0]))
            self._wait()

        return add_up_

    def _wait(self):
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


def on_ranks(num_ranks, work):
    """What `work(rank, add_up_)` returns on each of as many threads; and how often they added."""
    together = AllReduce(num_ranks)

    def guarded(rank):
        torch.set_num_threads(1)  # of this thread: else each has a pool of its own, and they wait for each other
        with together.turn:
            try:
                return work(rank, together.of(rank))
            except BaseException:
                together.barrier.abort()
                raise

    with ThreadPoolExecutor(num_ranks) as threads:
        futures = [threads.submit(guarded, rank) for rank in range(num_ranks)]
    errors = [future.exception() for future in futures if future.exception() is not None]
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return [future.result() for future in futures], together.num_calls


def assert_same_bits(whole, ranks):
    """`whole` is a `Run`, `ranks` those of its parts."""
    of_ranks = [rank.tensors() for rank in ranks]
    for index, expected in enumerate(whole.tensors()):
        for name, tensor in expected.items():
            held = [one[index][name] for one in of_ranks]
            if ranks[0].spans[index] is None or name == "step":
                assert all(torch.equal(one, tensor) for one in held), (index, name)
            else:
                assert torch.equal(torch.cat(held), tensor.flatten()), (index, name)


def steps_of(run, num_steps, spoilt=None, after_step=None):
    """`spoilt`: {step: (tensor, element) of the gradient that is inf}."""
    for step in range(num_steps):
        run.step(step + 1, spoilt=(spoilt or {}).get(step))
        if after_step is not None:
            after_step(run, step)
    return run


def assert_shared_as_whole(rule, options, shapes, num_ranks, *, num_steps=3, spoilt=None, after_step=None, **kind):
    """A few steps of one optimizer, and of one on each rank."""
    take_steps = functools.partial(steps_of, num_steps=num_steps, spoilt=spoilt, after_step=after_step)
    whole = take_steps(Run(rule, shapes, options, **kind))

    def work(rank, add_up_):
        return take_steps(Run(rule, shapes, options, rank=rank, num_ranks=num_ranks, add_up_=add_up_, **kind))

    ranks, num_calls = on_ranks(num_ranks, work)
    assert_same_bits(whole, ranks)
    num_sums = 1 if rule is LARS else 2
    assert num_calls == (num_steps * num_sums if any(ranks[0].spans) else 0)
    return whole, ranks


@every_path
@pytest.mark.sampled(10)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", RATIOS)
def test_parts_of_tensors_move_as_the_whole_ones_bit_for_bit(name, num_ranks, path):
    rule, options = RATIOS[name]
    assert_shared_as_whole(rule, {**options, **PATHS[path]}, shapes_for(num_ranks), num_ranks)


@pytest.mark.sampled(5)
@every_path
@pytest.mark.parametrize("rule", COMMON)
@pytest.mark.parametrize("held_by", [0, 2, "all"])
def test_an_overflow_in_the_part_of_one_rank_skips_the_step_on_all(held_by, rule, path):
    """Masters of a half-precision model; the second of three steps writes nothing, whoever holds the inf."""
    shapes = [(5,), (3 * BLOCK + 300,), (3, BLOCK + 17), (3 * BLOCK,)]
    spoilt = (0, 2) if held_by == "all" else (1, spans(3 * BLOCK + 300, 3)[held_by][0] + 7)
    other = {"denominator": "joint"} if rule is LARS else {"max_grad_norm": 1.0}
    for half, options in ((torch.float16, PATHS[path]), (torch.bfloat16, {**other, **PATHS[path]})):
        found = []

        def record(run, step, found=found):
            found.append((step, run.optimizer.last_found_inf.item()))

        _, ranks = assert_shared_as_whole(rule, options, shapes, 3, spoilt={1: spoilt}, half=half, after_step=record)
        assert sorted(found) == sorted([(0, 0.0), (1, 1.0), (2, 0.0)] * 4)
        for param, copy in ranks[0].optimizer.copies.items():
            assert torch.equal(copy, param.detach().to(half))


@every_path
@pytest.mark.parametrize("rule", COMMON)
def test_a_found_inf_that_one_rank_is_given_counts_on_all(rule, path):
    shapes = [(5,), (2 * BLOCK + 300,)]

    def work(rank, add_up_):
        run = Run(rule, shapes, PATHS[path], rank=rank, num_ranks=2, add_up_=add_up_)
        run.step(1)
        before = [{name: tensor.clone() for name, tensor in one.items()} for one in run.tensors()]
        run.optimizer.grad_scale, run.optimizer.found_inf = torch.tensor(1.0), torch.tensor(float(rank == 1))
        run.step(2)
        after = run.tensors()
        return all(torch.equal(before[i][name], after[i][name]) for i, one in enumerate(before) for name in one)

    assert on_ranks(2, work)[0] == [True, True]


@pytest.mark.parametrize("rule", COMMON)
@pytest.mark.parametrize(
    "kind", [{"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"half": torch.bfloat16}], ids=str
)
def test_parts_of_any_dtype_move_as_the_whole_ones_bit_for_bit(kind, rule):
    assert_shared_as_whole(rule, PATHS["fused"], shapes_for(2), 2, **kind)


@pytest.mark.parametrize("rule", COMMON)
def test_lists_of_float64_parts_differ_from_the_whole_by_rounding_only(rule):
    """A norm of float64 elements is added in another order, 1e-13 of it at most; a step is 2 % of a weight."""
    shapes = shapes_for(2)
    options, kind = PATHS["loop"], {"dtype": torch.float64}
    whole = steps_of(Run(rule, shapes, options, **kind), 3)
    make = functools.partial(Run, rule, shapes, options, num_ranks=2, **kind)
    ranks, _ = on_ranks(2, lambda rank, add_up_: steps_of(make(rank=rank, add_up_=add_up_), 3))
    for index, expected in enumerate(whole.tensors()):
        held = [one.tensors()[index]["weight"] for one in ranks]
        found = held[0] if ranks[0].spans[index] is None else torch.cat(held).view_as(expected["weight"])
        assert torch.linalg.vector_norm(found - expected["weight"]) <= 1e-14 * torch.linalg.vector_norm(found)


numels = st.builds(lambda blocks, more: max(1, blocks * BLOCK + more), st.integers(0, 5), st.integers(-300, 300))


@pytest.mark.parametrize("path", ["loop", "fused"])
@settings(max_examples=12)
@given(st.lists(numels, min_size=2, max_size=4), st.integers(2, 5), st.sampled_from(sorted(RATIOS)))
@example([3 * BLOCK + 1, 2 * BLOCK + 256], 3, "barlow")  # a last block of one element; of one row of a list's norm
def test_tensors_of_any_size_over_any_number_of_ranks(path, sizes, num_ranks, name):
    rule, options = RATIOS[name]
    shapes = [(size,) for size in sizes]
    assert_shared_as_whole(rule, {**options, **PATHS[path]}, shapes, num_ranks, num_steps=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("more", [1, 300, 20_000, 40_000])
@pytest.mark.parametrize("is_in_blocks", [False, True], ids="in_blocks={}".format)
def test_the_norm_of_a_lists_parts_is_that_of_the_whole_but_for_the_order_of_sums(is_in_blocks, more, dtype):
    """To 1e-13, where one sum of a tensor or of a small last block in another dtype would be 1e-9 off."""
    for numel in (2 * BLOCK + more, (1 << 19) + more):
        whole = normals(numel, seed=1).to(dtype)
        blocks = in_blocks([whole]) if is_in_blocks else [[[whole]]]
        expected = combined_norms([tensor_norms(block) for (block,) in blocks])

        def norm(rank, add_up_, whole=whole):
            begin, end = spans(whole.numel(), 3)[rank]
            part, own = Part(numel=whole.numel(), begin=begin, end=end), whole[begin:end]
            vector = ShardedVector(part=part, pieces=own.split(5 * BLOCK), is_in_blocks=is_in_blocks)
            return norms_over_ranks({own: [vector]}, torch.zeros(()), add_up_)[0][own][0]

        found, _ = on_ranks(3, norm)
        assert found[0] == found[1] == found[2]
        torch.testing.assert_close(found[0], expected[0], rtol=1e-13, atol=0)


@every_path
@pytest.mark.parametrize("half", [None, torch.float16], ids=str)
def test_a_write_to_weights_between_steps_counts_in_the_norm_of_the_whole(half, path):
    """Fused steps carry sum(w * w) from the last: each rank that of its own part, until something else writes it."""
    shapes = [(5,), (2 * BLOCK + 300,), (2 * BLOCK,)]

    def written(run):
        steps_of(run, 1)
        with torch.no_grad():
            for param in run.params:
                param.mul_(1.5)
        return steps_of(run, 2)

    whole = written(Run(LARS, shapes, PATHS[path], half=half))
    make = functools.partial(Run, LARS, shapes, PATHS[path], half=half, num_ranks=2)
    ranks, _ = on_ranks(2, lambda rank, add_up_: written(make(rank=rank, add_up_=add_up_)))
    assert_same_bits(whole, ranks)


def test_parts_that_come_after_a_first_step_are_seen():
    tables = []
    run = Run(LARS, [(2 * BLOCK,), (3,)], PATHS["fused"])
    run.step(1)
    run.optimizer.parts = {run.params[0]: Part(numel=5 * BLOCK, begin=0, end=2 * BLOCK)}
    run.optimizer.add_up_ = tables.append
    run.step(2)
    (table,) = tables
    assert table.numel() == 1 + 2 * (5 + 1)  # the verdict; twice all blocks of both tensors


@every_path
def test_the_trust_ratios_of_parts_are_those_of_the_whole(path):
    shapes = [(5,), (2 * BLOCK + 300,), (2 * BLOCK,), (2 * BLOCK,)]
    for name in ("paper", "optax", "lamb"):
        rule, options = RATIOS[name]
        options = {**options, **PATHS[path]}

        def ratios(run):
            steps_of(run, 2)
            return [ratio.item() for group in trust_ratios(run.optimizer) for ratio in group.values()]

        expected = ratios(Run(rule, shapes, options))
        make = functools.partial(Run, rule, shapes, options, num_ranks=2)
        found, _ = on_ranks(2, lambda rank, add_up_, make=make: ratios(make(rank=rank, add_up_=add_up_)))
        assert len(expected) == 3
        assert found[0] == found[1] == pytest.approx(expected, rel=1e-12)


def test_a_part_has_no_direction_of_its_own():
    run = Run(LARS, [(2 * BLOCK,), (3,)], {"direction": "orthogonal"}, num_ranks=2, add_up_=lambda table: None)
    with pytest.raises(ValueError, match=r"`direction` .*needs whole tensors.*0 to 16384 of 32768.*`work_group`"):
        run.step(1)


# ---- on real processes -----------------------------------------------------------------------------------------------


def shared_steps(name, shapes, half):
    rule, options = RATIOS[name]
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    run = Run(
        rule, shapes, {**options, "fused": True}, half=half, rank=rank, num_ranks=num_ranks, add_up_=dist.all_reduce
    )
    steps_of(run, 3, {1: (1, 2 * BLOCK)} if half else {})
    return run.spans, run.tensors()


@pytest.mark.parametrize("name", ["mlperf-nesterov", "barlow", "lamb, bounded"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_processes_share_an_update_bit_for_bit(name, num_ranks, rank_pool):
    rule, options = RATIOS[name]
    shapes = [(5,), (3 * BLOCK + 300,), (3, BLOCK + 17), (3 * BLOCK,)]
    for half in (None, torch.float16):
        whole = steps_of(
            Run(rule, shapes, {**options, "fused": True}, half=half), 3, {1: (1, 2 * BLOCK)} if half else {}
        )
        results = rank_pool.ranks(num_ranks).run(shared_steps, name, shapes, half)
        for index, expected in enumerate(whole.tensors()):
            for key, tensor in expected.items():
                held = [tensors[index][key] for _, tensors in results]
                is_whole = results[0][0][index] is None or key == "step"
                assert (
                    all(torch.equal(one, tensor) for one in held)
                    if is_whole
                    else torch.equal(torch.cat(held), tensor.flatten())
                )
