"""Two optimizers next to each other: one of whole tensors, and one of what a maker makes of the same tensors.

A maker says by which path a step goes (loop, lists, fused passes of C++), and where elements are: whole, in parts that
ranks share, or in shards of DTensors. `tests/optim/test_contract.py` holds all of them to one contract.
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

LOOP = {"foreach": False}
LISTS = {"foreach": True}
FUSED = {"fused": True}
PATHS = {"loop": LOOP, "lists": LISTS, "fused": FUSED}
# Tiles of 128 and a rest; no dimension; nothing; blocks that two and three ranks share, one of them a matrix, and one
# whose last block is short.
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
    """Spans of large tensors, as ranks share an update. `add_up_` adds a table over them."""

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
        places = [
            (param, whole.numel(), self.span(whole.numel()))
            for param, whole in zip(params, wholes, strict=True)
        ]
        optimizer.parts = {
            p: Part(numel=numel, begin=span.start, end=span.stop)
            for p, numel, span in places
            if span
        }
        optimizer.add_up_ = self.add_up_


@dataclass(frozen=True)
class Shards(Whole):
    """DTensors on a mesh. The placements of a dimension that a tensor does not have are left out."""

    mesh: object
    placements: tuple = (Shard(0),)

    def cut(self, tensor):
        num = tensor.dim()
        placements = [
            Replicate() if isinstance(placement, Shard) and placement.dim >= num else placement
            for placement in self.placements
        ]
        return distribute_tensor(tensor, self.mesh, placements)


def mesh_of(*shape, names=None):
    """A mesh, without what torch remembers of one in an earlier world of the pool.

    torch 2.11 holds meshes of equal shape for equal, and gives out one whose process groups have ended.
    """
    _clear_sharding_prop_cache()
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def place_of(kind):
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
    """The second half is excluded."""
    return [
        {"params": params[::2]},
        {"params": params[1::2], "trust_ratio": False, "weight_decay": 0.0},
    ]


def distance(params, others):
    """The largest relative distance of a tensor of `params` from that of `others`. Shards are made whole."""
    largest = 0.0
    for param, other in zip(params, others, strict=True):
        whole = [
            one.detach().full_tensor() if isinstance(one, DTensor) else one.detach()
            for one in (param, other)
        ]
        one, other = (tensor.cpu().double() for tensor in whole)
        assert one.isfinite().all()
        if one.numel() and not torch.equal(one, other):
            largest = max(largest, ((one - other).norm() / other.norm()).item())
    return largest


class Beside:
    """An optimizer of whole tensors by the path of `whole_path`, and one of `place.cut` of them by `path`.

    `half`: the dtype of the latter's gradients, which are scaled. The optimizer of whole tensors gets the same ones if
    it takes the same path, and else unscales them before its step.
    """

    def __init__(
        self,
        place,
        path,
        rule=LARS,
        *,
        shapes=SHAPES,
        whole_path=LOOP,
        half=None,
        device="cpu",
        **more,
    ):
        self.place = place
        self.half = half
        self.scale = 64.0 if half else 1.0
        self.device = device
        self.wholes = parameters(*shapes, dtype=more.pop("dtype", torch.float32))
        self.own = [
            nn.Parameter(place.cut(whole.detach().clone()).to(device)) for whole in self.wholes
        ]
        options = {"lr": LR[rule.__name__], "weight_decay": 0.01, **more}
        self.reference = rule(groups_of(self.wholes), **options, **whole_path)
        self.optimizer = rule(groups_of(self.own), **options, **path)
        place.lend(self.optimizer, self.own, self.wholes)
        self.scaled = [(self.optimizer, self.own)] if half else []
        self.scaled += [(self.reference, self.wholes)] if half and whole_path == path else []
        for _, params in self.scaled:
            for param in params:
                param.grad_dtype = None

    def give_grads(self, seed, spoilt=None, bad=torch.inf):
        """`spoilt`: (tensor, element) of the gradient that is `bad`, in the rank's own alone."""
        set_grads(self.wholes, seed)
        for index, (whole, own) in enumerate(zip(self.wholes, self.own, strict=True)):
            grad = (self.scale * whole.grad).to(self.half or whole.dtype)
            whole.grad = None
            whole.grad = grad if len(self.scaled) == 2 else grad.to(whole.dtype) / self.scale
            if spoilt is not None and spoilt[0] == index:
                grad = grad.clone()
                grad.view(-1)[spoilt[1]] = bad
            own.grad = None
            own.grad = self.place.cut(grad).to(self.device)
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
        """Each rate is half of the one before."""
        for seed in range(first, first + num):
            self.step(seed)
            for group in (*self.optimizer.param_groups, *self.reference.param_groups):
                group["lr"] *= 0.5
        return self

    def bits(self):
        """All that a step writes, as bytes, so that -0.0 differs from 0.0."""
        tensors = list(self.own)
        for param in self.own:
            tensors += self.optimizer.state[param].values()
        return [
            local(tensor.detach()).clone().view(-1).view(torch.uint8)
            for tensor in tensors
            if local(tensor).numel()
        ]

    def distance(self):
        """The largest relative distance of this rank's elements from the whole tensors, state included."""
        results = [distance(self.own, [self.place.cut(one.detach()) for one in self.wholes])]
        for own, whole in zip(self.own, self.wholes, strict=True):
            state = self.optimizer.state[own]
            expected = self.reference.state[whole]
            assert state.keys() == expected.keys()
            for key, tensor in expected.items():
                results.append(
                    distance([state[key]], [tensor if key == "step" else self.place.cut(tensor)])
                )
        return max(results)


