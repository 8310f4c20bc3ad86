"""Checkpoints of pipelines, which load with any number of stages and without a pipeline."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from lightning_hybrid.callbacks.ema import MasterWeightAveraging
from tests import toy
from tests.pipeline.cases import Validated, accumulated, in_stages
from tests.scenes import fit, same


def fit_and_save(ranks, num_stages, path, epochs, **scene):
    scene = {"save_to": path, "max_epochs": epochs, "precision": "16-true", **scene}
    if num_stages == 1:
        return fit(ranks, **accumulated(**scene))
    return fit(ranks, **in_stages(num_stages=num_stages, **scene))


def test_a_run_resumes_from_one_rank_on_four_stages_and_then_on_two_to_the_bit(
    one_rank, two_ranks, four_ranks, tmp_path
):
    of_one_rank = str(tmp_path / "one_rank.ckpt")
    of_four_stages = str(tmp_path / "four_stages.ckpt")
    of_two_stages = str(tmp_path / "two_stages.ckpt")
    uninterrupted = str(tmp_path / "uninterrupted.ckpt")
    fit_and_save(one_rank, 1, of_one_rank, 1)
    fit_and_save(four_ranks, 4, of_four_stages, 2, ckpt_path=of_one_rank)
    # With interleaving, a rank has the first and the third quarter of the network.
    resumes = {"ckpt_path": of_four_stages, "schedule": "interleaved"}
    on_two = fit_and_save(two_ranks, 2, of_two_stages, 3, **resumes)
    (whole,) = fit_and_save(one_rank, 1, uninterrupted, 3)
    for seen in on_two:
        assert same(seen.weights, whole.weights), f"rank {seen.rank}"
    piped = torch.load(of_two_stages, weights_only=True)
    plain = torch.load(uninterrupted, weights_only=True)
    assert list(piped["state_dict"]) == list(plain["state_dict"])
    assert same(piped["state_dict"], plain["state_dict"])
    assert same(piped["optimizer_states"], plain["optimizer_states"])
    num_parameters = len(list(toy.Toy().parameters()))
    assert list(piped["optimizer_states"][0]["state"]) == list(range(num_parameters))
    assert piped.keys() == plain.keys()


class Monitored(Validated):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return loss


AVERAGES = {
    "ours": [partial(MasterWeightAveraging, decay=0.5)],
    "none": [],
    "lightning's": [partial(EMAWeightAveraging, decay=0.5)],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("average", AVERAGES)
def test_best_checkpoint_and_average_are_those_without_a_pipeline(
    one_rank, two_ranks, tmp_path, average
):
    def scene(folder, val_batch_size):
        best = partial(ModelCheckpoint, folder, monitor="val_loss", filename="{epoch}")
        return {
            "callbacks": [best, *AVERAGES[average]],
            "enable_checkpointing": True,
            "max_epochs": 3,
            "val": partial(toy.loader, 32, val_batch_size),
            "precision": "16-true",
        }

    piped = fit(two_ranks, Monitored, **in_stages(**scene(tmp_path / "stages", 8)))
    (alone,) = fit(one_rank, Monitored, **accumulated(**scene(tmp_path / "alone", 2)))
    assert piped[0].metrics == piped[1].metrics
    for seen in piped:
        assert same(seen.weights, alone.weights), f"rank {seen.rank}"

    (expected_path,) = (tmp_path / "alone").glob("*.ckpt")
    (path,) = (tmp_path / "stages").glob("*.ckpt")
    assert path.name == expected_path.name, "the same epoch is the best"
    expected = torch.load(expected_path, weights_only=False)
    checkpoint = torch.load(path, weights_only=False)
    assert same(checkpoint["state_dict"], expected["state_dict"])
    if average != "none":
        assert same(checkpoint["current_model_state"], expected["current_model_state"])
        assert not same(checkpoint["current_model_state"], checkpoint["state_dict"])
