"""Two passes over the chunks of a batch, the first for embeddings and the second for gradients.

The second pass repeats the first pass exactly.

    forward     chunk -> embeddings; the state at its start is stored, and activations are freed
    backward    chunk, gradients of its embeddings -> embeddings again -> gradients of parameters, summed over chunks
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.batch_rows import BatchPart, requires_grad
from lightning_hybrid.contrastive.embedding import Embedding
from lightning_hybrid.contrastive.exchange import tree_sums
from lightning_hybrid.contrastive.module_contents import ModuleContents, RandomStreams
from lightning_hybrid.contrastive.module_state import (
    Buffers,
    BufferValue,
    Environment,
    Parameters,
    without_logging,
)
from lightning_hybrid.contrastive.pair_functions import refuse_second_derivatives

_TOLERANCE_ON_CPU = 1e-6
"""Tolerance relative to the norm of embeddings. On a CPU, the second pass reproduces the first pass bit for bit."""
_TOLERANCE = 1e-2
"""Tolerance on other devices, where kernels may add in any order, and the first call may try several kernels."""


@dataclass(frozen=True)
class _FirstPass:
    """Result of a chunk's first pass, with the random states and buffers at its start."""

    part: BatchPart
    random_states: list[Any]
    buffers: list[BufferValue]
    embeddings: tuple[Tensor, ...]


