"""`error_feedback=True` in whole fits: resumed runs, skipped steps, other layouts and other numbers of nodes."""

from types import SimpleNamespace

import pytest
import torch

from lightning_hybrid import Comm, DurableCheckpointIO, HybridAllReduceStrategy, Mean
from lightning_hybrid.comm import CommPlan
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.strategy.feedback_state import ErrorFeedbackExtension
from tests import toy

LONG = pytest.mark.long
LIMIT_S = 240.0  # of several fits, on a machine that has other work to do

# The leader of a node encodes all, or each of its ranks a shard of each small chunk.
BY_LEADER = CommPlan(algorithm="hierarchical")
BY_SHARDS = CommPlan(algorithm="two_level", bucket_bytes=1024, chunk_bytes=512, num_buckets=1)


class Toy(toy.Toy):
    """With a loss of inf on rank 1 in batch `overflows_at`; it saves files at the end of epochs `saves`."""

    overflows_at = -1
    saves: dict = {}

    def __init__(self, **settings):
        super().__init__(**settings)
        self.residuals = []  # after each batch, of all nodes, on rank zero

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_bad = batch_idx == self.overflows_at and self.global_rank == 1
        return loss * torch.inf if is_bad else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.overflows_at >= 0:
            extensions = self.trainer.strategy._extensions
            self.residuals.append(extensions.made[0].collected(extensions.fit))

    def on_train_epoch_end(self):
        path = self.saves.pop(self.current_epoch, None)
        if path is not None:
            self.trainer.save_checkpoint(path)


def fit(codec="int4", *, precision="16-true", resume=None, overflows_at=-1, saves=(), options=None, **settings):
    module = Toy(lr=0.05)
    module.overflows_at, module.saves = overflows_at, dict(saves)
    options = {"between_nodes": Mean(dtype=codec, error_feedback=True), "ranks_per_node": 1, **(options or {})}
    strategy = HybridAllReduceStrategy(**options)
    trainer = toy.trainer(strategy=strategy, precision=precision, **settings)
    trainer.fit(module, toy.loader(), ckpt_path=resume)
    return trainer, {name: value.detach().clone() for name, value in module.named_parameters()}


# ---- resumed runs ----------------------------------------------------------------------------------------------------


def fit_and_resume(codec, precision, path, options, settings):
    kwargs = {"precision": precision, "options": options, **settings}
    _, whole = fit(codec, saves={0: path}, **kwargs)
    _, resumed = fit(codec, resume=path, **kwargs)
    return toy.same_bits(whole, resumed)


