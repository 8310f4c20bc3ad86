"""Baseline strategies of the benchmarks: DDP with fp16 gradients, and a hybrid all-reduce that sends nothing."""

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid import HybridAllReduceStrategy

# No `from __future__ import annotations` in this file: DistributedDataParallel compares the hook's annotations with
# classes, and rejects strings.


class CompressedDDPStrategy(DDPStrategy):
    """DDP strategy that uses torch's `fp16_compress_hook` even on the CPU, where Lightning ignores such hooks."""

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, fp16_compress_hook)


class SilentStrategy(HybridAllReduceStrategy):
    """Hybrid all-reduce strategy that sends no gradients, for timing steps without communication."""

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, keep_bucket)


def keep_bucket(state: object, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return a gradient bucket unchanged. This DDP communication hook sends nothing."""
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future
