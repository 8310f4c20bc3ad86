"""What fp16 cannot hold of a network's weights, activations and gradients, found before a run."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_iter

from lightning_hybrid.callbacks.recalibrate_bn import generators_kept, new_train_loader
from lightning_hybrid.checks import require_whole
from lightning_hybrid.precision.master_weights import NORMALISATION_TYPES, is_reparametrised

# 2**-24 is fp16's smallest subnormal, 2**-14 its smallest normal; from 2**16 on, a value is inf.
SUBNORMAL, NORMAL, END = -24, -14, 16
LEAST, MOST = -50, 40  # exponents that are told apart
LARGEST_SCALE = 24
# Shares that need no remedy; our choice: of normally distributed weights of 0.02 they are 2e-6 and 0.002.
MOST_LOST, MOST_SUBNORMAL = 0.01, 0.1

NORMALISE = "a normalisation layer before it, which computes in fp32, or precision='bf16-true'"
REMEDIES = {
    ("weight", "above"): "keep_fp32=(its class,) of MasterWeightPrecision, or precision='bf16-true'",
    ("weight", "below"): "fp32 masters hold them, forward sees 0: draw them wider, or precision='bf16-true'; so small "
    "a layer moves with LAMB(weight_norm_bounds=(low, high))",
    ("activation", "above"): NORMALISE,
    ("activation", "below"): NORMALISE,
    ("gradient", "above"): "precision='bf16-true', as no loss scale is below 1; or a mean in the loss, no sum",
    ("gradient", "below"): "precision='bf16-true', as no loss scale holds the largest and the smallest",
}


@dataclass(frozen=True, kw_only=True)
class TensorRange:
    """Shares of a tensor's values that fp16 does not hold; zeros do not count.

    Attributes:
        kind: "weight", "activation" or "gradient", of a weight or of an activation.
        below_subnormal: Less than 2^-24 = 6e-8: most of these are 0 in fp16.
        below_normal: Less than 2^-14 = 6e-5, with these: of fewer than 11 bits in fp16.
        above: From 65,536 on, inf and nan too.
        remedy: What to do; empty where fp16 does.
    """

    kind: str
    name: str
    below_subnormal: float
    below_normal: float
    above: float
    remedy: str


@dataclass(frozen=True, kw_only=True)
class RangeReport:
    """Ranges of all tensors that would be fp16.

    Attributes:
        loss_scale: The largest power of two with which every gradient that was seen stays below 32,768.
    """

    tensors: tuple[TensorRange, ...]
    loss_scale: float

    def __str__(self) -> str:
        found = [one for one in self.tensors if one.remedy]
        lines = [
            f"half precision: of {len(self.tensors)} tensors {len(found)} have values that fp16 does not hold; "
            f"there is room for a loss scale up to {self.loss_scale:g}"
        ]
        if found:
            lines += ["| tensor | below 6e-8 | below 6e-5 | above 65,504 | remedy |", "|---|---|---|---|---|"]
            lines += [
                f"| {one.kind} {one.name} | {one.below_subnormal:.1%} | {one.below_normal:.1%} | {one.above:.1%} | "
                f"{one.remedy} |"
                for one in found
            ]
        return "\n".join(lines)


def half_precision_report(module: pl.LightningModule, batches: Iterable[Any], *, num_batches: int = 2) -> RangeReport:
    """Measure what fp16 cannot hold in forward and backward of some batches, by a copy of the module.

    `training_step` runs in the module's own precision, where it is; module, its buffers and gradients, random numbers
    and the loader's generators stay as they are. Seen are weights that `"16-true"` converts, what leaf modules put out,
    and the gradients of both; not what is computed between layers. bf16 holds all of it, in 8 bits in place of 11.

    Raises:
        ValueError: The module optimizes by hand, or has no parameters yet.

    >>> class Small(pl.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.net = torch.nn.Linear(2, 1, bias=False)
    ...         torch.nn.init.constant_(self.net.weight, 1e-9)
    ...     def training_step(self, batch):
    ...         return self.net(batch).square().mean()
    >>> [(one.kind, one.below_subnormal) for one in half_precision_report(Small(), [torch.ones(4, 2)]).tensors]
    [('weight', 1.0), ('activation', 1.0), ('gradient', 1.0), ('gradient', 1.0)]
    """
    require_whole("num_batches", num_batches, "so many batches are run. Set callbacks.half_precision.num_batches=2")
    if not module.automatic_optimization or not any(True for _ in module.parameters()):
        what = "`automatic_optimization` (=False)" if not module.automatic_optimization else "`parameters()` (=none)"
        raise ValueError(
            f"{what} leaves the report on half precision nothing to see: it runs `training_step` of layers that exist, "
            "and backward of the loss that comes back. Leave callbacks.half_precision out."
        )
    trainer = module._trainer
    shadow = copy.deepcopy(module, {id(trainer): trainer})
    shadow.log = lambda *_, **__: None  # type: ignore[method-assign]
    ranges = _Ranges()
    for name, one in shadow.named_modules():
        if not isinstance(one, NORMALISATION_TYPES) and not is_reparametrised(one):
            for own, parameter in one.named_parameters(name, recurse=False):
                ranges.add("weight", own, parameter)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(partial(ranges.take_gradient, own))
        if name and not any(one.children()):
            one.register_forward_hook(partial(ranges.see_output, f"{name} ({type(one).__name__})"))
    num_arguments = len(inspect.signature(module.training_step).parameters)
    shadow.zero_grad()
    with isolate_rng(), generators_kept(batches), torch.enable_grad():
        for index, batch in enumerate(islice(batches, num_batches)):
            moved = shadow._apply_batch_transfer_handler(batch, shadow.device)
            # Of this library's loaders, such as the normalisation of images that travel as uint8.
            moved = batches.on_device(moved) if hasattr(batches, "on_device") else moved
            found = shadow.training_step(*(moved, index)[:num_arguments])
            loss = found["loss"] if isinstance(found, Mapping) else found
            if loss is not None:  # of a batch that is left out
                loss.backward()
    return ranges.report()


class HalfPrecisionReport(Callback):
    """Callback that says, before a fit, what fp16 cannot hold: `half_precision_report` of its training batches.

    It runs where the module then is, on the CPU; rank zero prints what its own batches showed. *Every rank must have
    this callback*, as `training_step` may wait for others.

    Args:
        num_batches: Batches that are run.
    """

    def __init__(self, num_batches: int = 2) -> None:
        self.num_batches = num_batches
        self.report: RangeReport | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Run the batches, before the strategy converts the module."""
        if stage == "fit":
            loader = new_train_loader(trainer, asked_by="callbacks=half_precision")
            self.report = half_precision_report(pl_module, loader, num_batches=self.num_batches)
            rank_zero_info(str(self.report))


class _Ranges:
    """How many values of each tensor have which exponent."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Tensor] = {}

    def add(self, kind: str, name: str, tensor: Tensor) -> None:
        values = tensor.detach().float()
        values = values[values != 0]
        # x = m 2^e with m in [1/2, 1): below 2^k is e <= k.
        exponents = torch.where(values.isfinite(), torch.frexp(values).exponent, MOST).clamp(LEAST, MOST)
        counts = torch.bincount(exponents.flatten() - LEAST, minlength=MOST - LEAST + 1)
        self._counts[kind, name] = self._counts.get((kind, name), 0) + counts

    def take_gradient(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.add("gradient", name, parameter.grad)
        parameter.grad = None

    def see_output(self, name: str, _: Any, __: Any, output: Any) -> None:
        for one in tree_iter(output):
            if isinstance(one, Tensor) and one.is_floating_point():
                self.add("activation", name, one)
                if one.requires_grad:
                    one.register_hook(partial(self.add, "gradient", name))

    def report(self) -> RangeReport:
        shares = {key: (counts.double() / counts.sum().clamp(min=1)).tolist() for key, counts in self._counts.items()}
        largest = [
            LEAST + max(index for index, share in enumerate(found) if share)
            for (kind, _), found in shares.items()
            if kind == "gradient" and any(found)
        ]
        scale = min(max(END - 1 - max(largest, default=0), 0), LARGEST_SCALE)
        tensors = (_range_of(kind, name, found, scale) for (kind, name), found in shares.items())
        return RangeReport(tensors=tuple(tensors), loss_scale=2.0**scale)


def _range_of(kind: str, name: str, shares: list[float], scale: int) -> TensorRange:
    def below(exponent: int) -> float:
        return sum(shares[: exponent - LEAST + 1])

    def is_lossy(scale: int = 0) -> bool:
        return below(SUBNORMAL - scale) > MOST_LOST or below(NORMAL - scale) > MOST_SUBNORMAL

    above = sum(shares[END + 1 - LEAST :])
    remedy = REMEDIES[kind, "above"] if above else REMEDIES[kind, "below"] if is_lossy() else ""
    if kind == "gradient" and not above and is_lossy() and not is_lossy(scale):
        remedy = f"a loss scale: loss_scale='dynamic', or {2.0**scale:g}"
    return TensorRange(
        kind=kind,
        name=name,
        below_subnormal=below(SUBNORMAL),
        below_normal=below(NORMAL),
        above=above,
        remedy=remedy,
    )
