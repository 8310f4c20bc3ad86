"""Gradients around one backward: earlier gradients are kept, new ones are converted to fp32 and unscaled.

    before      p.grad   fp32, unscaled, or None          the user's own
    backward    p.grad   half, times the loss scale       in DDP's buckets
    after       p.grad   fp32, unscaled                   the sum of both

Of a step of several batches the gradients are summed in fp32. Into the last backward, which averages over ranks, the
sum goes back as the gradient to which autograd adds, and is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_hybrid.precision.loss_scale import unscale_
from lightning_hybrid.precision.window import HALF_DTYPES, HalfPrecisionWindow

_BLOCK_NUMEL = 1 << 26
"""Elements that are converted to fp32 at a time where they are added to a sum: 256 MiB."""


@dataclass(eq=False)
class GradientRecord:
    """Facts about a gradient that the precision plugin made, stored on the tensor itself."""

    found_inf: (
        Tensor | None
    )  # above 0 if it, or one that was checked with it, is inf or nan; None: not known
    is_local: bool  # of this rank alone: a backward under `no_sync` made it


def record_of(gradient: Tensor) -> GradientRecord | None:
    """Return the record of a gradient, or None for one that user code has made."""
    record: GradientRecord | None = vars(gradient).get("_half_precision_record")
    return record


class GradientMemory:
    """Memory of fp32 gradients on a CPU, used again once the gradient that was in it is gone.

    Fresh pages cost five times what the conversion does. A device's allocator has memory at hand.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def empty_fp32(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return an fp32 tensor with the shape and layout of a parameter's gradient, with undefined values."""
        if gradient.device.type != "cpu":
            return torch.empty_like(gradient, dtype=torch.float32)
        storage = self._storages.get(id(parameter))
        num_bytes = 4 * gradient.numel()
        # One holder is this dictionary.
        is_free = storage is not None and torch._C._storage_Use_Count(storage._cdata) == 1
        if storage is None or not is_free or storage.nbytes() != num_bytes:
            fresh = torch.empty_like(gradient, dtype=torch.float32)
            self._storages[id(parameter)] = fresh.untyped_storage()
            return fresh
        layout = torch.empty_like(gradient, device="meta")
        return torch.empty(0, dtype=torch.float32).set_(storage, 0, layout.size(), layout.stride())

    def clear(self) -> None:
        """Free the memory that no gradient uses."""
        self._storages.clear()


class BackwardGradients:
    """The gradients of a window's modules before, in and after each backward.

    `scaled`: gradients that were left as backward made them, by `id` of their parameter, for an optimizer that unscales
    them in its step, out of sight of all other code. `unscaled_in_step`: those that such a step has used, for errors.
    """

    def __init__(self, window: HalfPrecisionWindow) -> None:
        self._window = window
        self._aside: dict[int, Tensor] = {}
        self._memory = GradientMemory()
        self.scaled: dict[int, Tensor] = {}
        self.unscaled_in_step: dict[int, Tensor] = {}

    # ---- before ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(
        self,
        parameters: Iterable[nn.Parameter],
        scale: Tensor | None,
        averages: Callable[[Tensor], bool],
    ) -> None:
        """Set aside the gradients that a backward must not change. The window is open.

        Args:
            parameters: all that the backward may reach.
            scale: the loss scale of this backward, or None.
            averages: returns whether this backward averages a parameter's gradient over ranks.
        """
        self.scaled.clear()
        self.unscaled_in_step.clear()
        self._aside.clear()
        returning: list[nn.Parameter] = []
        sums: list[Tensor] = []
        for parameter in parameters:
            gradient = parameter.grad
            _empty(parameter)
            if gradient is None:
                continue
            record = record_of(gradient)
            is_average = record is not None and not record.is_local
            if averages(parameter) and not is_average:
                returning.append(parameter)
                sums.append(gradient)
            else:
                self._aside[id(parameter)] = gradient
        if returning:
            self._return_sums(returning, sums, scale)

    def _return_sums(
        self, parameters: list[nn.Parameter], sums: list[Tensor], scale: Tensor | None
    ) -> None:
        """Put sums of this rank, scaled and rounded, where autograd adds to them: DDP averages the result."""
        if scale is not None:
            sums = list(torch._foreach_mul(sums, scale))
        rounded = [
            torch.empty_like(total, dtype=p.dtype)
            for p, total in zip(parameters, sums, strict=True)
        ]
        torch._foreach_copy_(rounded, sums)
        for parameter, gradient in zip(parameters, rounded, strict=True):
            parameter.grad = gradient

    @torch.no_grad()
    def add_outside_terms(self, loss: Tensor) -> None:
        """Add the gradients of terms that were computed from the fp32 parameters, outside of a forward.

        Such a term, as a weight penalty in a loop of the user's own, reaches the fp32 tensors, of which DDP knows
        nothing. A backward to these tensors alone comes first, and what it brings joins the gradients in DDP's buckets.
        It visits only the nodes between them and the loss: most often none.
        """
        pairs = [
            pair for pair in self._window.pairs.values() if pair.is_open and pair.fp32.requires_grad
        ]
        leaves = [pair.fp32 for pair in pairs]
        if not leaves or loss.grad_fn is None:
            return
        with torch.enable_grad():
            torch.autograd.backward(loss, inputs=leaves, retain_graph=True)
        for pair in pairs:
            if pair.fp32.grad is None:
                continue
            term = pair.fp32.grad.to(pair.dtype)
            if pair.parameter.grad is None:
                pair.parameter.grad = term
            else:
                pair.parameter.grad.add_(term)
            pair.fp32.grad = None

    # ---- after -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        scale: Tensor | None,
        averages: Callable[[Tensor], bool],
    ) -> None:
        """Put fp32 gradients, divided by the scale, into `p.grad`, and add the gradients that were set aside.

        The window is open.

        Args:
            groups: the parameters of each optimizer, and others. One gradient of a group that is inf or nan makes the
                optimizer skip its step.
            scale: what the gradients were multiplied by; None: they need no division and no check.
            averages: as in `begin`.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        self._drop_outside_terms()
        for group in groups:
            for parameters in self._blocks(group):
                self._unscale_group(parameters, scale, averages)
        for group in groups:
            for parameter in group:
                if parameter.grad is None:
                    _show(parameter, self._aside.pop(id(parameter), None))
        self._aside.clear()

    def keep_scaled(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the gradients as backward made them, out of sight, in `scaled`."""
        self._drop_outside_terms()
        for parameter in parameters:
            if parameter.grad is not None:
                self.scaled[id(parameter)] = parameter.grad
                _empty(parameter)

    @torch.no_grad()
    def abort(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the gradients of a backward that raised an error, and restore the gradients from before it."""
        self._drop_outside_terms()
        for parameter in parameters:
            _show(parameter, self._aside.pop(id(parameter), None))

    def _drop_outside_terms(self) -> None:
        # The backward of everything has made them again.
        for pair in self._window.pairs.values():
            if pair.is_open:
                pair.fp32.grad = None

    def _blocks(self, group: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        # All at once if nothing is added up: their fp32 gradients stay. Else the converted ones are for a moment.
        with_gradient = [parameter for parameter in group if parameter.grad is not None]
        if not any(id(parameter) in self._aside for parameter in with_gradient):
            yield with_gradient
            return
        block: list[nn.Parameter] = []
        numel = 0
        for parameter in with_gradient:
            block.append(parameter)
            numel += parameter.numel()
            if numel >= _BLOCK_NUMEL:
                yield block
                block = []
                numel = 0
        yield block

    def _unscale_group(
        self,
        parameters: Sequence[nn.Parameter],
        scale: Tensor | None,
        averages: Callable[[Tensor], bool],
    ) -> None:
        gradients = self._converted(parameters)
        found_inf = None
        checked = [gradient for gradient in gradients if gradient.numel() > 0]
        if scale is not None and checked:
            found_inf = unscale_(checked, scale)
        self._add_to_sums(parameters, gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            record = GradientRecord(found_inf=found_inf, is_local=not averages(parameter))
            total = self._aside.pop(id(parameter), None)
            if total is None:
                total = gradient
            else:
                # A sum may hold an inf of an earlier backward: it is looked through once more before the step.
                record.found_inf = None
            vars(total)["_half_precision_record"] = record
            _show(parameter, total)

    def _add_to_sums(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        sums: list[Tensor] = []
        addends: list[Tensor] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            earlier = self._aside.get(id(parameter))
            if earlier is not None:
                sums.append(earlier)
                addends.append(gradient)
        if sums:
            torch._foreach_add_(sums, addends)

    def _converted(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the gradients in fp32, as new tensors."""
        converted: list[Tensor] = []
        half_gradients: list[Tensor] = []
        targets: list[Tensor] = []
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            _refuse_sparse(gradient)
            if gradient.dtype.itemsize > 2:
                # A copy: DDP's bucket is written by the next backward, and user code may keep the gradient.
                converted.append(gradient.clone(memory_format=torch.preserve_format))
                continue
            if id(parameter) in self._aside:
                target = torch.empty_like(gradient, dtype=torch.float32)
            else:
                target = self._memory.empty_fp32(parameter, gradient)
            converted.append(target)
            targets.append(target)
            half_gradients.append(gradient)
        if targets:
            torch._foreach_copy_(targets, half_gradients)
        return converted

    # ---- step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def found_inf(self, parameters: Iterable[Tensor], *, device: torch.device) -> Tensor:
        """Return 1.0 if a gradient of these is inf or nan, else 0.0. Gradients of unknown content are read."""
        verdicts: dict[int, Tensor] = {}
        unknown: list[Tensor] = []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None or gradient.numel() == 0:
                continue
            record = record_of(gradient)
            if record is None or record.found_inf is None:
                unknown.append(gradient)
            else:
                verdicts[id(record.found_inf)] = record.found_inf
        if unknown:
            verdicts[-1] = unscale_(unknown, torch.ones((), device=device))
        if not verdicts:
            return torch.zeros((), device=device)
        return torch.stack(list(verdicts.values())).amax()

    @contextmanager
    def given_scaled(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """Put the gradients that were kept in `scaled` into `p.grad`, for the step of an optimizer that unscales."""
        for parameter in parameters:
            gradient = self.scaled.pop(id(parameter), None)
            if gradient is not None:
                if self._window.pairs:  # DDP's buckets hold them anyway
                    self.unscaled_in_step[id(parameter)] = gradient
                parameter.grad = None
                parameter.grad_dtype = None  # half gradients on an fp32 parameter
                parameter.grad = gradient
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype

    @contextmanager
    def hidden(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Hide all gradients for a while, because DDP would round them when it makes its buckets again."""
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def of(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's gradient of the last backward, also if a step has used it unseen."""
        return self.unscaled_in_step.get(id(parameter), parameter.grad)

    def clear(self) -> None:
        """Forget all gradients and free their memory."""
        self._aside.clear()
        self.scaled.clear()
        self.unscaled_in_step.clear()
        self._memory.clear()


def _empty(parameter: nn.Parameter) -> None:
    # The dtype decides, not the window: with `shard_update` some parameters are in half precision and have no pair.
    parameter.grad = None
    parameter.grad_dtype = parameter.dtype  # backward casts what it brings


def _show(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    parameter.grad = None
    if parameter.dtype in HALF_DTYPES:
        parameter.grad_dtype = None  # allows fp32 gradients
    parameter.grad = gradient


def _refuse_sparse(gradient: Tensor) -> None:
    if gradient.layout is torch.strided:
        return
    raise RuntimeError(
        f"A gradient of shape {tuple(gradient.shape)} is sparse (layout={gradient.layout}). Half precision on fp32 "
        "weights and the all-reduce of buckets need dense gradients. Build the embedding with `sparse=False`."
    )
