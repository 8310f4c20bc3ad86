"""Lightning's `ModelParallelStrategy` with LARS and LAMB: FSDP2, tensor parallelism and both train like `ddp`."""

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
        # Biases before BatchNorm have gradients of pure rounding error, and LAMB divides these by their size.
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
    """Return the whole parameters and their original types."""
    weights = {}
    kinds = set()
    for name, parameter in module.net.named_parameters():
        weight = parameter.detach().clone()
        kinds.add(type(weight).__name__)
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        weights[name] = weight
    return weights, kinds


def fit_on_rank(scene):
    # of an earlier world of the pool (see `tests.optim.makers.mesh_of`)
    _clear_sharding_prop_cache()
    callbacks = [*scene.pop("callbacks", []), at(on_train_end=whole)]
    return fit(None, callbacks=callbacks, **scene)


def trained(ranks, module, strategy, num_steps=8, **scene):
    """Fit on these ranks and return the whole parameters and their types, by rank."""
    results = ranks.run(fit_on_rank, {"module": module, "strategy": strategy, **scene})
    assert [seen.global_step for seen in results] == [num_steps] * len(results)
    return [seen.looks["on_train_end"][0] for seen in results]


def distance(expected, weights):
    """Return the largest relative distance of a parameter from the expected one."""
    assert expected.keys() == weights.keys()
    distances = [(weights[name] - value).norm() / value.norm() for name, value in expected.items()]
    return max(distances).item()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", LAYERWISE)
def test_fully_shard_trains_as_ddp(optimizer, two_ranks):
    """With two ranks, both strategies add two gradients and agree bit for bit, except for fused optimizers.

    The fused sums of squares of a shard round differently. LAMB divides by roots of squared gradients, which amplifies
    the difference in its weights.
    """
    (expected, _), _ = trained(two_ranks, partial(Layerwise, optimizer), "ddp")
    results = trained(two_ranks, partial(Sharded, optimizer), ModelParallelStrategy(2, 1))
    for rank, (weights, kinds) in enumerate(results):
        assert kinds == {"DTensor"}, f"rank {rank}"
        assert distance(expected, weights) <= BOUND[optimizer], f"rank {rank}"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("data_size", [1, 2], ids="data={}".format)
@pytest.mark.parametrize("optimizer", LAYERWISE)
def test_tensor_parallelism_trains_as_ddp_on_the_data_parallel_ranks(
    optimizer, data_size, one_rank, two_ranks, four_ranks
):
    """Slices add in a different order, and LAMB amplifies this when it divides by roots of small squared gradients."""
    if data_size == 1:
        num_steps = 16
        data_parallel_ranks = one_rank
        all_ranks = two_ranks
    else:
        num_steps = 8
        data_parallel_ranks = two_ranks
        all_ranks = four_ranks
    under_ddp = trained(data_parallel_ranks, partial(Layerwise, optimizer, True), "ddp", num_steps)
    expected, _ = under_ddp[0]
    strategy = ModelParallelStrategy(data_size, 2)
    results = trained(all_ranks, partial(Sliced, optimizer, True), strategy, num_steps)
    for rank, (weights, kinds) in enumerate(results):
        assert "DTensor" in kinds, f"rank {rank}"
        assert distance(expected, weights) <= 1e-5, f"rank {rank}"


class ByStrategy(Layerwise):
    def configure_model(self):
        self.trainer.strategy.shard_(self.net)


KINDS = {
    "fsdp": (Sharded, ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)),
    "recipe": (ByStrategy, FullyShardedStrategy()),
    "hybrid": (Layerwise, "hybrid_allreduce"),
    "ddp": (Layerwise, "ddp"),
}


def resume(ranks, reader, optimizer, path):
    """Resume from a file and return the parameters at the end, by rank."""
    module, strategy = KINDS[reader]
    results = trained(ranks, partial(module, optimizer), strategy, ckpt_path=path)
    return [weights for weights, _ in results]


def saved(ranks, writer, optimizer, path, **scene):
    """Save a file after the first epoch and return the parameters at the end, on rank zero."""
    module, strategy = KINDS[writer]
    scene["callbacks"] = [Saves(path, epoch=0)]
    weights, _ = trained(ranks, partial(module, optimizer), strategy, **scene)[0]
    return weights


@pytest.mark.sampled(7)
@pytest.mark.parametrize("optimizer", ["lars", "lamb fused"])
@pytest.mark.parametrize("reader", ["hybrid", "recipe", "ddp"])
@pytest.mark.parametrize("writer", ["fsdp", "hybrid", "recipe"])
def test_a_file_of_one_strategy_resumes_under_another(
    writer, reader, optimizer, two_ranks, tmp_path
):
    path = tmp_path / "midway.ckpt"
    expected = saved(two_ranks, writer, optimizer, path)
    for rank, weights in enumerate(resume(two_ranks, reader, optimizer, path)):
        assert distance(expected, weights) <= max(1e-7, BOUND[optimizer]), f"rank {rank}"


