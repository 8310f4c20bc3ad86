"""A half-precision module and the fp32 masters behind it.

Every trained floating-point parameter of the module has a *pair*: the low-precision tensor that forward and backward
use, and its fp32 `master`, the value that is trained, saved and restored. Normalisation layers, reparametrised
weights, buffers and, in a fit, frozen parameters keep their own dtype and have no pair.

The low tensor keeps its identity and its place in the optimizer's `param_groups`; the masters stand in only while
`Optimizer.step` or `load_state_dict` runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer

from lightning_hybrid.placement import broadcast_first_
from lightning_hybrid.precision.module_hooks import ModuleHooks
from lightning_hybrid.precision.optimizer_protocol import optimizers_within, parameters_of
from lightning_hybrid.precision.write_tracking import is_untouched, mark_clean, track, untrack

# Elements compared at once on a CPU: the expected values (2 MiB) then stay in cache, where those of a large layer would
# be fresh pages in every step.
_BLOCK = 1 << 20

NORMALISATION_TYPES: tuple[type[nn.Module], ...] = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

_SUMMED_NUMEL = 1 << 26  # elements whose gradients are converted to fp32 at a time, on CUDA: 256 MiB


@dataclass(eq=False)
class MasterPair:
    """One parameter in two precisions: `master` is fp32 and holds the value, `low == master.to(low.dtype)`."""

    low: Tensor
    master: Tensor
    original_dtype: torch.dtype
    _gradient: Tensor | None = field(default=None, repr=False)
    _sum: Tensor | None = field(default=None, repr=False)
    _master_version: int | None = field(default=None, repr=False)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the elements of `tensor`, which is as large as `low`, that the master stands for: all of them."""
        return tensor

    def whole(self) -> Tensor:
        """Return the value of all elements in fp32; what is written into it, the master has."""
        return self.master.detach()

    @torch.no_grad()
    def take_(self, value: Tensor) -> None:
        """Give the master the values of a tensor as large as `low`."""
        self.master.copy_(self.part_of(value))

    def load_(self, value: Tensor) -> None:
        """Give the master the values of a state dict."""
        self.take_(value)

    @torch.no_grad()
    def gradient_fp32(self) -> Tensor:
        """Return the low tensor's gradient in fp32."""
        assert self.low.grad is not None
        # On CUDA the allocator has memory at hand, and between steps others can use it. On a CPU it is always the same
        # memory: fresh pages cost 50 times what the conversion does.
        if self.low.is_cuda:
            return self.low.grad.float()
        if self._gradient is None:
            self._gradient = torch.empty_like(self.low.grad, dtype=torch.float32)
        return self._gradient.copy_(self.low.grad)

    @torch.no_grad()
    def return_sum(self) -> None:
        """Make the sum the low tensor's gradient, rounded once: the next backward adds its own to it."""
        if self._sum is not None:
            gradient, self._sum = self._sum.to(self.low.dtype), None
            self.low.grad = gradient if self.low.grad is None else self.low.grad.add_(gradient)

    def absorb_outside_writes_(self) -> None:
        """Take over what others wrote: to `low`, element by element, or to the master alone.

            master = where(low == low_dtype(master), master, low)

        Weight averaging, clamps and pruning write the module's tensors, and the next copy from the masters would undo
        that. Untouched elements stay as they are, in all fp32 bits.
        """
        # A state dict writes the master alone: then the low tensor, which was not written, follows.
        low_was_written = getattr(self.low, "clean_version", None) != self.low._version
        if self._master_version not in (None, self.master._version) and not low_was_written:
            with torch.no_grad():
                self.part_of(self.low).copy_(self.master)
            self.mark_clean()
        if is_untouched(self.low):
            return  # no write can have happened: no memory is read
        self._absorb_()

    @torch.no_grad()
    def _absorb_(self) -> None:
        # On a CPU this answer is free, and it saves four passes over memory where nothing was written.
        low = self.part_of(self.low)
        if low.device.type != "cpu" or not _is_rounded(low, self.master):
            torch.where(low == self.master.to(low.dtype), self.master, low, out=self.master)

    def mark_clean(self) -> None:
        """Note that both tensors agree; writes are looked for from now on."""
        mark_clean(self.low)
        self._master_version = self.master._version

    def exact(self) -> Tensor:
        """Return the value in the dtype before the conversion: what copies and pickles hold."""
        self.absorb_outside_writes_()
        return self.whole().to(self.original_dtype)


