"""`LocalSteps`: independent training on each node, averages between nodes, resumed runs, errors."""

from datetime import timedelta
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid import LocalSteps, Mean
from lightning_hybrid.callbacks import MasterWeightAveraging, ReplicaCheck
from lightning_hybrid.comm import CommEngine, CommPlan, Topology
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.optim import LARS
from lightning_hybrid.strategy.local_steps import independent_nodes
from tests import toy
from tests.scenes import Saves, Spoiled, at, fit, same


class Toy(Spoiled):
    """Classifier whose learning rate falls in each step. With "LARS" it follows the orthogonalized momentum."""

    def __init__(self, lr=0.05, **options):
        super().__init__(lr=lr, **options)

    def configure_optimizers(self):
        if self.optimizer_name == "LARS":
            return LARS(self.parameters(), lr=4.0, direction="orthogonal")
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def after_batch(trainer, module, outputs, batch, batch_idx):
    return values_of(module), trainer.optimizers[0].param_groups[0]["lr"], batch


def validated(trainer, module, *args):
    if trainer.sanity_checking:
        return None
    return values_of(module)


def values_of(module):
    return torch.cat(
        [value.detach().float().reshape(-1) for _, value in sorted(module.state_dict().items())]
    )


def trained_of(module):
    names = {name for name, _ in module.named_parameters()}
    kinds = [
        torch.full((value.numel(),), name in names)
        for name, value in sorted(module.state_dict().items())
    ]
    return torch.cat(kinds)


def local(ranks, every, options=None, module=None, callbacks=(), **scene):
    if every > 1:
        between_nodes = LocalSteps(every=every, **(options or {}))
    else:
        between_nodes = Mean()
    scene = {"between_nodes": between_nodes, "ranks_per_node": 1, **scene}
    callbacks = [at(on_train_batch_end=after_batch), *callbacks]
    return fit(ranks, partial(Toy, **(module or {})), callbacks=callbacks, **scene)


def values(seen):
    """Return the weights and running statistics after each batch."""
    return [weights for weights, _, _ in seen.looks["on_train_batch_end"]]


def final(seen):
    return [seen.weights, seen.states]


def tensors_of_node(node):
    """Return 14-bit numbers in the dtypes and layouts of parameters and state. Means of two are exact in float32."""
    generator = torch.Generator().manual_seed(node)

    def draw(*shape):
        return torch.randint(-(2**13), 2**13 + 1, shape, generator=generator) / 2**10

    channels_last = draw(2, 3, 4, 4).to(memory_format=torch.channels_last)
    special = [
        draw(3).double(),
        draw(4).round().bfloat16(),
        draw(6, 4)[:, ::2],
        draw(2, 2) * 1j,
        draw(0),
    ]
    return [draw(5, 7), *special, channels_last]


def mean_of_two_nodes():
    pairs = zip(tensors_of_node(0), tensors_of_node(1), strict=True)
    return [(first + second) / 2 for first, second in pairs]


def averaged(algorithm, across=None, chunk_numel=16, is_narrow=False):
    topology = Topology.from_ranks_per_node(rank=dist.get_rank(), world_size=4, ranks_per_node=2)
    engine = CommEngine(
        topology=topology,
        plan=CommPlan(algorithm=algorithm),
        timeout=timedelta(seconds=45),
        device=torch.device("cpu"),
        dtype_across_nodes=across,
    )
    tensors = tensors_of_node(topology.nodes.index(topology.node))
    with patch.object(independent_nodes, "CHUNK_NUMEL", chunk_numel):
        independent_nodes.NodeAverage(engine).average_(tensors, is_narrow=is_narrow)
    engine.close()
    return tensors


@pytest.mark.parametrize("algorithm", ["flat", "hierarchical", "two_level"])
def test_an_average_counts_each_node_once_whatever_carries_it(four_ranks, algorithm):
    expected = mean_of_two_nodes()
    for rank, result in enumerate(four_ranks.run(averaged, algorithm)):
        assert all(map(torch.equal, result, expected)), f"rank {rank}"


