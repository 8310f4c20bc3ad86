"""`HybridAllReduceStrategy`: names, options, checkpoints, errors, and equality with plain DDP."""

import inspect
import json
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid import Adasum, Comm, HybridAllReduceStrategy, MasterWeightPrecision, Report
from lightning_hybrid.comm import CommPlan
from tests import toy
from tests.held import growth
from tests.scenes import Saves, at, fit, same, this_rank
from tests.toy import Toy

HUNDRED_STEPS = {"module": partial(Toy, lr=0.05), "precision": "32-true", "max_epochs": 25}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("algorithm", ["flat", "hierarchical", "two_level"])
def test_fp32_losses_are_those_of_plain_ddp_over_100_steps(two_ranks, algorithm):
    """Two gradients can be added in only one order, so even the bits agree with plain DDP."""
    plain = fit(two_ranks, strategy="ddp", **HUNDRED_STEPS)
    ours = fit(two_ranks, comm=Comm(algorithm=algorithm), ranks_per_node=2, **HUNDRED_STEPS)
    assert [len(seen.losses) for seen in plain] == [100, 100]
    for rank, seen in enumerate(ours):
        assert seen.losses == plain[rank].losses, f"rank {rank}"


def cap_of_ddp(trainer, module):
    return trainer.strategy.model.bucket_bytes_cap


def test_hook_runs_on_the_cpu_bucket_bytes_reach_ddp_and_each_rank_leaves_a_timeline(
    two_ranks, tmp_path
):
    """Our strategy also registers its hook on the CPU. Stock Lightning silently registers hooks on CUDA only."""
    scene = {"comm": Comm(bucket_bytes=4096), "report": Report(trace_dir=tmp_path)}
    for rank, seen in enumerate(fit(two_ranks, callbacks=[at(on_train_start=cap_of_ddp)], **scene)):
        assert seen.looks["on_train_start"] == [4096], f"rank {rank}"
        assert seen.sent.num_buckets >= 8, f"rank {rank}"
        events = json.loads((tmp_path / f"rank{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events}
        assert {"backward, from its first bucket on", "bucket 0"} <= names, f"rank {rank}"
        durations = [event["dur"] for event in events if event["ph"] == "X"]
        assert min(durations) >= 0, f"rank {rank}"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "32-true"])
def test_resume_is_bitwise(two_ranks, tmp_path, precision, optimizer):
    """Four steps, a save, a load and four steps equal eight steps in weights, optimizer state and loss scale."""
    scene = {"module": partial(Toy, optimizer=optimizer, lr=1e-2), "precision": precision}
    path = tmp_path / "midway.ckpt"
    whole = fit(two_ranks, callbacks=[Saves(path, epoch=0)], **scene)
    for rank, resumed in enumerate(fit(two_ranks, ckpt_path=path, **scene)):
        assert same(resumed.weights, whole[rank].weights), f"rank {rank}"
        assert resumed.losses == whole[rank].losses[4:], f"rank {rank}"


def test_checkpoint_is_fp32_loads_without_pickle_and_resumes_under_plain_ddp(two_ranks, tmp_path):
    scene = {"module": partial(Toy, optimizer="AdamW", lr=1e-2)}
    path = tmp_path / "half.ckpt"
    half = fit(two_ranks, precision="16-true", max_epochs=1, save_to=path, **scene)
    checkpoint = torch.load(path, weights_only=True)
    floats = [value for value in checkpoint["state_dict"].values() if value.is_floating_point()]
    assert {value.dtype for value in floats} == {torch.float32}
    is_rounded = [torch.equal(value, value.half().float()) for value in floats]
    assert not all(is_rounded), "master weights, not rounded ones"
    assert same(dict(checkpoint["state_dict"]), half[0].weights)
    dtypes = set()
    for state in checkpoint["optimizer_states"][0]["state"].values():
        dtypes |= {value.dtype for value in state.values()}
    assert dtypes == {torch.float32}
    assert checkpoint["MasterWeightPrecision"]["loss_scale"]["scale"] == 2.0**16
    for seen in fit(two_ranks, strategy="ddp", ckpt_path=path, **scene):
        assert len(seen.losses) == 4, f"rank {seen.rank}"
        assert seen.losses[-1] < half[0].losses[0], f"rank {seen.rank}"