@pytest.mark.parametrize(
    ("codec", "precision", "settings"),
    [
        ("int4", "16-true", {}),
        pytest.param("int8", "32-true", {}, marks=LONG),
        pytest.param("int8", "bf16-true", {"accumulate_grad_batches": 2}, marks=LONG),
        pytest.param("int4", "16-true", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, marks=LONG),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(two_ranks, tmp_path, codec, precision, settings):
    path = tmp_path / "one.ckpt"
    assert two_ranks.run(fit_and_resume, codec, precision, path, {}, settings, timeout_s=LIMIT_S) == [True] * 2
    residuals = DurableCheckpointIO().load_checkpoint(path)["error_feedback"]["residuals"]
    assert residuals["net.5.weight"].shape == (2, 16, 48)
    assert all(float(rows.abs().amax()) > 0 for rows in residuals.values())


@pytest.mark.parametrize("options", [{}, {"ranks_per_node": 2, "shard_update": "node"}])
@pytest.mark.long
def test_a_resumed_run_on_four_ranks_too(four_ranks, tmp_path, options):
    """Of four nodes; of two whose ranks share the update."""
    found = four_ranks.run(fit_and_resume, "int4", "16-true", tmp_path / "one.ckpt", options, {}, timeout_s=LIMIT_S)
    assert found == [True] * 4


def fits_by_plan(path):
    options = [{"ranks_per_node": 2, "comm": Comm(plan=plan)} for plan in (BY_LEADER, BY_SHARDS)]
    settings = {"max_epochs": 3}
    _, one = fit(options=options[0], saves={0: path}, **settings)
    _, other = fit(options=options[1], **settings)
    _, resumed = fit(options=options[1], resume=path, **settings)
    return one, toy.same_bits(one, other), toy.same_bits(one, resumed)


def test_residuals_move_to_the_rank_that_encodes_their_block(four_ranks, tmp_path):
    """Neither algorithm and buckets, which DDP makes otherwise in the first step, nor saving change a bit."""
    ranks = four_ranks.run(fits_by_plan, tmp_path / "one.ckpt", timeout_s=LIMIT_S)
    for weights, *same in ranks:
        assert same == [True, True]
        assert toy.same_bits(weights, ranks[0][0])


# ---- skipped steps ---------------------------------------------------------------------------------------------------


def residuals_over_an_overflow(precision):
    trainer, weights = fit(overflows_at=2, precision=precision, max_epochs=1)
    return trainer.lightning_module.residuals, weights


def test_a_skipped_step_leaves_all_residuals_as_they_were(two_ranks):
    """And the loss scale, which falls, does not show in them."""
    (found, weights), (_, other) = two_ranks.run(residuals_over_an_overflow, "16-true", timeout_s=LIMIT_S)
    assert toy.same_bits(found[2], found[1])
    assert not toy.same_bits(found[3], found[2])
    assert all(value.isfinite().all() for value in found[3].values())
    assert toy.same_bits(weights, other)
    assert all(value.isfinite().all() for value in weights.values())


# ---- other numbers of nodes ------------------------------------------------------------------------------------------


def save_as_it_is(path, resume, epochs, ranks_per_node=1):
    trainer, _ = fit(resume=resume, max_epochs=epochs, options={"ranks_per_node": ranks_per_node})
    trainer.save_checkpoint(path)


def owed(path):
    """By the mean gradient, float64, by name."""
    saved = DurableCheckpointIO().load_checkpoint(path)["error_feedback"]
    return {name: rows.double().sum(0) / saved["world_size"] for name, rows in saved["residuals"].items()}


def test_two_nodes_then_two_of_two_ranks_then_four_then_two_owe_the_same(two_ranks, four_ranks, tmp_path):
    first, larger, second, third, fourth = (tmp_path / f"{place}.ckpt" for place in range(5))
    two_ranks.run(save_as_it_is, first, None, 1, timeout_s=LIMIT_S)
    four_ranks.run(save_as_it_is, larger, first, 1, 2, timeout_s=LIMIT_S)  # trains no step: the first epoch is over
    four_ranks.run(save_as_it_is, second, larger, 1, timeout_s=LIMIT_S)
    two_ranks.run(save_as_it_is, third, second, 1, timeout_s=LIMIT_S)
    expected = owed(first)
    for path in (larger, second, third):
        for name, value in owed(path).items():
            ulp = torch.finfo(torch.float32).eps * expected[name].abs()
            assert bool(((value - expected[name]).abs() <= ulp).all()), name
    two_ranks.run(save_as_it_is, fourth, third, 2, timeout_s=LIMIT_S)
    assert not toy.same_bits(owed(fourth), owed(third))


def test_a_file_that_is_saved_while_an_error_ends_the_run_has_no_residuals(monkeypatch):
    """Other ranks may not come to collect them."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    precision = SimpleNamespace(precision="32-true")
    fit = SimpleNamespace(precision=precision, module=None, optimizer_steps=(), failures=SimpleNamespace())
    extension, checkpoint = ErrorFeedbackExtension(fit), {"optimizer_states": []}
    extension._feedback, fit.failures.ending_error = object(), KeyError("label")
    with pytest.warns(UserWarning, match="saved while KeyError ends this rank has no residuals"):
        extension.save(fit, checkpoint)
    assert checkpoint == {"optimizer_states": []}


# ---- what is refused -------------------------------------------------------------------------------------------------


class Manual(toy.Toy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def fit_by_hand():
    strategy = HybridAllReduceStrategy(between_nodes=Mean(dtype="int8", error_feedback=True), ranks_per_node=1)
    toy.trainer(strategy=strategy, precision="16-true").fit(Manual(), toy.loader())


def test_a_fit_is_refused_before_it_trains():
    assert toy.error_of(fit_by_hand).startswith("ValueError: `automatic_optimization` (=False)")


def error_of_unlike_ranks():
    has_feedback = torch.distributed.get_rank() == 0
    return toy.error_of(fit, options={"between_nodes": Mean(dtype="int4", error_feedback=has_feedback)})


def test_ranks_that_want_different_things_learn_of_it_before_training(two_ranks):
    for error in two_ranks.run(error_of_unlike_ranks):
        assert str(Codec(bits=4, error_feedback=True)) in error
        assert str(Codec(bits=4)) in error
