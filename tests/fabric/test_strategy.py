"""`Fabric(strategy="hybrid_allreduce")` in a user's own loop, compared with the Trainer."""

import gc
import os
import subprocess
import sys
import time
import weakref
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
from tests.fabric.support import FABRICS, fabric_of, play
from tests.scenes import fit
from tests.test_readme import python_blocks

PAGE = Path(__file__).resolve().parents[2] / "lightning_hybrid" / "fabric" / "README.md"

OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "LAMB": lambda parameters: LAMB(parameters, lr=1e-2),
}


class Net(nn.Sequential):
    """Network of normalization and matrix products, whose bits do not depend on memory addresses."""

    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(nn.Linear(12, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))


def loader():
    rank = 0
    world_size = 1
    if dist.is_initialized():
        rank = dist.get_rank()
        world_size = dist.get_world_size()
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
        "train": loader,
        "max_epochs": 1,
        "use_distributed_sampler": False,
    }
    of_trainer = fit(two_ranks, partial(Classifier, optimizer), **scene)
    for (losses, weights, dtypes), seen in zip(ours, of_trainer, strict=True):
        assert losses == seen.losses, f"rank {seen.rank}"
        of_module = {f"net.{name}": value for name, value in weights.items()}
        assert toy.same_bits(of_module, seen.weights), f"rank {seen.rank}"
        assert dtypes == {torch.float32}, f"rank {seen.rank}"
    assert ours[0][0] != ours[1][0], "ranks must see different data"
    assert toy.same_bits(ours[0][1], ours[1][1])


def gradients_around_a_rebuild():
    """Return the gradients of a first backward pass, and their values after DDP has rebuilt its buckets."""
    fabric = fabric_of("bf16-true")
    net = Net()
    model = fabric.setup(net)
    inputs = torch.linspace(-1, 1, 96).reshape(8, 12)
    fabric.backward(model(inputs).square().mean() / 3)
    for parameter in net.parameters():
        parameter.grad.mul_(1 / 3)
    before = [parameter.grad.clone() for parameter in net.parameters()]
    model(inputs)
    return before, [parameter.grad for parameter in net.parameters()]


def test_rebuilt_buckets_of_ddp_do_not_round_accumulated_gradients(two_ranks):
    for before, after in two_ranks.run(play, gradients_around_a_rebuild):
        for gradient, unchanged in zip(after, before, strict=True):
            assert torch.equal(gradient, unchanged)


def trained_one_after_another(precision):
    """Train a model in each of three folds with one Fabric, and return what it holds at the end."""
    strategy = HybridAllReduceStrategy()
    if precision == "16-true":
        scale = DynamicLossScale(init_scale=2.0**4, growth_interval=2)
        strategy = HybridAllReduceStrategy(loss_scale=scale)
    fabric = fabric_of(precision, strategy)
    nets = []
    weights = []
    scales = []
    for _ in range(3):
        gc.collect()
        net = Net()
        nets.append(weakref.ref(net))
        model, optimizer = fabric.setup(net, OPTIMIZERS["AdamW"](net.parameters()))
        steps_of(fabric, model, optimizer, 4)
        weights.append(toy.weights(net))
        if precision == "16-true":
            (state,) = fabric.strategy.precision.optimizer_steps
            scales.append(state.loss_scale.value)
    gc.collect()
    alive = [net() is not None for net in nets]
    num_pairs = 0
    if precision != "32-true":
        num_pairs = len(fabric.strategy.precision.window.pairs)
    return alive, len(fabric.strategy._engines), num_pairs, scales, weights


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true"])
def test_models_trained_one_after_another_are_freed(two_ranks, precision):
    for result in two_ranks.run(play, trained_one_after_another, precision):
        alive, num_engines, num_pairs, scales, weights = result
        assert alive == [False, False, True]
        assert num_engines == 1, "the first backward of a model closes the engines of earlier ones"
        if precision != "32-true":
            assert num_pairs == 4
        if precision == "16-true":
            assert scales == [2.0**6, 2.0**8, 2.0**10], "a dead model holds no scale down"
        else:
            assert toy.same_bits(weights[0], weights[2])


