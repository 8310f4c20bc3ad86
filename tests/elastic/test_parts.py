"""Building blocks of an elastic step: shards, flat buckets and logs."""

import threading
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_hybrid import HybridElasticStrategy
from lightning_hybrid.comm import Topology
from lightning_hybrid.data.place import Place
from lightning_hybrid.data.shard_loader import ShardLoader, shards_of
from lightning_hybrid.elastic import held_loggers
from lightning_hybrid.elastic.elastic_fit import ElasticFit
from lightning_hybrid.elastic.flat_buckets import BufferCopy, flat_buckets
from lightning_hybrid.elastic.step_logs import metrics_of
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from recipes.datasets.in_memory.loader import ImageSet, Normalize, TrainLoader
from tests.netlab.recovery import parts_of
from tests.scenes import same

NUM_SHARDS = 4


def numbered_images(num: int = 40) -> ImageSet:
    labels = torch.arange(num)
    return ImageSet(
        images=labels.view(-1, 1, 1, 1).expand(-1, 1, 2, 2).to(torch.uint8), labels=labels
    )


def own_loader(rank: int = 0, world_size: int = 2) -> TrainLoader:
    sizes = {
        "global_batch_size": 8,
        "world_size": world_size,
        "rank": rank,
        "accumulate_grad_batches": 1,
    }
    return TrainLoader(
        numbered_images(), seed=3, shift_pixels=0, normalize=Normalize(0.0, 1.0), **sizes
    )


def user_loader(rank: int = 0, world_size: int = 2) -> DataLoader[Any]:
    data = TensorDataset(torch.zeros(40, 1), torch.arange(40))
    return DataLoader(
        data, batch_size=2, sampler=DistributedSampler(data, world_size, rank, seed=5)
    )


def labels_of(loader: Any) -> list[list[int]]:
    return [batch[1].tolist() for batch in loader]


class Reads:
    """Run that reads a loader from the first batch of each epoch."""

    rank = 0
    world_size = NUM_SHARDS
    seed = 0
    accumulate_grad_batches = 1
    sets_epochs = False
    reads_to_end = False
    epoch = -1

    def is_reading(self, holder: Any) -> bool:
        return True

    def is_within_training(self) -> bool:
        return True

    def place_of(self, resume: Any) -> Place:
        self.epoch += 1
        return Place(self.epoch)


def unchanged(loader: Any) -> Any:
    """Return the loader unchanged, in place of the strategy's processing."""
    return loader


def shard_loader(loader: Any, shards: list[int]) -> ShardLoader:
    loader_of_shards = ShardLoader(loader, Reads(), unchanged)
    loader_of_shards.use(shards)
    return loader_of_shards


@pytest.mark.parametrize("make", [own_loader, user_loader])
def test_a_shard_has_what_a_rank_of_the_largest_world_would_read(make: Any) -> None:
    of_ranks = [labels_of(make(rank, NUM_SHARDS)) for rank in range(NUM_SHARDS)]
    loader = shard_loader(make(), [2, 3])
    for step, batch in enumerate(loader):
        assert batch[1].tolist() == of_ranks[2][step]
        assert loader.batch_of(3)[1].tolist() == of_ranks[3][step]
    assert step + 1 == len(loader) == len(of_ranks[0])


@pytest.mark.parametrize("make", [own_loader, user_loader])
def test_shards_of_a_lost_host_are_read_from_the_step_on_in_which_it_was_lost(make: Any) -> None:
    of_ranks = [labels_of(make(rank, NUM_SHARDS)) for rank in range(NUM_SHARDS)]
    loader = shard_loader(make(), [1])
    num_steps = 0
    for step, batch in enumerate(loader):
        if step == 2:
            loader.use([0, 1])
        read = [loader.batch_of(shard)[1].tolist() for shard in loader.shards]
        if step < 2:
            assert read == [of_ranks[1][step]], f"step {step}"
        else:
            assert read == [of_ranks[0][step], of_ranks[1][step]], f"step {step}"
        # The batch of step 2 was read before the loss.
        first_shard = 1 if step <= 2 else 0
        assert batch[1].tolist() == of_ranks[first_shard][step], f"step {step}"
        num_steps += 1
    assert num_steps == 5


