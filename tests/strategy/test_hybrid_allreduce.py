"""The strategy: names, options, checkpoints, what is refused, and equality with plain DDP where it must be equal."""

from __future__ import annotations

import inspect
import json
import time
from datetime import timedelta
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid import Adasum, Comm, HybridAllReduceStrategy, MasterWeightPrecision, Report
from lightning_hybrid.comm import CommPlan
from tests import toy

# ---- the same as plain DDP where nothing else was asked for ----------------------------------------------------------


def losses_over_100_steps(strategy):
    module = toy.Toy(lr=0.05)
    toy.trainer(strategy=strategy, precision="32-true", max_epochs=25).fit(module, toy.loader())
    return module.losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize("algorithm", ["flat", "hierarchical", "two_level"])
def test_fp32_losses_are_those_of_plain_ddp_over_100_steps(two_ranks, algorithm):
    """Two ranks add in one order only, so even the bits agree."""
    plain = two_ranks.run(losses_over_100_steps, "ddp")
    ours = two_ranks.run(losses_with_algorithm, algorithm)
    assert len(plain[0]) == 100
    assert ours == plain


def losses_with_algorithm(algorithm):
    return losses_over_100_steps(HybridAllReduceStrategy(comm=Comm(algorithm=algorithm), ranks_per_node=2))


@pytest.mark.long
def test_fp32_losses_of_four_ranks_follow_plain_ddp_to_fp32_rounding(four_ranks):
    plain = torch.tensor(four_ranks.run(losses_over_100_steps, "ddp"))
    ours = torch.tensor(four_ranks.run(losses_in_two_nodes))
    # Another order of summation: a relative 2**-24 per step, amplified over 100 steps of training.
    assert torch.allclose(ours, plain, atol=1e-4, rtol=0)


def losses_in_two_nodes():
    return losses_over_100_steps(HybridAllReduceStrategy(comm=Comm(algorithm="hierarchical"), ranks_per_node=2))


class CountsBuckets(pl.Callback):
    num_buckets = 0

    def on_train_end(self, trainer, module):
        self.num_buckets = trainer.strategy.comm_trace.drain().num_buckets


def test_hook_runs_on_the_cpu(two_ranks):
    """Stock Lightning registers communication hooks on CUDA only, and says nothing."""
    assert all(num_buckets >= 8 for num_buckets in two_ranks.run(buckets_of_a_fit))


def buckets_of_a_fit():
    callback = CountsBuckets()
    toy.trainer(callbacks=[callback]).fit(toy.Toy(), toy.loader())
    return callback.num_buckets


def test_bucket_bytes_reach_ddp(two_ranks):
    assert two_ranks.run(bucket_cap)[0] == 4096


def bucket_cap():
    seen = []

    class Looks(pl.Callback):
        def on_train_start(self, trainer, module):
            seen.append(trainer.strategy.model.bucket_bytes_cap)

    strategy = HybridAllReduceStrategy(comm=Comm(bucket_bytes=4096))
    toy.trainer(strategy=strategy, callbacks=[Looks()], max_epochs=1).fit(toy.Toy(), toy.loader())
    return seen[0]


