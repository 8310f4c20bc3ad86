"""Tells whether a parameter may have been written since we last did, without reading its memory.

torch counts writes in ``Tensor._version``: in-place operations, also on views, on ``detach()``, under ``no_grad`` and
``inference_mode``, in lists and in compiled graphs. What it does not count goes through ``Tensor.data``, which has a
count of its own. So ``data`` of a watched parameter notes that somebody has it, and may write at any later time:

    untouched   =   nobody was given ``data`` since `watch`, and ``_version`` is what it was at `settle`

Neither sees writes behind torch's back: through numpy or DLPack views, by kernels that are given addresses, by a
replayed CUDA graph, or through ``data`` inside a compiled graph. Whoever makes such a write tells with
``torch.autograd.graph.increment_version(parameter)``, as autograd asks of them anyway.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

_DATA: Any = torch.Tensor.data


class Value(Protocol):
    """What stands behind a watched parameter."""

    master: Tensor

    def exact(self) -> Tensor:
        """The parameter's value in the dtype that it had before the conversion."""


class TrackedParameter(nn.Parameter):
    """A parameter, for the time it is watched; ``data`` gives what it always gives.

    Copies and pickles are plain parameters that hold the exact value, as of a model in mixed precision.
    """

    version_settled: int | None
    is_data_known: bool
    value: Value

    @property
    def data(self) -> Tensor:
        """As ``torch.Tensor.data``; noted, for the memory behind it can now be written unseen."""
        self.is_data_known = True
        value: Tensor = _DATA.__get__(self)
        return value

    @data.setter
    def data(self, value: Tensor) -> None:
        self.is_data_known = True  # to whoever has `value`
        if value.dtype is not self.dtype and value.shape == self.shape and value.is_floating_point():
            # `p.data = tau * p.data + ...` in fp32: all its digits are kept, and the parameter stays half.
            with torch.no_grad():
                self.value.master.copy_(value)
            value = value.to(self.dtype)
        _DATA.__set__(self, value)

    def __repr__(self) -> str:  # type: ignore[override]
        """As of a plain parameter."""
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter with the exact value."""
        if id(self) not in memo:
            exact = self.value.exact().clone(memory_format=torch.preserve_format)
            memo[id(self)] = nn.Parameter(exact, self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As of a plain parameter with the exact value."""
        return nn.Parameter(self.value.exact(), self.requires_grad).__reduce_ex__(protocol)


def watch(parameter: Tensor, value: Value) -> None:
    """Begin; :func:`is_untouched` is False until :func:`settle`. Its identity and all it does stay.

    Only what is exactly an ``nn.Parameter`` is watched: a class of the user's may have a ``data`` of its own.
    """
    if type(parameter) is nn.Parameter:
        parameter.__class__ = TrackedParameter
        parameter.version_settled = None  # type: ignore[attr-defined]
        parameter.is_data_known = False  # type: ignore[attr-defined]
        parameter.value = value  # type: ignore[attr-defined]


def mark_clean(parameter: Tensor) -> None:
    """All that was written is known; from now on count anew."""
    if type(parameter) is TrackedParameter:
        parameter.version_settled = parameter._version


def is_untouched(parameter: Tensor) -> bool:
    """Whether nobody can have written since :func:`settle`. Always False if it is not watched.

    >>> weight = nn.Parameter(torch.ones(2)); watch(weight, None); mark_clean(weight)
    >>> is_untouched(weight)
    True
    >>> with torch.no_grad(): _ = weight[0].mul_(2.0)
    >>> is_untouched(weight)
    False
    >>> mark_clean(weight); _ = weight.data
    >>> is_untouched(weight)    # now and later
    False
    """
    return (
        type(parameter) is TrackedParameter
        and not parameter.is_data_known
        and parameter.version_settled == parameter._version
    )


def unwatch(parameter: Tensor) -> None:
    """End: the parameter is what it was before."""
    if type(parameter) is TrackedParameter:
        del parameter.version_settled, parameter.is_data_known, parameter.value
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
