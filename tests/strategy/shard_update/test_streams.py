"""Reduce-scattered gradients on the CUDA path, with streams and events that only record."""

from types import SimpleNamespace

import torch
from torch import nn

from lightning_hybrid.placement import BLOCK, spans
from lightning_hybrid.strategy.shard_update import gradient_scatter
from lightning_hybrid.strategy.shard_update.gradient_scatter import GradientScatter
from lightning_hybrid.strategy.shard_update.shard_pairs import WeightShard
from tests.comm.engine.test_cuda_streams import cuda, engine_of, fake_world  # noqa: F401  fixtures


def bucket_of(parameters, buffer):
    rows = buffer.split([parameter.numel() for parameter in parameters])
    gradients = [row.view_as(parameter) for row, parameter in zip(rows, parameters, strict=True)]
    values = {
        "parameters": parameters,
        "gradients": gradients,
        "buffer": buffer,
        "index": 0,
        "is_last": False,
    }
    return SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})


class OfTheCpu:
    """Mock of `torch.futures.collect_all` for futures of a device, whose waits order no stream."""

    def __init__(self, futures):
        self.futures = futures

    def then(self, callback):
        value = callback(SimpleNamespace(value=lambda: self.futures))
        return SimpleNamespace(wait=lambda: value)


def test_a_wait_for_a_bucket_orders_the_reads_of_the_rank_s_part_and_of_shared_gradients(
    fake_world,  # noqa: F811
    cuda,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr(gradient_scatter, "collect_all", OfTheCpu)
    large = nn.Parameter(torch.ones(4 * BLOCK))
    small = nn.Parameter(torch.ones(5))
    pairs = {id(large): WeightShard("large", large, spans(large.numel(), 2), 0)}
    engine = engine_of("two_level")
    scatter = GradientScatter(engine, lambda parameter: pairs.get(id(parameter)), is_possible=True)
    scatter.prepare_step(True)
    for _ in range(2):
        buffer = torch.zeros(large.numel() + small.numel()).add_(1)
        future = scatter(bucket_of([large, small], buffer))
        future.wait().mul_(0.1)
    del buffer, future
    torch.zeros(1)  # one more operation, which would reuse memory that was freed too early
    assert cuda.violations == []
    assert cuda.host_waits == []
    engine.close()
