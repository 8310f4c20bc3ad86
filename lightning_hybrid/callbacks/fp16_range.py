"""Report on weights, activations and gradients that fp16 cannot represent."""

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
from lightning_hybrid.precision.half_window import NORMALIZATION_TYPES, is_reparametrized

# Exponents of fp16: the smallest subnormal value is 2^-24, the smallest value with all 11 bits of
# precision is 2^-14, and values from 2^16 on overflow to inf.
SUBNORMAL = -24
NORMAL = -14
END = 16

# Range of the exponents that are counted, and the exponent of the largest loss scale.
LEAST = -50
MOST = 40
LARGEST_SCALE = 24

# Largest acceptable fractions of lost and of imprecise values. We chose these limits. For
# comparison, normally distributed weights with a standard deviation of 0.02 have fractions of 2e-6
# and 0.002.
MOST_LOST = 0.01
MOST_SUBNORMAL = 0.1

NORMALIZE = (
    "add a normalization layer before it, which computes in fp32, or set precision='bf16-true'"
)
ABOVE = {
    "weight": "add the class of the layer to MasterWeightPrecision(keep_fp32=...), or set precision='bf16-true'",
    "activation": NORMALIZE,
    "gradient": (
        "set precision='bf16-true', because the loss scale cannot be below 1, or average the loss instead of summing it"
    ),
}
BELOW = {
    "weight": (
        "initialize the weights with a larger spread, because these values are 0 in the fp16 forward pass, or set "
        "precision='bf16-true'. With LAMB, weight_norm_bounds=(low, high) lets layers with such small weights train"
    ),
    "activation": NORMALIZE,
    "gradient": "set precision='bf16-true', because no loss scale fits both the largest and the smallest values",
}


class TensorRange(NamedTuple):
    """Fractions of a tensor's non-zero values outside the range of fp16, with a remedy.

    Attributes:
        kind: `"weight"`, `"activation"` or `"gradient"`.
        name: Name of the parameter or layer.
        below_subnormal: Fraction of magnitudes below 2^-24 = 6e-8.
        below_normal: Fraction of magnitudes below 2^-14 = 6e-5, including `below_subnormal`.
        above: Fraction of magnitudes of at least 65,536, including inf and nan.
        remedy: What to do, or an empty string if fp16 is sufficient.
    """

    kind: str
    name: str
    below_subnormal: float
    below_normal: float
    above: float
    remedy: str


class RangeReport(NamedTuple):
    """Value ranges of all tensors that would be converted to fp16, and a suitable loss scale.

    The loss scale is the largest power of two from 1 to 2^24 that keeps all gradients below 32,768.
    If there is no such power, it is 1. If there are no gradients, it is 32,768.
    """

    tensors: list[TensorRange]
    loss_scale: float

    def __str__(self) -> str:
        lossy = [tensor for tensor in self.tensors if tensor.remedy]
        text = (
            f"half precision: {len(lossy)} of {len(self.tensors)} tensors have values that fp16 cannot represent. The "
            f"loss scale can be at most {self.loss_scale:g}."
        )
        for tensor in lossy:
            text += (
                f"\n  {tensor.kind} {tensor.name}: {tensor.below_subnormal:.1%} below 6e-8, {tensor.below_normal:.1%} "
                f"below 6e-5, {tensor.above:.1%} above 65,504. Remedy: {tensor.remedy}."
            )
        return text


def half_precision_report(
    module: pl.LightningModule, batches: Iterable[Any], *, num_batches: int = 2
) -> RangeReport:
    """Run some batches and report which weights, activations and gradients fp16 cannot represent.

    A copy of the module runs `training_step` in the module's own precision and on its device. The
    module, its buffers and gradients, the global random number generators and the loader's
    generators stay unchanged.

    The report covers the weights that `"16-true"` converts, the outputs of leaf modules, and the
    gradients of both. It does not cover values that are computed between layers. It does not apply
    to bf16, which has the range of fp32 and 8 bits of precision.

    Args:
        module: The module.
        batches: The training loader.
        num_batches: Number of batches to run.

    Raises:
        ValueError: The module uses manual optimization, or has no parameters yet.
    """
    num_batches = plain_value(num_batches)
    require_whole(
        "num_batches", num_batches, "the report runs this number of batches. Set num_batches=2"
    )
    _check_module(module)
    counts = _ExponentCounts()
    shadow = _observed_copy(module, counts)
    num_arguments = len(inspect.signature(module.training_step).parameters)
    shadow.zero_grad()
    with isolate_rng(), generators_kept(batches), torch.enable_grad():
        for index, batch in enumerate(islice(batches, num_batches)):
            moved = shadow._apply_batch_transfer_handler(batch, shadow.device)
            on_device = getattr(batches, "on_device", None)
            if callable(on_device):
                # Loaders of this library may process batches on the device, for example to
                # normalize images that are sent as uint8.
                moved = on_device(moved)
            output = shadow.training_step(*(moved, index)[:num_arguments])
            loss = output["loss"] if isinstance(output, Mapping) else output
            if loss is not None:  # None means that the step skips this batch
                loss.backward()
    return counts.report()


