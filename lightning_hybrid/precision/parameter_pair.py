"""Parameters whose fp32 value can be swapped for a half-precision copy and back.

User code, optimizers and lists always hold the same Python object. Only its C++ tensor changes: torch swaps the C++
tensors of two Python objects (`torch._C._swap_tensor_impl`, the core of `torch.utils.swap_tensors`).

                     closed                       open
    parameter   ->   fp32 value, fp32 gradient    half-precision copy, on which DDP was built
    hidden      ->   half-precision copy          fp32 value
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.lightning_names import misconfiguration
from lightning_hybrid.placement import flattened, has_gaps
from lightning_hybrid.precision.device_writes import WriteSearch

_BLOCK = 1 << 18
"""Number of elements compared at a time on a CPU, where the expected values of a block (512 KiB) stay in the cache."""

_BLOCK_ON_DEVICE = 1 << 26
"""Number of elements compared at a time on other devices, where a block takes 128 MiB of memory."""

_HOST_DEVICES = {"cpu"}
"""Device types on which switching back to fp32 waits for the comparison of a copy and its fp32 value."""


class ParameterPair:
    """Parameter with a half-precision copy that can be swapped in for the fp32 value.

    Args:
        name: Name of the parameter, for errors.
        parameter: fp32 parameter.
        dtype: `torch.float16` or `torch.bfloat16`.

    Attributes:
        was_written: Whether user code has written the copy, whose values are rounded. It is set on a CPU only. On other
            devices `WriteSearch` detects writes.
    """

    def __init__(self, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.name = name
        self.parameter = parameter
        self.dtype = dtype
        half = parameter.detach().to(dtype)
        self._hidden = nn.Parameter(half, requires_grad=parameter.requires_grad)
        # The address of the C++ tensor shows which tensor is active, even after an interrupt between two statements.
        self._half_address: int = self._hidden._cdata
        self.was_written = False
        # torch's version counters, which count writes, at the time of the copy.
        self._fp32_version: int = parameter._version
        self._half_version: int = self._hidden._version

    @property
    def is_open(self) -> bool:
        """True if the parameter is currently in half precision."""
        return self.parameter._cdata == self._half_address

    @property
    def fp32(self) -> Tensor:
        """Tensor that holds the parameter's fp32 value."""
        if self.is_open:
            return self._hidden
        return self.parameter

    @property
    def half(self) -> Tensor:
        """Tensor that holds the parameter's half-precision copy."""
        if self.is_open:
            return self.parameter
        return self._hidden

    def open(self) -> None:
        """Switch the parameter to its half-precision copy, without changing its fp32 gradient."""
        if self.is_open:
            return
        gradient = self.parameter.grad
        self.parameter.grad = None
        self._exchange()
        self.show_gradient(gradient)
        # `copy.deepcopy` and `pickle` use attributes of the object before those of its class. With these, a copy made
        # inside a step is in fp32.
        vars(self.parameter)["__deepcopy__"] = self._deepcopy
        vars(self.parameter)["__reduce_ex__"] = self._reduce_ex

    def close(self) -> None:
        """Switch the parameter to its fp32 value, and convert its gradient to fp32."""
        if not self.is_open:
            return
        vars(self.parameter).pop("__deepcopy__", None)
        vars(self.parameter).pop("__reduce_ex__", None)
        gradient = self.parameter.grad
        self.hide_gradient()
        self._exchange()
        if gradient is not None:
            if gradient.dtype is not self.parameter.dtype:
                gradient = gradient.float()
            self.parameter.grad = gradient

    def show_gradient(self, gradient: Tensor | None) -> None:
        """Set the gradient to an fp32 tensor while the parameter is in half precision."""
        self.parameter.grad = None
        # None allows a gradient of another dtype than the parameter's.
        self.parameter.grad_dtype = None
        self.parameter.grad = gradient

    def hide_gradient(self) -> None:
        """Set the gradient to None, so that the next backward pass creates a half-precision gradient."""
        self.parameter.grad = None
        self.parameter.grad_dtype = self.dtype  # Backward casts gradients to this dtype.

    def _exchange(self) -> None:
        parameter = self.parameter
        requires_grad = parameter.requires_grad
        backward_hooks = parameter._backward_hooks
        accumulate_hooks = parameter._post_accumulate_grad_hooks

        torch._C._swap_tensor_impl(parameter, self._hidden)

        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)
        if self._hidden.requires_grad != requires_grad:
            self._hidden.requires_grad_(requires_grad)
        # Hooks belong to the C++ tensor, but the user has registered them on the Python object.
        if backward_hooks is not None:
            parameter._backward_hooks = backward_hooks
        if accumulate_hooks is not None:
            parameter._post_accumulate_grad_hooks = accumulate_hooks

    def leave_hooks_to_half(self) -> None:
        """Run the user's gradient hooks only for the half-precision copy until the parameter is in fp32 again.

        Otherwise they would run twice if the graph of a loss contains the fp32 value as well.
        """
        if self.parameter._backward_hooks:
            self._hidden._backward_hooks = None
        if self.parameter._post_accumulate_grad_hooks:
            # torch ignores None here.
            self._hidden._post_accumulate_grad_hooks = {}

    # ---- values ----------------------------------------------------------------------------------------------------

    def note_cast(self) -> None:
        """Record that the half-precision copy has been updated from the current fp32 value.

        The cast itself leaves the copy's version counter unchanged, so graphs that saved the copy stay valid. If the
        fp32 value has changed since the previous cast, those graphs are stale, so the counter is increased and torch
        raises its usual in-place modification error.
        """
        version = self.fp32._version
        if version != self._fp32_version:
            torch.autograd.graph.increment_version(self.half)
            self._fp32_version = version
        self._half_version = self.half._version

    def is_exact_cast(self) -> bool:
        """Return whether the half-precision copy is bitwise equal to the rounded fp32 value.

        This waits for the device.
        """
        return is_rounded(self.half.detach(), self.fp32.detach())

    @property
    def is_written_as_fp32(self) -> bool:
        """True if user code has written the fp32 value during the step, but not the half-precision copy.

        User code may write the fp32 value through another tensor with the same memory, such as a value of a state dict.
        The copy is then out of date.
        """
        return self.fp32._version != self._fp32_version and self.half._version == self._half_version

    @torch.no_grad()
    def take_writes_(self) -> None:
        """Transfer elements that user code wrote into the half-precision copy to the fp32 value.

            fp32 <- where(half == half_dtype(fp32), fp32, half)

        Other elements keep all fp32 bits. On a CPU nothing is written if no element differs. On other devices the host
        does not wait for the comparison.
        """
        self.check_dtype()
        if self.is_written_as_fp32:
            cast_([self])
            return
        if self.half.device.type not in _HOST_DEVICES:
            self.take_writes_without_waiting_()
            return
        if self.is_exact_cast():
            return
        self.was_written = True
        half = self.half.detach()
        fp32 = self.fp32.detach()
        fp32.copy_(torch.where(raw_bits(fp32.to(self.dtype)) == raw_bits(half), fp32, half.float()))
        self._fp32_version = self.fp32._version
        self._half_version = self.half._version

    @torch.no_grad()
    def take_writes_without_waiting_(self, cast: Tensor | None = None) -> None:
        """Transfer values that user code wrote into the copy to the fp32 value, without waiting for the device.

        Args:
            cast: fp32 value rounded to half precision, if the caller has computed it.
        """
        half = self.half.detach()
        # Usually the written values equal the old ones. With `data`, a graph that uses the fp32 value stays valid.
        value = self.fp32.data
        if cast is None:
            cast = value.to(self.dtype)
        torch.where(raw_bits(cast) == raw_bits(half), value, half, out=value)

    def check_dtype(self) -> None:
        """Raise if user code has changed the dtype or shape of the parameter's data during a step.

        Raises:
            RuntimeError: The dtype or the shape has changed.
        """
        half = self.half
        fp32 = self.fp32
        if half.dtype is self.dtype and half.shape == fp32.shape:
            return
        raise RuntimeError(
            f"`{self.name}.data` was replaced inside a training step by a tensor of shape {tuple(half.shape)} and "
            f"dtype {half.dtype}, but must keep its shape {tuple(fp32.shape)} and dtype {self.dtype}, because DDP's "
            "buckets are built for them. Write into the parameter with `p.copy_(value)` under `torch.no_grad()`, or "
            "replace it in a hook outside the step, such as `on_train_batch_end`."
        )

    def load_(self, value: Tensor) -> None:
        """Copy a value from a state dict into the fp32 value.

        torch itself writes the rounded value into the half-precision copy.
        """
        with torch.no_grad():
            self.fp32.detach().copy_(value)
        self._fp32_version = self.fp32._version

    # ---- copies made inside of a step ------------------------------------------------------------------------------

    @torch.no_grad()
    def shown_in_fp32(self) -> Tensor:
        """Return the parameter's current value in fp32, even while it is in half precision.

        Elements that were not written have all their fp32 digits. The fp32 value itself is not changed, so it stays the
        same if user code writes the copy and later restores it.
        """
        self.check_dtype()
        fp32 = self.fp32.detach()
        if self.is_written_as_fp32 or self.is_exact_cast():
            return fp32
        half = self.half.detach()
        return torch.where(raw_bits(fp32.to(self.dtype)) == raw_bits(half), fp32, half.float())

    def _fp32_copy(self) -> nn.Parameter:
        value = self.shown_in_fp32().clone(memory_format=torch.preserve_format)
        return nn.Parameter(value, requires_grad=self.parameter.requires_grad)

    def _deepcopy(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self.parameter) not in memo:
            memo[id(self.parameter)] = self._fp32_copy()
        return memo[id(self.parameter)]

    def _reduce_ex(self, protocol: Any) -> Any:
        return self._fp32_copy().__reduce_ex__(protocol)