def load_other_weights(trainer, module, batch, batch_idx):
    """Load a checkpoint in the middle of a fit, as the learning-rate finder does."""
    if batch_idx == 2:
        trainer.strategy.load_model_state_dict({"state_dict": Toy(seed=5).state_dict()})
        trainer.optimizers[0].param_groups[0] |= {"lr": 0.0, "momentum": 0.0}


def test_weights_that_are_loaded_during_a_fit_replace_the_master_weights(two_ranks):
    expected = {name: value.detach() for name, value in Toy(seed=5).named_parameters()}
    loads = at(on_train_batch_start=load_other_weights)
    for seen in fit(two_ranks, precision="16-true", max_epochs=1, callbacks=[loads]):
        assert same(seen.parameters, expected), f"rank {seen.rank}"


class Positioned:
    """Loader of this rank's batches that is not a `DataLoader` and saves its position."""

    position = 0

    def __len__(self):
        return 8

    def __iter__(self):
        for position in range(self.position % 8, 8):
            self.position = position + 1
            share = slice(2 * position + this_rank(), None, 32)
            yield toy.Blobs().images[share], toy.Blobs().targets[share]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class AsksForSteps(Toy):
    def configure_optimizers(self):
        _ = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def test_resume_in_the_middle_of_an_epoch_continues_after_the_saved_batch(two_ranks, tmp_path):
    """Our strategy keeps the loader's state, which Lightning drops if a module reads `estimated_stepping_batches`."""
    scene = {"module": AsksForSteps, "train": Positioned, "precision": "16-true"}
    path = tmp_path / "step3.ckpt"
    whole = fit(two_ranks, callbacks=[Saves(path, step=3)], **scene)
    for rank, resumed in enumerate(fit(two_ranks, ckpt_path=path, **scene)):
        assert resumed.losses == whole[rank].losses[3:], f"rank {rank}"


def test_registered_names_have_the_suffixes_of_ddps_names():
    assert suffixes_of("hybrid_allreduce") == suffixes_of("ddp")


def suffixes_of(prefix):
    names = StrategyRegistry.available_strategies()
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"algoritm": "flat"},
            r"`algoritm` \(='flat'\) is not an option.*Did you mean `comm=Comm\(algorithm=...\)`",
        ),
        (
            {"every": 8},
            r"`every` \(=8\) is not an option.*Did you mean `between_nodes=LocalSteps\(every=...\)`",
        ),
        (
            {"comm": Comm(bucket_bytes=2**20), "bucket_cap_mb": 1},
            r"`bucket_cap_mb` \(=1\) and `comm.bucket_bytes` \(=",
        ),
        (
            {"comm": Comm(plan=CommPlan()), "bucket_cap_mb": 1},
            r"`bucket_cap_mb` \(=1\) and `comm.plan` both .* Leave `bucket_cap_mb` out",
        ),
        ({"bucket_cap_mb": "25 MB"}, r"`bucket_cap_mb` \(='25 MB'\) must be a number in \(0, inf"),
        ({"bucket_cap_mb": 0}, r"`bucket_cap_mb` \(=0\) must be a number in \(0, inf"),
        (
            {"between_nodes": Adasum},
            r"`between_nodes` \(=Adasum\) must be a Mean, Adasum or LocalSteps object",
        ),
        (
            {"ranks_per_node": "two"},
            r"`ranks_per_node` \(='two'\) must be an integer, 1 or more",
        ),
        (
            {"timeout": "1 min"},
            r"`timeout` \(='1 min'\) must be a positive number of seconds or a positive timedelta",
        ),
        ({"timeout": timedelta(0)}, r"`timeout` \(=.*timedelta\(0\)\) must be a positive number"),
        (
            {"start_method": "thread"},
            r"`start_method` \(='thread'\) must be one of 'popen', 'spawn', 'fork', 'forkse",
        ),
        ({"loss_scale": 1000}, r"`loss_scale` \(=1000.0\) must be a power of two"),
        ({"device_ids": [0]}, r"`device_ids` cannot be set"),
    ],
)
def test_bad_options_are_refused_by_the_constructor(options, message):
    with pytest.raises(ValueError, match=message):
        HybridAllReduceStrategy(**options)


