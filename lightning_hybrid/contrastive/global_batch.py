"""Contrastive loss over batches whose activations do not fit into memory."""

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
"""Number of training steps with slow checks of user code. Averages of weights first change in the second step."""


class GlobalBatch(nn.Module):
    """Contrastive loss over all pairs of a step, with activations of only `chunk` pairs in memory.

        z = embed(batch)            chunk by chunk; activations are freed
        loss = loss(*z)             over the pairs of all ranks
        backward                    dloss/dz, then each chunk again: d(embed(chunk) . dloss/dz) / dw

    The gradients equal those of one large batch, at the cost of about one additional forward. The second pass of
    a chunk repeats the first pass exactly. It uses the same:

    * parameters and buffers, so that running statistics are updated once;
    * random numbers: from the global generators of torch, NumPy and Python, and from generators that are attributes of
      the module, including generators in lists, dictionaries and plain objects;
    * arithmetic: autocast, default dtype, training or evaluation mode.

    Hooks on parameters and `self.log` run once. Other effects of `embed` on Python objects happen
    twice.

    Layers that depend on the whole batch treat each chunk as a batch: BatchNorm normalizes each
    chunk by itself, and a buffer that `embed` writes changes with each chunk.

    Gradients of chunks are added over a binary tree. With a loss of this package, chunks of
    `loss.block` pairs and 2^k chunks on 2^j ranks, they are bit-identical on 1, 2 and 4 ranks if
    the all-reduce of gradients also uses a tree, as `hierarchical` on 2 x 2 ranks does.

    Args:
        loss: Module that is called with the embeddings: `InfoNCE`, `SigLIP`, `BarlowTwins`, or any loss of one rank's
            pairs.
        chunk: Number of pairs that pass through the network at a time.

    In `training_step`, write `return self.global_batch(self.embed, batch)`, with all pairs of a
    rank in the batch.

    Source: Gao et al. 2021 (GradCache, arXiv:2101.06983).
    """

    # False although it is True for the loss, because this module treats all pairs of a step as one batch.
    couples_the_batch: bool = False

    def __init__(self, loss: nn.Module, *, chunk: int = 256) -> None:
        super().__init__()
        chunk = plain_value(chunk)
        require_whole(
            "chunk", chunk, "the network processes this number of pairs at a time. Set chunk=256"
        )
        self.loss = loss
        self.chunk = chunk
        self._num_steps = 0

    def forward(self, embed: Callable[[Any], Any], batch: Any) -> Tensor:
        """Embed the batch chunk by chunk, and return the contrastive loss.

        Args:
            embed: Module, or method of a module, whose parameters receive the gradients. It takes a chunk of the
                batch and returns one or more tensors with a row for each pair. It is called twice for each chunk.
            batch: Tensors and NumPy arrays with a row for each pair, and lists with an entry for each pair, in any
                nesting of lists, dictionaries, named tuples and dataclasses. Other values are passed to each chunk
                unchanged.

        Raises:
            ValueError: `embed` or the batch has the wrong type, or `embed` returns the wrong number of rows, changes
                parameters or leaves them without a gradient.
            RuntimeError: Raised in backward if parameters have changed since the forward, or `embed` computes different
                results in its second pass.
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
