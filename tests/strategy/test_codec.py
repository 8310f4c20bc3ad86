"""`comm_dtype_across_nodes="int8"` and `"int4"` in whole fits: the same bits, resumed runs, skipped steps, errors."""

import pytest

from lightning_hybrid import HybridAllReduceStrategy
from lightning_hybrid.comm import CommPlan
from tests import toy

CODECS = pytest.mark.parametrize("codec", ["int8", "int4"])


def fit(codec, *, ranks_per_node=1, plan=None, epochs=2, precision="32-true", resume=None, callbacks=(), **settings):
    module = toy.Toy(lr=0.05)
    strategy = HybridAllReduceStrategy(comm_dtype_across_nodes=codec, ranks_per_node=ranks_per_node, plan=plan)
    trainer = toy.trainer(
        strategy=strategy, precision=precision, max_epochs=epochs, callbacks=list(callbacks), **settings
    )
    trainer.fit(module, toy.loader(), ckpt_path=resume)
    return module, trainer


def fit_on_rank(codec, plans, ranks_per_node, precision):
    found = []
    for plan in plans:
        module, _ = fit(codec, ranks_per_node=ranks_per_node, plan=plan, precision=precision)
        found.append((toy.weights(module), module.losses))
    return found


@CODECS
@pytest.mark.parametrize("precision", ["32-true", "16-true"])
def test_no_bit_depends_on_buckets_chunks_or_groups(two_ranks, codec, precision):
    """Blocks and their noise belong to a gradient: tuning, and DDP's buckets in a resumed step, change nothing."""
    plans = [None, CommPlan(bucket_bytes=512, chunk_bytes=256, num_parallel_groups=1, algorithm="flat", num_buckets=1)]
    ranks = two_ranks.run(fit_on_rank, codec, plans, 1, precision)
    (one, losses), (other, _) = ranks[0]
    assert toy.same_bits(one, other)
    assert toy.same_bits(one, ranks[1][0][0])
    assert losses[-1] < losses[0] / 2