def test_a_timeout_may_be_seconds_a_folder_any_path_and_a_dtype_any_spelling():
    assert HybridAllReduceStrategy(timeout=60)._timeout == timedelta(minutes=1)
    assert HybridAllReduceStrategy(timeout=timedelta(hours=1))._timeout == timedelta(hours=1)
    strategy = HybridAllReduceStrategy(report=Report(trace_dir=Path("traces")))
    assert strategy._options.trace_dir == "traces"
    for dtype in ("fp16", "float16", "torch.float16", torch.float16):
        strategy = HybridAllReduceStrategy(comm=Comm(dtype=dtype))
        assert strategy._options.comm.on_wire is torch.float16, dtype


def test_a_plan_comes_from_a_file_and_excludes_the_options_it_holds(tmp_path):
    plan = CommPlan(algorithm="hierarchical", chunk_bytes=12345)
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert HybridAllReduceStrategy(comm=Comm(plan=str(path)))._options.plan == plan
    for options in ({"algorithm": "flat"}, {"bucket_bytes": 1}):
        with pytest.raises(
            ValueError,
            match=r"^`comm.plan` .* Leave `comm.algorithm` and `comm.bucket_bytes` out, or",
        ):
            Comm(plan=plan, **options)


def trainer_with_two_per_node():
    toy.trainer(strategy=HybridAllReduceStrategy(ranks_per_node=2))


def test_ranks_per_node_that_does_not_divide_is_refused_by_the_trainer(three_ranks):
    for rank, error in enumerate(three_ranks.run(toy.error_of, trainer_with_two_per_node)):
        assert "`ranks_per_node` (=2) must divide `world_size` (=3)" in error, f"rank {rank}"


def test_the_strategys_precision_plugin_is_used_and_a_second_precision_is_refused(one_rank):
    plugin = MasterWeightPrecision("16-true", loss_scale=128)
    assert fit(one_rank, max_epochs=1, precision_plugin=plugin)[0].loss_scale == 128.0
    (seen,) = fit(one_rank, raises=True, precision="bf16-true", precision_plugin=plugin)
    assert (
        "`precision` (='bf16-true') differs from the precision of the strategy's own plugin"
        in seen.error
    )


class Bare(Toy):
    def __init__(self, frozen=False):
        super().__init__()
        if frozen:
            self.net.requires_grad_(False)
        else:
            self.net = nn.Identity()


class Foreign(Toy):
    def configure_optimizers(self):
        groups = [{"params": self.parameters()}, {"params": [nn.Parameter(torch.zeros(3))]}]
        return torch.optim.SGD(groups, lr=0.1)


class HasUnused(Toy):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