def test_a_rank_reads_its_own_shard_alone_from_the_first_step_on() -> None:
    fit = ElasticFit.__new__(ElasticFit)
    # Hosts have met before Lightning asks for the loader.
    fit._loader = None
    fit._shards = [2]
    loader = fit.deal(own_loader(), Reads(), unchanged)
    assert next(iter(loader))[1].tolist() == labels_of(own_loader(2, NUM_SHARDS))[0]
    assert list(loader._streams) == [2]


def test_a_step_without_a_loss_is_refused_before_others_wait_for_it() -> None:
    fit = ElasticFit.__new__(ElasticFit)
    fit._runs_shard = False
    fit._loader = None
    fit._shards = []
    assert fit.training_step(lambda batch: batch, 3) == 3
    with pytest.raises(
        RuntimeError,
        match=r"`training_step` returned None, but must return a loss in an elastic run",
    ):
        fit.training_step(lambda batch: None, 3)


def test_a_view_that_ends_before_its_groups_are_there_is_not_entered_and_later_they_are_cut() -> (
    None
):
    from lightning_hybrid.elastic.host_changes import Views

    views = Views.__new__(Views)
    cut = []
    views.ended = ""
    views.may_cut = True
    views.groups = None
    views._lock = threading.Lock()
    views.topology = Topology.from_ranks_per_node(rank=0, world_size=2, ranks_per_node=1)
    views._timeout = timedelta(seconds=9)
    views._engine = SimpleNamespace(device=torch.device("cpu"), cut=cut.append)
    views._membership = SimpleNamespace(me=SimpleNamespace(id="a", host="a"), end_view=cut.append)
    views._left = 2
    views._next_server = None
    views._vote = lambda is_so: is_so
    views._on_change(2, "a thread that comes late")
    assert not views.ended
    views._on_change(3, "a host joins")
    view: Any = SimpleNamespace(
        members=[0, 1], rank_of=lambda member: 0, store="127.0.0.1:1", number=3
    )
    with pytest.raises(RuntimeError, match="comm: a host joins"):
        views._enter(view)
    views.groups.cut = lambda: cut.append("groups")
    views._on_change(3, "a host is lost")
    assert cut == ["comm: a host joins", "groups"]
    assert not views.agrees(False, "")  # other ranks of the host may wait for this one
    assert cut[2:] == [
        "an all-reduce failed on host a: a host joins",
        "comm: a host joins",
        "groups",
    ]


def test_shards_of_a_rank_are_consecutive_and_every_shard_belongs_to_one_rank() -> None:
    for world_size in range(1, 9):
        shards = [shard for rank in range(world_size) for shard in shards_of(rank, world_size, 8)]
        assert shards == list(range(8)), f"{world_size} ranks"


def test_an_order_that_does_not_follow_from_the_epoch_is_refused() -> None:
    data = TensorDataset(torch.arange(8))
    loader = DataLoader(data, sampler=WeightedRandomSampler([1.0] * 8, 8))
    with pytest.raises(
        ValueError, match=r"^The order of the training loader .* must depend only on seed and epoch"
    ):
        ShardLoader(loader, Reads(), unchanged)


class Notes:
    def __init__(self) -> None:
        self.done: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.done.append(metrics.get("loss", step))

    def log_hyperparams(self, values: Any) -> None:
        self.done.append(values)

    log_graph = save = log_hyperparams


