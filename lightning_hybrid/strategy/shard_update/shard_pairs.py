"""Parameters that hold only this rank's shard during an optimizer step, and the full tensor otherwise.

                     between steps                            in a step
    parameter   ->   full tensor: forward, backward           shard: elements begin ... end - 1, in memory order
    hidden      ->   shard                                    full tensor

Lists, `param_groups` and the keys of `optimizer.state` hold the same Python object all the time. As in
`precision/parameter_pair.py`, torch swaps the C++ tensors of two Python objects.

There are two kinds. `MasterShard` is a shard of the fp32 master weights of a half-precision parameter, in its own
memory. `WeightShard` is a shard of an fp32 parameter, in the parameter's own memory, so that only optimizer state is
sharded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.placement import Part, flattened
from lightning_hybrid.precision.parameter_pair import ParameterPair, cast_, is_rounded, raw_bits

Span = tuple[int, int]
"""Elements from begin to end."""


class ParameterShard:
    """Base class of parameters that can switch between the full tensor and this rank's shard.

    Args:
        name: Name of the parameter, for errors.
        parameter: Parameter that holds the full tensor.
        part: This rank's shard, 1-D.
        spans: Elements of each rank that shares the update, in the order of `Topology.sharers`.
        rank: Index of this rank among them.

    Attributes:
        whole: Full tensor that forward reads, as a plain tensor in the parameter's memory.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, part: nn.Parameter, spans: list[Span], rank: int
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.spans = spans
        self.rank = rank
        self.whole: Tensor = parameter.detach()
        self._hidden = part
        # The address of the C++ tensor shows which tensor the parameter holds, even after an error between two
        # statements.
        self._part_address: int = part._cdata

    @property
    def part(self) -> Part:
        """Range of elements that this rank's shard covers."""
        begin, end = self.spans[self.rank]
        return Part(numel=self.whole.numel(), begin=begin, end=end)

    @property
    def shows_part(self) -> bool:
        """True while the parameter holds this rank's shard instead of the full tensor."""
        return self.parameter._cdata == self._part_address

    @property
    def values(self) -> Tensor:
        """Shard of this rank, which the optimizer updates, as a 1-D fp32 tensor."""
        if self.shows_part:
            return self.parameter.detach()
        return self._hidden.detach()

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return this rank's shard of a tensor of the full shape, flattened to 1-D.

        It is a view if the memory layout allows it, and otherwise a copy.
        """
        begin, end = self.spans[self.rank]
        flat = flattened(tensor, self.whole)
        return flat[begin:end]

    def show_part(self) -> None:
        """Swap this rank's shard and its gradient into the parameter."""
        if self.shows_part:
            return
        gradient = self.parameter.grad
        if self._hidden.requires_grad != self.parameter.requires_grad:
            self._hidden.requires_grad_(self.parameter.requires_grad)
        self._hidden.grad = None
        if gradient is not None:
            self._hidden.grad = self.part_of(gradient)
        torch._C._swap_tensor_impl(self.parameter, self._hidden)

    def show_whole(self) -> None:
        """Swap the full tensor and its gradient back into the parameter."""
        if not self.shows_part:
            return
        # A second reference would keep the gradient's memory alive after `zero_grad`.
        self.parameter.grad = None
        torch._C._swap_tensor_impl(self.parameter, self._hidden)

    def _follow_memory(self) -> None:
        """Switch to the parameter's new memory if user code has assigned `p.data`.

        Raises:
            RuntimeError: The new memory has another dtype, shape or layout.
        """
        parameter = self.parameter
        whole = self.whole
        has_same_layout = parameter.shape == whole.shape and parameter.stride() == whole.stride()
        if parameter.dtype is not whole.dtype or not has_same_layout:
            raise RuntimeError(
                f"`{self.name}.data` was replaced by a tensor of shape {tuple(parameter.shape)}, strides "
                f"{parameter.stride()} and dtype {parameter.dtype}. With `shard_update`, this parameter must keep "
                f"shape {tuple(whole.shape)}, strides {whole.stride()} and dtype {whole.dtype} during training, "
                "because each rank updates a contiguous shard of it. Write into the parameter with `p.copy_(value)` "
                "under `torch.no_grad()`."
            )
        if parameter.data_ptr() != whole.data_ptr():
            self.whole = parameter.detach()

    def take_writes_(self) -> None:
        """Update this rank's shard with values that user code has written into the full tensor.

        The parameter must hold the full tensor.
        """
        raise NotImplementedError


