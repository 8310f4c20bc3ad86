"""`error_feedback=True` in whole fits: resumed runs, skipped steps, other layouts and numbers of nodes."""

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

# Either the leader of a node encodes everything, or each of its ranks encodes a shard of each small chunk.
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
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    rank_pool, tmp_path, num_ranks, codec, scene
):
    path = tmp_path / "epoch0.ckpt"
    ranks = rank_pool.ranks(num_ranks)
    whole = fit(ranks, codec, callbacks=[Saves(path, epoch=0)], **scene)
    resumed = fit(ranks, codec, ckpt_path=path, **scene)
    for rank, seen in enumerate(resumed):
        assert same(seen.parameters, whole[rank].parameters), f"rank {rank}"
    residuals = residuals_in(path)["residuals"]
    num_nodes = num_ranks // scene.get("ranks_per_node", 1)
    assert residuals["net.5.weight"].shape == (num_nodes, 16, 48)
    for name, rows in residuals.items():
        assert float(rows.abs().amax()) > 0, name


def test_residuals_move_to_the_rank_that_encodes_their_block(four_ranks, tmp_path):
    """The algorithm, the buckets (which DDP rebuilds after the first step) and saving do not change a bit."""
    path = tmp_path / "epoch0.ckpt"
    scene = {"ranks_per_node": 2, "max_epochs": 3}
    by_shards = scene | {"comm": Comm(plan=BY_SHARDS)}
    by_leader = scene | {"comm": Comm(plan=BY_LEADER)}
    whole_by_leader = fit(four_ranks, callbacks=[Saves(path, epoch=0)], **by_leader)
    whole_by_shards = fit(four_ranks, **by_shards)
    resumed_by_shards = fit(four_ranks, ckpt_path=path, **by_shards)
    expected = whole_by_leader[0].parameters
    for seen in [*whole_by_leader, *whole_by_shards, *resumed_by_shards]:
        assert same(seen.parameters, expected), f"rank {seen.rank}"


def of_all_nodes(trainer, module, *args):
    extensions = trainer.strategy._extensions
    return extensions.members[0].collected(extensions.fit)


def test_a_skipped_step_leaves_all_residuals_unchanged(two_ranks):
    """A skipped step keeps the residuals although the loss scale falls."""
    module = partial(Spoiled, batches=(2,), lr=0.05)
    callbacks = [at(on_train_batch_end=of_all_nodes)]
    rank_0, rank_1 = fit(two_ranks, module=module, max_epochs=1, callbacks=callbacks)
    residuals = rank_0.looks["on_train_batch_end"]
    assert same(residuals[2], residuals[1])
    assert not same(residuals[3], residuals[2])
    assert all(value.isfinite().all() for value in residuals[3].values())
    assert same(rank_0.parameters, rank_1.parameters)
    assert all(value.isfinite().all() for value in rank_0.parameters.values())


def missing_in_the_mean(path):
    """Return the accumulated error of the mean gradient in float64, by parameter name."""
    saved = residuals_in(path)
    return {
        name: rows.double().sum(0) / saved["world_size"]
        for name, rows in saved["residuals"].items()
    }


def test_residuals_keep_their_sum_on_another_number_of_nodes_and_ranks(
    two_ranks, four_ranks, tmp_path
):
    """The sum stays the same across two nodes of one rank, two of two ranks, four of one rank, and two of one rank."""
    first = tmp_path / "first.ckpt"
    fit(two_ranks, max_epochs=1, save_to=first)
    expected = missing_in_the_mean(first)
    previous = first
    worlds = [(four_ranks, 2), (four_ranks, 1), (two_ranks, 1)]
    for number, (ranks, ranks_per_node) in enumerate(worlds):
        path = tmp_path / f"world{number}.ckpt"
        # No step is trained, because the first epoch has ended.
        fit(ranks, max_epochs=1, ckpt_path=previous, save_to=path, ranks_per_node=ranks_per_node)
        for name, value in missing_in_the_mean(path).items():
            ulp = torch.finfo(torch.float32).eps * expected[name].abs()
            is_close = (value - expected[name]).abs() <= ulp
            assert bool(is_close.all()), f"{name} in world {number}"
        previous = path
    end = tmp_path / "end.ckpt"
    fit(two_ranks, max_epochs=2, ckpt_path=previous, save_to=end)
    assert not same(missing_in_the_mean(end), missing_in_the_mean(previous))


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
    with pytest.warns(
        UserWarning, match="saved after this rank failed with KeyError contains no residuals"
    ):
        extension.save(fit, checkpoint)
    assert checkpoint == {"optimizer_states": []}


class Manual(toy.Toy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_is_refused_before_training():
    seen = fit(None, module=Manual, raises=True)
    assert seen.error.startswith("ValueError: `automatic_optimization` (=False)")
