"""Pairs of optimizers: a reference on whole tensors, and one on the same tensors as a maker prepares them.

A maker determines the path of a step (loop, lists, fused C++ passes) and the location of elements: whole tensors, parts
that ranks share, or DTensor shards. `tests/optim/test_contract.py` checks all makers against one contract.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from lightning_hybrid.optim import LARS
from lightning_hybrid.placement import BLOCK, Part, is_split, spans
from tests.scenes import same

LOOP = {"foreach": False}
LISTS = {"foreach": True}
FUSED = {"fused": True}
PATHS = {"loop": LOOP, "lists": LISTS, "fused": FUSED}
# Tiles of 128 and a remainder, a scalar, an empty tensor, blocks that two and three ranks share (one of them a matrix),
# and a tensor whose last block is short.
SHAPES = [(33, 17), (), (0, 3), (3 * BLOCK + 300,), (3, BLOCK + 17), (5,)]
LR = {"LARS": 4.0, "LAMB": 0.1}


@dataclass(frozen=True)
class Whole:
    def cut(self, tensor):
        return tensor

    def lend(self, optimizer, params, wholes):
        pass


@dataclass(frozen=True)
class Parts:
    """Layout in which ranks share the spans of large tensors. `add_up_` reduces a table over the ranks."""

    rank: int
    num_ranks: int
    add_up_: object = dist.all_reduce

    def span(self, numel):
        if is_split(numel, self.num_ranks):
            return slice(*spans(numel, self.num_ranks)[self.rank])
        return None

    def cut(self, tensor):
        span = self.span(tensor.numel())
        if span is None:
            return tensor
        return tensor.flatten()[span].clone()

    def lend(self, optimizer, params, wholes):
        optimizer.parts = {}
        for param, whole in zip(params, wholes, strict=True):
            span = self.span(whole.numel())
            if span is not None:
                part = Part(numel=whole.numel(), begin=span.start, end=span.stop)
                optimizer.parts[param] = part
        optimizer.add_up_ = self.add_up_


@dataclass(frozen=True)
class Shards(Whole):
    """Layout of DTensors on a mesh. Placements of dimensions that a tensor does not have are ignored."""

    mesh: object
    placements: tuple = (Shard(0),)

    def cut(self, tensor):
        placements = []
        for placement in self.placements:
            if isinstance(placement, Shard) and placement.dim >= tensor.dim():
                placements.append(Replicate())
            else:
                placements.append(placement)
        return distribute_tensor(tensor, self.mesh, placements)


def mesh_of(*shape, names=None):
    """Make a mesh without torch's memory of a mesh from an earlier world of the pool.

    torch 2.11 treats meshes of equal shape as equal, and may return one whose process groups have ended.
    """
    _clear_sharding_prop_cache()
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def layout_of(kind):
    if kind == "shards":
        return Shards(mesh_of(dist.get_world_size()))
    if kind == "parts":
        return Parts(dist.get_rank(), dist.get_world_size())
    return Whole()


def local(tensor):
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def groups_of(params):
    """Return two groups of alternating parameters. The second one is excluded from trust ratios and decay."""
    return [
        {"params": params[::2]},
        {"params": params[1::2], "trust_ratio": False, "weight_decay": 0.0},
    ]


def distance(params, expected):
    """Return the largest relative distance between tensors of `params` and of `expected`."""
    largest = 0.0
    for param, expected_param in zip(params, expected, strict=True):
        values = whole_in_float64(param)
        expected_values = whole_in_float64(expected_param)
        assert values.isfinite().all()
        if values.numel() and not torch.equal(values, expected_values):
            difference = (values - expected_values).norm() / expected_values.norm()
            largest = max(largest, difference.item())
    return largest


def whole_in_float64(tensor):
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.cpu().double()


class OptimizerPair:
    """Reference optimizer of whole tensors, and an optimizer of the same tensors as `layout` cuts them.

    Args:
        layout: `Whole`, `Parts` or `Shards`.
        path: Flags of the optimizer under test.
        whole_path: Flags of the reference.
        half: dtype of the gradients of the optimizer under test, which are scaled. The reference gets the same
        gradients if
            it uses the same path. Otherwise they are unscaled before its step.
    """

    def __init__(
        self,
        layout,
        path,
        rule=LARS,
        *,
        shapes=SHAPES,
        whole_path=LOOP,
        half=None,
        device="cpu",
        **options,
    ):
        self.layout = layout
        self.half = half
        self.scale = 64.0 if half else 1.0
        self.device = device
        self.wholes = parameters(*shapes, dtype=options.pop("dtype", torch.float32))
        self.params = []
        for whole in self.wholes:
            self.params.append(nn.Parameter(layout.cut(whole.detach().clone()).to(device)))
        options = {"lr": LR[rule.__name__], "weight_decay": 0.01, **options}
        self.reference = rule(groups_of(self.wholes), **options, **whole_path)
        self.optimizer = rule(groups_of(self.params), **options, **path)
        layout.lend(self.optimizer, self.params, self.wholes)
        self.scaled = []
        if half:
            self.scaled.append((self.optimizer, self.params))
        if half and whole_path == path:
            self.scaled.append((self.reference, self.wholes))
        for _, params in self.scaled:
            for param in params:
                param.grad_dtype = None

    def give_grads(self, seed, spoilt=None, bad=torch.inf):
        """Give both optimizers the gradients of a seed.

        `spoilt`: (tensor, element) of the gradient that becomes `bad`, only for the optimizer under test.
        """
        set_grads(self.wholes, seed)
        for index, (whole, param) in enumerate(zip(self.wholes, self.params, strict=True)):
            grad = (self.scale * whole.grad).to(self.half or whole.dtype)
            whole.grad = None
            if len(self.scaled) == 2:
                whole.grad = grad
            else:
                whole.grad = grad.to(whole.dtype) / self.scale
            if spoilt is not None and spoilt[0] == index:
                grad = grad.clone()
                grad.view(-1)[spoilt[1]] = bad
            param.grad = None
            param.grad = self.layout.cut(grad).to(self.device)
        for optimizer, _ in self.scaled:
            optimizer.grad_scale = torch.tensor(self.scale, device=self.device)

    def step(self, seed, spoilt=None):
        self.give_grads(seed, spoilt)
        self.optimizer.step()
        if spoilt is None:
            self.reference.step()
        if self.optimizer.last_found_inf is None:
            return None
        return self.optimizer.last_found_inf.item()

    def steps(self, num, first=1):
        """Make `num` steps, and halve the learning rate after each."""
        for seed in range(first, first + num):
            self.step(seed)
            for group in (*self.optimizer.param_groups, *self.reference.param_groups):
                group["lr"] *= 0.5
        return self

    def bits(self):
        """Return all values that a step writes as bytes, so that -0.0 differs from 0.0."""
        tensors = list(self.params)
        for param in self.params:
            tensors += self.optimizer.state[param].values()
        values = [local(tensor.detach()).clone().view(-1) for tensor in tensors]
        return [value.view(torch.uint8) for value in values if value.numel()]

    def distance(self):
        """Return the largest relative distance from the whole tensors on this rank, including the state."""
        cuts = [self.layout.cut(whole.detach()) for whole in self.wholes]
        distances = [distance(self.params, cuts)]
        for param, whole in zip(self.params, self.wholes, strict=True):
            state = self.optimizer.state[param]
            expected = self.reference.state[whole]
            assert state.keys() == expected.keys()
            for key, tensor in expected.items():
                if key != "step":
                    tensor = self.layout.cut(tensor)
                distances.append(distance([state[key]], [tensor]))
        return max(distances)


def on_threads(num_ranks, work):
    """Return the results of `work(rank, add_up_)` on one thread per rank, of which one runs at a time."""
    turn = threading.Lock()
    barrier = threading.Barrier(num_ranks, timeout=120)
    tables = [None] * num_ranks

    def wait():
        turn.release()
        try:
            barrier.wait()
        finally:
            turn.acquire()

    def guarded(rank):
        def add_up_(table):
            assert table.dtype == torch.float64
            tables[rank] = table.clone()
            wait()
            table.copy_(sum(tables[1:], tables[0]))
            wait()

        # Limits this thread. Otherwise each thread would have its own pool, and the pools would wait for each other.
        torch.set_num_threads(1)
        with turn:
            try:
                return work(rank, add_up_)
            except BaseException:
                barrier.abort()
                raise

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(guarded, range(num_ranks)))


def overflow(both, spoilt, is_verdict_given=False, bad=torch.inf):
    """Return the verdicts of three steps, whether the second left all bits unchanged, and the distance after the third.

    Args:
        both: Optimizers to step.
        spoilt: (tensor, element) of the gradient that is `bad`.
        is_verdict_given: Whether the user sets `found_inf` instead. With parts, only the last rank sets it.
        bad: Value of the spoilt element.
    """
    verdicts = [both.step(1)]
    make_first_element_negative_zero(both)  # it must not become 0.0
    before = both.bits()
    if is_verdict_given:
        layout = both.layout
        is_here = not isinstance(layout, Parts) or layout.rank == layout.num_ranks - 1
        both.optimizer.found_inf = torch.tensor(float(is_here), device=both.device)
        spoilt = None
    both.give_grads(2, spoilt, bad)
    both.optimizer.step()
    verdicts.append(both.optimizer.last_found_inf.item())
    both.optimizer.found_inf = None
    is_untouched = same(before, both.bits())
    verdicts.append(both.step(3))
    return verdicts, is_untouched, both.distance()


def make_first_element_negative_zero(both):
    whole = both.wholes[0]
    sign = torch.ones_like(whole)
    sign.view(-1)[0] = torch.copysign(torch.zeros(()), -whole.detach().view(-1)[0])
    with torch.no_grad():
        whole.mul_(sign)
        both.params[0].mul_(both.layout.cut(sign).to(both.device))


def written(both):
    """Return the distance after three steps, between which user code writes all weights.

    Torch sees only the first write.
    """
    both.steps(1)
    with torch.no_grad():
        for param in (*both.params, *both.wholes):
            param.mul_(1.5)
    both.steps(1, first=2)
    for param in (*both.params, *both.wholes):
        param.data.mul_(1.5)
    return both.steps(1, first=3).distance()


def normals(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def parameters(*shapes, dtype=torch.float32):
    params = []
    for index, shape in enumerate(shapes):
        params.append(nn.Parameter(normals(*shape, seed=index, dtype=dtype)))
    return params


def set_grads(params, seed, scale=1.0):
    for index, param in enumerate(params):
        param.grad = (scale * normals(*param.shape, seed=1000 * seed + index)).to(param.dtype)


def run(optimizer, params, num_steps, first=0):
    for step in range(first, first + num_steps):
        set_grads(params, step + 1)
        optimizer.step()


def copies_of(params):
    return [nn.Parameter(param.detach().clone()) for param in params]


def assert_same_bits(params, expected):
    for param, expected_param in zip(params, expected, strict=True):
        assert torch.equal(param, expected_param)
