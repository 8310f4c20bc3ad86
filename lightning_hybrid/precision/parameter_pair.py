"""A parameter in two precisions behind one Python object: fp32 outside of forward and backward, half precision inside.

The object that user code, optimizers and lists hold never changes. What it points to does: torch exchanges the C++
tensors of two Python objects (`torch._C._swap_tensor_impl`, the core of `torch.utils.swap_tensors`).

                     closed                       open
    parameter   ->   fp32 value, fp32 gradient    half copy, on which DDP was built
    hidden      ->   half copy                    fp32 value
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

_BLOCK = 1 << 20
"""Elements compared at once on a CPU. The expected values of a block (2 MiB) stay in cache."""

_BLOCK_ON_DEVICE = 1 << 26
"""Elements compared at once on other devices, for which memory is taken: 128 MiB."""

_HOST_DEVICES = {"cpu"}
"""Types of devices on which a closing waits for the comparison of a copy and its fp32 value."""


class ParameterPair:
    """A parameter with its fp32 value and its half-precision copy, of which it shows one at a time.

    Args:
        name: the parameter's name, for errors.
        parameter: an fp32 parameter.
        dtype: `torch.float16` or `torch.bfloat16`.

    Attributes:
        was_written: whether user code was seen to write the copy, whose values are rounded. Known on a CPU only: on
            other devices `WriteSearch` looks for writes.
    """

    def __init__(self, name: str, parameter: nn.Parameter, dtype: torch.dtype) -> None:
        self.name = name
        self.parameter = parameter
        self.dtype = dtype
        half = parameter.detach().to(dtype)
        self._hidden = nn.Parameter(half, requires_grad=parameter.requires_grad)
        # The address of the C++ tensor tells which side is shown, also after an interrupt between two statements.
        self._half_address: int = self._hidden._cdata
        self.was_written = False
        # How often torch had counted a write to each side when the copy was made.
        self._fp32_version: int = parameter._version
        self._half_version: int = self._hidden._version

    @property
    def is_open(self) -> bool:
        """True while the parameter shows its half-precision copy."""
        return self.parameter._cdata == self._half_address

    @property
    def fp32(self) -> Tensor:
        """The tensor that holds the fp32 value, whichever side is shown."""
        if self.is_open:
            return self._hidden
        return self.parameter

    @property
    def half(self) -> Tensor:
        """The tensor that holds the half-precision copy, whichever side is shown."""
        if self.is_open:
            return self.parameter
        return self._hidden

    def open(self) -> None:
        """Show the half-precision copy, with the fp32 gradient that the parameter has."""
        if self.is_open:
            return
        gradient = self.parameter.grad
        self.parameter.grad = None
        self._exchange()
        self.show_gradient(gradient)
        # `copy.deepcopy` and `pickle` ask the object before its class. A copy made inside of a step is fp32.
        vars(self.parameter)["__deepcopy__"] = self._deepcopy
        vars(self.parameter)["__reduce_ex__"] = self._reduce_ex

    def close(self) -> None:
        """Show the fp32 value. The gradient goes along, in fp32."""
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
        """Put an fp32 gradient into `parameter.grad` while the half-precision copy is shown, as user code may too."""
        self.parameter.grad = None
        self.parameter.grad_dtype = None  # allows a gradient of another dtype than the parameter's
        self.parameter.grad = gradient

    def hide_gradient(self) -> None:
        """Empty `parameter.grad` while the half-precision copy is shown, ready for a backward."""
        self.parameter.grad = None
        self.parameter.grad_dtype = self.dtype  # backward casts what it brings

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
        # Hooks belong to the C++ tensor. The user registered them on the Python object.
        if backward_hooks:
            parameter._backward_hooks = backward_hooks
        if accumulate_hooks:
            parameter._post_accumulate_grad_hooks = accumulate_hooks

    # ---- values ----------------------------------------------------------------------------------------------------

    def note_cast(self) -> None:
        """Note that the copy was made from the current fp32 value.

        The cast itself is not counted as a write: a graph that waits for its backward holds the copy, and the same
        bits were written. If torch has counted a write to the fp32 value since, the graph is out of date, and torch's
        own error about a modified variable has to come.
        """
        version = self.fp32._version
        if version != self._fp32_version:
            torch.autograd.graph.increment_version(self.half)
            self._fp32_version = version
        self._half_version = self.half._version

    def is_exact_cast(self) -> bool:
        """Return whether the copy has the bits of the fp32 value, rounded. Waits for the device."""
        return is_rounded(self.half.detach(), self.fp32.detach())

    @property
    def is_written_as_fp32(self) -> bool:
        """True if the fp32 value was written inside of the step, through another tensor in its memory.

        A value of a state dict is such a tensor. The copy, which was not written, is then out of date.
        """
        return self.fp32._version != self._fp32_version and self.half._version == self._half_version

    @torch.no_grad()
    def take_writes_(self) -> None:
        """Copy into the fp32 value the elements that user code wrote into the half-precision copy.

            fp32 <- where(half == half_dtype(fp32), fp32, half)

        Elements that were not written keep all fp32 bits. On a CPU nothing is written if nothing differs. On other
        devices the host does not wait for the answer.
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
        """Do the same on a device, by one `where`: the host does not ask whether anything differs.

        Args:
            cast: the fp32 value in half precision, if it is known.
        """
        half = self.half.detach()
        # Through `data`, as most often the same bits are written: a graph of the fp32 value stays valid.
        value = self.fp32.data
        if cast is None:
            cast = value.to(self.dtype)
        torch.where(raw_bits(cast) == raw_bits(half), value, half, out=value)

    def check_dtype(self) -> None:
        """Check that user code has not given the parameter memory of another dtype or shape inside of a step.

        Raises:
            RuntimeError: it has.
        """
        half = self.half
        fp32 = self.fp32
        if half.dtype is self.dtype and half.shape == fp32.shape:
            return
        raise RuntimeError(
            f"`{self.name}.data` was replaced inside of a training step by a tensor of shape {tuple(half.shape)} and "
            f"dtype {half.dtype}. Inside of a step a parameter keeps its shape {tuple(fp32.shape)} and dtype "
            f"{self.dtype}, as DDP reduces gradients into buckets of these. Write into it with `p.copy_(value)` under "
            "`torch.no_grad()`, or replace it in a hook outside of the step, such as `on_train_batch_end`."
        )

    def load_(self, value: Tensor) -> None:
        """Load the value of a state dict in full precision. torch writes the rounded value into the copy."""
        with torch.no_grad():
            self.fp32.detach().copy_(value)
        self._fp32_version = self.fp32._version

    # ---- copies made inside of a step ------------------------------------------------------------------------------

    @torch.no_grad()
    def shown_in_fp32(self) -> Tensor:
        """Return the value that is shown inside of a step, with all fp32 digits of elements that were not written.

        Nothing is taken over: what user code writes for a moment and puts back leaves the fp32 value as it was.
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
    """Round the fp32 values into the half-precision copies, in one pass over memory."""
    pairs = list(pairs)
    if not pairs:
        return
    # `data` has a version counter of its own: see `ParameterPair.note_cast`.
    copies = [pair.half.data for pair in pairs]
    torch._foreach_copy_(copies, [pair.fp32.detach() for pair in pairs])
    for pair in pairs:
        pair.note_cast()


@torch.no_grad()
def take_writes_(pairs: Iterable[ParameterPair], search: WriteSearch) -> None:
    """Take over writes to the copies, on a device by lists. See `ParameterPair.take_writes_`.

    Args:
        pairs: parameters in both precisions.
        search: search for writes on a device. On a CPU a pair itself knows that it was written.
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
    """Check that the installed torch exchanges tensors as half precision needs it.

    Raises:
        MisconfigurationException: it does not.
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
        cause = "parameters or gradients are not what they should be afterwards"
    except (AttributeError, RuntimeError, TypeError) as error:
        works = False
        cause = f"{type(error).__name__}: {error}"
    if not works:
        raise misconfiguration(
            f"`torch` (={torch.__version__}) does not exchange the tensors of two parameters as half precision on fp32 "
            f'weights needs it ({cause}). Install torch 2.11 to 2.15, or use precision="16-mixed".'
        )


def is_rounded(half: Tensor, fp32: Tensor) -> bool:
    """Return whether `half` has the bits of `fp32`, rounded. Waits for the device."""
    if half.numel() <= _BLOCK or half.stride() != fp32.stride() or has_gaps(half):
        return torch.equal(raw_bits(half), raw_bits(fp32.to(half.dtype)))
    half_blocks = flattened(half, half).split(_BLOCK)
    fp32_blocks = flattened(fp32, fp32).split(_BLOCK)
    expected = torch.empty(_BLOCK, dtype=half.dtype)
    for half_block, fp32_block in zip(half_blocks, fp32_blocks, strict=True):
        expected_block = expected[: half_block.numel()].copy_(fp32_block)
        if not _same_bits(half_block, expected_block):
            return False
    return True


def _same_bits(first: Tensor, second: Tensor) -> bool:
    # Four elements at a time, where `torch.equal` would compare them one by one.
    if first.numel() % 4 or first.storage_offset() % 4 or second.storage_offset() % 4:
        return torch.equal(raw_bits(first), raw_bits(second))
    return torch.equal(first.view(torch.int64), second.view(torch.int64))


def raw_bits(tensor: Tensor) -> Tensor:
    """Return the memory of a half-precision tensor as integers. They compare equal for equal NaN too."""
    return tensor.view(torch.int16)