def test_ddp_is_built_on_the_stream_on_which_backward_runs(monkeypatch):
    """On a stream of its own, as Lightning's, torch warns and each gradient waits for an event more."""
    seen = []

    def no_stream(*args):
        raise AssertionError("another stream")

    monkeypatch.setattr(
        "lightning_hybrid.strategy.comm_setup.DistributedDataParallel", lambda *a, **k: seen.append((a, k))
    )
    monkeypatch.setattr(HybridAllReduceStrategy, "determine_ddp_device_ids", lambda self: [3])
    for name in ("Stream", "stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, no_stream)
    module = nn.Linear(1, 1)
    strategy = HybridAllReduceStrategy(find_unused_parameters=True, ranks_per_node=1)
    strategy._comm.begin(0, 1, torch.device("cpu"), None)
    strategy._setup_model(module)
    ((args, kwargs),) = seen
    assert args == (module,)
    assert kwargs["device_ids"] == [3]
    assert kwargs["find_unused_parameters"]
    assert kwargs["gradient_as_bucket_view"]


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def fit_to(path, epochs, precision="16-true", resume=None, strategy="hybrid_allreduce", optimizer="AdamW"):
    module = toy.Toy(optimizer=optimizer, lr=1e-2)
    trainer = toy.trainer(precision=precision, max_epochs=epochs, strategy=strategy)
    trainer.fit(module, toy.loader(), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return toy.weights(module), module.losses


class SavesMidway(pl.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def fit_and_save_midway(path, precision, optimizer):
    module = toy.Toy(optimizer=optimizer, lr=1e-2)
    toy.trainer(precision=precision, max_epochs=2, callbacks=[SavesMidway(path)]).fit(module, toy.loader())
    return toy.weights(module)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "32-true"])
def test_resume_is_bitwise(two_ranks, tmp_path, precision, optimizer):
    """Eight steps are four, save, load, four; weights, optimizer state and loss scale continue exactly."""
    path = str(tmp_path / "midway.ckpt")
    whole = two_ranks.run(fit_and_save_midway, path, precision, optimizer)
    resumed = two_ranks.run(fit_to, str(tmp_path / "end.ckpt"), 2, precision, path, "hybrid_allreduce", optimizer)
    for rank in range(2):
        assert toy.same_bits(resumed[rank][0], whole[rank])
    assert len(resumed[0][1]) == 4, "the first epoch must not have run again"


def test_checkpoint_is_fp32_and_loads_without_pickle(two_ranks, tmp_path):
    path = str(tmp_path / "half.ckpt")
    module = two_ranks.run(fit_to, path, 1)[0][0]
    checkpoint = torch.load(path, weights_only=True)
    floats = {k: v for k, v in checkpoint["state_dict"].items() if v.is_floating_point()}
    assert {v.dtype for v in floats.values()} == {torch.float32}
    assert any(not torch.equal(v, v.half().float()) for v in floats.values()), "masters, not rounded weights"
    assert toy.same_bits(checkpoint["state_dict"], module)
    moments = [s for state in checkpoint["optimizer_states"][0]["state"].values() for s in state.values()]
    assert {m.dtype for m in moments} == {torch.float32}
    assert checkpoint["MasterWeightPrecision"]["loss_scale"]["scale"] == 2.0**16


@pytest.mark.parametrize(("first", "then"), [("16-true", "ddp"), ("32-true", "hybrid_allreduce")])
def test_checkpoints_go_between_plain_ddp_in_fp32_and_ours(two_ranks, tmp_path, first, then):
    """ours in fp16 -> stock ddp in fp32, and stock fp32 -> ours in fp16; both go on training."""
    path, end = str(tmp_path / "first.ckpt"), str(tmp_path / "end.ckpt")
    precision = "32-true" if then == "ddp" else "16-true"
    one = two_ranks.run(fit_to, path, 1, first, None, "hybrid_allreduce" if then == "ddp" else "ddp")
    two = two_ranks.run(fit_to, end, 2, precision, path, then)
    assert len(two[0][1]) == 4
    assert two[0][1][-1] < one[0][1][0]


def test_loading_weights_during_a_fit_reaches_the_masters(two_ranks):
    """As the learning-rate finder does: load in the middle, and the next step starts from the exact values."""
    for loaded, expected in two_ranks.run(load_in_the_middle):
        assert toy.same_bits(loaded, expected)


def load_in_the_middle():
    expected = {name: value + 0.0 for name, value in toy.Toy(seed=5).state_dict().items()}

    class Loads(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2:
                trainer.strategy.load_model_state_dict({"state_dict": expected})
                trainer.optimizers[0].param_groups[0]["lr"] = 0.0
                trainer.optimizers[0].param_groups[0]["momentum"] = 0.0

    module = toy.Toy(seed=1)
    toy.trainer(precision="16-true", max_epochs=1, callbacks=[Loads()]).fit(module, toy.loader())
    keep = [name for name in expected if "running" not in name and "num_batches" not in name]
    after = toy.weights(module)
    return {n: after[n] for n in keep}, {n: expected[n] for n in keep}


def test_best_checkpoint_can_be_tested_afterwards(two_ranks, tmp_path):
    for result in two_ranks.run(fit_then_test_best, str(tmp_path)):
        assert result < 0.7


def fit_then_test_best(folder):
    module = toy.Toy()
    trainer = toy.trainer(
        precision="16-true",
        max_epochs=4,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        enable_checkpointing=True,
    )
    trainer.fit(module, toy.loader())
    losses = []
    module.test_step = lambda batch, batch_idx: losses.append(module.loss(batch).item())
    trainer.test(module, toy.loader(), ckpt_path="best", weights_only=True)
    return sum(losses) / len(losses)


# ---- names and options ---------------------------------------------------------------------------------------------


def test_registered_names_are_ddps_names():
    ddp = {name.removeprefix("ddp") for name in StrategyRegistry.available_strategies() if name.startswith("ddp")}
    ours = {
        name.removeprefix("hybrid_allreduce")
        for name in StrategyRegistry.available_strategies()
        if name.startswith("hybrid_allreduce")
    }
    assert ours == ddp


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algoritm": "flat"}, r"`algoritm` \(='flat'\) is not an option.*Did you mean `comm=Comm\(algorithm=...\)`"),
        ({"every": 8}, r"`every` \(=8\) is not an option.*Did you mean `between_nodes=LocalSteps\(every=...\)`"),
        (
            {"comm": Comm(bucket_bytes=2**20), "bucket_cap_mb": 1},
            r"`bucket_cap_mb` \(=1\) and `comm.bucket_bytes` \(=1048",
        ),
        (
            {"between_nodes": Adasum},
            r"`between_nodes` \(=<class .*\) must be Mean\(...\) or Adasum\(...\) or",
        ),
        ({"comm": {"tune": "off"}}, r"`comm` \(={'tune': 'off'}\) must be Comm\(...\)"),
        ({"report": "traces"}, r"`report` \(='traces'\) must be Report\(...\)"),
        ({"extensions": [3]}, r"`extensions` \(with 3\) must hold what makes extensions"),
        ({"ranks_per_node": "two"}, r"`ranks_per_node` \(='two'\) must be a whole number, 1 or more"),
        ({"timeout": "1 min"}, r"`timeout` \(='1 min'\) must be a number of seconds above zero, or a timedelta"),
        ({"timeout": True}, r"`timeout` \(=True\) must be a number of seconds"),
        ({"timeout": None}, r"`timeout` \(=None\) must be a number of seconds"),
        ({"timeout": timedelta(0)}, r"`timeout` \(=.*timedelta\(0\)\) must be a number of seconds"),
        ({"timeout": float("inf")}, r"`timeout` \(=inf\) must be a number of seconds"),
        ({"start_method": "thread"}, r"`start_method` \(='thread'\) must be one of 'popen', 'spawn', 'fork', 'forkse"),
        ({"loss_scale": 1000}, r"`loss_scale` \(=1000.0\) must be a power of two"),
        ({"ddp_comm_hook": print}, r"`ddp_comm_hook` .* it is the communication hook"),
        ({"device_ids": [0]}, r"`device_ids` cannot be given"),
    ],
)
def test_bad_options_are_refused_when_the_object_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        HybridAllReduceStrategy(**options)


