"""Tracking of writes to a parameter: whether others may have written it, without reading its memory.

torch counts writes in `Tensor._version`: in-place operations, also on views, on `detach()`, under `no_grad` and
`inference_mode`, in lists and in compiled graphs. What it does not count goes through `Tensor.data`, which has a
count of its own. So `data` of a tracked parameter notes that it was read: its reader may write at any later time.

    untouched   =   `data` was not read since `track`, and `_version` is what it was at `mark_clean`

Neither sees writes behind torch's back: through numpy or DLPack views, by kernels that are given addresses, a replayed
CUDA graph, or `data` in a compiled graph. Such code has to call `torch.autograd.graph.increment_version(parameter)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_DATA: Any = torch.Tensor.data


class TrackedParameter(nn.Parameter):
    """A parameter while it is tracked; copies and pickles are plain parameters that hold the exact value."""

    clean_version: int | None
    is_data_known: bool
    value: Any  # a `MasterPair`, which has the exact value

    @property
    def data(self) -> Tensor:
        """What `torch.Tensor.data` is; noted, for the memory behind it can now be written unseen."""
        self.is_data_known = True
        return _DATA.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        self.is_data_known = True  # the caller has `value`, which shares the memory
        if value.dtype is not self.dtype and value.shape == self.shape and value.is_floating_point():
            # `p.data = tau * p.data + ...` in fp32: the master takes all its digits, and the parameter stays half.
            self.value.take_(value)
            value = value.to(self.dtype)
        _DATA.__set__(self, value)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            exact = self.value.exact().clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(exact, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.value.exact(), self.requires_grad).__reduce_ex__(protocol)


def track(parameter: Tensor, value: Any) -> None:
    """Begin to track; `is_untouched` is False until `mark_clean`. The parameter's identity and behaviour stay."""
    # Only what is exactly an `nn.Parameter`: a class of the user's may have a `data` of its own.
    if type(parameter) is nn.Parameter:
        # Its class is changed in place: optimizers, DDP and user code hold references to this object.
        tracked: Any = parameter
        tracked.__class__ = TrackedParameter
        tracked.clean_version, tracked.is_data_known, tracked.value = None, False, value


def mark_clean(parameter: Tensor) -> None:
    """Note that all writes so far are known."""
    if type(parameter) is TrackedParameter:
        parameter.clean_version = parameter._version


def is_untouched(parameter: Tensor) -> bool:
    """Return whether no write can have happened since `mark_clean`. Always False for what is not tracked."""
    return (
        type(parameter) is TrackedParameter
        and not parameter.is_data_known
        and parameter.clean_version == parameter._version
    )


def untrack(parameter: Tensor) -> None:
    """Make the parameter a plain one again."""
    if type(parameter) is TrackedParameter:
        tracked: Any = parameter
        del tracked.clean_version, tracked.is_data_known, tracked.value
        tracked.__class__ = nn.Parameter
