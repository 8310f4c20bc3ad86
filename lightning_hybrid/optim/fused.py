"""The fused step of LARS: two passes over memory for all tensors of a kind, whatever the number of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_hybrid.optim.rows import RowEngine
from lightning_hybrid.optim.scaling import Scaling
from lightning_hybrid.optim.trust_ratio import trust_ratio

_OPTIONS = ("lr", "momentum", "weight_decay", "trust_coefficient", "eps", "trust_clip", "excluded_lr_mult")
_FORMS = ("lr_inside", "lr_outside", "ratio_outside")


class Engine(Protocol):
    """Two passes over tensors of one kind; see `RowEngine`."""

    def is_of(self, params: Sequence[Tensor], buffers: Sequence[Tensor], copies: Sequence[Tensor]) -> bool:
        """Whether it was made for these tensors."""

    def squares(self, grads: Sequence[Tensor], unscaled_decay: Tensor | None, needed: Sequence[bool]) -> Tensor:
        """Sums of squares, float64, of shape (2, tensors)."""

    def update(self, coefficients: Tensor) -> None:
        """The step."""


@dataclass
class Kind:
    """Tensors that one kernel takes: alike in device, dtypes and all that is compiled in."""

    nesterov: bool
    is_joint: bool
    has_momentum: bool
    places: list[int] = field(default_factory=list)  # among all parameters with a gradient
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)  # of each tensor
    engine: Engine | None = None

    def __post_init__(self) -> None:
        self.options = Options()


class FusedLars:
    """What an optimizer keeps between fused steps: its tensors by kind, each kind with an engine.

    `members`: group, parameter and gradient of all that is to be stepped. `buffer_of` gives a parameter's momentum.
    """

    def __init__(self) -> None:
        self._signature: list[Any] = []
        self._kinds: list[Kind] = []

    def step(
        self,
        members: Sequence[tuple[dict[str, Any], Tensor, Tensor]],
        copies: Mapping[Tensor, Tensor],
        buffer_of: Callable[[Tensor], Tensor],
        scaling: Scaling,
        *,
        is_checked: bool,
    ) -> Scaling:
        """Move the parameters; gradients are read, never written. Returns the scaling with the verdict.

        `is_checked`: find out here whether a gradient is inf or nan, before anything is written. The sums of squares
        tell: inf and nan survive them. So a gradient past 1e18, scaled and in float32, counts as inf.
        """
        self._sort(members, copies)
        squares = []
        for kind in self._kinds:
            kind.grads = [members[place][2] for place in kind.places]
            kind.buffers = [buffer_of(param) for param in kind.params] if kind.has_momentum else []
            if kind.engine is None or not kind.engine.is_of(kind.params, kind.buffers, kind.copies):
                kind.engine = _engine(kind)
            kind.options.take(kind)
            decay = None
            if kind.is_joint:
                own = scaling.to(kind.params[0].device)
                decay = kind.options.decay * kind.options.sign / _or_one(own.inverse_scale)
            needed = [is_checked or group["trust_ratio"] for group in kind.groups]
            squares.append(kind.engine.squares(kind.grads, decay, needed))
        if is_checked and squares:
            first = squares[0].device
            total = torch.stack([sums[1].sum().to(first, non_blocking=True) for sums in squares]).sum()
            scaling = Scaling(inverse_scale=scaling.inverse_scale, found_inf=(~total.isfinite()).float())
        for kind, sums in zip(self._kinds, squares, strict=True):
            assert kind.engine is not None
            own = scaling.to(sums.device)
            kind.engine.update(coefficients(sums, kind.options, own, is_joint=kind.is_joint))
            kind.grads = []
        return scaling

    def _sort(self, members: Sequence[tuple[dict[str, Any], Tensor, Tensor]], copies: Mapping[Tensor, Tensor]) -> None:
        """Sort the tensors by kind, unless they are those of the last step."""
        signature: list[Any] = []
        for group, param, grad in members:
            copy = copies.get(param) if copies else None
            flags = (group["momentum"] != 0, group["nesterov"], group["denominator"] == "joint")
            signature.append((id(param), id(copy), grad.dtype, param.dtype, param.device, *flags, id(group)))
        if signature == self._signature:
            return
        kinds: dict[Any, Kind] = {}
        for place, ((group, param, _), about) in enumerate(zip(members, signature, strict=True)):
            copy = copies.get(param)
            has_momentum, nesterov, is_joint = about[5:8]
            key = (copy is None or copy.dtype, *about[2:8])
            made = Kind(nesterov=nesterov, is_joint=is_joint, has_momentum=has_momentum)
            kind = kinds.setdefault(key, made)
            kind.places.append(place)
            kind.params.append(param)
            kind.groups.append(group)
            if copy is not None:
                kind.copies.append(copy)
        self._signature, self._kinds = signature, list(kinds.values())


class Options:
    """The options of the groups as float64 vectors with one number per tensor, on the tensors' device."""

    def __init__(self) -> None:
        self._key: Any = None

    def take(self, kind: Kind) -> None:
        """Read the groups again; unchanged numbers stay on the device, changed ones go there without a wait."""
        groups = list({id(group): group for group in kind.groups}.values())
        numbers = [[_number(group, name) for name in _OPTIONS] for group in groups]
        flags = [
            [_FORMS.index(_form(group)), bool(group["trust_ratio"]), -1.0 if group["maximize"] else 1.0]
            for group in groups
        ]
        key = (numbers, flags, [id(group) for group in kind.groups])
        device = kind.params[0].device
        if key != self._key:
            index = {id(group): i for i, group in enumerate(groups)}
            rows = [numbers[index[id(group)]] + flags[index[id(group)]] for group in kind.groups]
            table = torch.tensor(rows, dtype=torch.float64)
            if device.type == "cuda":
                table = table.pin_memory().to(device, non_blocking=True)
            columns = table.unbind(1)
            self._lr, self.momentum, self.decay, self.trust_coefficient, self.eps, self.clip, self.mult = columns[:7]
            self.form, self.is_adapted, self.sign = columns[7], columns[8] > 0, columns[9]
            self._key = key
        self.lr = self._lr
        if any(isinstance(group["lr"], Tensor) for group in groups):
            rates = [group["lr"] for group in kind.groups]
            self.lr = torch.stack([_on_device(rate, device) for rate in rates])


