"""`Mean(dtype="int8")` and `"int4"` in whole fits: the same bits, resumed runs, skipped steps, errors."""

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from lightning_hybrid import Comm, HybridAllReduceStrategy, Mean
from lightning_hybrid.callbacks import TrainingMetrics
from lightning_hybrid.comm import CommPlan, Topology
from lightning_hybrid.comm.codec.coded_plan import plan_for_codec
from lightning_hybrid.flavours import fabric as fabric_flavour
from tests import toy

CODECS = pytest.mark.parametrize("codec", ["int8", "int4"])
CASES = [("int8", "16-true"), ("int8", "32-true"), ("int4", "32-true"), ("int4", "16-true")]


class Toy(toy.Toy):
    """With a loss of inf on rank 1 in its fourth batch, if `overflows`."""

    overflows = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_bad = self.overflows and batch_idx == 3 and self.global_rank == 1
        return loss * torch.inf if is_bad else loss


def fit(codec, *, plan=None, precision="32-true", resume=None, ranks_per_node=1, overflows=False, **settings):
    module = Toy(lr=0.05)
    module.overflows = overflows
    strategy = HybridAllReduceStrategy(
        between_nodes=Mean(dtype=codec), comm=Comm(plan=plan), ranks_per_node=ranks_per_node
    )
    trainer = toy.trainer(strategy=strategy, precision=precision, **settings)
    trainer.fit(module, toy.loader(), ckpt_path=resume)
    return trainer, {name: value.detach().clone() for name, value in module.named_parameters()}


def fit_by_plans(codec, plans, precision):
    found = []
    for plan in plans:
        trainer, weights = fit(codec, plan=plan, precision=precision)
        found.append((weights, trainer.lightning_module.losses))
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("codec", "precision"), CASES)
def test_no_bit_depends_on_rank_buckets_chunks_or_groups(two_ranks, codec, precision):
    """Blocks and their noise belong to a gradient: tuning, and DDP's buckets in a resumed step, change nothing."""
    small = CommPlan(bucket_bytes=512, chunk_bytes=256, num_parallel_groups=1, algorithm="flat", num_buckets=1)
    ranks = two_ranks.run(fit_by_plans, codec, [None, small], precision)
    weights, losses = ranks[0][0]
    for other in (ranks[0][1], *ranks[1]):
        assert toy.same_bits(weights, other[0])
    assert losses[-1] < losses[0] / 2


def fit_and_resume(codec, path, precision):
    _, whole = fit(codec, precision=precision, max_epochs=3)
    trainer, _ = fit(codec, precision=precision, max_epochs=1)
    trainer.save_checkpoint(path)
    _, resumed = fit(codec, precision=precision, max_epochs=3, resume=path)
    _, other = fit("float16", precision=precision, max_epochs=3)
    return toy.same_bits(whole, resumed), toy.same_bits(whole, other)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("codec", "precision"), CASES)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(two_ranks, tmp_path, codec, precision):
    assert two_ranks.run(fit_and_resume, codec, tmp_path / "last.ckpt", precision) == [(True, False)] * 2


def fit_with_overflow(codec):
    trainer, weights = fit(codec, precision="16-true", overflows=True, max_epochs=1)
    return weights, trainer.precision_plugin.num_skipped_steps, trainer.precision_plugin.loss_scale.value


@CODECS
def test_an_overflow_on_one_rank_skips_the_step_on_all_as_in_float16(two_ranks, codec):
    expected = two_ranks.run(fit_with_overflow, "float16")
    for found, other in zip(two_ranks.run(fit_with_overflow, codec), expected, strict=True):
        assert all(value.isfinite().all() for value in found[0].values())
        assert found[1:] == other[1:]
        assert found[1] == 1