def test_the_first_host_alone_opens_loggers_and_the_next_first_writes_again_what_may_be_missing(
    monkeypatch,
) -> None:
    logger = Notes()
    now = [0.0]
    monkeypatch.setitem(vars(rank_zero_only), "rank", 0)
    monkeypatch.setattr(held_loggers, "monotonic", lambda: now[0])
    held = held_loggers.HeldLoggers([logger])
    assert rank_zero_only.rank == 1  # so that Lightning opens no logger
    held.let_lightning_open()
    assert rank_zero_only.rank == 0
    monkeypatch.setitem(vars(rank_zero_only), "rank", 3)  # the rank in a view
    held.let_lightning_open()
    assert rank_zero_only.rank == 3
    logger.log_hyperparams("settings")
    held.meet(is_first=False)
    assert logger.done == []  # another host has opened its own loggers
    row: dict[str, float] = {}  # one dictionary for all steps
    for step, now[0] in enumerate((0.0, 50.0, 130.0)):
        row["loss"] = float(step)
        logger.log_metrics(row, step=step)  # Lightning itself writes nothing on such a rank
        held.after_step()
    logger.done.clear()
    held.meet(is_first=True)
    logger.log_hyperparams("new settings")
    logger.log_metrics({}, step=3)
    # other hosts wait for the view, and must not wait for loggers that open
    assert logger.done == []
    held.after_step()
    held.meet(is_first=True)  # still the first, in another view
    held.after_step()
    assert logger.done == ["settings", "new settings", 1, 2, 3]
    logger.log_metrics({}, step=4)
    held.end()
    logger.log_metrics({}, step=5)
    assert logger.done[5:] == [4, 5]
    assert list(vars(logger)) == ["done"]


def test_an_error_before_loggers_are_opened_leaves_nothing_changed(monkeypatch) -> None:
    logger = Notes()
    monkeypatch.setitem(vars(rank_zero_only), "rank", 0)
    held_loggers.HeldLoggers([logger]).end()
    assert rank_zero_only.rank == 0
    assert list(vars(logger)) == ["done"]


def test_buffers_are_copied_whatever_their_dtypes_and_shared_in_one_message() -> None:
    def network(value: int) -> nn.Module:
        layers = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(1, 1), nn.BatchNorm1d(2))
        layers[0].register_buffer("mask", torch.tensor([value > 1]))
        layers[2].register_buffer("narrow", torch.full((2, 3), value, dtype=torch.float16).t())
        layers[0].num_batches_tracked.fill_(value)
        return layers

    source = network(1)
    receiver = network(2)
    sent = []
    BufferCopy(source).share(sent.append, is_source=True)
    assert len(sent) == 1
    copy = BufferCopy(receiver)
    copy.take()
    BufferCopy(receiver).share(lambda flat: flat.copy_(sent[0]), is_source=False)
    assert same(dict(receiver.named_buffers()), dict(source.named_buffers()))
    copy.put_back()
    assert same(dict(receiver.named_buffers()), dict(network(2).named_buffers()))

    receiver[0].mask = torch.ones(5)  # a different layout
    copy.take()
    receiver[0].mask.zero_()
    copy.put_back()
    assert receiver[0].mask.sum() == 5

    BufferCopy(nn.Linear(1, 1)).share(sent.append, is_source=True)
    assert len(sent) == 1, "a module without buffers sends nothing"