@pytest.mark.parametrize("across", [Codec(bits=8), Codec(bits=4), torch.bfloat16], ids=str)
def test_an_average_travels_narrower_only_where_it_is_asked_for(four_ranks, across):
    """An average is sent in fewer bits only on request.

    The 14-bit numbers of this test do not fit into bfloat16, or into the codes of 8 / 127 and 8 / 7.
    """
    expected = mean_of_two_nodes()
    for rank, result in enumerate(four_ranks.run(averaged, "two_level", across, 1024)):
        assert all(map(torch.equal, result, expected)), f"rank {rank}"
    narrow = four_ranks.run(averaged, "two_level", across, 1024, True)
    for rank, result in enumerate(narrow):
        assert all(map(torch.equal, result, narrow[0])), f"rank {rank}"
        assert torch.equal(result[1], expected[1]), f"float64 on rank {rank}"
        assert 0 < (result[0] - expected[0]).abs().max() < 8, f"rank {rank}"


def test_a_codec_rounds_what_weights_have_moved_and_momentum(two_ranks):
    """A codec rounds the change of the weights, not the weights, so weights that did not move keep their bits."""
    scene = {"module": {"lr": 0.0}, "max_epochs": 1}
    exact, _ = local(two_ranks, 2, {"dtype": None}, **scene)
    rank_0, rank_1 = local(two_ranks, 2, {"dtype": "int8"}, **scene)
    initial = dict(Toy().named_parameters())
    assert all(torch.equal(value, initial[name]) for name, value in rank_0.parameters.items())
    errors = [
        (state["momentum_buffer"] - exact.states[0][number]["momentum_buffer"]).abs().max()
        for number, state in rank_0.states[0].items()
    ]
    assert 0 < max(errors) < 0.1
    assert same(final(rank_0), final(rank_1))


def fit_and_reference(every):
    """Return whether the weights after each batch equal those of a plain loop, and the weights after step 4."""
    seen = local(None, every)
    module = Toy()
    expected = []
    optimizers = module.configure_optimizers()
    optimizer = optimizers["optimizer"]
    schedule = optimizers["lr_scheduler"]["scheduler"]
    statistics = []
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            statistics += layer.buffers()
    for step, (_, _, batch) in enumerate(seen.looks["on_train_batch_end"]):
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % every == 0:
            for tensor in [*module.parameters(), *statistics]:
                if tensor.is_floating_point():
                    with torch.no_grad():
                        dist.all_reduce(tensor)
                        # exact, because the sum of two numbers is the same on both ranks
                        tensor /= 2
            for state in optimizer.state.values():
                dist.all_reduce(state["momentum_buffer"])
                state["momentum_buffer"] /= 2
        expected.append(values_of(module))
    is_equal = [
        torch.equal(result, reference)
        for result, reference in zip(values(seen), expected, strict=True)
    ]
    return is_equal, values(seen)[3]