@torch.no_grad()
def sum_gradients_(pairs: Iterable[MasterPair]) -> None:
    """Move the low tensors' gradients into fp32 sums; on CUDA by lists, and not a kernel for each tensor."""
    # In half precision every addition would round, and of n batches each is about 1 / n of the sum: beyond 2048 of
    # them in fp16, or 256 in bf16, nothing would be left of one.
    block, numel = list[MasterPair](), 0
    for pair in pairs:
        gradient = pair.low.grad
        if gradient is None or gradient.dtype is not pair.low.dtype or gradient.layout is not torch.strided:
            continue
        if not gradient.is_cuda:
            pair._sum = pair.gradient_fp32() if pair._sum is None else pair._sum.add_(gradient)
            pair.low.grad = None
            continue
        block.append(pair)
        numel += gradient.numel()
        if numel >= _SUMMED_NUMEL:
            _sum_block_(block)
            block, numel = [], 0
    if block:
        _sum_block_(block)


def _sum_block_(block: Sequence[MasterPair]) -> None:
    gradients = [pair.low.grad for pair in block if pair.low.grad is not None]
    gradients_fp32 = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
    torch._foreach_copy_(gradients_fp32, gradients)
    pairs = zip(block, gradients_fp32, strict=True)
    known = [(pair._sum, gradient) for pair, gradient in pairs if pair._sum is not None]
    if known:
        torch._foreach_add_([total for total, _ in known], [gradient for _, gradient in known])
    for pair, gradient in zip(block, gradients_fp32, strict=True):
        pair._sum = gradient if pair._sum is None else pair._sum
        pair.low.grad = None


class MasterWeights:
    """A module converted to half precision in place, and the fp32 masters of its parameters, until `restore`.

    Args:
        module: the module to convert. Values must be the final fp32 ones (after a checkpoint was loaded).
        dtype: `torch.float16` or `torch.bfloat16`.
        keep_fp32: module types that stay fp32 like the normalisation layers. Their submodules are converted.
        frozen: whether parameters that do not require gradients are converted too. Not in a fit: teachers and
            averages are written there, in steps that half precision would round away.
        on_meta: whether parameters on the meta device are converted too. In a fit they are those of other stages.

    Weights that are computed from others (`parametrizations`, `weight_norm`, `spectral_norm`) stay fp32 as well.
    Further modules may be added by `convert`.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        keep_fp32: tuple[type[nn.Module], ...] = (),
        frozen: bool = False,
        on_meta: bool = False,
    ) -> None:
        self.dtype = dtype
        # Where ranks share the update: brings together what each has of these tensors, one for each pair. Collective.
        self.gather_: Callable[[list[MasterPair], list[Tensor]], None] | None = None
        self.largest: Callable[[Iterable[Tensor]], Tensor] | None = None  # there: of gradients; collective
        self.pairs: dict[int, MasterPair] = {}
        self.hooks = ModuleHooks(self.pair_of, dtype)
        self._keep_fp32, self._frozen, self._on_meta = keep_fp32, frozen, on_meta
        self.convert(module)

    def convert(self, module: nn.Module) -> None:
        """Convert a module in place."""
        for child in _modules_outside_metrics(module):
            # BatchNorm takes half activations and fp32 parameters by itself; other normalisation layers need hooks.
            if isinstance(child, NORMALISATION_TYPES):
                if not isinstance(child, _BatchNorm):
                    self.hooks.compute_in_fp32(child)
                continue
            if is_reparametrised(child) or (self._keep_fp32 and isinstance(child, self._keep_fp32)):
                continue
            for parameter in child.parameters(recurse=False):
                is_real = parameter.is_floating_point() and parameter.dtype is not torch.float64
                if is_real and (self._on_meta or not parameter.is_meta) and (self._frozen or parameter.requires_grad):
                    if id(parameter) not in self.pairs:
                        self.pairs[id(parameter)] = self._convert_(parameter)
                    self.hooks.show_masters(child)
        self.hooks.compute_as_in_a_step(module)

    def _convert_(self, parameter: nn.Parameter) -> MasterPair:
        original_dtype = parameter.dtype
        # The clone comes first: at this moment the module holds exact fp32 values, after the cast it does not.
        value = parameter.detach().to(torch.float32, copy=True)
        master = nn.Parameter(value, requires_grad=parameter.requires_grad)
        master.grad_dtype = None  # an optimizer may be handed half gradients
        # A gradient left over from before would have the wrong dtype for the converted parameter.
        parameter.grad = None
        parameter.data = parameter.data.to(self.dtype)
        parameter.grad_dtype = self.dtype  # backward casts what it brings
        return MasterPair(low=parameter, master=master, original_dtype=original_dtype)

    def follow_device(self) -> None:
        """Move each master to where its low tensor is; track writes to it."""
        # Between the module's move and DDP, whose gradient accumulators are for the parameters as they are then.
        for pair in self.pairs.values():
            pair.master.data = pair.master.data.to(pair.low.device)
            track(pair.low, pair)

    def return_sums(self) -> None:
        """Make the sums gradients again, see `MasterPair.return_sum`."""
        for pair in self.pairs.values():
            pair.return_sum()

    def drop_sums(self) -> None:
        """Forget the gradients that were summed so far."""
        for pair in self.pairs.values():
            pair._sum = None

    def pair_of(self, parameter: Tensor) -> MasterPair | None:
        """Return the pair of `parameter`, or None where it stays in fp32 or is unknown."""
        return self.pairs.get(id(parameter))

    def gradient_fp32(self, parameter: Tensor) -> Tensor:
        """Return the gradient of a parameter in fp32, see `MasterPair.gradient_fp32`."""
        pair = self.pair_of(parameter)
        assert parameter.grad is not None
        return parameter.grad.float() if pair is None else pair.gradient_fp32()

    def of(self, optimizer: Optimizer) -> list[MasterPair]:
        """Return the pairs of the parameters in `optimizer`, in the order of its groups."""
        return [pair for parameter in parameters_of(optimizer) if (pair := self.pair_of(parameter)) is not None]

    @contextmanager
    def swapped_in(self, optimizer: Optimizer) -> Iterator[None]:
        """Put the masters into `param_groups` and as keys into `optimizer.state`, for the time of one call."""
        pairs, optimizers = self.of(optimizer), optimizers_within(optimizer)
        for each in optimizers:
            _exchange_(each, [(pair.low, pair.master) for pair in pairs])
        try:
            yield
        finally:
            for each in optimizers:
                _exchange_(each, [(pair.master, pair.low) for pair in pairs])

    @torch.no_grad()
    def broadcast_(self, module: nn.Module, ignored: Container[str] = ()) -> None:
        """Take rank zero's values, those of names in `ignored` excepted. Collective: every rank must call it."""
        # DDP gives every rank rank zero's weights when it wraps a module, in half precision here: where ranks began
        # with other weights, as without a common seed, the masters' lower digits would differ, and the ranks part.
        pairs = [self.pair_of(parameter) for name, parameter in module.named_parameters() if name not in ignored]
        broadcast_first_([pair.master.detach() for pair in pairs if pair is not None])

    @torch.no_grad()
    def restore(self) -> None:
        """Put the masters back into the module: dtypes, values and hooks are as before the conversion."""
        for pair in self.pairs.values():
            if pair.master.device != pair.low.device:  # the module was moved without its masters
                pair.master.data = pair.master.data.to(pair.low.device)
            pair.absorb_outside_writes_()
            untrack(pair.low)
            gradient = pair.low.grad
            # `grad_dtype` can only change while there is no gradient.
            pair.low.grad = None
            pair.low.data = pair.whole().to(pair.original_dtype)
            pair.low.grad_dtype = pair.original_dtype
            if gradient is not None and gradient.dtype is pair.original_dtype:
                pair.low.grad = gradient
        self.hooks.remove()
        self.pairs.clear()
        self.gather_ = self.largest = None


