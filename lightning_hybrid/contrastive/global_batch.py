"""A loss over more pairs than the activations of a device allow: embeddings are kept, activations made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_hybrid.checks import require_whole
from lightning_hybrid.contrastive.exchange import TreeSum
from lightning_hybrid.models.activation_checkpointing import second_pass


class GlobalBatch(nn.Module):
    """The loss of all pairs of a step, in the memory that `chunk` pairs take.

        z = embed(batch)            chunk by chunk, without activations
        loss = loss(*z)             over the pairs of all ranks
        backward                    dloss/dz, then each chunk once more: d(embed(chunk) . dloss/dz) / dw

    Gradients are those of one batch, as by Gao et al. 2021 (GradCache, arXiv:2101.06983), for about a second forward.
    The second pass of a chunk draws the random numbers of the first (dropout), and does not move BatchNorm's running
    statistics; BatchNorm normalises each chunk by itself. Gradients of chunks are added by a tree: with a loss of this
    package, chunks of `loss.block` and 2^k chunks on 2^j ranks, they have the same bits on 1, 2, 4 ranks, as far as
    the all-reduce of gradients adds by a tree too (`hierarchical` on 2 x 2 ranks does).

    Args:
        loss: takes what `embed` returns: `InfoNCE`, `SigLIP`, `BarlowTwins`, or any of one rank's pairs.
        chunk: pairs that pass through the network at a time.

    In `training_step`: `return self.global_batch(self.embed, batch)`, with the whole share of a rank as the batch.

    Source: Gao et al. 2021 (arXiv:2101.06983).
    """

    couples_the_batch: bool = False  # nor does its loss: the batches of a step are one

    def __init__(self, loss: nn.Module, *, chunk: int = 256) -> None:
        super().__init__()
        require_whole("chunk", chunk, "pairs that pass through the network at a time")
        self.loss, self.chunk = loss, chunk

    def forward(self, embed: Callable[[Any], Any], batch: Any) -> Tensor:
        """Return the loss of the batch.

        Args:
            embed: a module, or a method of one, whose parameters get the gradients; it takes a part of the batch and
                returns a tensor or several, with a row for each pair. Called twice for each part.
            batch: tensors with a row for each pair, in any nest of lists and dictionaries; other values go into each
                part.

        Raises:
            ValueError: `embed` is neither; the batch has no tensor, or tensors of different length.
        """
        module = embed if isinstance(embed, nn.Module) else getattr(embed, "__self__", None)
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"`embed` (={embed!r}) must be a module, or a method of one: its parameters get the gradients. "
                "Move the function into your module."
            )
        parts = _cut(batch, self.chunk)
        if not torch.is_grad_enabled():
            return self.loss(*_joined([_outputs(embed(part)) for part in parts]))
        weights = [one for one in module.parameters() if one.requires_grad]
        return self.loss(*_Chunks.apply(embed, module, parts, *weights))


def _cut(batch: Any, chunk: int) -> list[Any]:
    leaves, spec = tree_flatten(batch)
    lengths = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(lengths) != 1:
        raise ValueError(
            f"the tensors of `batch` (of {sorted(lengths)} rows) must have one number of rows, that of pairs."
        )
    [num_rows] = lengths
    return [
        tree_unflatten(
            [leaf[at : at + chunk] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves], spec
        )
        for at in range(0, num_rows, chunk)
    ]


def _outputs(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def _random_as_now(part: Any) -> AbstractContextManager[None]:
    """Return a context for another pass like the one that begins: its random numbers and autocast."""
    of_cpu, (devices, states) = torch.get_rng_state(), get_device_states(*tree_flatten(part)[0])
    device = "cuda" if devices else "cpu"
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device))

    @contextmanager
    def context() -> Iterator[None]:
        with torch.random.fork_rng(devices), autocast:
            torch.set_rng_state(of_cpu)
            set_device_states(devices, states)
            yield

    return context()


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embed: Callable[[Any], Any], module: nn.Module, parts: list[Any], *weights: Tensor) -> Any:
        ctx.embed, ctx.parts, ctx.again, outputs = embed, parts, [], []
        ctx.save_for_backward(*weights)
        for part in parts:
            ctx.again.append((_random_as_now(part), second_pass(module)))
            outputs.append(_outputs(embed(part)))
        return _joined(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        weights = list(ctx.saved_tensors)
        sums = [TreeSum[Tensor](torch.add) for _ in weights]
        at = 0
        for part, (random, second) in zip(ctx.parts, ctx.again, strict=True):
            with torch.enable_grad(), random, second:
                outputs = _outputs(ctx.embed(part))
            own = [grad[at : at + len(outputs[0])] for grad in grads]
            trained = [pair for pair in zip(outputs, own, strict=True) if pair[0].requires_grad]  # a teacher's are not
            found = torch.autograd.grad(
                [one for one, _ in trained], weights, [grad for _, grad in trained], allow_unused=True
            )
            for tree, grad in zip(sums, found, strict=True):
                if grad is not None:
                    tree.push(grad)
            at += len(outputs[0])
        return None, None, None, *(tree.total() if tree.is_begun else None for tree in sums)