def test_a_node_of_one_rank_trains_as_one_process_and_the_mean_is_taken_every_so_many_steps(
    two_ranks,
):
    """Eight steps with means after steps 3 and 6 match a plain torch loop bit for bit. Nodes differ after step 4."""
    rank_0, rank_1 = two_ranks.run(fit_and_reference, 3)
    for rank, (is_equal, _) in enumerate((rank_0, rank_1)):
        assert is_equal == [True] * 8, f"rank {rank}"
    assert not torch.equal(rank_0[1], rank_1[1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("precision", "across"), [("16-true", "int4"), ("bf16-true", None)])
def test_ranks_of_a_node_agree_at_each_step_and_all_ranks_after_a_mean(
    four_ranks, precision, across
):
    scene = {"precision": precision, "module": {"optimizer": "Adam"}, "ranks_per_node": 2}
    ranks = local(
        four_ranks, 3, {"dtype": across}, callbacks=[ReplicaCheck(every_n_steps=1)], **scene
    )
    trained = trained_of(toy.Toy())
    for step in range(4):
        weights = [values(seen)[step] for seen in ranks]
        # Statistics are synchronized in the next forward pass, as under ddp.
        assert torch.equal(weights[0][trained], weights[1][trained]), f"node 0 in step {step}"
        assert torch.equal(weights[2][trained], weights[3][trained]), f"node 1 in step {step}"
        for rank in (1, 2, 3):
            is_equal = torch.equal(weights[0], weights[rank])
            assert is_equal == (step == 2), f"rank {rank} in step {step}"
    # At the end this includes optimizer state.
    assert all(same(final(ranks[0]), final(seen)) for seen in ranks)


def test_a_layerwise_optimizer_with_accumulation_agrees_after_a_mean(four_ranks):
    """With steps of two batches, a period counts steps and not batches."""
    scene = {
        "module": {"optimizer": "LARS"},
        "precision": "16-true",
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
    }
    ranks = local(four_ranks, 2, ranks_per_node=2, **scene)
    for seen in ranks:
        assert same(final(seen), final(ranks[0])), f"rank {seen.rank}"
        assert all(value.isfinite().all() for value in seen.weights.values()), f"rank {seen.rank}"


def test_steps_before_the_local_ones_are_those_of_a_synchronous_run_bit_for_bit(four_ranks):
    """Gradients, running statistics and weights match first. Then each node makes pairs of local steps."""
    scene = {"ranks_per_node": 2, "precision": "16-true"}
    whole = local(four_ranks, 1, **scene)
    ranks = local(four_ranks, 2, {"from_step": 2}, **scene)
    for synchronous, seen in zip(whole, ranks, strict=True):
        pairs = zip(values(synchronous), values(seen), strict=True)
        is_equal = [torch.equal(expected, result) for expected, result in pairs]
        assert is_equal == [True, True, False, False], f"rank {seen.rank}"


OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}


def test_the_outer_step_goes_on_along_what_past_periods_have_moved(two_ranks):
    """An outer rate of 1 without momentum gives the mean. A rate of 2 doubles the first move from the start."""
    start = values_of(toy.Toy())
    trained = trained_of(toy.Toy())
    mean = values(local(two_ranks, 4, {})[0])
    lr_1 = values(local(two_ranks, 4, {"outer_lr": 1.0})[0])
    lr_2 = values(local(two_ranks, 4, {"outer_lr": 2.0})[0])
    momentum = values(local(two_ranks, 4, {"outer_lr": 2.0, "outer_momentum": 0.5})[0])
    assert torch.equal(mean[3], lr_1[3])
    step = lr_2[3] - start
    expected = 2 * (mean[3] - start)
    # differs by rounding
    torch.testing.assert_close(step[trained], expected[trained], rtol=1e-3, atol=1e-6)
    # The outer step does not apply to running statistics.
    assert torch.equal(lr_2[3][~trained], mean[3][~trained])
    # d + m / 2
    torch.testing.assert_close(
        (momentum[3] - start)[trained], 1.5 * step[trained], rtol=1e-3, atol=1e-6
    )
    assert not torch.equal(momentum[7], lr_2[7])


def test_the_mean_is_validated_and_so_is_a_moving_average_of_it(four_ranks):
    """After two steps of a period of 100, all ranks validate the same bits, which are the weights of the EMA."""
    callbacks = [at(on_validation_batch_start=validated), partial(MasterWeightAveraging, decay=0.5)]
    scene = {
        "val": partial(toy.loader, 16),
        "limit_val_batches": 1,
        "ranks_per_node": 2,
        "callbacks": callbacks,
    }
    ranks = local(four_ranks, 100, **scene)
    for seen in ranks:
        weights = seen.looks["on_validation_batch_start"]
        assert len(weights) == 2, f"rank {seen.rank}"
        assert same(weights, ranks[0].looks["on_validation_batch_start"]), f"rank {seen.rank}"
        assert same(final(seen), final(ranks[0])), f"rank {seen.rank}"
        assert not torch.equal(weights[0], values(seen)[1]), f"rank {seen.rank}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("precision", "optimizer", "options"),
    [
        ("16-true", "Adam", OUTER),
        ("bf16-true", "SGD", {}),
        ("32-true", "Adam", {"dtype": "int4"} | OUTER),
    ],
)
def test_a_run_resumed_within_a_period_has_the_bits_of_one_that_saved_there_too(
    two_ranks, tmp_path, precision, optimizer, options
):
    """A run saved one step into the second period of three resumes bit for bit."""
    path = tmp_path / "four.ckpt"
    scene = {"precision": precision, "module": {"optimizer": optimizer}, "max_epochs": 3}
    saving = local(two_ranks, 3, options, callbacks=[Saves(path, epoch=0)], **scene)
    resumed = local(two_ranks, 3, options, ckpt_path=path, **scene)
    without = local(two_ranks, 3, options, ckpt_path=None, **scene)
    for rank, seen in enumerate(saving):
        assert same(final(seen), final(resumed[rank])), f"rank {rank}"
        assert same(final(seen), final(saving[0])), f"rank {rank}"
        assert not same(final(seen), final(without[rank])), "a save ends a period"


