"""User code around a pipelined network, which trains as with accumulation or raises an error that names it."""

from __future__ import annotations

import io
from collections import UserDict

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid.pipeline import training_step as training
from tests import toy
from tests.pipeline.cases import accumulated, in_stages
from tests.scenes import fit, play, same

WIDTH = toy.NUM_FEATURES


class Mlp(toy.Toy):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = self.made()
        self.seen = 0

    def made(self):
        hidden = (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        return nn.Sequential(*hidden, nn.Linear(WIDTH, toy.NUM_CLASSES))


class Described(toy.Blobs):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {
            "x": x,
            "y": y,
            "name": "abcdefg"[index % 7],
            "place": index,
            "words": torch.ones(1 + index % 3),
        }


def collated(samples):
    batch = UserDict({key: [sample[key] for sample in samples] for key in samples[0]})
    batch["x"] = torch.stack(batch["x"])
    batch["y"] = torch.stack(batch["y"])
    batch["place"] = np.array(batch["place"])
    return batch


class Weighted(Mlp):
    def loss(self, batch):
        losses = F.cross_entropy(self.net(batch["x"]).float(), batch["y"], reduction="none")
        by_name = torch.tensor([float(ord(name)) - 96 for name in batch["name"]])
        by_words = torch.tensor([float(len(words)) for words in batch["words"]])
        return (losses * by_name * by_words * torch.from_numpy(batch["place"] % 4)).mean()


class InPlace(Mlp):
    def loss(self, batch):
        batch[0].mul_(2)
        batch[1].sub_(1).remainder_(toy.NUM_CLASSES)
        return super().loss(batch)


class ClipsByLightning(Mlp):
    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class Widened(torch.autograd.Function):
    """Function whose gradient has another dtype than its input. Autograd converts it."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.double() * 2


class WidensGradients(Mlp):
    def made(self):
        layers = super().made()
        layers[2].register_forward_pre_hook(lambda layer, args: (Widened.apply(args[0]),))
        return layers


RIGHT = {
    "names": Weighted,
    "in place": InPlace,
    "clipping by Lightning": ClipsByLightning,
    "dtype": WidensGradients,
}


@pytest.mark.parametrize("name", RIGHT)
def test_modules_of_users_train_as_under_accumulation(one_rank, two_ranks, name):
    alone = accumulated(batch_size=16, max_epochs=1)
    stages = in_stages(batch_size=16, max_epochs=1)
    if name == "names":
        alone["train"] = DataLoader(Described(64), 4, collate_fn=collated)
        stages["train"] = DataLoader(Described(64), 16, collate_fn=collated)
    (expected,) = fit(one_rank, RIGHT[name], **alone)
    for seen in fit(two_ranks, RIGHT[name], **stages):
        assert same(seen.weights, expected.weights), f"rank {seen.rank}"


class KeepsFeatures(Mlp):
    def loss(self, batch):
        handle = self.net[1].register_forward_hook(
            lambda layer, args, output: setattr(self, "kept", output)
        )
        self.kept = None
        loss = super().loss(batch)
        handle.remove()
        if self.kept is None:
            return loss
        return loss + 0.05 * self.kept.float().pow(2).mean()


class LeavesOut(nn.Sequential):
    def pipeline_blocks(self):
        return list(self)

    def forward(self, x):
        for layer in self:
            x = layer(x).tanh()
        return x


class Glue(Mlp):
    def made(self):
        return LeavesOut(*super().made())


class Centered(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(toy.NUM_CLASSES))

    def loss(self, batch):
        output = self.net(batch[0]).float()
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        return F.cross_entropy(output - self.center, batch[1])


class CenteredThroughData(Centered):
    def loss(self, batch):
        output = self.net(batch[0]).float()
        self.center.data.mul_(0.9).add_(0.1 * output.detach().mean(0))
        return F.cross_entropy(output - self.center, batch[1])


class MovesAttribute(Mlp):
    def loss(self, batch):
        self.seen += 1
        return super().loss(batch) * self.seen


class Clips(Mlp):
    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class ClipsThroughData(Mlp):
    def configure_gradient_clipping(
        self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None
    ):
        squares = [p.grad.square().sum() for p in self.parameters() if p.grad is not None]
        norm = sum(squares).sqrt()
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.data.mul_(0.05 / norm)


class Penalised(Mlp):
    def loss(self, batch):
        x = batch[0].requires_grad_()
        output = self.net(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.cross_entropy(output.float(), batch[1]) + slope.pow(2).mean()


class Saves(Mlp):
    def on_train_epoch_end(self):
        torch.save(self.state_dict(), io.BytesIO())


class CallsLayers(Mlp):
    def on_train_epoch_end(self):
        self.net(torch.ones(2, WIDTH))


class Targets:
    """Batch object that hides where its samples begin."""

    def __init__(self, labels):
        self.labels = labels

    def __len__(self):
        return len(self.labels)


class WithTargets(Mlp):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [*batch, Targets(batch[1])]


REFUSED = {
    KeepsFeatures: "in the pipeline, but ",
    Glue: "If `forward` computes something outside its blocks, move it into a block",
    Centered: "`training_step` has changed buffers outside of the network (`center`)",
    CenteredThroughData: "`training_step` has changed buffers outside of the network (`center`)",
    MovesAttribute: "must not depend on module state that it changes",
    Clips: "must clip with `self.clip_gradients`",
    ClipsThroughData: "must clip with `self.clip_gradients`",
    Penalised: "the network's input is not connected to its output",
    Saves: "Call `trainer.save_checkpoint(path)` on every rank",
    CallsLayers: "parameters of other stages are on the meta device",
    WithTargets: "`batch` contains a Targets",
}


def fit_in_stages(ranks, module, **scene):
    return fit(ranks, module, **in_stages(data=toy.Blobs(32), batch_size=16, max_epochs=1, **scene))


@pytest.mark.parametrize("module", REFUSED, ids=lambda module: module.__name__)
def test_user_code_that_a_pipeline_would_silently_change_is_refused_by_name(two_ranks, module):
    for seen in fit_in_stages(two_ranks, module, raises=True):
        assert REFUSED[module] in seen.error, f"rank {seen.rank}"


class Thaws(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.net[0])


@pytest.mark.parametrize(
    ("name", "value", "word"), [("callbacks", [Thaws()], "Thaws"), ("sync_batchnorm", True, "True")]
)
def test_callbacks_and_options_for_whole_networks_are_refused_at_setup(
    two_ranks, name, value, word
):
    for seen in fit_in_stages(two_ranks, Mlp, raises=True, **{name: value}):
        assert f"`{name}` (={word}) and a pipeline cannot be combined" in seen.error


class LogsGradientNorm(Mlp):
    def on_before_optimizer_step(self, optimizer):
        self.log("same", 1.0)
        self.log_dict(grad_norm(self, 2))


def test_logged_values_that_differ_between_stages_are_a_single_warning(two_ranks):
    rank_0, rank_1 = fit_in_stages(two_ranks, LogsGradientNorm, warns=True)
    (text,) = [text for text in rank_0.warnings if "Logged values" in text]
    assert not [text for text in rank_1.warnings if "Logged values" in text]
    assert "grad_2.0_norm_total (= " in text
    assert "same" not in text.partition(".")[0]


def lines_of_fits():
    scene = in_stages(data=toy.Blobs(32), batch_size=16, max_epochs=1, raises=True, warns=False)
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "rank_zero_info", lines.append)
        # Only rank zero has no free memory.
        patch.setattr(training, "free_bytes", lambda device: dist.get_rank() * 1e12)
        lines.append(play({"module": Glue, **scene}).error)
    return lines


def test_a_loss_that_cannot_be_compared_is_logged_in_one_line_and_the_run_continues(two_ranks):
    for rank, (line, error) in enumerate(two_ranks.run(lines_of_fits)):
        assert error == "", f"rank {rank}"
        assert "was not compared" in line, f"rank {rank}"
        assert "does not have enough memory for the whole network" in line, f"rank {rank}"