class TwoPasses:
    """Embedding pass over the chunks of a batch, and a second pass that computes gradients.

    Args:
        embedding: Function that embeds a chunk.
        loss_parameters: Parameters of the loss, which may be the only trained parameters.
        is_checked: Whether to run slow checks that detect code for which the passes differ.

    Raises:
        ValueError: The module has parameters of a kind that cannot be trained in this way.
    """

    def __init__(
        self, embedding: Embedding, *, loss_parameters: Iterable[Tensor], is_checked: bool
    ) -> None:
        contents = ModuleContents.of(embedding.module)
        self._embedding = embedding
        self._module_name = type(embedding.module).__name__
        self._modules = contents.modules
        self._is_checked = is_checked
        self._parameters = Parameters(
            embedding.module, contents.modules, takes_fingerprints=is_checked
        )
        loss_ids = {id(parameter) for parameter in loss_parameters}
        self._trains_network = any(
            id(parameter) not in loss_ids for parameter in self._parameters.trained
        )
        self._buffers = Buffers(contents.modules)
        self._environment = Environment(contents.modules)
        self._streams = RandomStreams(
            contents, {parameter.device for parameter in embedding.module.parameters()}
        )
        self._first_passes: list[_FirstPass] = []
        self.is_differentiable: list[bool] = []
        """Whether each embedding depends on a trained parameter."""

    @property
    def trained(self) -> list[Tensor]:
        """Parameters that receive a gradient."""
        return self._parameters.trained

    # ---- forward -------------------------------------------------------------------------------------------------

    def embed_all(self, parts: Sequence[BatchPart]) -> tuple[Tensor, ...]:
        """Return the embeddings of all chunks, detached from the autograd graph.

        Raises:
            ValueError: `embed` cannot run twice, or leaves parameters without a gradient.
        """
        self._first_passes = [self._first_pass(part) for part in parts]
        if names := self._parameters.names_of_changed():
            raise ValueError(
                f"`embed` (={self._embedding.name}) changed {_listed(names)}, but must not change parameters, because "
                "`embed` runs once for each chunk of a batch and again in backward. Move the update to a hook such "
                "as `on_train_batch_start`."
            )
        by_embedding = zip(*[first.embeddings for first in self._first_passes], strict=True)
        return tuple(torch.cat(values) for values in by_embedding)

    def _first_pass(self, part: BatchPart) -> _FirstPass:
        if requires_grad(part.batch):
            raise ValueError(
                "`batch` must not contain tensors that require gradients, because `GlobalBatch` computes gradients "
                f"only for the parameters of `{self._module_name}`. Compute these tensors within `embed`, or detach "
                "them."
            )
        random_states = self._streams.states()
        buffers = self._buffers.capture()
        # Autograd is enabled as in the second pass, because kernels and user code may depend on it. The graph is freed
        # at the end of this call.
        embeddings = self._embedding.of(part)
        self._check_graph(embeddings)
        self.is_differentiable = [embedding.requires_grad for embedding in embeddings]
        # Copy the values, because an embedding may be a view of a larger activation.
        values = tuple(embedding.detach().clone() for embedding in embeddings)
        return _FirstPass(part, random_states, buffers, values)

    def _check_graph(self, embeddings: tuple[Tensor, ...]) -> None:
        if self._trains_network and not any(embedding.requires_grad for embedding in embeddings):
            raise ValueError(
                f"`embed` (={self._embedding.name}) must return embeddings that depend on trained parameters of "
                f"`{self._module_name}`, because these parameters would get no gradient otherwise. Compute the "
                "embeddings without `torch.no_grad()` and `detach()`. With activation checkpointing, set "
                "use_reentrant=False, or pass an input that requires a gradient."
            )
        if not self._is_checked:
            return
        trained_ids = {id(parameter) for parameter in self.trained}
        for leaf in _leaves_of_graph(embeddings):
            if id(leaf) not in trained_ids:
                raise ValueError(
                    f"`embed` (={self._embedding.name}) must depend only on trained parameters of "
                    f"`{self._module_name}`, but depends on another tensor of shape {tuple(leaf.shape)}, "
                    "which requires a gradient but would get none. Make the module of that tensor an "
                    f"attribute of `{self._module_name}`."
                )

    # ---- backward ------------------------------------------------------------------------------------------------

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of trained parameters, given the gradients of all embeddings.

        Raises:
            RuntimeError: Parameters have changed, or `embed` computes different embeddings.
        """
        if names := self._parameters.names_of_lost():
            raise RuntimeError(
                f"{_listed(names)} must not change between the forward of `GlobalBatch` and its backward, because "
                f"backward runs `embed` (={self._embedding.name}) again. Update parameters before forward or after "
                "backward, for example in `on_train_batch_end`."
            )
        sums = tree_sums(len(self.trained))
        distances = []
        begin = 0
        with (
            self._parameters.as_leaves(),
            self._environment.of_modules(),
            without_logging(self._modules),
        ):
            for first in self._first_passes:
                end = begin + first.part.num_rows
                grads_of_part = [None if grad is None else grad[begin:end] for grad in grads]
                with self._streams.at(first.random_states), self._buffers.at(first.buffers):
                    distances.append(self._backward_of_part(first, grads_of_part))
                for total, parameter in zip(sums, self.trained, strict=True):
                    if parameter.grad is not None:
                        total.push(parameter.grad)
                        parameter.grad = None
                begin = end
        self._check_distance(torch.stack(distances).amax())
        return [None if total.is_empty else total.total() for total in sums]

    def _backward_of_part(self, first: _FirstPass, grads: Sequence[Tensor | None]) -> Tensor:
        """Repeat a chunk's forward, run its backward, and return the deviation of its embeddings.

        The deviation is relative to the embeddings of the first pass. The gradients are added to the parameters.
        """
        with torch.enable_grad(), self._environment.of_forward():
            embeddings = self._embedding.of(first.part)
        self._check_same_kind(embeddings, first.embeddings)
        trained_embeddings = []
        their_grads = []
        for embedding, grad in zip(embeddings, grads, strict=True):
            if embedding.requires_grad and grad is not None:
                trained_embeddings.append(embedding)
                their_grads.append(grad)
        if trained_embeddings:
            # `torch.autograd.grad` would not work with reentrant activation checkpointing.
            torch.autograd.backward(trained_embeddings, their_grads)
        return _distance(embeddings, first.embeddings)

    def _check_same_kind(self, second: Sequence[Tensor], first: Sequence[Tensor]) -> None:
        kinds = [(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in second]
        expected = []
        for tensor, is_differentiable in zip(first, self.is_differentiable, strict=True):
            expected.append((tuple(tensor.shape), tensor.dtype, is_differentiable))
        if kinds != expected:
            raise RuntimeError(
                f"`embed` (={self._embedding.name}) must return embeddings of the same shape, dtype and requires_grad "
                f"in both passes, but they were {expected} in the first pass and {kinds} in the second pass. Remove "
                "code whose result changes from call to call."
            )

    def _check_distance(self, distance: Tensor) -> None:
        is_on_cpu = distance.device.type == "cpu"
        # On a GPU, the comparison makes the host wait for the device, so it runs only in checked steps.
        if not is_on_cpu and not self._is_checked:
            return
        tolerance = _TOLERANCE_ON_CPU if is_on_cpu else _TOLERANCE
        if not distance <= tolerance:
            raise RuntimeError(
                f"`embed` (={self._embedding.name}) must compute the same embeddings in both passes, because the "
                f"gradients would be wrong otherwise, but they differ by {float(distance):.2g} of their norm. "
                "Parameters, buffers, the global random states of torch, NumPy and Python, and generators that are "
                "attributes of the module are restored. Remove any other state that changes, such as counters, files, "
                "clocks, other generators, and tensors that are neither parameters nor buffers."
            )


def _distance(second: Sequence[Tensor], first: Sequence[Tensor]) -> Tensor:
    """Return the largest relative difference between corresponding tensors of two sequences."""
    largest = torch.zeros((), dtype=torch.float64, device=first[0].device)
    for after, before in zip(second, first, strict=True):
        if not before.is_floating_point():
            distance = (after != before).double().mean()
        else:
            difference = (after.detach() - before).double()
            # Elements that are not finite in both passes, as after an overflow, are not compared.
            difference = difference.masked_fill(~before.isfinite() & ~after.isfinite(), 0)
            scale = before.double().masked_fill(~before.isfinite(), 0).norm().clamp(min=1e-30)
            distance = difference.norm() / scale
        largest = torch.maximum(largest, distance.to(largest.device))
    return largest


def _leaves_of_graph(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the autograd leaves of tensors, except leaves inside reentrant checkpoints."""
    stack = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(stack)
    while stack:
        node: Any = stack.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for neighbor, _ in node.next_functions:
            if neighbor is not None and neighbor not in seen:
                seen.add(neighbor)
                stack.append(neighbor)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:3])
    if len(names) <= 3:
        return shown
    return f"{shown} and {len(names) - 3} more"


class SecondPass(torch.autograd.Function):
    """Autograd function whose forward returns the embeddings, and whose backward runs the second pass."""

    @staticmethod
    def forward(
        ctx: Any, passes: TwoPasses, embeddings: tuple[Tensor, ...], *trained: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the embeddings of the first pass, as outputs that depend on the trained parameters."""
        ctx.passes = passes
        ctx.set_materialize_grads(False)
        constants = []
        for embedding, is_differentiable in zip(embeddings, passes.is_differentiable, strict=True):
            if not is_differentiable:
                constants.append(embedding)
        ctx.mark_non_differentiable(*constants)
        return embeddings

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the second pass, and return the gradients of the trained parameters."""
        refuse_second_derivatives("GlobalBatch")
        return None, None, *ctx.passes.gradients(grads)