def test_a_file_of_two_nodes_loads_under_ddp_and_on_another_number_of_nodes(
    two_ranks, four_ranks, tmp_path
):
    """A checkpoint contains only values that all nodes agree on, so it loads on any number of nodes."""
    path = tmp_path / "last.ckpt"
    saved = local(four_ranks, 5, ranks_per_node=2, precision="16-true", save_to=path)[0]
    under_ddp = fit(two_ranks, Toy, strategy="ddp", ckpt_path=path)
    on_two_nodes = local(two_ranks, 2, ckpt_path=path)
    for seen in [*under_ddp, *on_two_nodes]:
        assert same(final(seen), final(saved)), f"rank {seen.rank}"


def test_a_node_skips_its_own_steps_and_at_the_end_all_agree_on_scale_and_state(two_ranks):
    """Node 1 skips four steps because of overflow and has no momentum yet when node 0 has. Both learning rates fall."""
    steps = (0, 1, 2, 3)
    module = {"optimizer": "Adam", "steps": steps}
    ranks = local(two_ranks, 3, precision="16-true", module=module, max_epochs=1)
    for seen in ranks:
        assert same(final(seen), final(ranks[0])), f"rank {seen.rank}"
        assert all(value.isfinite().all() for value in seen.weights.values())
        assert (seen.num_skipped, seen.loss_scale) == (len(steps), ranks[0].loss_scale)
        assert seen.loss_scale <= 2.0 ** (16 - len(steps))
        assert {float(state["step"]) for state in seen.states[0].values()} == {4.0}
        rates = [rate for _, rate, _ in seen.looks["on_train_batch_end"]]
        expected_rates = [0.05 * 0.9**step for step in range(1, 5)]
        assert rates == pytest.approx(expected_rates), f"rank {seen.rank}"


def die(trainer, module, *args):
    if trainer.global_step == 2 and trainer.global_rank == 1:
        raise ArithmeticError("the batch is odd")


def error_of_a_death():
    error = local(None, 3, callbacks=[at(on_train_batch_end=die)], raises=True).error
    # with Lightning's pending operations; the next test gets another group
    dist.destroy_process_group()
    return error


def test_an_error_on_one_node_within_a_period_ends_the_other_and_names_the_rank(two_ranks):
    rank_0, rank_1 = two_ranks.run(error_of_a_death)
    assert rank_1.startswith("ArithmeticError: the batch is odd")
    assert "comm: rank 1 gave up: ArithmeticError: the batch is odd" in rank_0


def test_on_one_node_a_warning_says_that_there_is_nothing_to_do(two_ranks):
    plain = local(two_ranks, 1, ranks_per_node=2, warns=True)
    ranks = local(two_ranks, 2, ranks_per_node=2, warns=True)
    words = (
        "`between_nodes` (=LocalSteps(every=2)) has no effect, because all ranks are on one node"
    )
    for rank, seen in enumerate(ranks):
        assert any(text.startswith(words) for text in seen.warnings) == (rank == 0)
        assert same(final(seen), final(plain[rank]))
