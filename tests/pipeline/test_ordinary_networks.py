"""Networks as users write them, trained without changes: in place, shared, cached, in any memory layout."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests import toy
from tests.pipeline.cases import InBlocks, Photos, Validated, accumulated, in_stages, loader_of
from tests.scenes import Keeps, fit, play, same

WIDTH = toy.NUM_FEATURES


class Block(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = scale

    def forward(self, x):
        return x + self.linear(x * self.scale_of(x)).tanh()

    def scale_of(self, x):
        return self.scale


class WithBuffer(Block):
    def __init__(self, scale):
        super().__init__(None)
        del self.scale
        self.register_buffer("scale", scale)


class Caching(Block):
    """Block that creates a tensor in its first forward pass, and keeps it as an attribute or in a dictionary."""

    def scale_of(self, x):
        kept = vars(self) if self.scale is None else self.scale
        if kept.get("table") is None:
            kept["table"] = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype, device=x.device)
        return kept["table"]


class Attends(nn.Module):
    """Block that passes on a boolean mask, positions, a bias without gradient and a residual with the hidden state."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, mask=None, places=None, bias=None, residual=None):
        if mask is None:
            mask = x > 0
            residual = x.sin() + self.linear(x)
            places = x.argsort(-1)
            bias = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
        attended = self.linear(self.norm(residual)).masked_fill(mask, 0) + bias.mul(x)
        return x.add(attended).gather(-1, places), mask, places, bias, residual + x.tanh()


class Joins(nn.Linear):
    def forward(self, x, mask, places, bias, residual):
        return super().forward(x - residual)


def net_of(kind):
    table = torch.linspace(-1, 1, WIDTH)
    kinds = {
        "in place": lambda: [
            layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.SELU(inplace=True))
        ],
        "shared buffer": lambda: [WithBuffer(table) for _ in range(4)],
        "cached": lambda: [Caching(None), Caching(None), Caching({}), Caching({})],
        "plain": lambda: [Block(table.clone()) for _ in range(4)],
    }
    if kind == "many":
        return InBlocks(*(Attends() for _ in range(3)), Joins(WIDTH, WIDTH))
    return nn.Sequential(*kinds[kind](), nn.Linear(WIDTH, toy.NUM_CLASSES))


class Ordinary(Validated):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.net = net_of(kind)


def left_by(kind, path, scene):
    module = Ordinary(kind)
    settings = {
        "module": module,
        "callbacks": [ModelCheckpoint(path, save_last=True)],
        "enable_checkpointing": True,
        "val": toy.loader(16, 8),
        "max_epochs": 1,
    }
    seen = play(settings | scene)
    saved = torch.load(path / "last.ckpt", weights_only=True)["state_dict"]
    return seen, saved, module.net(torch.ones(2, WIDTH)).detach()  # whole on every rank


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        pytest.param("in place", [1], id="a stage begins with an operation in place"),
        pytest.param("shared buffer", None, id="a buffer is shared by all blocks"),
        pytest.param("cached", None, id="blocks keep a tensor of their first forward"),
        pytest.param("many", [2], id="several tensors go from block to block"),
    ],
)
def test_networks_as_users_write_them_train_as_under_accumulation(
    one_rank, two_ranks, tmp_path, kind, cuts
):
    scene = {"data": toy.Blobs(32), "batch_size": 16}
    ((expected, _, output),) = one_rank.run(left_by, kind, tmp_path / "alone", accumulated(**scene))
    val_loss = pytest.approx(expected.metrics["val_loss"], rel=1e-5)
    piped = in_stages(cuts=cuts, **scene)
    for seen, saved, output_in_stages in two_ranks.run(left_by, kind, tmp_path / "stages", piped):
        assert same(seen.weights, expected.weights), f"rank {seen.rank}"
        assert same(dict(saved), expected.weights), f"rank {seen.rank}"
        assert seen.metrics["val_loss"] == val_loss, f"rank {seen.rank}"
        assert torch.equal(output_in_stages, output), f"rank {seen.rank}"


class WithExample(Ordinary):
    """Module with the example input that the README recommends, and a matching `forward`."""

    def __init__(self):
        super().__init__("plain")
        self.example_input_array = torch.zeros(2, WIDTH)

    def forward(self, x):
        return self.net(x)


class LogsGraphs(Keeps):
    """Logger that runs the network on the module's example, as TensorBoard's does with `log_graph=True`."""

    def log_graph(self, model, input_array=None):
        if model.example_input_array is not None:
            model(model.example_input_array)


def error_and_example(scene):
    module = WithExample()
    return play({"module": module, **scene}).error, tuple(module.example_input_array.shape)


def test_summary_and_logged_graph_run_no_forward_on_the_example(two_ranks):
    scene = in_stages(
        batch_size=16,
        logger=LogsGraphs(),
        enable_model_summary=True,
        max_epochs=1,
        raises=True,
    )
    for rank, (error, shape) in enumerate(two_ranks.run(error_and_example, scene)):
        assert error == "", f"rank {rank}"
        assert shape == (2, WIDTH), f"rank {rank}"


class ChannelsLast(Validated):
    """Network with channels-last images and weights, which are faster on tensor cores."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        convolutions = (
            nn.Conv2d(3, 16, 3, stride=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
        )
        self.net = nn.Sequential(
            *convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
        )
        self.net.to(memory_format=torch.channels_last)

    def loss(self, batch):
        return super().loss((batch[0].to(memory_format=torch.channels_last), batch[1]))


class Transposes(nn.Module):
    def forward(self, x):
        return x.flatten(2).transpose(1, 2)


class Turned(ChannelsLast):
    """Network in which a stage ends with a view whose strides are not descending, like a transformer's tokens."""

    def __init__(self):
        super().__init__()
        to_tokens = (nn.AdaptiveAvgPool2d(2), Transposes())
        self.net = nn.Sequential(
            *self.net[:3], *to_tokens, nn.Linear(16, 8), nn.Flatten(), nn.Linear(32, 10)
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("module", "cuts", "precision"),
    [(ChannelsLast, [2], "bf16-true"), (ChannelsLast, [3], "32-true"), (Turned, [5], "32-true")],
)
def test_a_cut_between_tensors_that_are_not_contiguous_changes_nothing(
    one_rank, two_ranks, module, cuts, precision
):
    photos = Photos(17, 19, num=16)
    scene = {
        "data": photos,
        "val": partial(loader_of, photos, 8),
        "precision": precision,
        "max_epochs": 1,
    }
    (expected,) = fit(one_rank, module, **accumulated(num=2, **scene))
    bound = 1e-2 if precision == "bf16-true" else 1e-5
    val_loss = pytest.approx(expected.metrics["val_loss"], abs=bound)
    for seen in fit(two_ranks, module, **in_stages(num_microbatches=2, cuts=cuts, **scene)):
        assert same(seen.weights, expected.weights), f"rank {seen.rank}"
        assert seen.metrics["val_loss"] == val_loss, f"rank {seen.rank}"
