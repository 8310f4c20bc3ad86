"""A loss over more pairs than the memory of a device has activations for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.batch_rows import split_rows
from lightning_hybrid.checks import plain_value, require_whole
from lightning_hybrid.contrastive.embedding import Embedding
from lightning_hybrid.contrastive.two_passes import SecondPass, TwoPasses

_NUM_CHECKED_STEPS = 2
"""Training steps in which user code is checked at length. Averages of weights first move in the second one."""


class GlobalBatch(nn.Module):
    """Loss over all pairs of a step, in the memory that the activations of `chunk` pairs take.

        z = embed(batch)            part by part; activations are freed
        loss = loss(*z)             over the pairs of all ranks
        backward                    dloss/dz, then each part once more: d(embed(part) . dloss/dz) / dw

    Gradients are those of one batch, for about the time of a second forward. The second pass of a part repeats the
    first exactly. It sees the same:

    * parameters and buffers, so that running statistics move once;
    * random numbers: the global ones of torch, NumPy and Python, and those of generators that are attributes of the
      module, in lists, dictionaries and plain objects too;
    * arithmetic: autocast, default dtype, training or evaluation mode.

    Hooks on parameters and `self.log` run once. Other effects of `embed` on Python objects happen twice.

    Parts are as batches of their own for layers that look at a whole batch: BatchNorm normalises each part by itself,
    and a buffer that `embed` writes changes with each part.

    Gradients of parts are added by a tree. With a loss of this package, parts of `loss.block` pairs and 2^k parts on
    2^j ranks they have the same bits on 1, 2, 4 ranks, if the all-reduce of gradients adds by a tree too
    (`hierarchical` on 2 x 2 ranks does).

    Args:
        loss: called with the embeddings: `InfoNCE`, `SigLIP`, `BarlowTwins`, or any loss of one rank's pairs.
        chunk: pairs that pass through the network at a time.

    In `training_step`: `return self.global_batch(self.embed, batch)`, with all pairs of a rank in the batch.

    Source: Gao et al. 2021 (GradCache, arXiv:2101.06983).
    """

    couples_the_batch: bool = False  # its loss does, but the batches of a step are one

    def __init__(self, loss: nn.Module, *, chunk: int = 256) -> None:
        super().__init__()
        chunk = plain_value(chunk)
        require_whole("chunk", chunk, "pairs that pass through the network at a time")
        self.loss = loss
        self.chunk = chunk
        self._num_steps = 0

    def forward(self, embed: Callable[[Any], Any], batch: Any) -> Tensor:
        """Return the loss of the batch.

        Args:
            embed: a module, or a method of one, whose parameters get the gradients. It takes a part of the batch and
                returns a tensor or several, with a row for each pair. It is called twice for each part.
            batch: tensors and NumPy arrays with a row for each pair, and lists with an entry for each pair, in any
                nest of lists, dictionaries, named tuples and dataclasses. Other values go into each part.

        Raises:
            ValueError: `embed` or the batch is something else; `embed` returns other rows, changes parameters, or
                leaves them without a gradient.
            RuntimeError: in backward: parameters have changed since the forward, or `embed` computes something else
                in its second pass.
        """
        embedding = Embedding(embed, self.chunk)
        parts = split_rows(batch, self.chunk)
        if not torch.is_grad_enabled():
            by_part = [embedding.of(part) for part in parts]
            return self.loss(*[torch.cat(values) for values in zip(*by_part, strict=True)])

        is_checked = self._num_steps < _NUM_CHECKED_STEPS
        self._num_steps += 1
        passes = TwoPasses(embedding, loss_parameters=self.loss.parameters(), is_checked=is_checked)
        embeddings = passes.embed_all(parts)
        if any(passes.is_differentiable):
            embeddings = SecondPass.apply(passes, embeddings, *passes.trained)
        return self.loss(*embeddings)
