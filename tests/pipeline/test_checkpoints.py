"""One file for any number of stages, and for no pipeline at all."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from lightning_hybrid.callbacks.ema import MasterWeightAveraging
from tests import toy
from tests.pipeline.cases import Validated, accumulated, in_stages
from tests.scenes import fit, same


def fit_some(ranks, num_stages, path, epochs, **scene):
    scene = {"save_to": path, "max_epochs": epochs, "precision": "16-true", **scene}
    return fit(
        ranks,
        **(accumulated(**scene) if num_stages == 1 else in_stages(num_stages=num_stages, **scene)),
    )


def test_one_file_goes_from_one_rank_to_four_stages_to_two_to_the_bit(
    one_rank, two_ranks, four_ranks, tmp_path
):
    paths = [str(tmp_path / f"{name}.ckpt") for name in "abcd"]
    fit_some(one_rank, 1, paths[0], 1)
    fit_some(four_ranks, 4, paths[1], 2, ckpt_path=paths[0])
    # Interleaved: a rank has the first and the third quarter of the network.
    on_two = fit_some(two_ranks, 2, paths[2], 3, ckpt_path=paths[1], schedule="interleaved")
    (whole,) = fit_some(one_rank, 1, paths[3], 3)
    assert all(same(each.weights, whole.weights) for each in on_two)
    piped, plain = (torch.load(path, weights_only=True) for path in paths[2:])
    assert list(piped["state_dict"]) == list(plain["state_dict"])
    assert same(piped["state_dict"], plain["state_dict"])
    assert same(piped["optimizer_states"], plain["optimizer_states"])
    assert list(piped["optimizer_states"][0]["state"]) == list(
        range(len(list(toy.Toy().parameters())))
    )
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
    def scene(scene_of, size):
        best = partial(
            ModelCheckpoint, tmp_path / scene_of.__name__, monitor="val_loss", filename="{epoch}"
        )
        more = {
            "callbacks": [best, *AVERAGES[average]],
            "enable_checkpointing": True,
            "max_epochs": 3,
        }
        return scene_of(val=partial(toy.loader, 32, size), precision="16-true", **more)

    piped = fit(two_ranks, Monitored, **scene(in_stages, 8))
    (alone,) = fit(one_rank, Monitored, **scene(accumulated, 2))
    assert piped[0].metrics == piped[1].metrics
    assert all(same(own.weights, alone.weights) for own in piped)
    (one,), (two,) = (
        list((tmp_path / name).glob("*.ckpt")) for name in ("accumulated", "in_stages")
    )
    assert one.name == two.name, "the same epoch is the best"
    one, two = (torch.load(path, weights_only=False) for path in (one, two))
    assert same(one["state_dict"], two["state_dict"])
    if average != "none":
        assert same(one["current_model_state"], two["current_model_state"])
        assert not same(one["current_model_state"], two["state_dict"])