def test_a_timeout_is_seconds_and_a_folder_any_path(tmp_path):
    assert HybridAllReduceStrategy(timeout=60)._timeout == timedelta(minutes=1)
    assert HybridAllReduceStrategy(timeout=timedelta(hours=1))._timeout == timedelta(hours=1)
    assert HybridAllReduceStrategy(report=Report(trace_dir=Path("traces")))._trace_dir == "traces"


@pytest.mark.parametrize("dtype", ["fp16", "float16", "torch.float16", torch.float16])
def test_spellings_of_a_dtype(dtype):
    assert HybridAllReduceStrategy(comm=Comm(dtype=dtype))._comm._comm_dtype is torch.float16


def test_ranks_per_node_that_does_not_divide_is_refused_by_the_trainer(three_ranks):
    for error in three_ranks.run(toy.error_of, trainer_with_two_per_node):
        assert "`ranks_per_node` (=2) must divide `world_size` (=3)" in error
        assert "algorithm=flat" in error


def trainer_with_two_per_node():
    toy.trainer(strategy=HybridAllReduceStrategy(ranks_per_node=2))


def test_two_precisions_are_refused(one_rank):
    (error,) = one_rank.run(toy.error_of, fit_with_two_precisions)
    assert "`precision` (='bf16-true') must agree with the strategy's own precision plugin" in error