def engines_while_one_rank_holds_a_model():
    """Count the engines after each setup. Rank zero releases the first model earlier than rank one."""
    fabric = fabric_of()
    held = [fabric.setup_module(Net())]
    if dist.get_rank() == 0:
        held.clear()
    gc.collect()
    second = fabric.setup_module(Net())
    counts = [len(fabric.strategy._engines)]
    held.clear()
    gc.collect()
    third = fabric.setup_module(Net())
    counts.append(len(fabric.strategy._engines))
    assert second is not third  # and both are still alive
    return counts


def test_an_engine_stays_open_until_no_rank_holds_its_model(two_ranks):
    for rank, counts in enumerate(two_ranks.run(play, engines_while_one_rank_holds_a_model)):
        assert counts == [2, 2], f"rank {rank}"


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


def whole_and_resumed(folder):
    """Train six steps with a checkpoint after three, and train three more from that checkpoint."""
    path = f"{folder}/three.ckpt"
    fabric, net, optimizer = set_up()
    steps_of(fabric, net, optimizer, 3)
    fabric.save(path, {"net": net, "optimizer": optimizer, "step": 3})
    steps_of(fabric, net, optimizer, 3, first=3)
    whole = toy.weights(net), fabric.strategy.precision.loss_scale.value

    fabric, net, optimizer = set_up()
    state = {"net": net, "optimizer": optimizer, "step": 0}
    assert fabric.load(path, state) == {}
    steps_of(fabric, net, optimizer, 3, first=state["step"])
    resumed = toy.weights(net), fabric.strategy.precision.loss_scale.value
    return whole, resumed


def test_a_resumed_loop_has_the_bits_of_an_uninterrupted_one(two_ranks, tmp_path):
    results = two_ranks.run(play, whole_and_resumed, str(tmp_path))
    for rank, (whole, resumed) in enumerate(results):
        weights, scale = whole
        resumed_weights, resumed_scale = resumed
        assert toy.same_bits(weights, resumed_weights), f"rank {rank}"
        assert scale == 2.0**13, "doubled after steps 2, 4 and 6"
        assert resumed_scale == scale, f"rank {rank}"

    file = torch.load(tmp_path / "three.ckpt", weights_only=True)
    assert {value.dtype for value in file["net"].values()} == {torch.float32}
    dtypes = set()
    for state in file["optimizer"]["state"].values():
        dtypes |= {value.dtype for value in state.values() if isinstance(value, torch.Tensor)}
    assert dtypes == {torch.float32}


def loaded_by_ddp(path):
    """Load a half-precision checkpoint under `ddp`, and return the weights and the unused keys."""
    net = Net()
    fabric = fabric_of("32-true", "ddp")
    model, optimizer = fabric.setup(net, OPTIMIZERS["AdamW"](net.parameters()))
    unused = fabric.load(path, {"net": model, "optimizer": optimizer, "step": 0})
    return toy.weights(net), list(unused)


def test_a_checkpoint_of_half_precision_loads_under_ddp(two_ranks, tmp_path):
    two_ranks.run(play, whole_and_resumed, str(tmp_path))
    path = tmp_path / "three.ckpt"
    file = torch.load(path, weights_only=True)
    for rank, (weights, unused) in enumerate(two_ranks.run(play, loaded_by_ddp, str(path))):
        assert toy.same_bits(weights, file["net"]), f"rank {rank}"
        assert unused == ["MasterWeightPrecision"], f"rank {rank}"


def masters_of_ranks_that_differ():
    fabric = fabric_of()
    net = nn.Linear(12, 3)
    torch.nn.init.constant_(net.weight, 1 / (3 + fabric.global_rank))
    fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return toy.weights(net)


def test_every_rank_gets_the_exact_master_weights_of_rank_zero(two_ranks):
    rank_0, rank_1 = two_ranks.run(play, masters_of_ranks_that_differ)
    assert toy.same_bits(rank_0, rank_1)
    assert torch.equal(rank_0["weight"], torch.full((3, 12), 1 / 3))


