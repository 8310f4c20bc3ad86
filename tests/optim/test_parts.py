"""LARS and LAMB on parts of tensors, as ranks share an update: the bits of one optimizer that has all of them.

Ranks are threads here, and their sum a stand-in; the last tests are on real processes.
"""

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.optim.fused.cpu import passes
from lightning_hybrid.placement import BLOCK, Part, is_split, spans
from tests.optim.test_lars import normals
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


def shapes_for(num_ranks):
    """Around one block, and around the least that is shared; a matrix; the last is an excluded one."""
    numels = [1, BLOCK - 1, BLOCK, BLOCK + 1, *(num_ranks * BLOCK + more for more in (-1, 0, 1))]
    return [*((numel,) for numel in numels), (2 * num_ranks + 1, BLOCK + 17), (num_ranks * BLOCK + 300,)]


class Run:
    """One optimizer and its tensors: all of them whole, or a rank's parts of those that are shared.

    `half`: masters with copies in this dtype, which also is that of scaled gradients.
    """

    def __init__(self, rule, shapes, options, *, dtype=torch.float32, half=None, rank=0, num_ranks=1, add_up_=None):
        self.shapes, self.half, self.params = shapes, half, []
        wholes = [0.1 * normals(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
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
    """A sum between threads: every one of them gets it, or an error once one has failed."""

    def __init__(self, num_ranks):
        self.barrier, self.tables, self.num_calls = threading.Barrier(num_ranks, timeout=60), [None] * num_ranks, 0

    def of(self, rank):
        def add_up_(table):
            assert table.dtype == torch.float64
            self.num_calls += rank == 0
            self.tables[rank] = table.clone()
            self.barrier.wait()
            table.copy_(sum(self.tables[1:], self.tables[0]))
            self.barrier.wait()

        return add_up_


def on_ranks(num_ranks, work):
    """What `work(rank, add_up_)` returns on each of as many threads; and how often they added."""
    together = AllReduce(num_ranks)

    def guarded(rank):
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


def steps_of(run, num_steps, spoilt):
    for step in range(num_steps):
        run.step(step + 1, spoilt=spoilt.get(step))
    return run


def assert_shared_as_whole(rule, options, shapes, num_ranks, *, num_steps=3, spoilt=None, **kind):
    """A few steps of one optimizer and of parts of it; steps in `spoilt` meet an inf."""
    whole = steps_of(Run(rule, shapes, options, **kind), num_steps, spoilt or {})

    def work(rank, add_up_):
        run = Run(rule, shapes, options, rank=rank, num_ranks=num_ranks, add_up_=add_up_, **kind)
        return steps_of(run, num_steps, spoilt or {})

    ranks, num_calls = on_ranks(num_ranks, work)
    assert_same_bits(whole, ranks)
    assert num_calls == num_steps * (1 if rule is LARS else 2)
    return whole, ranks


@every_path
@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", RATIOS)
def test_parts_of_tensors_move_as_the_whole_ones_bit_for_bit(name, num_ranks, path):
    rule, options = RATIOS[name]
    assert_shared_as_whole(rule, {**options, **PATHS[path]}, shapes_for(num_ranks), num_ranks)
