"""`error_feedback=True` in whole fits: resumed runs, skipped steps, other layouts and other numbers of nodes."""

import pytest
import torch

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.comm import CommPlan
from tests import toy

SMALL = CommPlan(bucket_bytes=512, chunk_bytes=256, num_parallel_groups=1, algorithm="flat", num_buckets=1)


class Toy(toy.Toy):
    """With a loss of inf on rank 1 in its fourth batch, if `overflows`; it saves files at the end of some epochs."""

    overflows = False
    saves: dict = {}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_bad = self.overflows and batch_idx == 3 and self.global_rank == 1
        return loss * torch.inf if is_bad else loss

    def on_train_epoch_end(self):
        path = self.saves.pop(self.current_epoch, None)
        if path is not None:
            self.trainer.save_checkpoint(path)


def fit(
    codec="int4",
    *,
    plan=None,
    precision="32-true",
    resume=None,
    ranks_per_node=1,
    overflows=False,
    saves=(),
    feedback=True,
    options=None,
    **settings,
):
    module = Toy(lr=0.05)
    module.overflows, module.saves = overflows, dict(saves)
    strategy = HybridAllReduceStrategy(
        comm_dtype_across_nodes=codec,
        error_feedback=feedback,
        ranks_per_node=ranks_per_node,
        plan=plan,
        **(options or {}),
    )
    trainer = toy.trainer(strategy=strategy, precision=precision, **settings)
    trainer.fit(module, toy.loader(), ckpt_path=resume)
    return trainer, {name: value.detach().clone() for name, value in module.named_parameters()}


def fit_and_resume(codec, path, precision, ranks_per_node):
    kwargs = {"precision": precision, "ranks_per_node": ranks_per_node}
    _, whole = fit(codec, max_epochs=3, **kwargs)
    _, saving = fit(codec, max_epochs=3, saves={1: path}, **kwargs)
    _, resumed = fit(codec, max_epochs=3, resume=path, **kwargs)
    _, without = fit(codec, max_epochs=3, feedback=False, **kwargs)
    return [toy.same_bits(whole, other) for other in (saving, resumed, without)]


@pytest.mark.parametrize(("codec", "precision"), [("int4", "16-true"), ("int8", "32-true")])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(two_ranks, tmp_path, codec, precision):
    """And saving in mid-run changes nothing."""
    for found in two_ranks.run(fit_and_resume, codec, tmp_path / "one.ckpt", precision, 1):
        assert found == [True, True, False]


def fits_by_plan(precision):
    plans = [
        CommPlan(algorithm="hierarchical"),
        CommPlan(algorithm="two_level", bucket_bytes=1024, chunk_bytes=512, num_buckets=1),
    ]
    return [fit(plan=plan, precision=precision, ranks_per_node=2, max_epochs=3)[1] for plan in plans]


def test_dbg_four(four_ranks, tmp_path):
    ranks = four_ranks.run(fits_by_plan, "16-true")
    for a, b in ranks:
        assert toy.same_bits(a, ranks[0][0])
        assert toy.same_bits(a, b)


def test_dbg_four_resume(four_ranks, tmp_path):
    for found in four_ranks.run(fit_and_resume, "int4", tmp_path / "one.ckpt", "16-true", 2):
        assert found == [True, True, False]


def test_dbg_four_nodes(four_ranks, tmp_path):
    for found in four_ranks.run(fit_and_resume, "int4", tmp_path / "one.ckpt", "16-true", 1):
        assert found == [True, True, False]