# ---- several modules, accumulation, overflow -----------------------------------------------------------------------


def two_players(precision):
    """Train a generator that accumulates over two batches, while the discriminator steps twice."""
    fabric = fabric_of(precision, HybridAllReduceStrategy(loss_scale=256.0))  # no step overflows
    net_g = Net()
    net_d = nn.Linear(3, 1)
    with torch.no_grad():
        net_d.weight.copy_(torch.tensor([[0.5, -0.25, 1.0]]))
        net_d.bias.zero_()
    generator, optimizer_g = fabric.setup(net_g, torch.optim.SGD(net_g.parameters(), lr=0.1))
    adamw = torch.optim.AdamW(net_d.parameters(), lr=0.01)
    discriminator, optimizer_d = fabric.setup(net_d, adamw)
    random_stream = torch.Generator().manual_seed(fabric.global_rank)
    for number in range(8):
        batch = torch.randn(8, 12, generator=random_stream)
        images = generator(batch)
        fabric.backward(discriminator(images.detach()).square().mean())
        optimizer_d.step()
        optimizer_d.zero_grad()
        with fabric.no_backward_sync(generator, enabled=number % 2 == 0):
            fabric.backward((discriminator(generator(batch)) - 1).square().mean() / 2)
        optimizer_d.zero_grad()
        if number % 2:
            optimizer_g.step()
            optimizer_g.zero_grad()
    of_discriminator = {f"d.{name}": value for name, value in toy.weights(net_d).items()}
    return toy.weights(net_g) | of_discriminator


def test_two_modules_with_an_optimizer_each_follow_fp32(two_ranks):
    half = two_ranks.run(play, two_players, "16-true")
    full = two_ranks.run(play, two_players, "32-true")
    assert toy.same_bits(half[0], half[1])
    for name, exact in full[0].items():
        # Over eight steps, a half-precision gradient is off by some units of 2**-11 of the largest element.
        bound = 0.02 * float(exact.abs().max()) + 2e-3
        assert torch.allclose(half[0][name], exact, atol=bound), name


def overflow_on_one_rank():
    fabric = fabric_of("16-true", HybridAllReduceStrategy(loss_scale="dynamic"))
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    before = toy.weights(net)
    history = []
    for number in range(2):
        loss = model(torch.ones(2, 12)).square().mean()
        if number == 0 and fabric.global_rank == 1:
            loss = loss * float("inf")
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        plugin = fabric.strategy.precision
        is_unchanged = toy.same_bits(before, toy.weights(net))
        history.append((is_unchanged, plugin.loss_scale.value, plugin.num_skipped_steps))
    return history


def test_overflow_on_one_rank_is_a_step_that_all_ranks_skip(two_ranks):
    for rank, history in enumerate(two_ranks.run(play, overflow_on_one_rank)):
        assert history == [(True, 2.0**15, 1), (False, 2.0**15, 1)], f"rank {rank}"


def one_step(between_nodes):
    strategy = HybridAllReduceStrategy(between_nodes=between_nodes, ranks_per_node=1)
    fabric = fabric_of("32-true", strategy)
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=1.0))
    steps_of(fabric, model, optimizer, 1)
    return toy.weights(net)


@pytest.mark.parametrize(
    ("between_nodes", "smallest", "largest"),
    [
        pytest.param(Adasum(), 1.05, 2, id="Adasum"),
        pytest.param(Mean(dtype="int4"), 0.8, 1.2, id="Mean in int4"),
    ],
)
def test_between_nodes_chooses_the_average_and_its_size(
    two_ranks, between_nodes, smallest, largest
):
    mean, _ = two_ranks.run(play, one_step, Mean())
    rank_0, rank_1 = two_ranks.run(play, one_step, between_nodes)
    assert toy.same_bits(rank_0, rank_1)
    assert not toy.same_bits(rank_0, mean)
    initial = Net().state_dict()["3.weight"]
    update = (rank_0["3.weight"] - initial).norm()
    update_of_mean = (mean["3.weight"] - initial).norm()
    assert smallest < float(update / update_of_mean) < largest


