"""Evaluation that counts every sample once: metrics of user code equal those of a single process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics.classification as of_classes
import torchmetrics.regression as of_numbers
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MetricCollection

from lightning_hybrid import HybridAllReduceStrategy, HybridElasticStrategy, LocalSteps
from lightning_hybrid.strategy import evaluation
from tests import toy
from tests.checkout import ROOT
from tests.rank_pool import Ranks
from tests.scenes import Seen, at, fit, same, this_rank
from tests.toy import NUM_CLASSES, Toy

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = ROOT / "lightning_hybrid" / "strategy" / "README.md"
NUM_SAMPLES = 101


class Numbered(toy.Blobs):
    """Blobs with their indices."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return *super().__getitem__(index), index


def numbered(
    num_samples: int = NUM_SAMPLES, batch_size: int = 5, distributed: bool = False, **options: Any
) -> DataLoader:
    data = Numbered(num_samples)
    if distributed:
        options["sampler"] = DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch_size=batch_size, **options)


class Scored(Toy):
    """Classifier with ten metrics, and with batch values that `self.log` reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.of_labels = MetricCollection(
            {
                "accuracy": of_classes.MulticlassAccuracy(NUM_CLASSES, average="micro"),
                "f1": of_classes.MulticlassF1Score(NUM_CLASSES),
                "auroc": of_classes.MulticlassAUROC(NUM_CLASSES),
                "average_precision": of_classes.MulticlassAveragePrecision(NUM_CLASSES),
                "kappa": of_classes.MulticlassCohenKappa(NUM_CLASSES),
                "calibration": of_classes.MulticlassCalibrationError(NUM_CLASSES),
            }
        )
        self.of_logits = MetricCollection(
            {
                "squared_error": of_numbers.MeanSquaredError(),
                "r2": of_numbers.R2Score(),
                "pearson": of_numbers.PearsonCorrCoef(),
                "spearman": of_numbers.SpearmanCorrCoef(),
            }
        )

    def score(self, batch: Any) -> None:
        # Rounded, because batches of other sizes change the last bit, and with it which repeated samples tie.
        logits = (self.net(batch[0]).float() * 4096).round() / 4096
        losses = cross_entropy(logits, batch[1], reduction="none")
        self.of_labels.update(logits.softmax(-1), batch[1])
        self.of_logits.update(logits[:, 0], logits[:, 0] + 0.3 * logits[:, 1])
        self.log_dict(self.of_labels)
        self.log_dict(self.of_logits)
        self.log("mean", losses.mean(), sync_dist=True)
        self.log("largest", losses.max(), sync_dist=True, reduce_fx="max")
        self.log("sum", losses.sum(), sync_dist=True, reduce_fx="sum")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[:2], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.score(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.score(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


class Counts(Toy):
    """Module whose evaluation reads samples and ignores them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[:2], batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass


def read(trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
    return dataloader_idx, batch[2].tolist()


def validate(ranks: Ranks | None = None, **scene: Any) -> Any:
    return fit(ranks, **{"module": Scored, "call": "validate", "train": numbered, **scene})


def exact(ranks: Ranks, **scene: Any) -> list[Seen]:
    return validate(ranks, **{"exact_evaluation": True, "warns": True, **scene})


def samples_of(ranks: list[Seen], dataloader_idx: int = 0) -> list[int]:
    samples = []
    for seen in ranks:
        for index, batch in seen.looks["on_validation_batch_start"]:
            if index == dataloader_idx:
                samples += batch
    return sorted(samples)


def sentences(seen: Seen) -> list[str]:
    return [text for text in seen.warnings if text.startswith("`exact_evaluation`")]


def assert_as_one_process(ranks: list[Seen], alone: Seen) -> None:
    for seen in ranks:
        assert seen.metrics == pytest.approx(alone.metrics, rel=1e-6, abs=1e-6)


# ---- metrics --------------------------------------------------------------------------------


def rows_of_page() -> list[list[str]]:
    section = PAGE.read_text().partition("## Evaluate every sample once")[2]
    table = section.partition("|---|---|---|---|\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]


def test_metrics_of_four_ranks_are_those_of_one_process_and_the_page_shows_those_of_ddp(four_ranks):
    alone = validate()
    assert len(alone.metrics) == 13
    ranks = exact(four_ranks)
    assert_as_one_process(ranks, alone)
    assert not any(sentences(seen) for seen in ranks)

    of_ddp = validate(four_ranks, strategy="ddp")[0]
    rows = rows_of_page()
    assert len(rows) == 6
    for name, *shown in rows:
        metric = name.partition(",")[0]
        num_digits = len(shown[0].partition(".")[2])
        measured = [seen.metrics[metric] for seen in (alone, of_ddp, ranks[0])]
        assert shown == [f"{value:.{num_digits}f}" for value in measured]
        assert shown[0] != shown[1]


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [1, 2, 5, 26, 128])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("call", ["validate", "test"])
def test_metrics_are_those_of_one_process(rank_pool, call, world_size, batch_size):
    loader = partial(numbered, batch_size=batch_size)
    alone = validate(call=call, train=loader)
    ranks = exact(rank_pool.ranks(world_size), call=call, train=loader)
    assert_as_one_process(ranks, alone)
    assert not any(sentences(seen) for seen in ranks)


def test_validation_during_a_fit_has_the_metrics_of_one_process_with_the_saved_weights(
    four_ranks, tmp_path
):
    """Metrics match although DDP broadcasts BatchNorm's running statistics in the first batch of a validation."""
    path = tmp_path / "fit.ckpt"
    steps = {"max_epochs": 1, "limit_train_batches": 2}
    ranks = fit(
        four_ranks,
        Scored,
        train=numbered,
        val=numbered,
        save_to=path,
        exact_evaluation=True,
        **steps,
    )
    alone = validate(ckpt_path=path)
    assert_as_one_process(ranks, alone)


# ---- samples --------------------------------------------------------------------------------


def several_loaders() -> list[DataLoader]:
    return [numbered(101, 5), numbered(13, 4), numbered(9, 1)]


def test_each_of_several_loaders_gives_every_sample_once(four_ranks):
    ranks = exact(
        four_ranks,
        module=Counts,
        train=several_loaders,
        callbacks=[at(on_validation_batch_start=read)],
    )
    for index, num_samples in enumerate([101, 13, 9]):
        assert samples_of(ranks, index) == list(range(num_samples))


def test_metrics_of_several_loaders_are_those_of_one_process(two_ranks):
    loaders = several_loaders
    assert_as_one_process(exact(two_ranks, train=loaders), validate(train=loaders))


@pytest.mark.parametrize(
    ("limit", "num_samples"), [(3, 60), (0.5, 60), (5, 100), (6, 101), (100, 101)]
)
def test_a_limit_before_the_last_batch_leaves_the_loader_as_ddp_has_it(
    four_ranks, limit, num_samples
):
    scene = {
        "module": Counts,
        "limit_val_batches": limit,
        "callbacks": [at(on_validation_batch_start=read)],
    }
    ranks = exact(four_ranks, **scene)
    samples = samples_of(ranks)
    assert len(samples) == len(set(samples)) == num_samples
    assert not sentences(ranks[0])
    if num_samples < NUM_SAMPLES:
        assert samples == samples_of(validate(four_ranks, strategy="ddp", **scene))


def test_the_sanity_check_and_each_validation_of_a_fit_read_what_they_should(four_ranks):
    ranks = fit(
        four_ranks,
        Counts,
        train=numbered,
        val=partial(numbered, shuffle=True),
        max_epochs=2,
        limit_train_batches=1,
        num_sanity_val_steps=2,
        callbacks=[at(on_validation_batch_start=read)],
        exact_evaluation=True,
    )
    batches = [[batch for _, batch in seen.looks["on_validation_batch_start"]] for seen in ranks]
    assert [len(rank_batches) for rank_batches in batches] == [2 + 6 + 6] * 4
    for begin, end in ((2, 8), (8, 14)):
        samples = [
            i for rank_batches in batches for batch in rank_batches[begin:end] for i in batch
        ]
        assert sorted(samples) == list(range(NUM_SAMPLES))
    assert batches[0][2:8] != batches[0][8:14]  # a new order in the second epoch


def test_fewer_samples_than_ranks_stay_padded_with_a_sentence(four_ranks):
    loader = partial(numbered, 3)
    ranks = exact(four_ranks, train=loader)
    assert sentences(ranks[0]) == [
        "`exact_evaluation` (=True) has no effect on a loader of `val_dataloader`, because it has 3 samples for 4 "
        "ranks, but every rank needs one, so 1 sample of 3 counts twice. Launch 3 ranks."
    ]
    of_ddp = validate(four_ranks, train=loader, strategy="ddp")[0].metrics
    assert ranks[0].metrics == pytest.approx(of_ddp, nan_ok=True)


def test_one_batch_that_a_limit_keeps_from_being_cut_stays_padded_with_a_sentence(two_ranks):
    loader = partial(numbered, 7, batch_size=8)
    ranks = exact(two_ranks, module=Counts, train=loader, limit_val_batches=1)
    assert len(sentences(ranks[0])) == 1
    assert "`limit_val_batches` (=1) allows one batch" in sentences(ranks[0])[0]
    assert "1 sample of 7 counts twice" in sentences(ranks[0])[0]


# ---- user code that calls collectives --------------------------------------------------------


class Gathers(Scored):
    """Module that gathers in every step, which requires batches of equal size."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        assert self.all_gather(batch[2]).shape == (4, len(batch[2]))


class LogsOnStep(Scored):
    """Module that averages over ranks in every step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("image", batch[0].mean(), on_step=True, sync_dist=True)


class SyncsMetric(Scored):
    """Module with a metric that reduces over ranks in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.now = of_numbers.MeanSquaredError(dist_sync_on_step=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.now(batch[0][:, 0], batch[0][:, 1])


def wait_for_all(trainer: Any, *args: Any) -> None:
    trainer.strategy.barrier()


CALLS = {
    "gathers": {"module": Gathers},
    "logs on step": {"module": LogsOnStep},
    "a metric syncs": {"module": SyncsMetric},
    "a callback waits": {"callbacks": [at(on_validation_batch_end=wait_for_all)]},
}


@pytest.mark.parametrize("batch_size", [5, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name",
    ["gathers", *(pytest.param(name, marks=pytest.mark.long) for name in list(CALLS)[1:])],
)
def test_a_step_that_calls_collectives_keeps_the_padding_and_a_sentence_counts_the_repeats(
    four_ranks, name, batch_size
):
    """Without padding, three of four ranks would have one batch less, and the fourth rank would hang."""
    loader = partial(numbered, batch_size=batch_size)
    ranks = exact(four_ranks, train=loader, **CALLS[name])
    of_ddp = validate(four_ranks, train=loader, strategy="ddp", **CALLS[name])
    assert ranks[0].metrics == pytest.approx(of_ddp[0].metrics, rel=1e-6)
    assert [len(sentences(seen)) for seen in ranks] == [1, 0, 0, 0]
    assert "`validation_step` or a hook calls collectives" in sentences(ranks[0])[0]
    assert "3 samples of 101 count twice" in sentences(ranks[0])[0]


def test_a_callback_that_waits_for_all_ranks_after_each_of_unequally_many_batches(two_ranks):
    scene = {"module": Counts, "train": partial(numbered, 7, batch_size=1)}
    waits = at(on_validation_batch_end=wait_for_all, on_validation_batch_start=read)
    ranks = exact(two_ranks, callbacks=[waits], **scene)
    assert samples_of(ranks) == [0, 0, 1, 2, 3, 4, 5, 6]
    assert "1 sample of 7 counts twice" in sentences(ranks[0])[0]


class GathersAtTheEnd(Counts):
    """Module that collects the samples it read, and gathers them after the last batch."""

    def on_validation_epoch_start(self) -> None:
        self.numbers: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.numbers.append(batch[2])

    def on_validation_epoch_end(self) -> None:
        self.all_gather(torch.cat(self.numbers))


def test_a_gather_of_unequal_shapes_is_an_error_on_every_rank(two_ranks):
    """Without the check, torch would end the process (Gloo) or read beyond the tensor (NCCL)."""
    for seen in exact(two_ranks, module=GathersAtTheEnd, raises=True):
        assert seen.error.startswith(
            "ValueError: `self.all_gather` requires tensors of the same shape, but the ranks have [(51,), (50,)]."
        )


def collectives(*args: Any) -> int:
    return evaluation._num_collectives()


def test_validation_during_a_fit_calls_collectives_in_its_first_batch_alone(two_ranks):
    """DDP's broadcast of buffers in the first batch does not count as a collective of user code."""
    looks = at(on_validation_batch_start=collectives, on_validation_batch_end=collectives)
    scene = {"val": numbered, "num_sanity_val_steps": 0, "max_epochs": 1, "limit_train_batches": 1}
    for seen in fit(
        two_ranks,
        Counts,
        train=numbered,
        callbacks=[looks],
        warns=True,
        exact_evaluation=True,
        **scene,
    ):
        starts = seen.looks["on_validation_batch_start"]
        ends = seen.looks["on_validation_batch_end"]
        assert ends[0] > starts[0]
        assert len(set(ends)) == 1
        assert not sentences(seen)


# ---- prediction -----------------------------------------------------------------------------


class Writes(BasePredictionWriter):
    """Writer of each rank's predictions with the indices of their samples."""

    def __init__(self, folder: Path) -> None:
        super().__init__(write_interval="epoch")
        self.folder = folder

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices) -> None:
        rows = {}
        for batch, indices in zip(predictions, batch_indices[0], strict=True):
            rows |= dict(zip(indices, batch, strict=True))
        torch.save(rows, self.folder / f"{this_rank()}.pt")