def test_flat_buckets_hold_every_gradient_once_in_its_own_layout() -> None:
    weights = [
        nn.Parameter(torch.randn(3, 5).t()),
        nn.Parameter(torch.randn(7).half()),
        nn.Parameter(torch.randn(2, 2)),
    ]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    gradients = [weight.grad.clone() for weight in weights]
    buckets = flat_buckets(weights, 80)
    assert [bucket.is_last() for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    for bucket in buckets:
        bucket.fill()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            assert gradient.stride() == parameter.stride()
        bucket.buffer().mul_(2)
        bucket.give_back()
    for weight, gradient in zip(weights, gradients, strict=True):
        assert torch.equal(weight.grad, gradient * 2)


def test_a_step_counts_for_the_view_that_made_it_and_not_for_one_that_received_it() -> None:
    seen = [(0.0, 0, 4, 1), (0.1, 1, 4, 1), (0.3, 1, 2, 2), (0.4, 2, 2, 2), (0.5, 3, 2, 3)]
    rows = [
        dict(zip(("t", "step", "hosts", "view"), row, strict=True), event="step") for row in seen
    ]
    assert parts_of(rows[::-1]) == [(0, 2, 4), (2, 3, 2), (3, 4, 2)]


class Logging(pl.LightningModule):
    """Module that logs with a metric, and with and without a reduction over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def log_step(self, value: float) -> None:
        self.mean(torch.tensor(value))
        self.log("own", value, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("shared", value, on_step=True, on_epoch=True, sync_dist=True, batch_size=2)


def as_it_is(value: Any, **_: Any) -> Any:
    """Return the value unreduced, as within an elastic step."""
    return value


@dataclass
class LoggingHost:
    """Logging module of a host, its collection of results, and the logs of its epoch."""

    module: Logging
    results: Any
    epoch: Any


def started(*, is_first: bool = True) -> LoggingHost:
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

    from lightning_hybrid.elastic.step_logs import EpochLogs

    module = Logging()
    results = _ResultCollection(training=True)
    trainer = SimpleNamespace(_results=results, current_epoch=0, is_last_batch=False)
    module._trainer = trainer  # type: ignore[assignment]

    def log(name: str, value: float, **options: Any) -> None:
        options = {"batch_size": 1, "on_step": False, "sync_dist_fn": as_it_is} | options
        results.log("training_step", name, torch.tensor(float(value)), **options)

    object.__setattr__(module, "log", log)
    return LoggingHost(module, results, EpochLogs(module, is_first=is_first))


def logged_by(
    shards: list[float], *, attempts: int, steps: int = 2, joins_after: int | None = None
) -> dict[str, float]:
    """Log steps of these shards and drop all attempts but the last. A joining host receives the earlier logs."""
    host = started()
    for step in range(steps):
        if step == joins_after:
            sums = host.epoch.collected()
            host = started()
            host.epoch.take(sums)
        logs = host.epoch.step()
        for _ in range(attempts):
            logs.restore()
            for value in shards:
                host.module.log_step(value)
                logs.end_shard()
        logs.share(lambda flat: None, num_shards=len(shards), is_first_of_host=True)
    shared = host.results["training_step.shared"]
    return {
        "own": float(host.results["training_step.own"].compute()),
        "of_step": float(shared._forward_cache),
        "of_epoch": float(shared.compute()),
        "metric": float(host.module.mean.compute()),
    }


@pytest.mark.parametrize("attempts", [1, 3])
def test_values_averaged_over_ranks_count_all_shards_and_others_the_first_shard_alone(
    attempts: int,
) -> None:
    assert logged_by([1.0, 2.0, 6.0], attempts=attempts) == {
        "own": 2.0,
        "of_step": 3.0,
        "of_epoch": 3.0,
        "metric": 3.0,
    }


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_host_that_joins_counts_what_was_logged_before(attempts: int) -> None:
    always = logged_by([1.0, 2.0, 6.0], attempts=1, steps=4)
    assert logged_by([1.0, 2.0, 6.0], attempts=attempts, steps=4, joins_after=1) == always
    assert always["own"] == 4.0


@pytest.mark.parametrize("is_first", [True, False])
def test_a_host_that_is_behind_at_the_end_of_an_epoch_has_the_sums_that_its_end_logs(
    is_first: bool,
) -> None:
    def step(host: LoggingHost, value: float) -> Any:
        logs = host.epoch.step()
        host.module.log_step(value)
        logs.end_shard()
        return logs

    ahead = started()
    behind = started(is_first=is_first)
    for value in (1.0, 2.0):
        for host in (ahead, behind):
            step(host, value).share(lambda flat: None, num_shards=1, is_first_of_host=True)
    step(behind, 7.0).restore()  # the all-reduce results never arrived
    ahead.module._trainer.is_last_batch = True
    step(ahead, 6.0).share(lambda flat: None, num_shards=1, is_first_of_host=True)
    ahead.epoch.commit()
    ahead.results.reset()
    ahead.module._trainer.current_epoch = 1
    behind.epoch.take(ahead.epoch.collected())
    shared = behind.results["training_step.shared"]
    assert float(shared._forward_cache) == 6.0
    assert not shared.has_reset
    assert float(shared.compute()) == (3.0 if is_first else 1.5)


def test_received_metric_states_move_to_the_device_of_the_metric() -> None:
    """Received metric states move to the metric's device, because they are sent through the CPU."""
    ahead = started()
    behind = started()
    for host in (ahead, behind):
        host.module.accuracy = MulticlassAccuracy(3)
        host.module.accuracy.update(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
        host.epoch._metrics = metrics_of(host.module)
        host.module.log_step(1.0)
    accuracy = behind.module.accuracy.to("meta")
    shared = behind.results["training_step.shared"].to("meta")
    behind.epoch.take(ahead.epoch.collected())
    states = [getattr(accuracy, name) for name in accuracy._defaults]
    assert {state.device.type for state in states} == {"meta"}
    assert shared.value.device.type == "meta"


def test_a_loss_scale_before_its_first_step_continues_alike_on_the_host_that_receives_it() -> None:
    sent = DynamicLossScale()
    received = DynamicLossScale()
    received.load_state_dict(sent.state_dict())
    for found_inf, largest in ((True, float("inf")), (False, 3.0), (False, 2.0)):
        for scale in (sent, received):
            value = None
            if scale.wants_largest:
                value = torch.tensor(largest)
            scale.update(torch.tensor(found_inf), value)
        assert sent.value == received.value
    # 3 needs an exponent of 2, which is 12 below the largest exponent of fp16.
    assert sent.value == 1024.0


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "is_over"),
    [(-1, 4, False), (-1, 2, True), (10, None, True), (11, -1, False)],
)
def test_a_fit_that_is_over_asks_no_host_that_may_have_left(
    max_steps: int, max_epochs: int | None, is_over: bool
) -> None:
    progress = SimpleNamespace(current=SimpleNamespace(processed=2))
    loop = SimpleNamespace(max_steps=max_steps, max_epochs=max_epochs, epoch_progress=progress)
    trainer = SimpleNamespace(should_stop=True, global_step=10, fit_loop=loop)
    asked: list[Any] = []
    fit = ElasticFit.__new__(ElasticFit)
    fit._views = SimpleNamespace(stops=False, stop=asked.append)  # type: ignore[assignment]
    fit._strategy = SimpleNamespace(lightning_module=SimpleNamespace(trainer=trainer))
    fit._stop_with_others()
    assert (not asked) == is_over


def test_within_a_step_what_is_logged_is_not_reduced_as_ranks_may_have_unequal_numbers_of_shards() -> (
    None
):
    strategy = HybridElasticStrategy(max_hosts=2, meet="127.0.0.1:29400")
    strategy._fit = SimpleNamespace(is_in_step=True)
    logged = torch.ones(1)
    with patch.object(DDPStrategy, "reduce", side_effect=AssertionError("a collective")):
        assert strategy.reduce(logged) is logged
        strategy._fit.is_in_step = False
        with pytest.raises(AssertionError, match="a collective"):
            strategy.reduce(logged)


def test_within_a_step_no_hook_gathers_over_the_host() -> None:
    strategy = HybridElasticStrategy(max_hosts=2, meet="127.0.0.1:29400")
    strategy._fit = ElasticFit.__new__(ElasticFit)
    strategy._fit._logs = SimpleNamespace()
    with pytest.raises(RuntimeError, match=r"`all_gather` cannot be called in `training_step`"):
        strategy.all_gather(torch.ones(1))