@torch.no_grad()
def copy_to_low_(pairs: list[MasterPair]) -> None:
    """Give the low tensors the masters' values, rounded."""
    if pairs:
        torch._foreach_copy_([pair.part_of(pair.low) for pair in pairs], [pair.master for pair in pairs])


def _is_rounded(low: Tensor, master: Tensor) -> bool:
    """Return whether `low` holds the bits of `master` rounded to its dtype."""
    if low.numel() <= _BLOCK or not (low.is_contiguous() and master.is_contiguous()):
        return _same_bits(low, master.to(low.dtype))
    blocks = zip(low.view(-1).split(_BLOCK), master.view(-1).split(_BLOCK), strict=True)
    return all(_same_bits(some_low, some_master.to(low.dtype)) for some_low, some_master in blocks)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare the bits of two 16-bit tensors, four elements at a time: `torch.equal` takes them one by one."""
    if one.numel() % 4 or one.storage_offset() % 4 or not (one.is_contiguous() and other.is_contiguous()):
        return torch.equal(one.view(torch.int16), other.view(torch.int16))
    return torch.equal(one.view(-1).view(torch.int64), other.view(-1).view(torch.int64))


def is_reparametrised(module: nn.Module) -> bool:
    """Return whether its weight is computed from parameters: `parametrizations`, `weight_norm`, `spectral_norm`."""
    return isinstance(module, parametrize.ParametrizationList) or any(
        isinstance(hook, WeightNorm | SpectralNorm) for hook in module._forward_pre_hooks.values()
    )


def _modules_outside_metrics(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()
    stack = [module]
    while stack:
        current = stack.pop()
        if id(current) in seen or isinstance(current, getattr(sys.modules.get("torchmetrics"), "Metric", ())):
            continue
        seen.add(id(current))
        yield current
        stack.extend(reversed(list(current.children())))


def _exchange_(optimizer: Optimizer, pairs: list[tuple[Tensor, Tensor]]) -> None:
    # The groups at this moment: `load_state_dict` makes new ones.
    substitute = {id(old): new for old, new in pairs}
    for group in optimizer.param_groups:
        group["params"] = [substitute.get(id(parameter), parameter) for parameter in group["params"]]
    for old, new in pairs:
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)