class HasBackbone(Toy):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(toy.NUM_FEATURES, toy.NUM_FEATURES)

    def loss(self, batch):
        return super().loss((self.backbone(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def every_epoch(epoch):
    return 1.0


UNFREEZES = BackboneFinetuning(
    unfreeze_backbone_at_epoch=1, lambda_func=every_epoch, backbone_initial_lr=0.1
)
LATE = {"module": HasBackbone, "callbacks": [UNFREEZES], "max_epochs": 3}


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        ({"module": Bare}, ["ValueError: Bare has", "nothing to train"]),
        ({"module": partial(Bare, frozen=True)}, ["ValueError: Bare has", "nothing to train"]),
        ({"module": Foreign}, ["a parameter in group 1 that is not part of the LightningModule"]),
        (LATE, ["`backbone.weight`", "is trained but not averaged"]),
        (LATE | {"precision": "16-true"}, ["`backbone.weight`", "is trained but not averaged"]),
        ({"module": HasUnused}, ["strategy='hybrid_allreduce_find_unused_parameters_true'"]),
    ],
    ids=[
        "no parameter",
        "all frozen",
        "foreign",
        "unfrozen late",
        "unfrozen late in half precision",
        "unused",
    ],
)
def test_a_parameter_that_would_not_be_averaged_is_refused(two_ranks, scene, words):
    """Under DDP such ranks would diverge or hang."""
    for seen in fit(two_ranks, raises=True, **scene):
        for word in words:
            assert word in seen.error, f"rank {seen.rank}"


def test_the_box_below_the_traceback_has_the_whole_advice_on_unused_parameters(two_ranks):
    for seen in fit(two_ranks, HasUnused, raises=True):
        box = seen.error.partition("-" * 80)[2]
        assert "parameters that were not used in producing the loss" in box, f"rank {seen.rank}"
        assert "strategy='hybrid_allreduce_find_unused_parameters_true'" in box
        assert "`strategy=HybridAllReduceStrategy(find_unused_parameters=True)`." in box
        assert "Expected to have finished reduction" not in seen.error


class Wide(Toy):
    def __init__(self):
        super().__init__()
        self.net[5] = nn.Sequential(
            nn.Linear(48, 128), nn.Linear(128, 128, bias=False), nn.Linear(128, 16)
        )


def buckets(trainer, module):
    """Return index, bytes and dtype of every bucket."""
    return [
        (bucket.index, bucket.num_bytes, bucket.dtype)
        for bucket in trainer.strategy._comm.engine.buckets
    ]


@pytest.mark.skipif(
    "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters,
    reason="this torch's DDP has one size for all buckets",
)
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str
)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_ddps_buckets_follow_the_plan_the_last_is_small_and_fp32_norms_come_after_fp16_weights(
    two_ranks, options
):
    """DDP reduces buckets in order, so an early bucket with the norm of every layer would delay all others."""
    plan = CommPlan(bucket_bytes=20_000, last_bucket_bytes=1000, num_buckets=16)
    scene = {
        "module": Wide,
        "comm": Comm(plan=plan),
        "max_epochs": 1,
        "callbacks": [at(on_train_end=buckets)],
    }
    for seen in fit(two_ranks, precision="32-true", **scene, **options):
        (of_step,) = seen.looks["on_train_end"]
        last = max(index for index, *_ in of_step)
        assert last >= 3, f"rank {seen.rank}"
        # The weight that is larger than a bucket has its own bucket.
        assert 128 * 128 * 4 in {num_bytes for _, num_bytes, _ in of_step}, f"rank {seen.rank}"
        smallest_of_last = min(num_bytes for index, num_bytes, _ in of_step if index == last)
        assert smallest_of_last <= 1000, f"rank {seen.rank}"
    for seen in fit(two_ranks, precision="16-true", **scene, **options):
        (of_step,) = seen.looks["on_train_end"]
        last = max(index for index, *_ in of_step)
        in_fp16 = {index for index, _, dtype in of_step if dtype == "float16"}
        in_fp32 = {index for index, _, dtype in of_step if dtype == "float32"}
        assert len(in_fp16) >= 3, f"rank {seen.rank}"
        assert max(in_fp32) >= last - 1, f"rank {seen.rank}"


class Tiny(Toy):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(toy.NUM_FEATURES, toy.NUM_CLASSES)


def growth_over_fits(num_cycles):
    """Alternate fits on two nodes of one rank and on one node of two, which use every kind of group and thread."""
    options = [{"ranks_per_node": 1}, {"comm": Comm(algorithm="hierarchical"), "ranks_per_node": 2}]

    def one_fit():
        options.reverse()
        seen = fit(
            module=Tiny, precision="16-true", max_epochs=1, train=toy.loader(32), **options[0]
        )
        assert seen.global_step == 2
        # After teardown the module holds the master weights.
        assert seen.weights["net.weight"].dtype is torch.float32

    return growth(one_fit, num_warm_up=6, num_cycles=num_cycles)


@pytest.mark.parametrize("num_cycles", [6, pytest.param(50, marks=pytest.mark.long)])
def test_many_fits_leave_no_thread_no_group_no_file_and_no_memory_behind(two_ranks, num_cycles):
    """Memory may grow by 80 KiB per cycle, over three times the measured growth, because arenas never settle."""
    for rank, grown in enumerate(two_ranks.run(growth_over_fits, num_cycles)):
        for name in ("threads", "groups", "files"):
            assert grown[name] <= 0, f"{name} on rank {rank}"
        assert grown["bytes"] <= 4 * 2**20, f"rank {rank}"
