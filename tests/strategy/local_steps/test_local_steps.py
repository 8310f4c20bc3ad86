"""`LocalSteps`: what each node trains on its own, what is averaged and when, resumed runs, errors."""

import warnings
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid import Comm, HybridAllReduceStrategy, LocalSteps, Mean
from lightning_hybrid.callbacks import MasterWeightAveraging, ReplicaCheck
from lightning_hybrid.comm import CommEngine, CommPlan, Topology
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.strategy.local_steps import node_average
from tests import scenes, toy
from tests.scenes import Saves


class Toy(toy.Toy):
    """With a loss of inf on rank 1 in the batches `overflows`, and a rate that falls in each step."""

    overflows = ()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_bad = self.trainer.global_step in self.overflows and self.global_rank == 1
        return loss * torch.inf if is_bad else loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Seen(Callback):
    """The weights after each batch and in each validation, and the learning rates."""

    def __init__(self):
        self.after, self.validated, self.rates, self.batches = [], [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches.append(batch)
        self.after.append(values_of(module))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_batch_start(self, trainer, module, *_):
        if not trainer.sanity_checking:
            self.validated.append(values_of(module))


def values_of(module):
    """Parameters and running statistics in one row."""
    return torch.cat([value.detach().float().reshape(-1) for _, value in sorted(module.state_dict().items())])


def fit(
    every,
    *,
    optimizer="SGD",
    precision="32-true",
    ranks_per_node=1,
    overflows=(),
    resume=None,
    options=None,
    lr=0.05,
    **settings,
):
    module, seen = Toy(lr=lr, optimizer=optimizer), Seen()
    module.overflows = overflows
    between_nodes = LocalSteps(every=every, **(options or {})) if every > 1 else Mean()
    strategy = HybridAllReduceStrategy(
        between_nodes=between_nodes, ranks_per_node=ranks_per_node, comm=Comm(tune="off")
    )
    callbacks = [seen, *settings.pop("callbacks", ())]
    settings = {"limit_val_batches": 0, **settings}
    trainer = toy.trainer(strategy=strategy, precision=precision, callbacks=callbacks, **settings)
    trainer.fit(module, toy.loader(), toy.loader(16), ckpt_path=resume)
    return trainer, seen


def final(trainer):
    """Weights, statistics and optimizer state."""
    state = trainer.optimizers[0].state_dict()["state"]
    moments = [
        value.reshape(-1).float() for _, one in sorted(state.items()) for value in one.values() if value is not None
    ]
    return torch.cat([values_of(trainer.lightning_module), *moments])


# ---- what is averaged ------------------------------------------------------------------------------------------------


def tensors_of_node(node):
    """Numbers of 14 bits, in dtypes and layouts of parameters and state; means of two of them are exact in float32."""
    generator = torch.Generator().manual_seed(node)

    def draw(*shape):
        return torch.randint(-(2**13), 2**13 + 1, shape, generator=generator) / 2**10

    channels_last = draw(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return [
        draw(5, 7),
        draw(3).double(),
        draw(4).round().bfloat16(),
        channels_last,
        draw(6, 4)[:, ::2],
        draw(2, 2) * 1j,
        draw(0),
    ]


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
    with patch.object(node_average, "CHUNK_NUMEL", chunk_numel):
        node_average.NodeAverage(engine).average_(tensors, is_narrow=is_narrow)
    engine.close()
    return tensors


@pytest.mark.parametrize("algorithm", ["flat", "hierarchical", "two_level"])
def test_an_average_counts_each_node_once_whatever_carries_it(four_ranks, algorithm):
    expected = [(one + other) / 2 for one, other in zip(tensors_of_node(0), tensors_of_node(1), strict=True)]
    for found in four_ranks.run(averaged, algorithm):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("across", [Codec(bits=8), Codec(bits=4), torch.bfloat16], ids=str)
def test_an_average_travels_narrower_only_where_it_is_asked_for(four_ranks, across):
    """14 bits are more than bfloat16 has, and codes of 8 / 127 and 8 / 7."""
    expected = [(one + other) / 2 for one, other in zip(tensors_of_node(0), tensors_of_node(1), strict=True)]
    for found in four_ranks.run(averaged, "two_level", across, 1024):
        assert all(map(torch.equal, found, expected))
    narrow = four_ranks.run(averaged, "two_level", across, 1024, True)
    for found in narrow:
        assert all(map(torch.equal, found, narrow[0]))
        assert torch.equal(found[1], expected[1])  # float64
        assert 0 < (found[0] - expected[0]).abs().max() < 8


def fit_at_rate_zero(across):
    """How far weights are from where they began, and momentum from that of fp32."""
    (exact, _), (narrow, _) = (
        fit(2, ranks_per_node=1, lr=0.0, options={"dtype": name}, max_epochs=1) for name in (None, across)
    )
    trained = trained_of(toy.Toy())
    moved = (values_of(narrow.lightning_module) - values_of(Toy()))[trained].abs().max()
    return float(moved), float((final(narrow) - final(exact)).abs().max()), final(narrow)


def test_a_codec_rounds_what_weights_have_moved_and_momentum(two_ranks):
    """Weights that have not moved stay to the bit, where rounding the weights themselves would change them."""
    (moved, apart, first), (_, _, second) = two_ranks.run(fit_at_rate_zero, "int8")
    assert moved == 0
    assert 0 < apart < 0.1
    assert torch.equal(first, second)


def fit_and_reference(every):
    """The weights after each step, and those of a loop in plain torch over this rank's batches."""
    _, seen = fit(every)
    module, expected = Toy(lr=0.05), []
    optimizer, schedule = (found := module.configure_optimizers())["optimizer"], found["lr_scheduler"]["scheduler"]
    statistics = [one for layer in module.modules() if isinstance(layer, _BatchNorm) for one in layer.buffers()]
    for step, batch in enumerate(seen.batches):
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
    return [torch.equal(one, other) for one, other in zip(seen.after, expected, strict=True)], seen.after[3]


def test_a_node_of_one_rank_trains_as_one_process_and_the_mean_is_taken_every_so_many_steps(two_ranks):
    """Bit for bit, against a loop in plain torch: eight steps, means after steps 3 and 6; after step 4 nodes differ."""
    (first, one), (second, other) = two_ranks.run(fit_and_reference, 3)
    assert first == second == [True] * 8
    assert not torch.equal(one, other)


def equal_steps(precision, optimizer, across):
    callbacks, options = [ReplicaCheck(every_n_steps=1)], {"dtype": across}
    trainer, seen = fit(
        3, precision=precision, optimizer=optimizer, ranks_per_node=2, callbacks=callbacks, options=options
    )
    return seen.after, seen.rates, final(trainer)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("precision", "across"), [("32-true", None), ("16-true", "int4"), ("bf16-true", None), ("bf16-true", "int8")]
)
def test_ranks_of_a_node_agree_at_each_step_and_all_ranks_after_a_mean(four_ranks, precision, across):
    ranks, trained = four_ranks.run(equal_steps, precision, "Adam", across), trained_of(toy.Toy())
    for step in range(4):
        of_ranks = [after[step] for after, _, _ in ranks]
        assert torch.equal(
            of_ranks[0][trained], of_ranks[1][trained]
        )  # statistics follow in the next forward, as ddp's
        assert torch.equal(of_ranks[2][trained], of_ranks[3][trained])
        assert [torch.equal(of_ranks[0], other) for other in of_ranks[1:]] == [step == 2] * 3
    assert all(torch.equal(ranks[0][2], last) for _, _, last in ranks)  # with optimizer state, at the end


class Layerwise(Toy):
    """With LARS along the orthogonalised momentum, or LAMB, which look at norms of whole tensors."""

    def configure_optimizers(self):
        if self.optimizer_name == "LAMB":
            return LAMB(self.parameters(), lr=0.01, weight_decay=0.01)
        return LARS(self.parameters(), lr=4.0, direction="orthogonal")


def fit_layerwise(name):
    found = []
    for between_nodes in (Mean(), LocalSteps(every=2)):
        module = Layerwise(optimizer=name)
        strategy = HybridAllReduceStrategy(between_nodes, ranks_per_node=2, comm=Comm(tune="off"))
        trainer = toy.trainer(strategy=strategy, precision="16-true", max_epochs=4, accumulate_grad_batches=2)
        trainer.fit(module, toy.loader())
        found.append(final(trainer))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_layerwise_optimizers_with_accumulation_agree_after_a_mean(four_ranks, name):
    """Steps of two batches each: a period is two steps, whatever the batches."""
    ranks = four_ranks.run(fit_layerwise, name)
    for whole, local in ranks:
        assert torch.equal(local, ranks[0][1])
        assert local.isfinite().all()
        assert not torch.equal(local, whole)


def fit_in_phases():
    found = []
    for every, from_step in ((1, 0), (2, 100), (2, 4)):
        options = {"from_step": from_step}
        found.append(fit(every, ranks_per_node=2, precision="16-true", options=options, max_epochs=4)[1].after)
    return found


def test_steps_before_the_local_ones_are_those_of_a_synchronous_run_bit_for_bit(four_ranks):
    """Gradients, running statistics and masters; then pairs of steps on each node."""
    for whole, late, four in four_ranks.run(fit_in_phases):
        assert all(map(torch.equal, whole, late))
        assert [torch.equal(*pair) for pair in zip(whole, four, strict=True)] == [True] * 4 + [False] * 4


def fit_with_outer_step(outer_step):
    _, seen = fit(4, options=outer_step)
    return seen.after[3], seen.after[7]


def test_the_outer_step_goes_on_along_what_past_periods_have_moved(two_ranks):
    """With rate 1 and no momentum it is the mean; with rate 2 the first common weights lie twice as far."""
    start = torch.cat([one.detach().reshape(-1) for _, one in sorted(toy.Toy().named_parameters())])
    (mean, _), (same, _), (far, far_end), (_, moved) = (
        two_ranks.run(fit_with_outer_step, outer)[0]
        for outer in ({}, {"outer_lr": 1.0}, {"outer_lr": 2.0}, {"outer_lr": 2.0, "outer_momentum": 0.5})
    )
    trained = trained_of(toy.Toy())
    assert torch.equal(mean, same)
    torch.testing.assert_close(far[trained] - start, 2 * (mean[trained] - start), rtol=1e-3, atol=1e-6)  # roundings
    assert torch.equal(far[~trained], mean[~trained])  # running statistics take no outer step
    assert not torch.equal(moved, far_end)


def trained_of(module):
    """Which elements of `values_of` are parameters."""
    names = {name for name, _ in module.named_parameters()}
    kinds = [torch.full((value.numel(),), name in names) for name, value in sorted(module.state_dict().items())]
    return torch.cat(kinds)


def fit_with_validation():
    ema = MasterWeightAveraging(decay=0.5)
    trainer, seen = fit(100, callbacks=[ema], ranks_per_node=2, limit_val_batches=1)
    return torch.stack(seen.validated), final(trainer), seen.after[1]


def test_the_mean_is_validated_and_so_is_a_moving_average_of_it(four_ranks):
    """After two steps, with a period of 100: what each rank validates are the same bits, those of the EMA."""
    ranks = four_ranks.run(fit_with_validation)
    for validated, last, after in ranks:
        assert torch.equal(validated, ranks[0][0])
        assert torch.equal(last, ranks[0][1])
        assert not torch.equal(validated[0], after)
    assert len(ranks[0][0]) == 2


# ---- bytes -----------------------------------------------------------------------------------------------------------


def bytes_of(ranks, every, options):
    between_nodes = LocalSteps(every=every, **options) if every > 1 else Mean()
    settings = {"between_nodes": between_nodes, "ranks_per_node": 2, "comm": Comm(tune="off"), "max_epochs": 4}
    sent = scenes.fit(ranks, **settings)[0].sent
    return sent.bytes_across, sent.num_steps, sent.exposed_s


def test_nodes_send_each_other_weights_and_momentum_once_in_so_many_steps(four_ranks):
    """Eight steps of two ranks on a node: two periods of four. BatchNorm's statistics are two rows of four."""
    whole, steps, _ = bytes_of(four_ranks, 1, {})
    num_blocks = -(-sum(one.numel() for one in Toy().parameters()) // 256)
    for options, once in (
        ({}, 2 * whole / 8),
        (OUTER, 2 * whole / 8),
        ({"dtype": "bf16"}, whole / 8),
        ({"dtype": "int8"}, 2 * num_blocks * (256 + 2)),
        ({"dtype": "int4"}, 2 * num_blocks * (128 + 2)),
    ):
        part, local_steps, exposed_s = bytes_of(four_ranks, 4, options)
        assert local_steps == steps == 8
        statistics = 2 * 8 * 4
        assert part == pytest.approx(2 * once + statistics)
        assert exposed_s > 0


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def fit_and_resume(path, precision, optimizer, options):
    kind = {"precision": precision, "optimizer": optimizer, "options": options, "max_epochs": 3}
    saving, _ = fit(3, callbacks=[Saves(path, epoch=0)], **kind)
    resumed, _ = fit(3, resume=path, **kind)
    return final(saving), final(resumed), final(fit(3, **kind)[0])


OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}
INT4 = {"dtype": "int4"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("precision", "optimizer", "options"),
    [
        ("32-true", "SGD", {}),
        ("16-true", "Adam", OUTER),
        ("bf16-true", "SGD", OUTER),
        ("16-true", "SGD", INT4),
        ("32-true", "Adam", INT4 | OUTER),
    ],
)
def test_a_run_resumed_within_a_period_has_the_bits_of_one_that_saved_there_too(
    two_ranks, tmp_path, precision, optimizer, options
):
    """Saved after step 4, one step into the second period of three."""
    ranks = two_ranks.run(fit_and_resume, tmp_path / "four.ckpt", precision, optimizer, options)
    for whole, resumed, without_saves in ranks:
        assert torch.equal(whole, resumed)
        assert torch.equal(whole, ranks[0][0])
        assert not torch.equal(whole, without_saves)  # a save ends a period


def save_after_two_epochs(path):
    trainer, _ = fit(5, ranks_per_node=2, precision="16-true", max_epochs=2)
    trainer.save_checkpoint(path)
    return final(trainer)


def go_on(path, strategy, ranks_per_node):
    module = Toy(lr=0.05)
    if strategy != "ddp":
        strategy = HybridAllReduceStrategy(
            between_nodes=LocalSteps(every=2), comm=Comm(tune="off"), ranks_per_node=ranks_per_node
        )
    trainer = toy.trainer(strategy=strategy, max_epochs=2)
    trainer.fit(module, toy.loader(), ckpt_path=path)
    return final(trainer)


def test_a_file_of_two_nodes_loads_under_ddp_and_on_another_number_of_nodes(two_ranks, four_ranks, tmp_path):
    """Files hold what all nodes agree on, so nothing in them depends on nodes."""
    saved = four_ranks.run(save_after_two_epochs, tmp_path / "last.ckpt")[0]
    for strategy, ranks_per_node in (("ddp", None), ("hybrid_allreduce", 1)):
        for found in two_ranks.run(go_on, tmp_path / "last.ckpt", strategy, ranks_per_node):
            assert torch.equal(found, saved)


# ---- overflow --------------------------------------------------------------------------------------------------------


def fit_with_overflow(every, overflows, optimizer="Adam"):
    trainer, seen = fit(every, precision="16-true", optimizer=optimizer, overflows=overflows, max_epochs=1)
    plugin, state = trainer.precision_plugin, trainer.optimizers[0].state_dict()["state"]
    steps = {float(one["step"]) for one in state.values() if "step" in one}
    return final(trainer), plugin.num_skipped_steps, plugin.loss_scale.value, seen.rates, steps


def test_a_node_skips_its_own_steps_and_at_the_end_all_agree_on_scale_and_state(two_ranks):
    """Node 1 overflows in the first two of four steps. It has no momentum yet when node 0 has; rates fall for both."""
    ranks = two_ranks.run(fit_with_overflow, 3, (0, 1))
    for last, num_skipped, scale, rates, steps in ranks:
        assert torch.equal(last, ranks[0][0])
        assert last.isfinite().all()
        assert (num_skipped, scale, steps) == (2, 2.0**14, {4.0})
        assert rates == pytest.approx([0.05 * 0.9**step for step in range(1, 5)])


def test_a_node_that_has_skipped_all_its_steps_takes_the_mean_of_what_others_have(two_ranks):
    ranks = two_ranks.run(fit_with_overflow, 3, (0, 1, 2, 3), "SGD")
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert ranks[0][1:3] == ranks[1][1:3] == (4, 2.0**12)


# ---- failures --------------------------------------------------------------------------------------------------------


class Drifts(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == 2 and trainer.global_rank in (1, 3):
            with torch.no_grad():
                next(module.parameters()).view(-1)[0] += 1


class Dies(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == 2 and trainer.global_rank == 1:
            raise ArithmeticError("the batch is odd")


def error_in(callback, ranks_per_node):
    callbacks = [callback, ReplicaCheck(every_n_steps=1)]
    error = toy.error_of(fit, 3, ranks_per_node=ranks_per_node, callbacks=callbacks)
    dist.destroy_process_group()  # with what Lightning has begun in it; the next test gets another
    return error


def test_a_rank_that_drifts_from_its_node_is_found_before_the_mean(four_ranks):
    """In both nodes, which find it by themselves."""
    for error in four_ranks.run(error_in, Drifts(), 2):
        assert error.startswith(
            "ReplicaDriftError: The ranks no longer hold the same model; they parted between steps 1"
        )


def test_an_error_on_one_node_within_a_period_ends_the_other_and_names_the_rank(two_ranks):
    first, second = two_ranks.run(error_in, Dies(), 1)
    assert second == "ArithmeticError: the batch is odd"
    assert "comm: rank 1 gave up: ArithmeticError: the batch is odd" in first


# ---- what is refused -------------------------------------------------------------------------------------------------


def fit_on_one_node():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one = final(fit(2, ranks_per_node=2)[0])
    told = [str(each.message) for each in caught if "nothing to do" in str(each.message)]
    return told, torch.equal(one, final(fit(1, ranks_per_node=2)[0]))


def test_on_one_node_a_warning_says_that_there_is_nothing_to_do(two_ranks):
    (warned, same), (silent, also_same) = two_ranks.run(fit_on_one_node)
    assert warned[0].startswith("`between_nodes` (=LocalSteps(every=2)) has nothing to do: all ranks share one node")
    assert silent == []
    assert same
    assert also_same