def predictions(folder: Path, ranks: Ranks | None = None, **scene: Any) -> list[dict[int, Tensor]]:
    folder.mkdir()
    fit(ranks, **{"module": Scored, "call": "predict", "callbacks": [Writes(folder)], **scene})
    return [torch.load(path) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize(
    "is_users",
    [pytest.param(False, id="sampler of Lightning"), pytest.param(True, id="sampler of the user")],
)
def test_predictions_are_those_of_one_process_in_order_and_once(four_ranks, tmp_path, is_users):
    (alone,) = predictions(tmp_path / "alone", train=numbered)
    loader = partial(numbered, distributed=is_users)
    by_rank = predictions(tmp_path / "ranks", four_ranks, train=loader, exact_evaluation=True)
    assert sum(len(rows) for rows in by_rank) == NUM_SAMPLES
    merged = {}
    for rows in by_rank:
        merged |= rows
    assert sorted(merged) == list(range(NUM_SAMPLES))
    for index, row in merged.items():
        assert torch.allclose(row, alone[index], atol=1e-6)


class GathersInPrediction(Scored):
    """Module that gathers in every step of prediction."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.all_gather(batch[2])
        return super().predict_step(batch, batch_idx)


def test_a_predict_step_that_gathers_keeps_the_repeats_with_their_numbers(two_ranks, tmp_path):
    by_rank = predictions(
        tmp_path / "ranks",
        two_ranks,
        module=GathersInPrediction,
        train=partial(numbered, 7, 2, distributed=True),
        exact_evaluation=True,
    )
    assert [sorted(rows) for rows in by_rank] == [[0, 2, 4, 6], [0, 1, 3, 5]]


# ---- training and other strategies -----------------------------------------------------------


def test_training_is_the_same_bit_for_bit_with_and_without_the_option(two_ranks):
    scene = {"train": toy.loader, "val": partial(toy.loader, 13, 4)}
    off = fit(two_ranks, **scene)
    on = fit(two_ranks, exact_evaluation=True, **scene)
    for before, after in zip(off, on, strict=True):
        assert before.losses == after.losses
        assert same(before.weights, after.weights)
        assert before.rows == after.rows


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_the_option_is_a_switch(value):
    with pytest.raises(ValueError, match=r"`exact_evaluation` \(=.*\) must be one of True, False"):
        HybridAllReduceStrategy(exact_evaluation=value)


class Moves(Scored):
    """Module that moves batches itself, so that no prefetcher moves them."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [part.to(device) for part in batch]


# The fork server would import everything that the tests need, once in each rank.
FORKED = {"num_workers": 1, "multiprocessing_context": "fork"}
OTHER_RUNS = {
    "workers": {"train": partial(numbered, **{**FORKED, "num_workers": 2})},
    "persistent workers": {"train": partial(numbered, **FORKED, persistent_workers=True)},
    "moves batches": {"module": Moves},
    "half precision": {"precision": "bf16-true"},
    "elastic": {"kind": HybridElasticStrategy, "max_hosts": 1, "meet": "127.0.0.1:29755"},
}


@pytest.mark.long
@pytest.mark.parametrize("name", OTHER_RUNS)
def test_metrics_are_those_of_one_process_in_other_runs(three_ranks, name):
    scene = OTHER_RUNS[name]
    alone = validate(
        **{key: scene[key] for key in ("train", "module", "precision") if key in scene}
    )
    ranks = exact(three_ranks, **scene)
    assert_as_one_process(ranks, alone)
    assert not any(sentences(seen) for seen in ranks)


OTHER_FITS = {
    "sharded update of a node": {"shard_update": "node"},
    "sharded update of the world": {"shard_update": "world", "precision": "bf16-true"},
    "local steps": {"between_nodes": LocalSteps(every=2), "ranks_per_node": 1},
    "half precision": {"precision": "16-true"},
    "elastic": {"kind": HybridElasticStrategy, "max_hosts": 1, "meet": "127.0.0.1:29755"},
}


@pytest.mark.long
@pytest.mark.parametrize("name", OTHER_FITS)
def test_validation_of_other_fits_gives_every_sample_once(two_ranks, name):
    ranks = fit(
        two_ranks,
        Counts,
        train=numbered,
        val=partial(numbered, 13, 4),
        callbacks=[at(on_validation_batch_start=read)],
        num_sanity_val_steps=0,
        max_epochs=1,
        limit_train_batches=4,
        exact_evaluation=True,
        warns=True,
        **OTHER_FITS[name],
    )
    assert samples_of(ranks) == list(range(13))
    assert not sentences(ranks[0])