class MasterShard(ParameterShard):
    """Half-precision parameter with this rank's shard of its fp32 master weights.

    The parameter holds its half-precision copy for the whole run, because no rank has the fp32 values of all elements.

    Args:
        pair: Parameter in both precisions. No half-precision window may open or close it any more.
        spans, rank: As in `ParameterShard`.

    Attributes:
        collected: Full master weights in fp32, while they are gathered on this rank.
    """

    def __init__(self, pair: ParameterPair, spans: list[Span], rank: int) -> None:
        cast_([pair])
        begin, end = spans[rank]
        values = flattened(pair.fp32, pair.fp32)[begin:end].clone()
        part = nn.Parameter(values, requires_grad=pair.parameter.requires_grad)
        part.grad_dtype = None  # any dtype is allowed: LARS and LAMB use half-precision gradients
        self._pair = pair
        self.collected: Tensor | None = None
        self._show_half()
        super().__init__(pair.name, pair.parameter, part, spans, rank)

    def _show_half(self) -> None:
        """Swap the half-precision copy into the parameter and free the memory of the full fp32 values."""
        pair = self._pair
        pair.open()
        pair.fp32.data = torch.empty(0, device=pair.half.device)
        # These replace the methods that `ParameterPair.open` sets, which would copy the freed memory.
        vars(pair.parameter)["__deepcopy__"] = self._deepcopy
        vars(pair.parameter)["__reduce_ex__"] = self._reduce_ex

    def show_fp32(self, values: Tensor) -> None:
        """Switch the parameter to the given full fp32 values, keeping its gradient."""
        self._pair.fp32.data = values
        self._pair.close()

    def show_rounded(self) -> None:
        """Switch the parameter to fp32 by converting its half-precision copy, unless it already is in fp32."""
        if self._pair.is_open:
            self.show_fp32(self.whole.float())

    @torch.no_grad()
    def take_fp32_(self) -> None:
        """Copy the parameter's fp32 values into this rank's shard and into the half-precision copy.

        Afterwards the parameter holds the half-precision copy.
        """
        values = self._pair.fp32.detach()
        self.values.copy_(self.part_of(values))
        self.whole.copy_(values)
        self._show_half()

    @torch.no_grad()
    def take_writes_(self) -> None:
        """Update the master weights with values that user code has written into the half-precision copy.

            master <- where(half == half_dtype(master), master, half)

        Only this rank's shard is checked. Elements that were not written keep all fp32 bits, because their
        half-precision value is the rounded master weight.
        """
        self._follow_memory()
        half = self.part_of(self.whole)
        master = self.values
        if half.device.type == "cpu" and is_rounded(half, master):
            return
        # On other devices this test is skipped, because the host would wait for its result.
        is_unwritten = raw_bits(master.to(half.dtype)) == raw_bits(half)
        torch.where(is_unwritten, master, half, out=master)

    def fp32_values(self) -> Tensor:
        """Return the full master weights if they are gathered, or else the half-precision copy in fp32."""
        if self.collected is not None:
            return self.collected
        if self.shows_part:
            return self.whole.float()
        # Reading the parameter itself waits for a late gather. Reading `whole` would not.
        return self.parameter.detach().float()

    @torch.no_grad()
    def load_(self, value: Tensor) -> None:
        """Load this rank's shard of a full tensor from a state dict, without rounding.

        torch loads the rounded value into the half-precision copy. A state dict of this run may hold rounded values,
        and loading them leaves the master weights unchanged.
        """
        part = self.part_of(value).to(self.whole.device)
        rounded_part = self.part_of(self.whole).float()
        if not torch.equal(part, rounded_part):
            self.values.copy_(part)

    # ---- copies made during the run --------------------------------------------------------------------------------

    def _fp32_copy(self) -> nn.Parameter:
        values = self.fp32_values().clone()
        return nn.Parameter(values, requires_grad=self.parameter.requires_grad)

    def _deepcopy(self, memo: dict[int, Any]) -> nn.Parameter:
        key = id(self.parameter)
        if key not in memo:
            memo[key] = self._fp32_copy()
        return memo[key]

    def _reduce_ex(self, protocol: Any) -> Any:
        return self._fp32_copy().__reduce_ex__(protocol)


class WeightShard(ParameterShard):
    """Parameter without master weights, with this rank's shard as a view of its memory."""

    def __init__(self, name: str, parameter: nn.Parameter, spans: list[Span], rank: int) -> None:
        begin, end = spans[rank]
        flat = flattened(parameter, parameter)
        view = flat[begin:end]
        part = nn.Parameter(view, requires_grad=parameter.requires_grad)
        super().__init__(name, parameter, part, spans, rank)

    def take_writes_(self) -> None:
        """Switch to the parameter's new memory if user code has assigned `p.data`.

        The shard shares the parameter's memory, so other writes need no copy.
        """
        self._follow_memory()
        view = self.part_of(self.whole)
        if self.values.data_ptr() != view.data_ptr():
            self._hidden.data = view


@torch.no_grad()
def write_wholes_(shards: Iterable[ParameterShard]) -> None:
    """Cast this rank's shards of master weights to half precision in a single fused copy."""
    parts_of_copies: list[Tensor] = []
    values: list[Tensor] = []
    for shard in shards:
        # A `WeightShard` shares the memory of the full tensor, so it needs no copy.
        if isinstance(shard, MasterShard):
            parts_of_copies.append(shard.part_of(shard.whole))
            values.append(shard.values)
    if values:
        torch._foreach_copy_(parts_of_copies, values)
