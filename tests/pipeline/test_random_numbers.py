"""Random numbers inside the network, which depend on the stage, the micro-batch and the position in the run."""

import pytest
import torch
from torch import nn

from lightning_hybrid.pipeline import training_step
from tests import toy
from tests.pipeline.cases import in_stages
from tests.scenes import at, fit, play, same


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(toy.NUM_FEATURES, toy.NUM_FEATURES)
        self.seen = []

    def forward(self, x):
        noise = torch.rand(x.shape)
        if type(noise) is torch.Tensor and self.training:  # not a fake tensor
            self.seen.append(noise[0, :4].tolist())
        return self.layer(x) + noise


class Wild(toy.Toy):
    """Module of four blocks that draw random numbers. With interleaving they are four stages."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)  # same on all ranks, as with `seed_everything`
        self.net = nn.Sequential(*(Noisy() for _ in range(4)))


class CallsLayers(nn.Module):
    """Network whose `forward` calls the layers of its blocks instead of the blocks. They share one dropout."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(toy.NUM_FEATURES, toy.NUM_FEATURES)
        self.second = nn.Linear(toy.NUM_FEATURES, toy.NUM_FEATURES)
        self.head = nn.Linear(toy.NUM_FEATURES, toy.NUM_CLASSES)
        self.dropout = nn.Dropout()

    def pipeline_blocks(self):
        return [
            nn.Sequential(self.first, self.dropout),
            nn.Sequential(self.second, self.dropout),
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
    """Return the noise of each block, and the state of the global stream."""
    return [block.seen for block in module.net], torch.get_rng_state()


def fit_wild(ranks, **options):
    scene = {
        "batch_size": 8,
        "num_microbatches": 2,
        "limit_train_batches": 2,
        "callbacks": [at(on_train_end=drawn)],
    }
    return fit(ranks, Wild, **in_stages(data=toy.Blobs(32), **scene, **options))


def noises_of(results):
    """Return the noise of all blocks on all ranks."""
    noises = []
    for seen in results:
        blocks, _ = seen.looks["on_train_end"][0]
        for noises_of_block in blocks:
            noises += map(str, noises_of_block)
    return noises


def test_every_pipeline_draws_different_numbers(four_ranks):
    noises = noises_of(fit_wild(four_ranks))
    assert len(noises) > 0
    assert len(noises) == len(set(noises))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])  # two stages, and four
def test_every_stage_draws_different_numbers_and_leaves_the_global_stream_alike(
    two_ranks, schedule
):
    results = fit_wild(two_ranks, schedule=schedule)
    noises = noises_of(results)
    # Blocks, micro-batches, batches, epochs.
    assert len(noises) == 4 * 2 * 2 * 2
    assert len(noises) == len(set(noises))
    state_0, state_1 = (seen.looks["on_train_end"][0][1] for seen in results)
    assert torch.equal(state_0, state_1)


def test_stages_draw_the_same_numbers_with_activation_checkpoints_and_after_a_resume(
    two_ranks, tmp_path
):
    path = str(tmp_path / "epoch.ckpt")
    whole = fit_wild(two_ranks)
    fit_wild(two_ranks, max_epochs=1, save_to=path)
    with_checkpoints = fit_wild(two_ranks, checkpoint_activations=True)
    resumed = fit_wild(two_ranks, ckpt_path=path)
    for seen in [*with_checkpoints, *resumed]:
        assert same(seen.weights, whole[seen.rank].weights), f"rank {seen.rank}"


def fit_with_lines():
    """Return the number of steps of a fit whose pipeline loss is compared, and the lines that training logs."""
    scene = in_stages(
        data=toy.Blobs(32), batch_size=16, num_microbatches=2, max_epochs=1, cuts=(1,)
    )
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_step, "rank_zero_info", lines.append)
        seen = play({"module": WithDropout, **scene})
    return seen.global_step, lines


def test_the_whole_network_draws_as_its_stages_where_forward_calls_the_layers_of_blocks(two_ranks):
    """Otherwise the comparison of the first loss would fail. A log line would mean that nothing was compared."""
    for rank, (num_steps, lines) in enumerate(two_ranks.run(fit_with_lines)):
        assert num_steps == 2, f"rank {rank}"
        assert lines == [], f"rank {rank}"