def fit_with_two_precisions():
    strategy = HybridAllReduceStrategy(precision_plugin=MasterWeightPrecision("16-true"))
    toy.trainer(strategy=strategy, precision="bf16-true").fit(toy.Toy(), toy.loader())


def test_a_plugin_of_ones_own_is_used(one_rank):
    assert one_rank.run(scale_of_own_plugin)[0] == (128.0, "16-true")


def scale_of_own_plugin():
    strategy = HybridAllReduceStrategy(precision_plugin=MasterWeightPrecision("16-true", loss_scale=128))
    trainer = toy.trainer(strategy=strategy, max_epochs=1)
    trainer.fit(toy.Toy(), toy.loader())
    return trainer.precision_plugin.loss_scale.value, trainer.precision


# ---- parameters that would not be averaged -------------------------------------------------------------------------


class Bare(toy.Toy):
    def __init__(self, frozen=False):
        super().__init__()
        if frozen:
            self.net.requires_grad_(False)
        else:
            self.net = nn.Identity()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_with_nothing_to_train_is_refused(one_rank, frozen):
    (error,) = one_rank.run(toy.error_of, fit_bare, frozen)
    assert error.startswith("ValueError: Bare has")
    assert "nothing to train" in error


def fit_bare(frozen):
    toy.trainer().fit(Bare(frozen), toy.loader())


def test_a_parameter_outside_the_module_is_refused(two_ranks):
    for error in two_ranks.run(toy.error_of, fit_with_foreign_parameter):
        assert "a parameter in group 1 that is not part of the LightningModule" in error


def fit_with_foreign_parameter():
    class Foreign(toy.Toy):
        def configure_optimizers(self):
            groups = [{"params": self.parameters()}, {"params": [nn.Parameter(torch.zeros(3))]}]
            return torch.optim.SGD(groups, lr=0.1)

    toy.trainer().fit(Foreign(), toy.loader())


@pytest.mark.parametrize("precision", ["32-true", "16-true"])
def test_parameters_unfrozen_after_wrapping_are_refused_where_ddp_would_let_ranks_drift(two_ranks, precision):
    for error in two_ranks.run(toy.error_of, fit_with_late_unfreezing, precision):
        assert "`backbone.weight`" in error
        assert "is trained but not averaged" in error


def test_one_rank_may_unfreeze_as_it_likes(one_rank):
    for precision in ("32-true", "16-true"):
        assert one_rank.run(toy.error_of, fit_with_late_unfreezing, precision) == [""]


