"""Networks as users write them, which have to be trained as they are: in place, with shared and cached tensors."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn

from lightning_hybrid import Comm, HybridAllReduceStrategy, HybridPipelineStrategy
from lightning_hybrid.pipeline.cut_model import example_hidden
from tests import toy

WIDTH = toy.NUM_FEATURES


class Block(nn.Module):
    """Adds something of its input; `scale` says where the tensor by which it multiplies comes from."""

    def __init__(self, scale):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x):
        return x + self.linear(x * self.scale_of(x)).tanh()

    def scale_of(self, x):
        return self.scale


class WithBuffer(Block):
    """Holds the tensor as a buffer."""

    def __init__(self, scale):
        super().__init__(None)
        del self.scale
        self.register_buffer("scale", scale)


class Rotary(nn.Module):
    """A module without parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH))

    def forward(self):
        return self.table


class WithModule(Block):
    """Asks a module for the tensor."""

    def scale_of(self, x):
        return self.scale()


class Caching(Block):
    """Makes the tensor at the first forward."""

    def scale_of(self, x):
        if self.scale is None:
            self.scale = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype, device=x.device)
        return self.scale


class CachingByName(Block):
    """Makes the tensor at the first forward, and keeps it in a dictionary."""

    def scale_of(self, x):
        if "scale" not in self.scale:
            self.scale["scale"] = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype, device=x.device)
        return self.scale["scale"]


def blocks(kind):
    table, rotary = torch.linspace(-1, 1, WIDTH), Rotary()
    if kind == "shared buffer":
        return [WithBuffer(table) for _ in range(4)]
    if kind == "shared module":
        return [WithModule(rotary) for _ in range(4)]
    if kind == "cached":
        return [*[Caching(None) for _ in range(2)], *[CachingByName({}) for _ in range(2)]]
    if kind == "plain":
        return [Block(torch.linspace(-1, 1, WIDTH)) for _ in range(4)]
    return [nn.Linear(WIDTH, WIDTH), nn.SELU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.SELU(inplace=True)]


class Ordinary(toy.Toy):
    """The blocks of one kind, and a classifier."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*blocks(kind), nn.Linear(WIDTH, toy.NUM_CLASSES))

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        self.log("val_loss", F.cross_entropy(self.net(images).float(), targets), sync_dist=True)


def fit(kind, strategy, size, accumulate, path):
    module = Ordinary(kind)
    callbacks = [ModelCheckpoint(path, save_last=True)]
    trainer = toy.trainer(
        strategy=strategy,
        accumulate_grad_batches=accumulate,
        max_epochs=1,
        callbacks=callbacks,
        enable_checkpointing=True,
    )
    trainer.fit(module, toy.loader(32, size), toy.loader(16, 8))
    saved = torch.load(path / "last.ckpt", weights_only=True)["state_dict"]
    alone = module.net(torch.ones(2, WIDTH)).detach()  # whole on every rank
    return toy.weights(module), saved, float(trainer.callback_metrics["val_loss"]), alone


def in_stages(kind, cuts, path):
    return fit(kind, HybridPipelineStrategy(num_stages=2, num_microbatches=4, cuts=cuts), 16, 1, path)


def without_stages(kind, path):
    return fit(kind, HybridAllReduceStrategy(comm=Comm(tune="off")), 4, 4, path)


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        pytest.param("in place", [1], id="a stage begins with an operation in place"),
        pytest.param("shared buffer", None, id="a buffer is shared by all blocks"),
        pytest.param("shared module", None, id="a module with a buffer is shared by all blocks"),
        pytest.param("cached", None, id="blocks keep a tensor of their first forward"),
        pytest.param("plain", None, id="blocks have a tensor that is no buffer"),
    ],
)
def test_networks_as_users_write_them_train_as_under_accumulation(one_rank, two_ranks, tmp_path, kind, cuts):
    (expected,) = one_rank.run(without_stages, kind, tmp_path / "alone")
    for own in two_ranks.run(in_stages, kind, cuts, tmp_path / "stages"):
        assert toy.same_bits(own[0], expected[0])
        assert toy.same_bits(own[1], expected[0])
        assert own[2] == pytest.approx(expected[2], rel=1e-5)
        assert torch.equal(own[3], expected[3])


class WithExample(Ordinary):
    """Has the example that the README recommends, and a `forward` for it."""

    def __init__(self):
        super().__init__("plain")
        self.example_input_array = torch.zeros(2, WIDTH)

    def forward(self, x):
        return self.net(x)


class LogsGraphs(DummyLogger):
    """Runs the network on the module's example, as TensorBoard's logger does with `log_graph=True`."""

    def log_graph(self, model, input_array=None):
        if model.example_input_array is not None:
            model(model.example_input_array)


class Fails(pl.Callback):
    def on_train_batch_end(self, *args):
        raise RuntimeError("on purpose")


def fit_with_example(fails):
    module = WithExample()
    trainer = toy.trainer(
        strategy=HybridPipelineStrategy(num_stages=2, num_microbatches=4),
        max_epochs=1,
        enable_model_summary=True,
        logger=LogsGraphs(),
        callbacks=[Fails()] if fails else [],
    )
    error = toy.error_of(trainer.fit, module, toy.loader(32, 16))
    return error, tuple(module.example_input_array.shape)


@pytest.mark.parametrize("fails", [False, True])
def test_summary_and_logged_graph_run_no_forward_on_the_example(two_ranks, fails):
    for error, shape in two_ranks.run(fit_with_example, fails):
        assert ("on purpose" in error) if fails else not error
        assert shape == (2, WIDTH)


class OfTheClass(Ordinary):
    example_input_array = torch.zeros(2, WIDTH)


class ReadOnly(Ordinary):
    @property
    def example_input_array(self):
        return torch.zeros(2, WIDTH)


def test_an_example_is_hidden_wherever_it_is_set():
    module = OfTheClass("plain")
    with example_hidden(module):
        assert module.example_input_array is None
    assert module.example_input_array is OfTheClass.example_input_array
    assert "example_input_array" not in vars(module)
    with (
        pytest.raises(ValueError, match=r"a property of ReadOnly\) must have a setter"),
        example_hidden(ReadOnly("plain")),
    ):
        pass