def _check_module(module: pl.LightningModule) -> None:
    if not module.automatic_optimization:
        subject = (
            "`automatic_optimization` (=False) cannot be combined with the half-precision report, which runs backward "
            "itself"
        )
    elif not list(module.parameters()):
        subject = (
            "`parameters()` is empty, but the report needs the layers of the module before training"
        )
    else:
        return
    raise ValueError(f"{subject}. Remove `HalfPrecisionReport`.")


class _ExponentCounts:
    """Histograms of the binary exponents of weights, activations and gradients."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Tensor] = {}  # by kind and name

    def add(self, kind: str, name: str, tensor: Tensor) -> None:
        """Count the exponents of the non-zero values of a tensor."""
        values = tensor.detach().float()
        values = values[values != 0]
        # frexp: x = m 2^e with m in [1/2, 1), so x is below 2^k if e <= k.
        exponents = torch.where(values.isfinite(), torch.frexp(values).exponent, MOST)
        exponents = exponents.clamp(LEAST, MOST)
        counts = torch.bincount(exponents - LEAST, minlength=MOST - LEAST + 1)
        self._counts[kind, name] = self._counts.get((kind, name), 0) + counts

    def take_gradient(self, name: str, parameter: Tensor) -> None:
        """Count the exponents of a parameter's gradient, then free the gradient."""
        if parameter.grad is not None:
            self.add("gradient", name, parameter.grad)
        parameter.grad = None

    def add_output(self, name: str, _: Any, __: Any, output: Any) -> None:
        """Count the exponents of a layer's output and, during backward, of the output's gradient."""
        for value in tree_iter(output):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.add("activation", name, value)
                if value.requires_grad:
                    value.register_hook(partial(self.add, "gradient", name))

    def report(self) -> RangeReport:
        """Return the value ranges of all counted tensors, and a suitable loss scale."""
        gradient_exponents = []  # exponent of the largest value in each gradient
        for (kind, _), counts in self._counts.items():
            if kind == "gradient" and counts.any():
                gradient_exponents.append(LEAST + int(counts.nonzero().max()))
        scale = END - 1 - max(gradient_exponents, default=0)
        scale = min(max(scale, 0), LARGEST_SCALE)

        tensors = []
        for (kind, name), counts in self._counts.items():
            tensors.append(_range_of(kind, name, counts, scale))
        return RangeReport(tensors, 2.0**scale)


def _observed_copy(module: pl.LightningModule, counts: _ExponentCounts) -> pl.LightningModule:
    """Return a copy of a module that counts the exponents of its weights, outputs and gradients."""
    trainer = module._trainer
    shadow = copy.deepcopy(module, {id(trainer): trainer})
    shadow.log = lambda *_, **__: None  # type: ignore[method-assign]
    for name, layer in shadow.named_modules():
        is_converted = not isinstance(layer, NORMALIZATION_TYPES) and not is_reparametrized(layer)
        if is_converted:
            for parameter_name, parameter in layer.named_parameters(name, recurse=False):
                counts.add("weight", parameter_name, parameter)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(
                        partial(counts.take_gradient, parameter_name)
                    )
        if name and not any(layer.children()):
            layer_name = f"{name} ({type(layer).__name__})"
            layer.register_forward_hook(partial(counts.add_output, layer_name))
    return shadow


def _range_of(kind: str, name: str, counts: Tensor, scale: int) -> TensorRange:
    """Compute the `TensorRange` of a tensor from its exponent counts.

    `scale` is the binary exponent of the loss scale.
    """
    shares = (counts.double() / counts.sum().clamp(min=1)).tolist()

    def below(exponent: int) -> float:
        return sum(shares[: exponent - LEAST + 1])

    def is_lossy(scale: int = 0) -> bool:
        return below(SUBNORMAL - scale) > MOST_LOST or below(NORMAL - scale) > MOST_SUBNORMAL

    above = sum(shares[END + 1 - LEAST :])
    remedy = ""
    if above:
        remedy = ABOVE[kind]
    elif kind == "gradient" and is_lossy() and not is_lossy(scale):
        remedy = f"set loss_scale='dynamic' or loss_scale={2.0**scale:g}"
    elif is_lossy():
        remedy = BELOW[kind]
    return TensorRange(kind, name, below(SUBNORMAL), below(NORMAL), above, remedy)


class HalfPrecisionReport(Callback):
    """Callback that runs `half_precision_report` on some batches before training.

    At this time the module is still on the CPU. Rank zero prints the result of its own batches.
    *Every rank must have this callback*, because `training_step` may wait for other ranks.

    Args:
        num_batches: Number of training batches to run.
    """

    def __init__(self, num_batches: int = 2) -> None:
        self.num_batches = num_batches
        self.report: RangeReport | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Run the report on training batches, before the strategy converts the module to fp16."""
        if stage == "fit":
            loader = new_train_loader(trainer, asked_by="HalfPrecisionReport")
            self.report = half_precision_report(pl_module, loader, num_batches=self.num_batches)
            rank_zero_info(str(self.report))
