"""`LocalSteps`: what each node trains on its own, what is averaged and when, resumed runs, errors."""

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
    """With a rate that falls in each step. By LARS along the orthogonalised momentum where it is asked to."""

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
    return [one for one, *_ in seen.looks["on_train_batch_end"]]


def final(seen):
    return [seen.weights, seen.states]


def tensors_of_node(node):
    """Numbers of 14 bits, in dtypes and layouts of parameters and state. Means of two of them are exact in float32."""
    generator = torch.Generator().manual_seed(node)

    def draw(*shape):
        return torch.randint(-(2**13), 2**13 + 1, shape, generator=generator) / 2**10

    channels_last = draw(2, 3, 4, 4).to(memory_format=torch.channels_last)
    others = [
        draw(3).double(),
        draw(4).round().bfloat16(),
        draw(6, 4)[:, ::2],
        draw(2, 2) * 1j,
        draw(0),
    ]
    return [draw(5, 7), *others, channels_last]


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
    expected = [
        (first + second) / 2
        for first, second in zip(tensors_of_node(0), tensors_of_node(1), strict=True)
    ]
    for result in four_ranks.run(averaged, algorithm):
        assert all(map(torch.equal, result, expected))


@pytest.mark.parametrize("across", [Codec(bits=8), Codec(bits=4), torch.bfloat16], ids=str)
def test_an_average_travels_narrower_only_where_it_is_asked_for(four_ranks, across):
    """14 bits are more than bfloat16 has, and codes of 8 / 127 and 8 / 7."""
    expected = [
        (first + second) / 2
        for first, second in zip(tensors_of_node(0), tensors_of_node(1), strict=True)
    ]
    for result in four_ranks.run(averaged, "two_level", across, 1024):
        assert all(map(torch.equal, result, expected))
    narrow = four_ranks.run(averaged, "two_level", across, 1024, True)
    for result in narrow:
        assert all(map(torch.equal, result, narrow[0]))
        assert torch.equal(result[1], expected[1])  # float64
        assert 0 < (result[0] - expected[0]).abs().max() < 8


def test_a_codec_rounds_what_weights_have_moved_and_momentum(two_ranks):
    """Weights that have not moved stay to the bit, where rounding the weights themselves would change them."""
    scene = {"module": {"lr": 0.0}, "max_epochs": 1}
    (exact, _), (first, second) = (
        local(two_ranks, 2, {"dtype": name}, **scene) for name in (None, "int8")
    )
    began = dict(Toy().named_parameters())
    assert all(torch.equal(value, began[name]) for name, value in first.parameters.items())
    apart = [
        (state["momentum_buffer"] - exact.states[0][number]["momentum_buffer"]).abs().max()
        for number, state in first.states[0].items()
    ]
    assert 0 < max(apart) < 0.1
    assert same(final(first), final(second))


def fit_and_reference(every):
    seen = local(None, every)
    module = Toy()
    expected = []
    optimizer = (found := module.configure_optimizers())["optimizer"]
    schedule = found["lr_scheduler"]["scheduler"]
    statistics = [
        one
        for layer in module.modules()
        if isinstance(layer, _BatchNorm)
        for one in layer.buffers()
    ]
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
                        tensor /= 2  # exact, as the sum of two numbers is the same on both ranks
            for state in optimizer.state.values():
                dist.all_reduce(state["momentum_buffer"])
                state["momentum_buffer"] /= 2
        expected.append(values_of(module))
    return [
        torch.equal(one, other) for one, other in zip(values(seen), expected, strict=True)
    ], values(seen)[3]


def test_a_node_of_one_rank_trains_as_one_process_and_the_mean_is_taken_every_so_many_steps(
    two_ranks,
):
    """Bit for bit, against a loop in plain torch: eight steps, means after steps 3 and 6. After step 4 nodes differ."""
    (first, one), (second, other) = two_ranks.run(fit_and_reference, 3)
    assert first == second == [True] * 8
    assert not torch.equal(one, other)


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
        zero, one, two, three = of_ranks = [values(seen)[step] for seen in ranks]
        # statistics follow in the next forward, as ddp's
        assert torch.equal(zero[trained], one[trained])
        assert torch.equal(two[trained], three[trained])
        assert [torch.equal(zero, of_rank) for of_rank in of_ranks[1:]] == [step == 2] * 3
    # with optimizer state, at the end
    assert all(same(final(ranks[0]), final(seen)) for seen in ranks)


def test_a_layerwise_optimizer_with_accumulation_agrees_after_a_mean(four_ranks):
    """Steps of two batches each: a period is two steps, whatever the batches."""
    scene = {
        "module": {"optimizer": "LARS"},
        "precision": "16-true",
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
    }
    ranks = local(four_ranks, 2, ranks_per_node=2, **scene)
    for seen in ranks:
        assert same(final(seen), final(ranks[0]))
        assert all(value.isfinite().all() for value in seen.weights.values())


def test_steps_before_the_local_ones_are_those_of_a_synchronous_run_bit_for_bit(four_ranks):
    """Gradients, running statistics and weights. Then pairs of steps on each node."""
    scene = {"ranks_per_node": 2, "precision": "16-true"}
    whole = local(four_ranks, 1, **scene)
    ranks = local(four_ranks, 2, {"from_step": 2}, **scene)
    for pair in zip(whole, ranks, strict=True):
        assert [torch.equal(*each) for each in zip(*map(values, pair), strict=True)] == [
            True
        ] * 2 + [False] * 2


OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}


def test_the_outer_step_goes_on_along_what_past_periods_have_moved(two_ranks):
    """With rate 1 and no momentum it is the mean. With rate 2 the first common weights lie twice as far."""
    start = values_of(toy.Toy())
    trained = trained_of(toy.Toy())
    options = [{}, {"outer_lr": 1.0}, {"outer_lr": 2.0}, {"outer_lr": 2.0, "outer_momentum": 0.5}]
    mean, one, far, moved = (values(local(two_ranks, 4, outer)[0]) for outer in options)
    assert torch.equal(mean[3], one[3])
    way = far[3] - start
    expected = 2 * (mean[3] - start)
    torch.testing.assert_close(way[trained], expected[trained], rtol=1e-3, atol=1e-6)  # roundings
    assert torch.equal(far[3][~trained], mean[3][~trained])  # running statistics take no outer step
    # d + m / 2
    torch.testing.assert_close(
        (moved[3] - start)[trained], 1.5 * way[trained], rtol=1e-3, atol=1e-6
    )
    assert not torch.equal(moved[7], far[7])


def test_the_mean_is_validated_and_so_is_a_moving_average_of_it(four_ranks):
    """After two steps, with a period of 100: what each rank validates are the same bits, those of the EMA."""
    callbacks = [at(on_validation_batch_start=validated), partial(MasterWeightAveraging, decay=0.5)]
    scene = {
        "val": partial(toy.loader, 16),
        "limit_val_batches": 1,
        "ranks_per_node": 2,
        "callbacks": callbacks,
    }
    ranks = local(four_ranks, 100, **scene)
    for seen in ranks:
        found = seen.looks["on_validation_batch_start"]
        assert same(found, ranks[0].looks["on_validation_batch_start"])
        assert same(final(seen), final(ranks[0]))
        assert not torch.equal(found[0], values(seen)[1])
        assert len(found) == 2


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
    """Saved after step 4, one step into the second period of three."""
    path = tmp_path / "four.ckpt"
    scene = {"precision": precision, "module": {"optimizer": optimizer}, "max_epochs": 3}
    saving = local(two_ranks, 3, options, callbacks=[Saves(path, epoch=0)], **scene)
    resumed, without = (
        local(two_ranks, 3, options, ckpt_path=each, **scene) for each in (path, None)
    )
    for first, again, second in zip(saving, resumed, without, strict=True):
        assert same(final(first), final(again))
        assert same(final(first), final(saving[0]))
        assert not same(final(first), final(second))  # a save ends a period


def test_a_file_of_two_nodes_loads_under_ddp_and_on_another_number_of_nodes(
    two_ranks, four_ranks, tmp_path
):
    """Files hold what all nodes agree on, so nothing in them depends on nodes."""
    path = tmp_path / "last.ckpt"
    saved = local(four_ranks, 5, ranks_per_node=2, precision="16-true", save_to=path)[0]
    of_other_nodes = local(two_ranks, 2, ckpt_path=path)
    for seen in [*fit(two_ranks, Toy, strategy="ddp", ckpt_path=path), *of_other_nodes]:
        assert same(final(seen), final(saved))


def test_a_node_skips_its_own_steps_and_at_the_end_all_agree_on_scale_and_state(two_ranks):
    """Node 1 overflows in each of four steps. It has no momentum yet when node 0 has. Rates fall for both."""
    steps = (0, 1, 2, 3)
    module = {"optimizer": "Adam", "steps": steps}
    ranks = local(two_ranks, 3, precision="16-true", module=module, max_epochs=1)
    for seen in ranks:
        assert same(final(seen), final(ranks[0]))
        assert all(value.isfinite().all() for value in seen.weights.values())
        assert (seen.num_skipped, seen.loss_scale) == (len(steps), ranks[0].loss_scale)
        assert seen.loss_scale <= 2.0 ** (16 - len(steps))
        assert {float(state["step"]) for state in seen.states[0].values()} == {4.0}
        rates = [rate for _, rate, _ in seen.looks["on_train_batch_end"]]
        assert rates == pytest.approx([0.05 * 0.9**step for step in range(1, 5)])


def die(trainer, module, *args):
    if trainer.global_step == 2 and trainer.global_rank == 1:
        raise ArithmeticError("the batch is odd")


def error_of_a_death():
    error = local(None, 3, callbacks=[at(on_train_batch_end=die)], raises=True).error
    dist.destroy_process_group()  # with what Lightning has begun in it; the next test gets another
    return error


def test_an_error_on_one_node_within_a_period_ends_the_other_and_names_the_rank(two_ranks):
    first, second = two_ranks.run(error_of_a_death)
    assert second.startswith("ArithmeticError: the batch is odd")
    assert "comm: rank 1 gave up: ArithmeticError: the batch is odd" in first


def test_on_one_node_a_warning_says_that_there_is_nothing_to_do(two_ranks):
    plain, ranks = (local(two_ranks, every, ranks_per_node=2, warns=True) for every in (1, 2))
    words = "`between_nodes` (=LocalSteps(every=2)) has no effect, because all ranks share one node"
    for rank, seen in enumerate(ranks):
        assert any(text.startswith(words) for text in seen.warnings) == (rank == 0)
        assert same(final(seen), final(plain[rank]))