def coefficients(sums: Tensor, options: Options, scaling: Scaling, *, is_joint: bool) -> Tensor:
    """What the update multiplies by, one line per tensor, (tensors, 6), float64; see `compiled` for the columns.

        INSIDE, OUTSIDE      "lr_inside"  lr * q, 1      "lr_outside"  q, lr      "ratio_outside"  1, lr * q

    `sums`: (2, tensors), of squares of weights, and of still scaled gradients or directions.
    """
    scale = _or_one(scaling.inverse_scale)
    weight_norms, norms = sums.sqrt().unbind()
    ratios = trust_ratio(
        weight_norms,
        norms * scale,
        trust_coefficient=options.trust_coefficient,
        weight_decay=0.0 if is_joint else options.decay,
        eps=options.eps,
    )
    lr = torch.where(options.is_adapted, options.lr, options.lr * options.mult)
    clipped = torch.minimum(ratios / lr, options.clip)
    ratios = torch.where(options.clip < torch.inf, clipped, ratios)
    ratios = torch.where(options.is_adapted, ratios, 1.0)
    inside = torch.where(options.form == 0, lr * ratios, torch.where(options.form == 1, ratios, 1.0))
    outside = torch.where(options.form == 0, 1.0, torch.where(options.form == 1, lr, lr * ratios))
    skip = torch.zeros_like(lr) if scaling.found_inf is None else (scaling.found_inf > 0).to(lr.dtype).expand_as(lr)
    return torch.stack([options.sign * scale, options.decay, options.momentum, inside, outside, skip], dim=1)


def _engine(kind: Kind) -> Engine:
    return RowEngine(
        kind.params,
        kind.buffers,
        kind.copies,
        kind.grads[0].dtype,
        nesterov=kind.nesterov,
        is_joint=kind.is_joint,
    )


def _number(group: dict[str, Any], name: str) -> float:
    value = group[name]
    if isinstance(value, Tensor):
        return 0.0  # read on the device
    return torch.inf if value is None else float(value)


def _form(group: dict[str, Any]) -> str:
    # Without momentum all forms agree; "lr_outside" multiplies as SGD does.
    return group["momentum_form"] if group["momentum"] != 0 else "lr_outside"


def _on_device(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, torch.float64, non_blocking=True)
    return torch.full((), value, dtype=torch.float64, device=device)


def _or_one(scale: Tensor | None) -> float | Tensor:
    return 1.0 if scale is None else scale