@torch.no_grad()
def cast_(pairs: Iterable[ParameterPair]) -> None:
    """Round fp32 values into their half-precision copies, in one pass over memory."""
    pairs = list(pairs)
    if not pairs:
        return
    # `data` has a version counter of its own (see `ParameterPair.note_cast`).
    copies = [pair.half.data for pair in pairs]
    torch._foreach_copy_(copies, [pair.fp32.detach() for pair in pairs])
    for pair in pairs:
        pair.note_cast()


@torch.no_grad()
def take_writes_(pairs: Iterable[ParameterPair], search: WriteSearch) -> None:
    """Transfer values that user code wrote into half-precision copies to the fp32 values of parameters.

    On a device, the parameters are processed in blocks without waiting. See `ParameterPair.take_writes_`.

    Args:
        pairs: Parameters in both precisions.
        search: Detector of writes on a device. On a CPU each pair records whether it was written.
    """
    block: list[ParameterPair] = []
    numel = 0
    for pair in pairs:
        if pair.half.is_meta:
            continue
        if pair.half.device.type in _HOST_DEVICES or pair.is_written_as_fp32:
            pair.take_writes_()
            continue
        pair.check_dtype()
        block.append(pair)
        numel += pair.half.numel()
        if numel >= _BLOCK_ON_DEVICE:
            _take_writes_of_block_(block, search)
            block = []
            numel = 0
    _take_writes_of_block_(block, search)
    search.end_closing()