# ---- the documentation page ----------------------------------------------------------------------------------------


def the_loop_of_the_page(folder):
    (loop,) = [block for block in python_blocks(PAGE) if "L.Fabric(" in block]
    names = {"__name__": "__main__"}
    torch.manual_seed(0)
    with chdir(folder):
        exec(compile(loop, str(PAGE), "exec"), names)
    FABRICS.append(names["fabric"])
    net = names["net"]
    parameters = [parameter.detach().clone() for parameter in net.parameters()]
    return parameters, net.state_dict(), names["fabric"].world_size


def test_the_loop_of_the_page_trains_on_two_ranks_and_saves_the_trained_weights(
    two_ranks, tmp_path
):
    rank_0, rank_1 = two_ranks.run(play, the_loop_of_the_page, str(tmp_path))
    parameters, weights, num_ranks = rank_0
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert num_ranks == 2
    assert toy.same_bits(weights, rank_1[1])
    assert toy.same_bits(weights, saved["model"])
    for parameter, of_file in zip(parameters, saved["model"].values(), strict=True):
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter, of_file)
    assert set(saved) == {"model", "optimizer", "MasterWeightPrecision"}


# ---- errors --------------------------------------------------------------------------------------------------------


def error_of_a_foreign_parameter():
    fabric = fabric_of()
    net = Net()
    foreign = nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([*net.parameters(), foreign], lr=0.1)
    model, optimizer = fabric.setup(net, sgd)
    fabric.backward(model(torch.ones(2, 12)).mean())
    return toy.error_of(optimizer.step)


def test_a_parameter_outside_of_the_module_is_refused_by_its_shape(two_ranks):
    for rank, error in enumerate(two_ranks.run(play, error_of_a_foreign_parameter)):
        assert "(shape (2,)) is trained but not averaged" in error, f"rank {rank}"


@pytest.mark.parametrize("option", ["report", "shard_update"])
def test_an_option_of_the_trainers_strategy_alone_is_refused_by_name(option):
    with pytest.raises(ValueError, match=rf"`{option}` \(=.*is not an option"):
        HybridAllReduceStrategy(**{option: "on"})


def test_a_precision_plugin_of_the_strategy_is_used():
    plugin = MasterWeightPrecision("16-true", loss_scale=8.0)
    strategy = HybridAllReduceStrategy(precision=plugin)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=1)
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
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    weights = []
    for arguments in (
        ("train.py", "hybrid_allreduce"),
        ("train.py", "hybrid_allreduce_spawn"),
        TORCHRUN,
    ):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
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


def error_while_rank_one_is_elsewhere(call):
    """Return the error of a collective call that fails on rank zero, while rank one runs its own code."""
    fabric = fabric_of()
    net = fabric.setup_module(Net())
    engine = fabric.strategy._failures.engine
    end_s = time.monotonic() + 20
    if dist.get_rank() == 1:
        while not engine.failure and time.monotonic() < end_s:
            time.sleep(0.05)
        return engine.failure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "barrier", fails)  # the first call in Lightning's `all_reduce`
        try:
            if call == "all_reduce":
                fabric.all_reduce(torch.ones(2))
            else:
                fabric.setup_module(Net())
        except RuntimeError as error:
            return str(error)
    return f"{net} went on"


@pytest.mark.parametrize("call", ["all_reduce", "second setup"])
def test_a_rank_that_is_absent_from_a_collective_of_fabrics_is_named(two_ranks, call):
    expected = "comm: rank 1 does not join the collective in which others wait. State of rank 1: with no bucket"
    for rank, text in enumerate(two_ranks.run(play, error_while_rank_one_is_elsewhere, call)):
        assert text.startswith(expected), f"rank {rank}"
        location = "in `error_while_rank_one_is_elsewhere` (test_strategy.py:"
        assert location in text, f"rank {rank}"


def error_at_the_end():
    """End the interpreter of rank one by an error, and return the failure that each rank receives."""
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
