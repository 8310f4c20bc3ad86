"""Lightning's `ModelParallelStrategy` with LARS and LAMB: FSDP2, tensor parallelism and both train as `ddp` does."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_hybrid import ShardedHalfPrecision
from lightning_hybrid.checkpoint.param_names import state_by_name
from lightning_hybrid.optim import LAMB, LARS, param_groups
from recipes.training.fully_sharded import FullyShardedStrategy
from tests import toy
from tests.scenes import Saves, at, fit, same

OPTIMIZERS = {
    "lars": (LARS, {"lr": 2.0}),
    "lars fused": (LARS, {"lr": 2.0, "fused": True}),
    "lamb": (LAMB, {"lr": 0.02}),
    "lamb fused": (LAMB, {"lr": 0.02, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
}
LAYERWISE = [name for name in OPTIMIZERS if name != "adamw"]

BOUND = {"lars": 0, "lars fused": 2e-6, "lamb": 0, "lamb fused": 1e-5}


class Layerwise(toy.Toy):
    def __init__(self, optimizer, is_pair=False):
        super().__init__()
        self.optimizer_name = optimizer
        # Biases before BatchNorm have gradients of rounding alone, which LAMB divides by their own size.
        if is_pair or "lamb" in optimizer:
            self.net = pair_net()

    def configure_optimizers(self):
        rule, options = OPTIMIZERS[self.optimizer_name]
        return rule(param_groups(self.net, weight_decay=0.01), **options)


class Sharded(Layerwise):
    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for block in self.net:
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def pair_net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Sequential(nn.Linear(toy.NUM_FEATURES, 16), nn.ReLU(), nn.Linear(16, 8)),
            nn.LayerNorm(8),
            nn.Linear(8, toy.NUM_CLASSES),
        )


class Sliced(Layerwise):
    def configure_model(self):
        parallelize_module(
            self.net[0],
            self.device_mesh["tensor_parallel"],
            {"0": ColwiseParallel(), "2": RowwiseParallel()},
        )
        if self.device_mesh["data_parallel"].size() > 1:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def whole(trainer, module):
    found = {name: param.detach().clone() for name, param in module.net.named_parameters()}
    kinds = {type(param).__name__ for param in found.values()}
    return {
        name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()
    }, kinds


def fit_on_rank(scene):
    _clear_sharding_prop_cache()  # of an earlier world of the pool: see `tests.optim.makers.mesh_of`
    callbacks = [*scene.pop("callbacks", []), at(on_train_end=whole)]
    return fit(None, callbacks=callbacks, **scene)


def trained(ranks, module, strategy, num_steps=8, **scene):
    ranks = ranks.run(fit_on_rank, {"module": module, "strategy": strategy, **scene})
    assert all(seen.global_step == num_steps for seen in ranks)
    return [seen.looks["on_train_end"][0] for seen in ranks]


def distance(one, other):
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).norm() / one[name].norm()).item() for name in one)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", LAYERWISE)
def test_fully_shard_trains_as_ddp(optimizer, two_ranks):
    """To the bit: with two ranks both add two gradients. The fused sums of squares of a shard round otherwise.

    LAMB divides by roots of squares of gradients, so that its weights amplify that.
    """
    (expected, _), _ = trained(two_ranks, partial(Layerwise, optimizer), "ddp")
    for result, kinds in trained(
        two_ranks, partial(Sharded, optimizer), ModelParallelStrategy(2, 1)
    ):
        assert kinds == {"DTensor"}
        assert distance(expected, result) <= BOUND[optimizer]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("data_size", [1, 2], ids="data={}".format)
@pytest.mark.parametrize("optimizer", LAYERWISE)
def test_tensor_parallelism_trains_as_ddp_on_the_data_parallel_ranks(
    optimizer, data_size, one_rank, two_ranks, four_ranks
):
    """Sums over slices are made in another order. LAMB divides by roots of squares of small gradients."""
    of_data, of_all, num_steps = (
        (one_rank, two_ranks, 16) if data_size == 1 else (two_ranks, four_ranks, 8)
    )
    (expected, _), *_ = trained(of_data, partial(Layerwise, optimizer, True), "ddp", num_steps)
    strategy = ModelParallelStrategy(data_size, 2)
    for result, kinds in trained(of_all, partial(Sliced, optimizer, True), strategy, num_steps):
        assert "DTensor" in kinds
        assert distance(expected, result) <= 1e-5


class ByStrategy(Layerwise):
    def configure_model(self):
        self.trainer.strategy.shard_(self.net)


KINDS = {
    "fsdp": (Sharded, ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)),
    "recipe": (ByStrategy, FullyShardedStrategy()),
    "hybrid": (Layerwise, "hybrid_allreduce"),
    "ddp": (Layerwise, "ddp"),
}


def goes_on(ranks, reader, optimizer, path):
    module, strategy = KINDS[reader]
    return [
        result for result, _ in trained(ranks, partial(module, optimizer), strategy, ckpt_path=path)
    ]


def saved(ranks, writer, optimizer, path, **scene):
    module, strategy = KINDS[writer]
    return trained(
        ranks, partial(module, optimizer), strategy, callbacks=[Saves(path, epoch=0)], **scene
    )[0][0]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("optimizer", ["lars", "lamb fused"])
@pytest.mark.parametrize("reader", ["hybrid", "recipe", "ddp"])
@pytest.mark.parametrize("writer", ["fsdp", "hybrid", "recipe"])
def test_one_file_goes_on_in_any_strategy(writer, reader, optimizer, two_ranks, tmp_path):
    expected = saved(two_ranks, writer, optimizer, tmp_path / "midway.ckpt")
    for result in goes_on(two_ranks, reader, optimizer, tmp_path / "midway.ckpt"):
        assert distance(expected, result) <= max(1e-7, BOUND[optimizer])


def test_a_file_of_hybrid_allreduce_goes_on_under_lightnings_own_strategy_once_its_state_has_names(
    two_ranks, tmp_path
):
    """Without names the state of one parameter would go to another."""
    path = tmp_path / "midway.ckpt"
    expected = saved(two_ranks, "hybrid", "lars", path)
    plain = Layerwise("lars")
    checkpoint = torch.load(path)
    states = zip(checkpoint["optimizer_states"], [plain.configure_optimizers()], strict=True)
    checkpoint["optimizer_states"] = [state_by_name(state, one, plain) for state, one in states]
    torch.save(checkpoint, path)
    for result in goes_on(two_ranks, "fsdp", "lars", path):
        assert distance(expected, result) <= 1e-7


class InHalf(Layerwise):
    """Sharded by its precision. From some step on one rank alone sees an overflow."""

    def __init__(self, optimizer, overflows=()):
        super().__init__(optimizer, is_pair=True)
        self.overflows = overflows

    def configure_model(self):
        if isinstance(self.trainer.precision_plugin, ShardedHalfPrecision) and not isinstance(
            self.net, FSDPModule
        ):
            mesh = self.device_mesh["data_parallel"]
            self.trainer.precision_plugin.shard_(self.net, self.net.children(), mesh=mesh)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_here = self.trainer.global_step in self.overflows and self.global_rank == 1
        if is_here:
            return loss * 1e30
        return loss


class ShardedByStrategy(InHalf):
    def configure_model(self):
        self.trainer.strategy.shard_(self.net)


def scale_and_dtypes(trainer, module, *args):
    plugin = trainer.precision_plugin
    scale = getattr(plugin, "loss_scale", None)  # none in fp32
    return scale and scale.value, getattr(plugin, "num_skipped_steps", 0)


def in_halves(ranks, optimizer, precision, strategy, path=None, **scene):
    module = partial(InHalf, optimizer, scene.pop("overflows", ()))
    if strategy == "fsdp":
        strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)
        scene |= {"plugins": ShardedHalfPrecision(precision)}
    else:
        scene |= {"precision": precision}
    scene |= {
        "module": module,
        "strategy": strategy,
        "callbacks": [at(on_train_batch_end=scale_and_dtypes)],
    }
    scene["callbacks"] += [Saves(path, epoch=0)] if path else []
    return ranks.run(fit_on_rank, scene)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_half_precision_on_shards_trains_as_on_masters_and_goes_on_to_the_bit(
    optimizer, precision, two_ranks, tmp_path
):
    """An overflow on one rank makes all skip. Sums are in another dtype, fp32: within two roundings of a weight.

    A bias whose gradients cancel moves by more in bf16: then no further from fp32 than `hybrid_allreduce` is.
    """
    overflows, dtype = ((1, 2), torch.float16) if precision == "16-true" else ((), torch.bfloat16)
    path = tmp_path / "midway.ckpt"
    made = {"overflows": overflows}
    whole = in_halves(two_ranks, optimizer, precision, "hybrid_allreduce", **made)
    parts = in_halves(two_ranks, optimizer, precision, "fsdp", path, **made)
    again = in_halves(two_ranks, optimizer, precision, "fsdp", ckpt_path=path, **made)
    if dtype is torch.bfloat16:
        in_fp32 = in_halves(two_ranks, optimizer, "32-true", "hybrid_allreduce")
    else:
        in_fp32 = ()
    for first, second, resumed in zip(whole, parts, again, strict=True):
        steps = second.looks["on_train_batch_end"]
        assert steps == first.looks["on_train_batch_end"]
        assert steps[-1] == ((2.0**14, 2) if overflows else (None, 0))
        (found, kinds), (after, _) = (seen.looks["on_train_end"][0] for seen in (second, resumed))
        assert kinds == {"DTensor"}
        expected = {name: first.weights[f"net.{name}"] for name in found}
        if dtype is torch.float16:
            assert distance(expected, found) <= 2 * torch.finfo(dtype).eps
        else:
            exact = {name: in_fp32[0].weights[f"net.{name}"] for name in found}
            assert distance(exact, found) <= max(
                2 * torch.finfo(dtype).eps, distance(exact, expected)
            )
        assert same(found, after)
        assert steps[4:] == resumed.looks["on_train_batch_end"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", ["lars", "lars fused", "lamb", "adamw"])
def test_offloaded_shards_have_the_same_bits(optimizer, two_ranks, tmp_path):
    """Where host and device are one. What lies where: `tests/recipes/training/test_fully_sharded.py`."""
    settings = {
        "precision": "16-true",
        "gradient_clip_val": 0.5,
        "module": partial(ShardedByStrategy, optimizer, (1, 2)),
    }
    settings["callbacks"] = [at(on_train_batch_end=scale_and_dtypes)]
    seen = {}
    for name, offload in {"device": False, "host": True, "again": True}.items():
        path = tmp_path / "midway.ckpt"
        scene = settings | {"strategy": FullyShardedStrategy(offload=offload)}
        scene |= {"ckpt_path": path} if name == "again" else {}
        if name == "host":
            saves = [Saves(path, epoch=0)]
        else:
            saves = []
        seen[name] = two_ranks.run(
            fit_on_rank, scene | {"callbacks": [*settings["callbacks"], *saves]}
        )
    for device, host, again in zip(*seen.values(), strict=True):
        (expected, _), (found, kinds), (after, _) = (
            one.looks["on_train_end"][0] for one in (device, host, again)
        )
        steps = host.looks["on_train_batch_end"]
        assert kinds == {"DTensor"}
        assert same(expected, found)
        assert same(found, after)
        assert steps == device.looks["on_train_batch_end"]
        assert steps[4:] == again.looks["on_train_batch_end"]
        assert steps[-1] == (2.0**14, 2)


class NotingNorm(nn.LayerNorm):
    """LayerNorm that notes the dtypes of its input and weight."""

    def __init__(self, size):
        super().__init__(size)
        self.dtypes = set()

    def forward(self, x):
        self.dtypes.add((x.dtype, self.weight.dtype))
        return super().forward(x)


class Noting(InHalf):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.net[1] = NotingNorm(8)


def dtypes_of_norm(trainer, module):
    return module.net[1].dtypes


def test_normalisation_on_shards_computes_in_fp32_with_fp32_weights(two_ranks):
    scene = {"module": partial(Noting, "adamw"), "strategy": ModelParallelStrategy(2, 1)}
    scene |= {
        "plugins": ShardedHalfPrecision("16-true"),
        "callbacks": [at(on_train_end=dtypes_of_norm)],
    }
    for seen in two_ranks.run(fit_with_looks, scene):
        assert seen.looks["on_train_end"] == [{(torch.float32, torch.float32)}]


def fit_with_looks(scene):
    _clear_sharding_prop_cache()
    return fit(None, **scene)


def mean_gradient_on_shards():
    """Of gradients 1 on rank zero and 2**-11 on rank one, whose sum is 1 in fp16."""
    _clear_sharding_prop_cache()
    net = nn.Sequential(nn.Linear(1, 2, bias=False))
    plugin = ShardedHalfPrecision("16-true")
    plugin.shard_(net, net.children(), mesh=init_device_mesh("cpu", (2,)))
    image = torch.full((1, 1), 2.0 ** (-11 * dist.get_rank()), dtype=torch.float16)
    net(image).float().sum().backward()
    gradient = net[0].weight.grad.full_tensor()
    return gradient.dtype, gradient.flatten().tolist()


def test_gradients_of_half_precision_on_shards_are_averaged_in_fp32(two_ranks):
    for dtype, values in two_ranks.run(mean_gradient_on_shards):
        assert dtype is torch.float32
        assert values == [0.5 + 2**-12] * 2


def test_half_precision_on_shards_needs_shards(one_rank):
    for strategy in ("ddp", ModelParallelStrategy(1, 1)):
        scene = {
            "module": partial(Unsharded, "lars"),
            "strategy": strategy,
            "plugins": ShardedHalfPrecision(),
        }
        seen = one_rank.run(fit_on_rank, scene | {"raises": True})[0]
        assert (
            "must be ModelParallelStrategy, and ShardedHalfPrecision must shard the module"
            in seen.error
        )


class Unsharded(Layerwise):
    def configure_model(self):
        """Shard nothing."""


def test_masters_of_half_precision_go_on_as_shards(two_ranks, tmp_path):
    """The file has fp32 masters, and the shards are the new ones."""
    saved(two_ranks, "hybrid", "lars", tmp_path / "midway.ckpt", precision="16-true")
    (resumed, _), (as_ddp, _) = (
        goes_on(two_ranks, one, "lars", tmp_path / "midway.ckpt") for one in ("recipe", "ddp")
    )
    assert distance(as_ddp, resumed) <= 1e-7
