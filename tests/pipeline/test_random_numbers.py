"""Random numbers inside the network: each stage and micro-batch has its own, by the place in the run."""

from __future__ import annotations

import torch
from torch import nn

from lightning_hybrid import HybridPipelineStrategy
from tests import toy


class Noisy(nn.Module):
    """Adds noise, and notes it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(toy.NUM_FEATURES, toy.NUM_FEATURES)
        self.seen = []

    def forward(self, x):
        noise = torch.rand(x.shape)
        if type(noise) is torch.Tensor and self.training:  # no fake one
            self.seen.append(noise[0, :4].tolist())
        return self.layer(x) + noise


class Wild(toy.Toy):
    """Four blocks that draw, in as many stages where they are interleaved."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)  # as `seed_everything`: the same on all ranks
        self.net = nn.Sequential(*(Noisy() for _ in range(4)))


def fit(path, resumed=None, **options):
    module = Wild()
    strategy = HybridPipelineStrategy(num_stages=2, num_microbatches=2, **options)
    trainer = toy.trainer(strategy=strategy, max_epochs=1 if path else 2, limit_train_batches=2)
    trainer.fit(module, toy.loader(32, 8), ckpt_path=resumed)
    if path:
        trainer.save_checkpoint(path)
    return toy.weights(module), [block.seen for block in module.net], torch.get_rng_state()


def fits(path):
    whole, kept = fit(None), fit(None, checkpoint_activations=True)
    fit(path)
    return whole, kept, fit(None, resumed=path), fit(None, schedule="interleaved")


def noise_of_two_pipelines():
    return [noise for seen in fit(None)[1] for noise in seen]


def test_each_pipeline_draws_its_own(four_ranks):
    found = four_ranks.run(noise_of_two_pipelines)
    drawn = [str(noise) for rank in found for noise in rank]
    assert len(drawn) == len(set(drawn)) > 0


def test_each_stage_draws_its_own_and_again_the_same(two_ranks, tmp_path):
    found = two_ranks.run(fits, str(tmp_path / "a.ckpt"))
    for number in (0, 3):  # two stages, and four
        drawn = [str(noise) for rank in found for seen in rank[number][1] for noise in seen]
        assert len(drawn) == len(set(drawn)) == 4 * 2 * 2 * 2  # blocks, micro-batches, batches, epochs
        assert torch.equal(found[0][number][2], found[1][number][2])  # outside all stages are where they were
    for whole, kept, resumed, _ in found:
        assert toy.same_bits(whole[0], kept[0])
        assert toy.same_bits(whole[0], resumed[0])