def fit_with_late_unfreezing(precision):
    class HasBackbone(toy.Toy):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Linear(toy.NUM_FEATURES, toy.NUM_FEATURES)

        def loss(self, batch):
            return super().loss((self.backbone(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    finetuning = BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0, backbone_initial_lr=0.1
    )
    toy.trainer(precision=precision, callbacks=[finetuning], max_epochs=3).fit(HasBackbone(), toy.loader())


# ---- batches -------------------------------------------------------------------------------------------------------


def test_batches_keep_their_dtypes_and_user_hooks_keep_working(two_ranks):
    for plain, hooked in two_ranks.run(dtypes_of_batches):
        assert plain == (torch.float32, torch.int64)
        assert hooked == (torch.float32, torch.int64, 2)  # the user's own hook saw and doubled every batch


def dtypes_of_batches():
    class Looks(toy.Toy):
        def training_step(self, batch, batch_idx):
            self.seen = (batch[0].dtype, batch[1].dtype)
            return super().training_step(batch, batch_idx)

    class Hooks(Looks):
        factor = 0

        def on_before_batch_transfer(self, batch, dataloader_idx):
            self.factor = 2
            return batch

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.seen = (*self.seen, self.factor)
            return loss

    plain, hooked = Looks(), Hooks()
    for module in (plain, hooked):
        toy.trainer(precision="16-true", max_epochs=1).fit(module, toy.loader())
    return plain.seen, hooked.seen


def test_teardown_leaves_no_thread_and_no_group(two_ranks):
    for before, after in two_ranks.run(threads_and_groups):
        assert after == before


def threads_and_groups():
    import threading

    def count():
        return threading.active_count(), len(dist.distributed_c10d._world.pg_map)

    toy.trainer(max_epochs=1).fit(toy.Toy(), toy.loader())
    before = count()
    for _ in range(5):
        toy.trainer(max_epochs=1, precision="16-true").fit(toy.Toy(), toy.loader())
    return before, count()


def test_advice_on_unused_parameters_names_this_strategy(two_ranks):
    for error in two_ranks.run(toy.error_of, fit_with_unused):
        assert "strategy='hybrid_allreduce_find_unused_parameters_true'" in error
        assert "HybridAllReduceStrategy(find_unused_parameters=True)" in error


def fit_with_unused():
    class HasUnused(toy.Toy):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(2, 2)

    toy.trainer().fit(HasUnused(), toy.loader())


# ---- resume in mid-epoch -------------------------------------------------------------------------------------------


class Positioned:
    """Batches of this rank, with a position that can be saved."""

    def __init__(self):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        data = toy.Blobs()
        self.batches = [(data.images[i::32], data.targets[i::32]) for i in range(rank, 16, world_size)]
        self.position = 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        if self.position >= len(self.batches):
            self.position = 0
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Scheduled(toy.Toy):
    """Asks for the number of steps where the schedule is made, as Lightning's documentation does."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SavesAt(pl.Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit_positioned(path, resume):
    module = Scheduled()
    callbacks = [] if resume else [SavesAt(3, path)]
    toy.trainer(precision="16-true", callbacks=callbacks, max_epochs=2).fit(
        module, Positioned(), ckpt_path=path if resume else None
    )
    return toy.weights(module), len(module.losses)


def test_resume_in_mid_epoch_continues_after_the_saved_batch(two_ranks, tmp_path):
    """Lightning drops the loader's state where `estimated_stepping_batches` was asked for; ours keeps it."""
    path = str(tmp_path / "step3.ckpt")
    whole = two_ranks.run(fit_positioned, path, False)
    resumed = two_ranks.run(fit_positioned, path, True)
    for rank in range(2):
        assert resumed[rank][1] == whole[rank][1] - 3
        assert toy.same_bits(resumed[rank][0], whole[rank][0])


# ------------------------------------------------------------------------------------------------ buckets and failures


class Wide(toy.Toy):
    """A layer of 64 KiB between the small ones."""

    def __init__(self):
        super().__init__()
        self.net[5] = torch.nn.Sequential(
            torch.nn.Linear(48, 128), torch.nn.Linear(128, 128, bias=False), torch.nn.Linear(128, 16)
        )


def buckets_of_a_wide_fit(options, precision):
    seen = []

    class Looks(pl.Callback):
        def on_train_end(self, trainer, module):
            seen.extend(trainer.strategy._engine.buckets)

    plan = CommPlan(bucket_bytes=20_000, last_bucket_bytes=1000, num_buckets=16)
    strategy = HybridAllReduceStrategy(comm=Comm(plan=plan), **options)
    toy.trainer(strategy=strategy, callbacks=[Looks()], max_epochs=1, precision=precision).fit(Wide(), toy.loader())
    return [(bucket.index, bucket.num_bytes, bucket.dtype) for bucket in seen]


@pytest.mark.skipif(
    "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters,
    reason="this torch's DDP has one size for all buckets",
)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_ddps_buckets_are_the_plans_and_the_last_is_small(two_ranks, options):
    for buckets in two_ranks.run(buckets_of_a_wide_fit, options, "32-true"):
        last = max(index for index, *_ in buckets)
        assert last >= 3
        assert any(num_bytes == 128 * 128 * 4 for _, num_bytes, _ in buckets)  # too large for the others: alone
        assert min(size for index, size, _ in buckets if index == last) <= 1000


@pytest.mark.skipif(
    "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters,
    reason="this torch's DDP has one size for all buckets",
)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_norms_in_fp32_wait_behind_the_halves(two_ranks, options):
    """DDP hands buckets over by number: one that holds the norm of every layer and came first would stop all others."""
    for buckets in two_ranks.run(buckets_of_a_wide_fit, options, "16-true"):
        last = max(index for index, *_ in buckets)
        halves = [index for index, _, dtype in buckets if dtype == "float16"]
        singles = [index for index, _, dtype in buckets if dtype == "float32"]
        assert len(set(halves)) >= 3
        assert last >= 3
        assert max(singles) >= last - 1


def fit_that_one_rank_leaves(rank):
    """An error in the user's code on one rank, while the other waits for its gradients; then a new fit."""

    class Breaks(toy.Toy):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2 and dist.get_rank() == rank:
                raise FloatingPointError("of the user")
            return super().training_step(batch, batch_idx)

    start = time.monotonic()
    error = toy.error_of(toy.trainer(max_epochs=1).fit, Breaks(), toy.loader())
    seconds = time.monotonic() - start
    dist.barrier()
    module = toy.Toy()
    toy.trainer(max_epochs=1).fit(module, toy.loader())
    return error, seconds, toy.weights(module)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_one_ranks_code_ends_the_fit_on_all_and_a_new_fit_works(two_ranks, rank):
    results = two_ranks.run(fit_that_one_rank_leaves, rank)
    assert results[rank][0] == "FloatingPointError: of the user"
    assert f"comm: rank {rank} gave up: FloatingPointError: of the user" in results[1 - rank][0]
    assert all(seconds < 20 for _, seconds, _ in results)  # the groups' timeout is 45 s
    assert results[0][2].keys() == results[1][2].keys()


def test_a_plan_comes_from_a_file_and_excludes_the_options_it_holds(tmp_path):
    plan = CommPlan(algorithm="hierarchical", chunk_bytes=12345)
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert HybridAllReduceStrategy(comm=Comm(plan=str(tmp_path / "plan.json")))._comm._plan == plan
    for options in ({"algorithm": "flat"}, {"bucket_bytes": 1}):
        with pytest.raises(ValueError, match=r"^`comm.plan` .* leave `comm.algorithm` and `comm.bucket_bytes` out, or"):
            Comm(plan=plan, **options)


def fit_with_a_timeline(trace_dir):
    toy.trainer(strategy=HybridAllReduceStrategy(report=Report(trace_dir=trace_dir)), max_epochs=1).fit(
        toy.Toy(), toy.loader()
    )


def test_a_fit_leaves_a_timeline_per_rank(two_ranks, tmp_path):
    two_ranks.run(fit_with_a_timeline, str(tmp_path))
    for rank in range(2):
        events = json.loads((tmp_path / f"rank{rank}.json").read_text())["traceEvents"]
        assert {"backward, from its first bucket on", "bucket 0"} <= {event["name"] for event in events}
        assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