def metrics_of(codec, ranks_per_node):
    callbacks = [TrainingMetrics(skip_steps=0)]
    trainer, _ = fit(codec, ranks_per_node=ranks_per_node, callbacks=callbacks, log_every_n_steps=1, max_epochs=1)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_what_rounding_costs_is_logged(four_ranks):
    """Of blocks with a few elements each, rotated: the error is some per cent of the gradient, and in 8 bits none."""
    found = [four_ranks.run(metrics_of, codec, 2)[0] for codec in ("int8", "int4", "float16")]
    assert 1e-6 < found[0]["comm/quantisation_nmse"] < 1e-3
    assert 1e-3 < found[1]["comm/quantisation_nmse"] < 0.1
    assert "comm/quantisation_nmse" not in found[2]
    assert found[0]["comm/link_bytes"] > found[1]["comm/link_bytes"]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["flat", "parallel_flat"])
def test_an_algorithm_without_a_sum_of_each_node_is_refused_before_training(four_ranks, algorithm):
    for error in four_ranks.run(error_of_fit, algorithm):
        assert error.startswith(f"ValueError: `algorithm` (='{algorithm}') has no stage between nodes, and")
        assert error.endswith("and such a `strategy.comm.plan` out, or set it to hierarchical.")


def error_of_fit(algorithm):
    return toy.error_of(fit, "int8", ranks_per_node=2, plan=CommPlan(algorithm=algorithm))


def error_of_ranks_with(settings):
    return toy.error_of(fit, settings[dist.get_rank()])


def test_ranks_with_other_settings_are_named_on_all_before_training(two_ranks):
    for settings in (["int8", "int4"], ["int4", None]):
        for error in two_ranks.run(error_of_ranks_with, settings):
            assert error.startswith("ValueError: the plan of communication must be the same on all ranks: ")
            assert "`dtype_across_nodes`" in error


def fit_shared(shard_update):
    module = Toy(lr=0.05)
    strategy = HybridAllReduceStrategy(between_nodes=Mean(dtype="int8"), ranks_per_node=2, shard_update=shard_update)
    trainer = toy.trainer(strategy=strategy, precision="16-true", max_epochs=1)
    trainer.fit(module, toy.loader())
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def test_the_shared_update_goes_with_a_codec_to_the_bit(four_ranks):
    whole, shared = (four_ranks.run(fit_shared, setting) for setting in ("off", "node"))
    assert toy.same_bits(whole[0], shared[0])
    assert toy.same_bits(shared[0], shared[3])


def test_plans_in_which_nodes_add_up_first_are_taken_and_auto_makes_one_on_cuda():
    even, uneven = Topology(rank=0, nodes=((0, 1), (2, 3))), Topology(rank=0, nodes=((0, 1), (2,)))
    lone, one = Topology(rank=0, nodes=((0,), (1,))), Topology(rank=0, nodes=((0, 1),))

    def chosen(algorithm, topology, on_cuda=False):
        return plan_for_codec(CommPlan(algorithm=algorithm), topology, bits=4, on_cuda=on_cuda).algorithm

    assert [chosen("auto", each, on_cuda=True) for each in (even, uneven)] == ["two_level", "hierarchical"]
    assert [chosen("auto", each, on_cuda=True) for each in (lone, one)] == ["auto", "auto"]
    assert [chosen("flat", each) for each in (lone, one)] == ["flat", "flat"]
    assert [chosen(each, even) for each in ("auto", "hierarchical", "two_level")] == [
        "auto",
        "hierarchical",
        "two_level",
    ]
    with pytest.raises(ValueError, match=r"^`algorithm` \(='two_level'\) needs nodes of equal size, and .*'int4'"):
        chosen("two_level", uneven)


# ---- Fabric ----------------------------------------------------------------------------------------------------------


def weights_by_fabric(codec):
    strategy = fabric_flavour.HybridAllReduceStrategy(between_nodes=Mean(dtype=codec), ranks_per_node=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = toy.Toy()
    before = toy.weights(module.net)
    model = fabric.setup_module(module.net)
    for images, targets in toy.loader():
        images = images + fabric.global_rank  # another gradient on every rank
        fabric.backward(torch.nn.functional.cross_entropy(model(images), targets))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    strategy.teardown()
    found = {name: value.detach().clone() for name, value in module.net.named_parameters()}
    return found, toy.same_bits(found, {name: before[name] for name in found})


def test_fabric_has_it_too(two_ranks):
    (one, is_unchanged), (other, _) = two_ranks.run(weights_by_fabric, "int4")
    assert toy.same_bits(one, other)
    assert not is_unchanged