def on_threads(num_ranks, work):
    """Return the results of `work(rank, add_up_)` on as many threads, of which one runs at a time."""
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

        # of this thread: else each has a pool of its own, and they wait for each other
        torch.set_num_threads(1)
        with turn:
            try:
                return work(rank, add_up_)
            except BaseException:
                barrier.abort()
                raise

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(guarded, range(num_ranks)))


def overflow(both, spoilt, given=False, bad=torch.inf):
    """Verdicts of three steps, whether the second left every bit, and the distance after the third.

    `spoilt`: (tensor, element) of the gradient that is `bad`; `given`: the verdict is, on the last rank of parts alone.
    """
    results = [both.step(1)]
    sign = torch.ones_like(both.wholes[0])
    # makes it -0.0,
    sign.view(-1)[0] = torch.copysign(torch.zeros(()), -both.wholes[0].detach().view(-1)[0])
    with torch.no_grad():  # which must not become 0.0
        both.wholes[0].mul_(sign)
        both.own[0].mul_(both.place.cut(sign).to(both.device))
    before = both.bits()
    if given:
        is_here = not isinstance(both.place, Parts) or both.place.rank == both.place.num_ranks - 1
        both.optimizer.found_inf = torch.tensor(float(is_here), device=both.device)
    both.give_grads(2, None if given else spoilt, bad)
    both.optimizer.step()
    results.append(both.optimizer.last_found_inf.item())
    both.optimizer.found_inf = None
    is_untouched = all(
        torch.equal(first, second) for first, second in zip(before, both.bits(), strict=True)
    )
    return [*results, both.step(3)], is_untouched, both.distance()


def written(both):
    """The distance after three steps, between which user code writes all weights. Torch sees only the first write."""
    both.steps(1)
    with torch.no_grad():
        for param in (*both.own, *both.wholes):
            param.mul_(1.5)
    both.steps(1, first=2)
    for param in (*both.own, *both.wholes):
        param.data.mul_(1.5)
    return both.steps(1, first=3).distance()


def normals(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def parameters(*shapes, dtype=torch.float32):
    return [
        nn.Parameter(normals(*shape, seed=index, dtype=dtype)) for index, shape in enumerate(shapes)
    ]


def set_grads(params, seed, scale=1.0):
    for index, param in enumerate(params):
        param.grad = (scale * normals(*param.shape, seed=1000 * seed + index)).to(param.dtype)


def run(optimizer, params, num_steps, first=0):
    for step in range(first, first + num_steps):
        set_grads(params, step + 1)
        optimizer.step()


def copies_of(params):
    return [nn.Parameter(param.detach().clone()) for param in params]


def assert_same_bits(params, others):
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)