def test_a_file_of_hybrid_allreduce_resumes_under_lightnings_own_strategy_once_its_state_has_names(
    two_ranks, tmp_path
):
    """Without parameter names, the state of one parameter would be assigned to another."""
    path = tmp_path / "midway.ckpt"
    expected = saved(two_ranks, "hybrid", "lars", path)
    module = Layerwise("lars")
    checkpoint = torch.load(path)
    (state,) = checkpoint["optimizer_states"]
    checkpoint["optimizer_states"] = [state_by_name(state, module.configure_optimizers(), module)]
    torch.save(checkpoint, path)
    for rank, weights in enumerate(resume(two_ranks, "fsdp", "lars", path)):
        assert distance(expected, weights) <= 1e-7, f"rank {rank}"


class InHalf(Layerwise):
    """Module that its precision plugin shards. In the steps `overflows`, only one rank sees an overflow."""

    def __init__(self, optimizer, overflows=()):
        super().__init__(optimizer, is_pair=True)
        self.overflows = overflows

    def configure_model(self):
        precision = self.trainer.precision_plugin
        is_sharded = isinstance(self.net, FSDPModule)
        if isinstance(precision, ShardedHalfPrecision) and not is_sharded:
            mesh = self.device_mesh["data_parallel"]
            precision.shard_(self.net, self.net.children(), mesh=mesh)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step in self.overflows and self.global_rank == 1:
            return loss * 1e30
        return loss


class ShardedByStrategy(InHalf):
    def configure_model(self):
        self.trainer.strategy.shard_(self.net)


def scale_and_skipped_steps(trainer, module, *args):
    plugin = trainer.precision_plugin
    scale = getattr(plugin, "loss_scale", None)  # there is none in fp32
    return scale and scale.value, getattr(plugin, "num_skipped_steps", 0)


def in_half_precision(ranks, optimizer, precision, strategy, overflows=(), **scene):
    if strategy == "fsdp":
        strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)
        scene["plugins"] = ShardedHalfPrecision(precision)
    else:
        scene["precision"] = precision
    scene["module"] = partial(InHalf, optimizer, overflows)
    scene["strategy"] = strategy
    looks = at(on_train_batch_end=scale_and_skipped_steps)
    scene["callbacks"] = [looks, *scene.get("callbacks", [])]
    return ranks.run(fit_on_rank, scene)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_half_precision_on_shards_trains_as_with_master_weights_and_resumes_to_the_bit(
    optimizer, precision, two_ranks, tmp_path
):
    """All ranks skip a step if one rank overflows. Weights agree within two roundings, as reductions are in fp32.

    In bf16, a bias whose gradients cancel moves by more. It must not be further from fp32 than `hybrid_allreduce` is.
    """
    path = tmp_path / "midway.ckpt"
    if precision == "16-true":
        overflows = (1, 2)
        last_step = (2.0**14, 2)
        two_roundings = 2 * torch.finfo(torch.float16).eps
    else:
        overflows = ()
        last_step = (None, 0)
        two_roundings = 2 * torch.finfo(torch.bfloat16).eps
    fit_sharded = partial(
        in_half_precision, two_ranks, optimizer, precision, "fsdp", overflows=overflows
    )
    whole = in_half_precision(
        two_ranks, optimizer, precision, "hybrid_allreduce", overflows=overflows
    )
    sharded = fit_sharded(callbacks=[Saves(path, epoch=0)])
    resumed = fit_sharded(ckpt_path=path)
    if precision == "bf16-true":
        exact = in_half_precision(two_ranks, optimizer, "32-true", "hybrid_allreduce")[0].weights
    for rank, seen in enumerate(sharded):
        steps = seen.looks["on_train_batch_end"]
        assert steps == whole[rank].looks["on_train_batch_end"], f"rank {rank}"
        assert steps[-1] == last_step, f"rank {rank}"
        weights, kinds = seen.looks["on_train_end"][0]
        assert kinds == {"DTensor"}, f"rank {rank}"

        expected = {name: whole[rank].weights[f"net.{name}"] for name in weights}
        if precision == "16-true":
            assert distance(expected, weights) <= two_roundings, f"rank {rank}"
        else:
            in_fp32 = {name: exact[f"net.{name}"] for name in weights}
            bound = max(two_roundings, distance(in_fp32, expected))
            assert distance(in_fp32, weights) <= bound, f"rank {rank}"

        resumed_weights, _ = resumed[rank].looks["on_train_end"][0]
        assert same(weights, resumed_weights), f"rank {rank}"
        assert steps[4:] == resumed[rank].looks["on_train_batch_end"], f"rank {rank}"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("optimizer", ["lars", "lars fused", "lamb", "adamw"])