def _take_writes_of_block_(block: list[ParameterPair], search: WriteSearch) -> None:
    if not block:
        return
    casts = [torch.empty_like(pair.half.detach()) for pair in block]
    torch._foreach_copy_(casts, [pair.fp32.detach() for pair in block])
    if search.is_on:
        names = [pair.name for pair in block]
        copies = [raw_bits(pair.half.detach()) for pair in block]
        search.compare(names, [raw_bits(cast) for cast in casts], copies)
    for pair, cast in zip(block, casts, strict=True):
        pair.take_writes_without_waiting_(cast)


@cache
def check_exchange() -> None:
    """Raise an error if the installed version of torch cannot swap the C++ tensors of two parameters.

    Raises:
        MisconfigurationException: The result of a swap is not as expected.
    """
    parameter = nn.Parameter(torch.tensor([1.0, 1.0 + 2**-12]))
    before = id(parameter)
    calls: list[torch.dtype] = []
    try:
        pair = ParameterPair("checked", parameter, torch.float16)
        hook = parameter.register_hook(lambda gradient: calls.append(gradient.dtype))
        view = parameter.detach()
        pair.open()
        (parameter * 2.0).sum().backward()
        has_half_gradient = parameter.grad is not None and parameter.grad.dtype is torch.float16
        pair.close()
        hook.remove()
        works = (
            id(parameter) == before
            and has_half_gradient
            and calls == [torch.float16]
            and parameter.dtype is torch.float32
            and parameter.grad is not None
            and parameter.grad.dtype is torch.float32
            and view.data_ptr() == parameter.data_ptr()
            and parameter.tolist() == [1.0, 1.0 + 2**-12]
        )
        cause = "parameters or gradients are not as expected afterwards"
    except (AttributeError, RuntimeError, TypeError) as error:
        works = False
        cause = f"{type(error).__name__}: {error}"
    if not works:
        raise misconfiguration(
            f"`torch` (={torch.__version__}) cannot swap the tensors of two parameters, which half precision with fp32 "
            f'master weights requires ({cause}). Install torch 2.11 to 2.15, or use precision="16-mixed".'
        )


def is_rounded(half: Tensor, fp32: Tensor) -> bool:
    """Return whether a half-precision tensor is bitwise equal to a rounded fp32 tensor.

    This waits for the device.
    """
    is_on_host = half.device.type in _HOST_DEVICES
    if not is_on_host or half.stride() != fp32.stride() or has_gaps(half):
        return torch.equal(raw_bits(half), raw_bits(fp32.to(half.dtype)))
    half_blocks = flattened(half, half).split(_BLOCK)
    fp32_blocks = flattened(fp32, fp32).split(_BLOCK)
    expected = torch.empty(min(half.numel(), _BLOCK), dtype=half.dtype)
    for half_block, fp32_block in zip(half_blocks, fp32_blocks, strict=True):
        expected_block = expected[: half_block.numel()].copy_(fp32_block)
        if not _same_bits(half_block, expected_block):
            return False
    return True


def _same_bits(first: Tensor, second: Tensor) -> bool:
    # Four elements are compared at a time, because `torch.equal` on 16-bit elements compares them one by one.
    if first.numel() % 4 or first.storage_offset() % 4 or second.storage_offset() % 4:
        return torch.equal(raw_bits(first), raw_bits(second))
    return torch.equal(first.view(torch.int64), second.view(torch.int64))


def raw_bits(tensor: Tensor) -> Tensor:
    """Return the bits of a half-precision tensor as int16, so that identical NaNs compare equal."""
    return tensor.view(torch.int16)
