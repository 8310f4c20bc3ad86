"""One file for any number of stages, and for no pipeline at all."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from lightning_hybrid import Comm, HybridAllReduceStrategy, HybridPipelineStrategy
from lightning_hybrid.callbacks.ema import MasterWeightAveraging
from lightning_hybrid.pipeline.rank_layout import PipelineRanks
from lightning_hybrid.pipeline.whole_state import gather_checkpoint
from tests import toy
from tests.pipeline import cases

NUM = 4  # micro-batches


def strategy_of(num_stages, schedule="1f1b"):
    if num_stages == 1:
        return HybridAllReduceStrategy(comm=Comm(tune="off")), {"batch_size": 8 // NUM, "accumulate_grad_batches": NUM}
    return HybridPipelineStrategy(num_stages=num_stages, num_microbatches=NUM, schedule=schedule), {}


def fit_some(num_stages, path, epochs, resume=None, precision="16-true", schedule="1f1b"):
    strategy, settings = strategy_of(num_stages, schedule)
    size = settings.pop("batch_size", 8)
    module = toy.Toy()
    trainer = toy.trainer(strategy=strategy, precision=precision, max_epochs=epochs, **settings)
    trainer.fit(module, toy.loader(64, size), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return cases.toy.weights(module)


def test_one_file_goes_from_one_rank_to_four_stages_to_two_to_the_bit(one_rank, two_ranks, four_ranks, tmp_path):
    paths = [str(tmp_path / f"{name}.ckpt") for name in "abcd"]
    one_rank.run(fit_some, 1, paths[0], 1)
    four_ranks.run(fit_some, 4, paths[1], 2, paths[0])
    # Interleaved: a rank has the first and the third quarter of the network.
    on_two = two_ranks.run(fit_some, 2, paths[2], 3, paths[1], "16-true", "interleaved")
    whole = one_rank.run(fit_some, 1, paths[3], 3)
    for each in on_two:
        assert toy.same_bits(each, whole[0])
    piped, plain = (torch.load(path, weights_only=True) for path in paths[2:])
    assert list(piped["state_dict"]) == list(plain["state_dict"])
    assert cases.same(piped["state_dict"], plain["state_dict"])
    assert cases.same(piped["optimizer_states"], plain["optimizer_states"])
    assert list(piped["optimizer_states"][0]["state"]) == list(range(len(list(toy.Toy().parameters()))))
    assert piped.keys() == plain.keys()


def fit_with(strategy, path):
    module = toy.Toy()
    trainer = toy.trainer(strategy=strategy, max_epochs=2)
    trainer.fit(module, toy.loader(), ckpt_path=path)
    return module.losses


@pytest.mark.long
def test_plain_ddp_goes_on_from_a_file_of_stages(two_ranks, tmp_path):
    path = str(tmp_path / "a.ckpt")
    two_ranks.run(fit_some, 2, path, 1, None, "32-true")
    assert len(two_ranks.run(fit_with, "ddp", path)[0]) == 4


class Monitored(toy.Toy):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)


def fit_monitored(num_stages, folder, average):
    strategy, settings = strategy_of(num_stages)
    size = settings.pop("batch_size", 8)
    best = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, filename="best")
    callbacks = [best, *([MasterWeightAveraging(decay=0.5)] if average == "ours" else [])]
    callbacks += [EMAWeightAveraging(decay=0.5)] if average == "lightning's" else []
    module = Monitored()
    trainer = toy.trainer(
        strategy=strategy, precision="16-true", enable_checkpointing=True, callbacks=callbacks, max_epochs=3, **settings
    )
    trainer.fit(module, toy.loader(64, size), toy.loader(32, size))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return toy.weights(module), logged, best.best_model_path


@pytest.mark.sampled(3)
@pytest.mark.parametrize("average", ["ours", "none", "lightning's"])
def test_best_checkpoint_and_average_are_those_without_a_pipeline(one_rank, two_ranks, tmp_path, average):
    piped = two_ranks.run(fit_monitored, 2, str(tmp_path / "two"), average)
    (weights, _, path), *_ = one_rank.run(fit_monitored, 1, str(tmp_path / "one"), average)
    assert len({str(logged) for _, logged, _ in piped}) == 1
    for own, _, own_path in piped:
        assert toy.same_bits(own, weights)
        assert own_path.rpartition("/")[2] == path.rpartition("/")[2]
    one, two = (torch.load(each, weights_only=False) for each in (path, piped[0][2]))
    assert cases.same(one["state_dict"], two["state_dict"])
    if average != "none":
        assert cases.same(one["current_model_state"], two["current_model_state"])
        assert not cases.same(one["current_model_state"], two["state_dict"])


def test_a_stage_s_part_of_a_checkpoint_goes_over_host_memory(monkeypatch):
    """NCCL would take it to the device first, where a stage's state may not fit twice."""
    sent = []
    monkeypatch.setattr(dist, "send_object_list", lambda parts, dst, group: sent.append((parts, group)))
    ranks = PipelineRanks(rank=1, world_size=2, num_ranks=2)
    gather_checkpoint({"state_dict": {"a": torch.ones(1)}}, ranks, group="of words")
    ((parts, group),) = sent
    assert list(parts[0]) == [("state_dict", "a")]
    assert group == "of words"