def test_offloaded_shards_have_the_same_bits(optimizer, two_ranks, tmp_path):
    """Offloading does not change bits on a CPU, where host and device are the same.

    `tests/recipes/training/test_fully_sharded.py` checks the placement.
    """
    path = tmp_path / "midway.ckpt"

    def fit_sharded(offload, callbacks=(), **scene):
        scene["module"] = partial(ShardedByStrategy, optimizer, (1, 2))
        scene["strategy"] = FullyShardedStrategy(offload=offload)
        scene["precision"] = "16-true"
        scene["gradient_clip_val"] = 0.5
        scene["callbacks"] = [at(on_train_batch_end=scale_and_skipped_steps), *callbacks]
        return two_ranks.run(fit_on_rank, scene)

    on_device = fit_sharded(offload=False)
    on_host = fit_sharded(offload=True, callbacks=[Saves(path, epoch=0)])
    resumed = fit_sharded(offload=True, ckpt_path=path)
    for rank, seen in enumerate(on_host):
        weights, kinds = seen.looks["on_train_end"][0]
        assert kinds == {"DTensor"}, f"rank {rank}"
        assert same(on_device[rank].looks["on_train_end"][0][0], weights), f"rank {rank}"
        assert same(resumed[rank].looks["on_train_end"][0][0], weights), f"rank {rank}"
        steps = seen.looks["on_train_batch_end"]
        assert steps == on_device[rank].looks["on_train_batch_end"], f"rank {rank}"
        assert steps[4:] == resumed[rank].looks["on_train_batch_end"], f"rank {rank}"
        assert steps[-1] == (2.0**14, 2), f"rank {rank}"


class RecordsDtypes(nn.LayerNorm):
    """LayerNorm that records the dtypes of its input and weight."""

    def __init__(self, size):
        super().__init__(size)
        self.dtypes = set()

    def forward(self, x):
        self.dtypes.add((x.dtype, self.weight.dtype))
        return super().forward(x)


class WithRecordedDtypes(InHalf):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.net[1] = RecordsDtypes(8)


def dtypes_of_norm(trainer, module):
    return module.net[1].dtypes


def test_normalization_on_shards_computes_in_fp32_with_fp32_weights(two_ranks):
    scene = {
        "module": partial(WithRecordedDtypes, "adamw"),
        "strategy": ModelParallelStrategy(2, 1),
        "plugins": ShardedHalfPrecision("16-true"),
        "callbacks": [at(on_train_end=dtypes_of_norm)],
    }
    for seen in two_ranks.run(fit_with_looks, scene):
        assert seen.looks["on_train_end"] == [{(torch.float32, torch.float32)}]


def fit_with_looks(scene):
    _clear_sharding_prop_cache()
    return fit(None, **scene)


def mean_gradient_on_shards():
    """Return dtype and values of the mean of two ranks' gradients, 1 and 2**-11, whose fp16 sum would be 1."""
    _clear_sharding_prop_cache()
    net = nn.Sequential(nn.Linear(1, 2, bias=False))
    plugin = ShardedHalfPrecision("16-true")
    plugin.shard_(net, net.children(), mesh=init_device_mesh("cpu", (2,)))
    image = torch.full((1, 1), 2.0 ** (-11 * dist.get_rank()), dtype=torch.float16)
    net(image).float().sum().backward()
    gradient = net[0].weight.grad.full_tensor()
    return gradient.dtype, gradient.flatten().tolist()


def test_gradients_of_half_precision_on_shards_are_averaged_in_fp32(two_ranks):
    for rank, (dtype, values) in enumerate(two_ranks.run(mean_gradient_on_shards)):
        assert dtype is torch.float32, f"rank {rank}"
        assert values == [0.5 + 2**-12] * 2, f"rank {rank}"


def test_half_precision_on_shards_needs_shards(one_rank):
    for strategy in ("ddp", ModelParallelStrategy(1, 1)):
        scene = {
            "module": partial(Unsharded, "lars"),
            "strategy": strategy,
            "plugins": ShardedHalfPrecision(),
        }
        seen = one_rank.run(fit_on_rank, scene | {"raises": True})[0]
        assert (
            "must be ModelParallelStrategy with a module that ShardedHalfPrecision has sharded"
            in seen.error
        )


class Unsharded(Layerwise):
    def configure_model(self):
        """Shard nothing."""


def test_fp32_shards_resume_from_the_master_weights_of_half_precision(two_ranks, tmp_path):
    """An fp32 fit resumes from a file with fp32 master weights."""
    path = tmp_path / "midway.ckpt"
    saved(two_ranks, "hybrid", "lars", path, precision="16-true")
    on_shards = resume(two_ranks, "recipe", "lars", path)
    under_ddp = resume(two_ranks, "ddp", "lars", path)
    assert distance(under_ddp[0], on_shards[0]) <= 1e-7
