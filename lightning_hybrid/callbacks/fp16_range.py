"""What fp16 cannot hold of a network's weights, activations and gradients, found before a run."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_iter

from lightning_hybrid.callbacks.recalibrate_bn import generators_kept, new_train_loader
from lightning_hybrid.checks import plain_value, require_whole
from lightning_hybrid.precision.window import NORMALISATION_TYPES, is_reparametrised

SUBNORMAL, NORMAL, END = (
    -24,
    -14,
    16,
)  # the smallest values are 2^-24, of 11 bits 2^-14; from 2^16 on they are inf
LEAST, MOST, LARGEST_SCALE = (
    -50,
    40,
    24,
)  # exponents of the counts, and that of the largest loss scale
# Shares that need no remedy; our choice: of normally distributed weights of 0.02 they are 2e-6 and 0.002.
MOST_LOST = 0.01
MOST_SUBNORMAL = 0.1

NORMALISE = "a normalisation layer before it, which computes in fp32, or precision='bf16-true'"
ABOVE = {
    "weight": "keep_fp32=(its class,) of MasterWeightPrecision, or precision='bf16-true'",
    "activation": NORMALISE,
    "gradient": "precision='bf16-true', as no loss scale is below 1; or a mean in the loss, no sum",
}
BELOW = {
    "weight": "the fp32 weights hold them, forward sees 0: draw them wider, or precision='bf16-true'; LAMB moves so "
    "small a layer with weight_norm_bounds=(low, high)",
    "activation": NORMALISE,
    "gradient": "precision='bf16-true', as no loss scale holds the largest and the smallest",
}


class TensorRange(NamedTuple):
    """Shares of the values of a weight, activation or gradient, zeros aside, and what to do where fp16 loses some."""

    kind: str
    name: str
    below_subnormal: float  # 2^-24 = 6e-8
    below_normal: float  # 2^-14 = 6e-5, with these
    above: float  # from 65,536 on; inf and nan too
    remedy: str  # empty where fp16 does


class RangeReport(NamedTuple):
    """Ranges of all tensors that would be fp16, and the largest loss scale that keeps their gradients below 32,768."""

    tensors: list[TensorRange]
    loss_scale: float

    def __str__(self) -> str:
        found = [one for one in self.tensors if one.remedy]
        text = (
            f"half precision: of {len(self.tensors)} tensors {len(found)} have values that fp16 does not hold; "
            f"there is room for a loss scale up to {self.loss_scale:g}"
        )
        for kind, name, *shares, remedy in found:
            lost, few_bits, above = (f"{share:.1%}" for share in shares)
            text += f"\n  {kind} {name}: {lost} below 6e-8, {few_bits} below 6e-5, {above} above 65,504: {remedy}"
        return text


def half_precision_report(
    module: pl.LightningModule, batches: Iterable[Any], *, num_batches: int = 2
) -> RangeReport:
    """Measure what fp16 cannot hold in forward and backward of some batches, by a copy of the module.

    `training_step` runs in the module's own precision, where it is; module, its buffers and gradients, random numbers
    and the loader's generators stay as they are. Seen are weights that `"16-true"` converts, what leaf modules put out,
    and the gradients of both; not what is computed between layers. bf16 has fp32's range, in 8 bits.

    Raises:
        ValueError: The module optimizes by hand, or has no parameters yet.
    """
    num_batches = plain_value(num_batches)
    require_whole("num_batches", num_batches, "so many batches are run. Write num_batches=2")
    if not module.automatic_optimization or not any(True for _ in module.parameters()):
        what = (
            "`automatic_optimization` (=False)"
            if not module.automatic_optimization
            else "`parameters()` (=none)"
        )
        raise ValueError(
            f"{what} leaves the report on half precision nothing to see: it runs `training_step` of layers that exist, "
            "and backward of the loss that comes back. Leave `HalfPrecisionReport` out."
        )
    counts: dict[tuple[str, str], Tensor] = {}

    def add(kind: str, name: str, tensor: Tensor) -> None:
        values = tensor.detach().float()
        values = values[values != 0]
        # x = m 2^e with m in [1/2, 1): below 2^k is e <= k.
        exponents = torch.where(values.isfinite(), torch.frexp(values).exponent, MOST).clamp(
            LEAST, MOST
        )
        counts[kind, name] = counts.get((kind, name), 0) + torch.bincount(
            exponents - LEAST, minlength=MOST - LEAST + 1
        )

    def take_gradient(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            add("gradient", name, parameter.grad)
        parameter.grad = None

    def see_output(name: str, _: Any, __: Any, output: Any) -> None:
        for one in tree_iter(output):
            if isinstance(one, Tensor) and one.is_floating_point():
                add("activation", name, one)
                if one.requires_grad:
                    one.register_hook(partial(add, "gradient", name))

    trainer = module._trainer
    shadow = copy.deepcopy(module, {id(trainer): trainer})
    shadow.log = lambda *_, **__: None  # type: ignore[method-assign]
    for name, one in shadow.named_modules():
        if not isinstance(one, NORMALISATION_TYPES) and not is_reparametrised(one):
            for own, parameter in one.named_parameters(name, recurse=False):
                add("weight", own, parameter)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(partial(take_gradient, own))
        if name and not any(one.children()):
            one.register_forward_hook(partial(see_output, f"{name} ({type(one).__name__})"))
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
    largest = [
        LEAST + int(each.nonzero().max())
        for (kind, _), each in counts.items()
        if kind == "gradient" and each.any()
    ]
    scale = min(max(END - 1 - max(largest, default=0), 0), LARGEST_SCALE)
    return RangeReport([_range_of(*key, each, scale) for key, each in counts.items()], 2.0**scale)


def _range_of(kind: str, name: str, counts: Tensor, scale: int) -> TensorRange:
    shares = (counts.double() / counts.sum().clamp(min=1)).tolist()

    def below(exponent: int) -> float:
        return sum(shares[: exponent - LEAST + 1])

    def is_lossy(scale: int = 0) -> bool:
        return below(SUBNORMAL - scale) > MOST_LOST or below(NORMAL - scale) > MOST_SUBNORMAL

    above = sum(shares[END + 1 - LEAST :])
    remedy = ABOVE[kind] if above else BELOW[kind] if is_lossy() else ""
    if kind == "gradient" and not above and is_lossy() and not is_lossy(scale):
        remedy = f"a loss scale: loss_scale='dynamic', or {2.0**scale:g}"
    return TensorRange(kind, name, below(SUBNORMAL), below(NORMAL), above, remedy)


class HalfPrecisionReport(Callback):
    """Callback that says, before a fit, what fp16 cannot hold: `half_precision_report` of its training batches.

    It runs where the module then is, on the CPU; rank zero prints what its own batches showed. *Every rank must have
    this callback*, as `training_step` may wait for others.
    """

    def __init__(self, num_batches: int = 2) -> None:
        self.num_batches = num_batches
        self.report: RangeReport | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Run the batches, before the strategy converts the module."""
        if stage == "fit":
            loader = new_train_loader(trainer, asked_by="HalfPrecisionReport")
            self.report = half_precision_report(pl_module, loader, num_batches=self.num_batches)
            rank_zero_info(str(self.report))
