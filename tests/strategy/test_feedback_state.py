"""`error_feedback=True` in whole fits: resumed runs, skipped steps, other layouts and other numbers of nodes."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from lightning_hybrid import Comm, DurableCheckpointIO, Mean
from lightning_hybrid.comm import CommPlan
from lightning_hybrid.strategy.feedback_state import ErrorFeedbackExtension
from tests import scenes, toy
from tests.scenes import Saves, Spoiled, at, same

LONG = pytest.mark.long

# The leader of a node encodes all, or each of its ranks a shard of each small chunk.
BY_LEADER = CommPlan(algorithm="hierarchical")
BY_SHARDS = CommPlan(algorithm="two_level", bucket_bytes=1024, chunk_bytes=512, num_buckets=1)


LOW_RATE = partial(toy.Toy, lr=0.05)


def fit(ranks, codec="int4", module=LOW_RATE, **scene):
    options = {
        "between_nodes": Mean(dtype=codec, error_feedback=True),
        "ranks_per_node": 1,
        "precision": "16-true",
    }
    return scenes.fit(ranks, module, timeout_s=240.0, **options | scene)


def residuals_in(path):
    return DurableCheckpointIO().load_checkpoint(path)["error_feedback"]


@pytest.mark.parametrize(
    ("num_ranks", "codec", "scene"),
    [
        (2, "int4", {}),
        pytest.param(2, "int8", {"precision": "32-true"}, marks=LONG),
        pytest.param(
            2, "int8", {"precision": "bf16-true", "accumulate_grad_batches": 2}, marks=LONG
        ),
        pytest.param(
            2, "int4", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, marks=LONG
        ),
        pytest.param(4, "int4", {}, marks=LONG),
        pytest.param(4, "int4", {"ranks_per_node": 2, "shard_update": "node"}, marks=LONG),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    rank_pool, tmp_path, num_ranks, codec, scene
):
    path = tmp_path / "one.ckpt"
    ranks = rank_pool.ranks(num_ranks)
    whole = fit(ranks, codec, callbacks=[Saves(path, epoch=0)], **scene)
    for first, second in zip(whole, fit(ranks, codec, ckpt_path=path, **scene), strict=True):
        assert same(first.parameters, second.parameters)
    residuals = residuals_in(path)["residuals"]
    assert residuals["net.5.weight"].shape == (num_ranks // scene.get("ranks_per_node", 1), 16, 48)
    assert all(float(rows.abs().amax()) > 0 for rows in residuals.values())


def test_residuals_move_to_the_rank_that_encodes_their_block(four_ranks, tmp_path):
    """Neither algorithm and buckets, which DDP makes otherwise in the first step, nor saving change a bit."""
    path = tmp_path / "one.ckpt"
    scene = {"ranks_per_node": 2, "max_epochs": 3}
    by_leader, by_shards = (Comm(plan=plan) for plan in (BY_LEADER, BY_SHARDS))
    first = fit(four_ranks, comm=by_leader, callbacks=[Saves(path, epoch=0)], **scene)
    others = [fit(four_ranks, comm=by_shards, ckpt_path=each, **scene) for each in (None, path)]
    for seen in [*first, *others[0], *others[1]]:
        assert same(seen.parameters, first[0].parameters)


def of_all_nodes(trainer, module, *args):
    extensions = trainer.strategy._extensions
    return extensions.members[0].collected(extensions.fit)


def test_a_skipped_step_leaves_all_residuals_as_they_were(two_ranks):
    """And the loss scale, which falls, does not show in them."""
    module = partial(Spoiled, batches=(2,), lr=0.05)
    callbacks = [at(on_train_batch_end=of_all_nodes)]
    seen, other = fit(two_ranks, module=module, max_epochs=1, callbacks=callbacks)
    found = seen.looks["on_train_batch_end"]
    assert same(found[2], found[1])
    assert not same(found[3], found[2])
    assert all(value.isfinite().all() for value in found[3].values())
    assert same(seen.parameters, other.parameters)
    assert all(value.isfinite().all() for value in seen.parameters.values())


def owed(path):
    """By the mean gradient, float64, by name."""
    saved = residuals_in(path)
    return {
        name: rows.double().sum(0) / saved["world_size"]
        for name, rows in saved["residuals"].items()
    }


def test_two_nodes_then_two_of_two_ranks_then_four_then_two_owe_the_same(
    two_ranks, four_ranks, tmp_path
):
    first, larger, second, third, fourth = (tmp_path / f"{place}.ckpt" for place in range(5))
    fit(two_ranks, max_epochs=1, save_to=first)
    steps = [(four_ranks, larger, 2), (four_ranks, second, 1), (two_ranks, third, 1)]
    before = first
    for ranks, path, ranks_per_node in steps:  # they train no step: the first epoch is over
        fit(ranks, max_epochs=1, ckpt_path=before, save_to=path, ranks_per_node=ranks_per_node)
        for name, value in owed(path).items():
            ulp = torch.finfo(torch.float32).eps * (expected := owed(first)[name]).abs()
            assert bool(((value - expected).abs() <= ulp).all()), name
        before = path
    fit(two_ranks, max_epochs=2, ckpt_path=third, save_to=fourth)
    assert not same(owed(fourth), owed(third))


def test_a_file_that_is_saved_while_an_error_ends_the_run_has_no_residuals(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    precision = SimpleNamespace(precision="32-true")
    fit = SimpleNamespace(
        precision=precision, module=None, optimizer_steps=(), failures=SimpleNamespace()
    )
    extension = ErrorFeedbackExtension(fit)
    checkpoint = {"optimizer_states": []}
    extension._feedback = object()
    fit.failures.ending_error = KeyError("label")
    with pytest.warns(UserWarning, match="saved while KeyError ends this rank has no residuals"):
        extension.save(fit, checkpoint)
    assert checkpoint == {"optimizer_states": []}


class Manual(toy.Toy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_a_fit_is_refused_before_it_trains():
    assert fit(None, module=Manual, raises=True).error.startswith(
        "ValueError: `automatic_optimization` (=False)"
    )
