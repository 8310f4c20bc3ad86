"""Random numbers inside the network: each stage and micro-batch has its own, by the place in the run."""

import torch
from torch import nn

from tests import toy
from tests.pipeline.cases import in_stages
from tests.scenes import at, fit, same


class Noisy(nn.Module):
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


class CallsLayers(nn.Module):
    """A `forward` that calls the layers of its blocks, and not the blocks. One dropout for all of them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(toy.NUM_FEATURES, toy.NUM_FEATURES) for _ in range(2))
        self.head = nn.Linear(toy.NUM_FEATURES, toy.NUM_CLASSES)
        self.dropout = nn.Dropout()

    def pipeline_blocks(self):
        return [
            *(nn.Sequential(layer, self.dropout) for layer in (self.first, self.second)),
            self.head,
        ]

    def forward(self, x):
        return self.head(self.dropout(self.second(self.dropout(self.first(x)))))


class WithDropout(toy.Toy):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = CallsLayers()


def drawn(trainer, module):
    return [block.seen for block in module.net], torch.get_rng_state()


def fit_wild(ranks, **options):
    scene = {
        "batch_size": 8,
        "num_microbatches": 2,
        "limit_train_batches": 2,
        "callbacks": [at(on_train_end=drawn)],
    }
    return fit(ranks, Wild, **in_stages(data=toy.Blobs(32), **scene, **options))


def noises(found):
    return [
        str(noise) for rank in found for seen in rank.looks["on_train_end"][0][0] for noise in seen
    ]


def test_each_pipeline_draws_its_own(four_ranks):
    of_all = noises(fit_wild(four_ranks))
    assert len(of_all) == len(set(of_all)) > 0


def test_each_stage_draws_its_own_and_again_the_same(two_ranks, tmp_path):
    path = str(tmp_path / "a.ckpt")
    whole = fit_wild(two_ranks)
    in_quarters = fit_wild(two_ranks, schedule="interleaved")
    for result in (whole, in_quarters):  # two stages, and four
        of_all = noises(result)
        # blocks, micro-batches, batches, epochs
        assert len(of_all) == len(set(of_all)) == 4 * 2 * 2 * 2
        states = [rank.looks["on_train_end"][0][1] for rank in result]
        assert torch.equal(*states)  # outside all stages they are where they were
    fit_wild(two_ranks, max_epochs=1, save_to=path)
    kept = fit_wild(two_ranks, checkpoint_activations=True)
    resumed = fit_wild(two_ranks, ckpt_path=path)
    for result in (kept, resumed):
        assert all(
            same(first.weights, second.weights) for first, second in zip(result, whole, strict=True)
        )


def test_the_whole_network_draws_as_its_stages_where_forward_calls_the_layers_of_blocks(two_ranks):
    scene = in_stages(
        data=toy.Blobs(32), batch_size=16, num_microbatches=2, max_epochs=1, cuts=(1,)
    )
    assert not any(seen.error for seen in fit(two_ranks, WithDropout, **scene))
