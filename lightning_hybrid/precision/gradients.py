"""Conversion of scaled half-precision gradients to unscaled fp32 gradients around each backward pass.

    before      p.grad   fp32, unscaled, or None                      earlier gradient
    backward    p.grad   half precision, times the loss scale         in DDP's buckets
    after       p.grad   fp32, unscaled                               sum of both

If a step has several batches, their gradients are summed in fp32. Before the last backward, which averages over ranks,
the sum is rounded once and becomes the gradient to which autograd adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.precision.half_window import HALF_DTYPES, HalfPrecisionWindow
from lightning_hybrid.precision.loss_scale import unscale_

_BLOCK_NUMEL = 1 << 26
"""Number of elements that are converted to fp32 at a time when they are added to a sum (256 MiB)."""


@dataclass(eq=False)
class GradientRecord:
    """Metadata of a gradient computed by the precision plugin, stored as an attribute of the tensor.

    Args:
        found_inf: Tensor that is above 0 if this gradient, or another one checked with it, is inf or nan, or None if
            this is unknown.
        version: torch's version counter of the gradient, which counts writes, when it was checked.
        is_local: Whether the gradient was not averaged over ranks, because its backward ran under `no_sync`.
    """

    found_inf: Tensor | None
    is_local: bool
    version: int = 0


def record_of(gradient: Tensor) -> GradientRecord | None:
    """Return the metadata of a gradient, or None if user code created the gradient."""
    record: GradientRecord | None = vars(gradient).get("_half_precision_record")
    return record


class GradientMemory:
    """Cache of CPU memory for fp32 gradients, which is reused after a gradient has been freed.

    Allocating new memory pages would take five times as long as the conversion. On a device, torch's caching allocator
    already reuses memory.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def empty_fp32(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return an uninitialized fp32 tensor for a parameter's gradient, from cached memory if possible."""
        if gradient.device.type != "cpu":
            return torch.empty_like(gradient, dtype=torch.float32)
        storage = self._storages.get(id(parameter))
        num_bytes = 4 * gradient.numel()
        # A use count of 1 means that only this dictionary holds the memory.
        is_free = storage is not None and torch._C._storage_Use_Count(storage._cdata) == 1
        if storage is None or not is_free or storage.nbytes() != num_bytes:
            fresh = torch.empty_like(gradient, dtype=torch.float32)
            self._storages[id(parameter)] = fresh.untyped_storage()
            return fresh
        layout = torch.empty_like(gradient, device="meta")
        return torch.empty(0, dtype=torch.float32).set_(storage, 0, layout.size(), layout.stride())

    def forget(self, parameters: Iterable[int]) -> None:
        """Remove the memory of parameters, given by their `id`s, from the cache."""
        for key in parameters:
            self._storages.pop(key, None)

    def clear(self) -> None:
        """Empty the cache, freeing memory that no gradient uses."""
        self._storages.clear()


class BackwardGradients:
    """Manager of a model's gradients before, during and after each half-precision backward pass.

    Args:
        window: Half-precision window that holds the model's parameters.

    Attributes:
        scaled: Scaled half-precision gradients by the `id` of their parameter, for an optimizer that unscales them in
            its step. Other code does not see them.
        unscaled_in_step: Scaled gradients that such a step has used, for error messages.
    """

    def __init__(self, window: HalfPrecisionWindow) -> None:
        self._window = window
        self._aside: dict[int, Tensor] = {}
        # Checks of the last backward, by the `id` of the parameter. They outlive gradients that user code removes.
        self._last_found_inf: dict[int, Tensor] = {}
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
        """Prepare a backward pass by saving existing fp32 gradients or converting them to half precision.

        If this backward averages gradients over ranks, a local sum of earlier batches is scaled, rounded and put into
        `p.grad`, so that it is averaged as well. All other gradients are saved, and `p.grad` is None. The window must
        be open.

        Args:
            parameters: All parameters that the backward may reach.
            scale: Loss scale of this backward. None: the loss is not scaled.
            averages: Function that returns whether this backward averages a parameter's gradient over ranks.
        """
        self.scaled.clear()
        self.unscaled_in_step.clear()
        self._aside.clear()
        self._last_found_inf.clear()
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
        """Set `p.grad` to this rank's accumulated gradients, scaled and rounded to half precision.

        Autograd adds the new gradients to them before DDP averages.
        """
        if scale is not None:
            sums = list(torch._foreach_mul(sums, scale))
        rounded = [
            torch.empty_like(total, dtype=p.dtype)
            for p, total in zip(parameters, sums, strict=True)
        ]
        torch._foreach_copy_(rounded, sums)
        for parameter, gradient in zip(parameters, rounded, strict=True):
            parameter.grad = gradient

    def with_outside_terms(self, loss: Tensor) -> Tensor:
        """Return the loss, with terms of the fp32 parameters connected to the half-precision parameters.

        A loop may compute loss terms outside of a forward pass, such as a weight penalty. Their graph leads to the fp32
        tensors, which DDP does not know. Therefore a backward pass to these tensors runs first. It visits only the
        nodes between them and the loss. Usually there are none. The returned loss has the same value, and its backward
        pass adds the gradients of these terms to those of the half-precision parameters. It runs DDP's hook of a
        parameter once, even if the parameter is used only in such terms.

        Returns:
            The new loss, or the given tensor itself if there are no such terms.
        """
        pairs = [
            pair for pair in self._window.pairs.values() if pair.is_open and pair.fp32.requires_grad
        ]
        if not pairs or loss.grad_fn is None:
            return loss
        for pair in pairs:
            pair.leave_hooks_to_half()
        leaves = [pair.fp32 for pair in pairs]
        gradients = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)

        parameters: list[Tensor] = []
        terms: list[Tensor] = []
        for pair, gradient in zip(pairs, gradients, strict=True):
            if gradient is not None:
                parameters.append(pair.half)
                terms.append(gradient)
        if not terms:
            return loss
        with torch.enable_grad():
            zero: Tensor = _OutsideTerms.apply(loss.new_zeros(()), terms, *parameters)
            return loss + zero

    # ---- after -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        scale: Tensor | None,
        averages: Callable[[Tensor], bool],
    ) -> None:
        """Set `p.grad` to the unscaled fp32 gradient plus the gradient saved before the backward pass.

        The window must be open.

        Args:
            groups: Parameters of each optimizer, and a group of other parameters. If a gradient of a group is inf or
                nan, its optimizer skips the step.
            scale: Loss scale of this backward. None: gradients are neither divided nor checked.
            averages: Function that returns whether this backward averages a parameter's gradient over ranks.

        Raises:
            RuntimeError: A gradient is sparse.
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
        """Move the scaled gradients from `p.grad` to `scaled`, for optimizers that unscale them."""
        self._drop_outside_terms()
        for parameter in parameters:
            if parameter.grad is not None:
                self.scaled[id(parameter)] = parameter.grad
                _empty(parameter)

    @torch.no_grad()
    def abort(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drop the gradients of a backward pass that raised an error, and restore those saved by `begin`."""
        self._drop_outside_terms()
        for parameter in parameters:
            _show(parameter, self._aside.pop(id(parameter), None))

    def _drop_outside_terms(self) -> None:
        # The main backward has computed these terms again.
        for pair in self._window.pairs.values():
            if pair.is_open:
                pair.fp32.grad = None

    def _blocks(self, group: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Yield the parameters that have gradients, as one list or divided into smaller lists.

        They are split into blocks to limit memory if converted gradients are added to earlier sums and then freed.
        """
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
            if found_inf is not None:
                self._last_found_inf[id(parameter)] = found_inf
            total = self._aside.pop(id(parameter), None)
            if total is None:
                total = gradient
            else:
                # A sum may contain an inf of an earlier backward, so it is checked again before the step.
                record.found_inf = None
            record.version = total._version
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
        """Return new tensors with the parameters' gradients in fp32 or wider."""
        converted: list[Tensor] = []
        half_gradients: list[Tensor] = []
        targets: list[Tensor] = []
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            _refuse_sparse(gradient)
            if gradient.dtype.itemsize > 2:
                # A copy is needed, because the next backward writes DDP's bucket, and user code may keep the gradient.
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
        """Return a 0-dim tensor that is 1.0 if a gradient contains inf or nan, else 0.0.

        A gradient of the last backward counts even if user code has removed or replaced it since then. Otherwise the
        loss scale would never decrease. Gradients that were checked and not written since then are not read again.
        """
        verdicts: dict[int, Tensor] = {}
        unknown: list[Tensor] = []
        for parameter in parameters:
            last_found_inf = self._last_found_inf.get(id(parameter))
            if last_found_inf is not None:
                verdicts[id(last_found_inf)] = last_found_inf
            gradient = parameter.grad
            if gradient is None or gradient.numel() == 0:
                continue
            record = record_of(gradient)
            if record is None or record.found_inf is None or record.version != gradient._version:
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
        """Temporarily set `p.grad` to the scaled gradients, for an optimizer that unscales them itself.

        Afterwards `p.grad` is None.
        """
        for parameter in parameters:
            gradient = self.scaled.pop(id(parameter), None)
            if gradient is not None:
                # This takes no memory, because DDP's buckets hold these gradients anyway.
                if self._window.pairs:
                    self.unscaled_in_step[id(parameter)] = gradient
                parameter.grad = None
                # None allows a half-precision gradient on an fp32 parameter.
                parameter.grad_dtype = None
                parameter.grad = gradient
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.grad = None
                parameter.grad_dtype = parameter.dtype

    @contextmanager
    def hidden(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Temporarily set all gradients to None.

        DDP would otherwise round them when it rebuilds its buckets.
        """
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def of(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's gradient from the last backward pass, even if a step has already consumed it."""
        return self.unscaled_in_step.get(id(parameter), parameter.grad)

    def forget(self, parameters: Iterable[int]) -> None:
        """Free the cached memory of parameters, given by their `id`s."""
        self._memory.forget(parameters)

    def clear(self) -> None:
        """Free all saved gradients and the cached memory."""
        self._aside.clear()
        self._last_found_inf.clear()
        self.scaled.clear()
        self.unscaled_in_step.clear()
        self._memory.clear()


class _OutsideTerms(torch.autograd.Function):
    """Autograd function that outputs zero and whose backward pass returns given gradients of the parameters.

    They are multiplied by the gradient of the output, as in any backward pass, and then rounded to half precision.
    """

    @staticmethod
    def forward(ctx: Any, zero: Tensor, terms: list[Tensor], *parameters: Tensor) -> Tensor:
        """Store the gradients, and return zero."""
        ctx.terms = terms
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        return zero

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the stored gradients times the gradient of the output."""
        products = torch._foreach_mul(ctx.terms, gradient)
        rounded = [product.to(dtype) for product, dtype in zip(products, ctx.dtypes, strict=True)]
        return None, None, *rounded


def _empty(parameter: nn.Parameter) -> None:
    # The window is not used here, because with `shard_update` some half-precision parameters have no pair in it.
    parameter.grad = None
    parameter.grad_dtype = parameter.dtype  # Backward casts gradients to this dtype.


def _show(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    parameter.grad = None
    if parameter.dtype in HALF_DTYPES:
        parameter.grad_dtype = None  # None allows fp32 gradients.
    parameter.grad = gradient


def _refuse_sparse(gradient: Tensor) -> None:
    if gradient.layout is torch.strided:
        return
    raise RuntimeError(
        f"A gradient of shape {tuple(gradient.shape)} has the layout {gradient.layout}, but half precision and the "
        "all-reduce support only dense gradients. Set `sparse=False` in the embedding."
    )
