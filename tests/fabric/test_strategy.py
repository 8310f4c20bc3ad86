"""`Fabric(strategy="hybrid_allreduce")`: a loop of the user's own, held against the Trainer's."""

import os
import subprocess
import sys
import time
from contextlib import chdir
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_hybrid import Adasum, Mean
from lightning_hybrid.flavours.fabric import HybridAllReduceStrategy, MasterWeightPrecision
from lightning_hybrid.optim import LAMB
from lightning_hybrid.precision.loss_scale import DynamicLossScale
from tests import toy
from tests.scenes import fit
from tests.test_readme import python_blocks

PAGE = Path(__file__).resolve().parents[2] / "lightning_hybrid" / "fabric" / "README.md"

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "LAMB": lambda parameters: LAMB(parameters, lr=1e-2),
}


MADE: list[Fabric] = []


class Net(nn.Sequential):
    """Normalisation and matrix products, whose bits do not depend on where tensors lie in memory."""

    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(nn.Linear(12, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def fabric_of(precision="16-true", strategy="hybrid_allreduce"):
    if dist.is_initialized():
        world_size = dist.get_world_size()
    else:
        world_size = 1
    fabric = Fabric(strategy=strategy, precision=precision, accelerator="cpu", devices=world_size)
    fabric.launch()
    MADE.append(fabric)
    return fabric


def play(function, *arguments):
    try:
        return function(*arguments)
    finally:
        while MADE:
            MADE.pop().strategy.teardown()


def loader():
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return DataLoader(Subset(toy.Blobs(64), range(rank, 64, world_size)), batch_size=8)


class Classifier(toy.Toy):
    def __init__(self, optimizer):
        super().__init__(optimizer=optimizer)
        self.net = Net()

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer_name](self.parameters())


def fabric_loop(precision, optimizer, accumulate, max_norm):
    fabric = fabric_of(precision)
    net = Net()
    model, stepper = fabric.setup(net, OPTIMIZERS[optimizer](net.parameters()))
    batches = fabric.setup_dataloaders(loader(), use_distributed_sampler=False)
    losses = []
    for i, (images, targets) in enumerate(batches, start=1):
        with fabric.no_backward_sync(model, enabled=i % accumulate != 0):
            loss = F.cross_entropy(model(images).float(), targets)
            fabric.backward(loss / accumulate)
        if i % accumulate == 0:
            if max_norm:
                fabric.clip_gradients(model, stepper, max_norm=max_norm)
            stepper.step()
            stepper.zero_grad()
        losses.append(loss.item())
    return losses, toy.weights(net), {value.dtype for value in net.state_dict().values()}


@pytest.mark.parametrize(
    ("precision", "optimizer", "accumulate", "max_norm"),
    [("16-true", "AdamW", 2, 0.1), ("bf16-true", "LAMB", 1, None)],
)
def test_a_loop_of_fabric_has_the_bits_of_the_trainer(
    two_ranks, precision, optimizer, accumulate, max_norm
):
    ours = two_ranks.run(play, fabric_loop, precision, optimizer, accumulate, max_norm)
    scene = {
        "accumulate_grad_batches": accumulate,
        "gradient_clip_val": max_norm,
        "precision": precision,
    }
    scene |= {"train": loader, "max_epochs": 1, "use_distributed_sampler": False}
    of_trainer = fit(two_ranks, partial(Classifier, optimizer), **scene)
    for (losses, weights, dtypes), seen in zip(ours, of_trainer, strict=True):
        assert losses == seen.losses
        assert toy.same_bits(
            {f"net.{name}": value for name, value in weights.items()}, seen.weights
        )
        assert dtypes == {torch.float32}
    assert ours[0][0] != ours[1][0], "ranks must see different data"
    assert toy.same_bits(ours[0][1], ours[1][1])


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def steps_of(fabric, net, optimizer, num_steps, first=0):
    for number in range(first, first + num_steps):
        generator = torch.Generator().manual_seed(100 * number + fabric.global_rank)
        loss = net(torch.randn(8, 12, generator=generator)).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()


def set_up():
    scale = DynamicLossScale(init_scale=2.0**10, growth_interval=2)
    fabric = fabric_of("16-true", HybridAllReduceStrategy(loss_scale=scale))
    net = Net()
    return fabric, *fabric.setup(net, OPTIMIZERS["AdamW"](net.parameters()))


def resumed(folder):
    fabric, net, stepper = set_up()
    steps_of(fabric, net, stepper, 3)
    fabric.save(f"{folder}/three.ckpt", {"net": net, "optimizer": stepper, "step": 3})
    file = torch.load(f"{folder}/three.ckpt", weights_only=True)
    steps_of(fabric, net, stepper, 3, first=3)

    fabric_2, net_2, stepper_2 = set_up()
    state = {"net": net_2, "optimizer": stepper_2, "step": 0}
    remainder = fabric_2.load(f"{folder}/three.ckpt", state)
    steps_of(fabric_2, net_2, stepper_2, 3, first=state["step"])
    scales = [one.strategy.precision.loss_scale.value for one in (fabric, fabric_2)]

    plain = Net()
    stock = fabric_of("32-true", "ddp")
    model, stepper_3 = stock.setup(plain, OPTIMIZERS["AdamW"](plain.parameters()))
    left = list(
        stock.load(f"{folder}/three.ckpt", {"net": model, "optimizer": stepper_3, "step": 0})
    )
    is_equal = toy.same_bits(toy.weights(plain), file["net"])
    return toy.weights(net), toy.weights(net_2), scales, remainder, file, left, is_equal


def test_a_resumed_loop_has_the_bits_of_one_that_was_never_stopped(two_ranks, tmp_path):
    """And its checkpoint loads into plain `ddp`."""
    for never, again, scales, *of_file in two_ranks.run(play, resumed, str(tmp_path)):
        remainder, file, left, is_equal = of_file
        assert toy.same_bits(never, again)
        assert (remainder, is_equal) == ({}, True)
        assert left == ["MasterWeightPrecision"]
        assert scales == [2.0**13] * 2  # doubled after steps 2, 4 and 6
        assert {value.dtype for value in file["net"].values()} == {torch.float32}
        state = [value for each in file["optimizer"]["state"].values() for value in each.values()]
        assert {value.dtype for value in state if isinstance(value, torch.Tensor)} == {
            torch.float32
        }


def masters_of_ranks_that_begin_apart():
    fabric = fabric_of()
    net = nn.Linear(12, 3)
    torch.nn.init.constant_(net.weight, 1 / (3 + fabric.global_rank))
    fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return toy.weights(net)


def test_every_rank_gets_rank_zeros_masters_in_all_digits(two_ranks):
    rank_0, rank_1 = two_ranks.run(play, masters_of_ranks_that_begin_apart)
    assert toy.same_bits(rank_0, rank_1)
    assert torch.equal(rank_0["weight"], torch.full((3, 12), 1 / 3))


# ---- several modules, accumulation, overflow -----------------------------------------------------------------------


def two_players(precision):
    """A generator and a discriminator. One accumulates over two batches, in which the other steps twice."""
    fabric = fabric_of(precision, HybridAllReduceStrategy(loss_scale=256.0))  # no step overflows
    one = Net()
    other = nn.Linear(3, 1)
    with torch.no_grad():
        other.weight.copy_(torch.tensor([[0.5, -0.25, 1.0]]))
        other.bias.zero_()
    generator, optimizer_g = fabric.setup(one, torch.optim.SGD(one.parameters(), lr=0.1))
    discriminator, optimizer_d = fabric.setup(other, torch.optim.AdamW(other.parameters(), lr=0.01))
    seed = torch.Generator().manual_seed(fabric.global_rank)
    for number in range(8):
        batch = torch.randn(8, 12, generator=seed)
        made = generator(batch)
        fabric.backward(discriminator(made.detach()).square().mean())
        optimizer_d.step()
        optimizer_d.zero_grad()
        with fabric.no_backward_sync(generator, enabled=number % 2 == 0):
            fabric.backward((discriminator(generator(batch)) - 1).square().mean() / 2)
        optimizer_d.zero_grad()
        if number % 2:
            optimizer_g.step()
            optimizer_g.zero_grad()
    return toy.weights(one) | {f"d.{name}": value for name, value in toy.weights(other).items()}


def test_two_modules_with_an_optimizer_each_follow_fp32(two_ranks):
    half = two_ranks.run(play, two_players, "16-true")
    full = two_ranks.run(play, two_players, "32-true")
    assert toy.same_bits(half[0], half[1])
    for name, exact in full[0].items():
        # Eight steps; a half-precision gradient is off by some units of 2**-11 of the largest element.
        assert torch.allclose(half[0][name], exact, atol=0.02 * float(exact.abs().max()) + 2e-3), (
            name
        )


def overflow_on_one_rank():
    fabric = fabric_of("16-true", HybridAllReduceStrategy(loss_scale="dynamic"))
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    before = toy.weights(net)
    history = []
    for number in range(2):
        if number == 0 and fabric.global_rank == 1:
            factor = float("inf")
        else:
            factor = 1.0
        fabric.backward(model(torch.ones(2, 12)).square().mean() * factor)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        plugin = fabric.strategy.precision
        history.append(
            (
                toy.same_bits(before, toy.weights(net)),
                plugin.loss_scale.value,
                plugin.num_skipped_steps,
            )
        )
    return history


def test_overflow_on_one_rank_is_a_step_that_all_ranks_skip(two_ranks):
    for history in two_ranks.run(play, overflow_on_one_rank):
        assert history == [(True, 2.0**15, 1), (False, 2.0**15, 1)]


def one_step(between_nodes):
    fabric = fabric_of(
        "32-true", HybridAllReduceStrategy(between_nodes=between_nodes, ranks_per_node=1)
    )
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    steps_of(fabric, model, optimizer, 1)
    return toy.weights(net)


@pytest.mark.parametrize("between_nodes", [Adasum(), Mean(dtype="int4")], ids=str)
def test_what_happens_between_nodes_is_as_asked(two_ranks, between_nodes):
    mean, _ = two_ranks.run(play, one_step, Mean())
    one, other = two_ranks.run(play, one_step, between_nodes)
    assert toy.same_bits(one, other)
    moved, of_mean = (
        one[name] - Net().state_dict()[name]
        for one, name in ((one, "3.weight"), (mean, "3.weight"))
    )
    ratio = float(moved.norm() / of_mean.norm())
    assert 1.05 < ratio < 2 if isinstance(between_nodes, Adasum) else 0.8 < ratio < 1.2
    assert not toy.same_bits(one, mean)


# ---- the page ------------------------------------------------------------------------------------------------------


def the_loop_of_the_page(folder):
    (loop,) = [block for block in python_blocks(PAGE) if "L.Fabric(" in block]
    torch.manual_seed(0)
    with chdir(folder):
        exec(compile(loop, str(PAGE), "exec"), names := {"__name__": "__main__"})
    MADE.append(names["fabric"])
    parameters = [
        (parameter.dtype, parameter.detach().float()) for parameter in names["net"].parameters()
    ]
    return parameters, names["net"].state_dict(), names["fabric"].world_size


def test_the_loop_of_the_page_trains_on_two_ranks_and_saves_what_it_trained(two_ranks, tmp_path):
    rank_0, rank_1 = two_ranks.run(play, the_loop_of_the_page, str(tmp_path))
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert rank_0[2] == 2
    assert toy.same_bits(rank_0[1], rank_1[1])
    assert toy.same_bits(rank_0[1], saved["model"])
    for (dtype, value), of_file in zip(rank_0[0], saved["model"].values(), strict=True):
        assert dtype is torch.float32
        assert torch.equal(value, of_file)
    assert set(saved) == {"model", "optimizer", "MasterWeightPrecision"}


# ---- what cannot work ----------------------------------------------------------------------------------------------


def errors():
    fabric = fabric_of()
    net = Net()
    model, optimizer = fabric.setup(
        net, torch.optim.SGD([*net.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    )
    fabric.backward(model(torch.ones(2, 12)).mean())
    return toy.error_of(optimizer.step)


def test_what_cannot_work_is_refused_by_name(two_ranks):
    for foreign in two_ranks.run(play, errors):
        assert "(shape (2,)) is trained but not averaged" in foreign
    for option in ("report", "shard_update"):
        with pytest.raises(ValueError, match=rf"`{option}` \(=.*is not an option"):
            HybridAllReduceStrategy(**{option: "on"})


def test_an_object_with_a_precision_plugin_is_taken():
    plugin = MasterWeightPrecision("16-true", loss_scale=8.0)
    fabric = Fabric(
        strategy=HybridAllReduceStrategy(precision=plugin), accelerator="cpu", devices=1
    )
    assert fabric.strategy.precision is plugin


# ---- real processes ------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import lightning as L
import torch
import lightning_hybrid


def main(fabric):
    net = torch.nn.Linear(12, 3)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    for step in range(4):
        loss = model(torch.full((4, 12), 1.0 + fabric.global_rank)).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    fabric.save("end.ckpt", {"model": model})


if __name__ == "__main__":
    L.seed_everything(1)
    fabric = L.Fabric(strategy=sys.argv[1], precision="16-true", accelerator="cpu", devices=2)
    fabric.launch(main)
"""


TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node=2",
    "train.py",
    "hybrid_allreduce",
)


@pytest.mark.long
def test_every_launcher_trains_the_same_model_and_ends(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    where = {
        "cwd": tmp_path,
        "env": {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    }
    weights = []
    for arguments in (
        ("train.py", "hybrid_allreduce"),
        ("train.py", "hybrid_allreduce_spawn"),
        TORCHRUN,
    ):
        done = subprocess.run(
            [sys.executable, *arguments], **where, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stderr[-4000:]
        weights.append(torch.load(tmp_path / "end.ckpt", weights_only=True)["model"])
        (tmp_path / "end.ckpt").unlink()
    assert toy.same_bits(weights[0], weights[1])
    assert toy.same_bits(weights[0], weights[2])


def fails(*args, **kwargs):
    raise RuntimeError(
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation"
    )


def error_beside():
    """A collective of Fabric's fails on rank zero, and rank one is in its own code until it learns of it."""
    fabric = fabric_of()
    net = fabric.setup_module(Net())
    engine = fabric.strategy._failures.engine
    end_s = time.monotonic() + 20
    if dist.get_rank() == 1:
        while not engine.failure and time.monotonic() < end_s:
            time.sleep(0.05)
        return engine.failure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "barrier", fails)  # with which Lightning's `all_reduce` begins
        try:
            fabric.all_reduce(torch.ones(2))
        except RuntimeError as error:
            return str(error)
    return f"{net} went on"


def test_a_rank_that_does_not_come_to_a_collective_of_fabrics_is_named(two_ranks):
    for text in two_ranks.run(play, error_beside):
        assert text.startswith(
            "comm: rank 1 does not join the collective in which others wait. State of rank 1: with no bucket"
        )
        assert "in `error_beside` (test_strategy.py:" in text


def error_at_the_end():
    """The interpreter of rank one ends by an error, and rank zero is in its own code."""
    fabric = fabric_of()
    fabric.setup_module(Net())
    engine = fabric.strategy._failures.engine
    end_s = time.monotonic() + 20
    if dist.get_rank() == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "last_value", ArithmeticError("the batch is odd"), raising=False)
            fabric.strategy._close_engines()
    while dist.get_rank() == 0 and not engine.failure and time.monotonic() < end_s:
        time.sleep(0.05)
    return engine.failure


def test_an_error_that_ends_the_interpreter_is_named_by_the_other_rank(two_ranks):
    text, _ = two_ranks.run(play, error_at_the_end)
    assert text.startswith("comm: rank 1 gave up: ArithmeticError: the batch is odd")
