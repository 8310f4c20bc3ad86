"""Comparison of the first training step on sliced layers with the same step on full layers.

The user writes the code between the two layers of a pair, and may read a weight without calling its layer. On slices
such code may compute another function without an error, for example a softmax over the features of one slice. Each rank
therefore runs `training_step` twice before the first step, without gradients, on its own batch:

    full layers     record the input of the last layer of each pair, and the output of every layer
    sliced layers   compare these values, and replace the output of each sliced layer by that of the full layer

Because outputs are replaced, each pair has the same input in both passes, and the first difference is reported at its
origin. Dropout is off, because each rank draws its own masks inside a pair. Random states, buffers and attributes are
restored after each pass, and nothing is logged.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_hybrid.batch_rows import copy_batch
from lightning_hybrid.comm.health.watchdog import short
from lightning_hybrid.lightning_names import lightning_function
from lightning_hybrid.module_state import put_back
from lightning_hybrid.precision.optimizer_protocol import temporary_attributes
from lightning_hybrid.strategy.extension import RunningFit
from lightning_hybrid.strategy.node_slices.sliced_fit import SlicedFit
from lightning_hybrid.strategy.node_slices.sliced_layers import HeadsAttention, SlicedLayer

# Maximum norm of a difference, relative to the norm with full layers. Matrix products of other shapes add in another
# order, which changes results by 1e-6 in fp32 and by 1e-3 in TF32. In half precision a few elements round to the
# neighboring number. A real error is far larger: a softmax over half of the features differs by 0.5.
MIN_TOLERANCE = 1e-3
TOLERANCE_IN_EPS = 4


@dataclass(frozen=True, kw_only=True)
class _PairRecord:
    """Record of one forward call of a layer pair or single layer, in the pass with full layers.

    Attributes:
        features: Input of the pair's last layer. None: the layer is not in a pair.
        output: Output of the last layer.
        draws: Whether code inside the pair draws random numbers. On slices these differ between ranks.
    """

    features: Tensor | None
    output: Any
    draws: bool


@dataclass(frozen=True, kw_only=True)
class _OutputRecord:
    """Record of the output of a module that is not sliced, with the shapes and norms of its tensors."""

    shapes: list[tuple[int, ...]]
    norms: list[float]

    @classmethod
    def of(cls, output: Any) -> _OutputRecord:
        """Create a record of the shapes and norms of an output's floating-point tensors.

        Scalars are left out. They are losses, which on slices lack the other ranks' terms of a penalty on weights.
        """
        shapes = []
        norms = []
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.is_floating_point():
                shapes.append(tuple(leaf.shape))
                norms.append(float(leaf.detach().double().norm()))
        return cls(shapes=shapes, norms=norms)


class _BackwardReachedError(Exception):
    """Exception that ends a training step in manual optimization when it calls `manual_backward`."""


class FirstStep:
    """Comparison of a rank's first training step with full layers and with sliced layers.

    Args:
        fit: Description of the training run whose first step is about to begin.
        slices: Layers that are sliced.
        args, kwargs: Arguments of `training_step`.
    """

    def __init__(
        self, fit: RunningFit, slices: SlicedFit, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self.device = fit.device
        self._fit = fit
        self._slices = slices
        self._args = args
        self._kwargs = kwargs
        self._module: nn.Module = fit.module
        self._records: defaultdict[str, deque[Any]] = defaultdict(deque)
        self._not_compared: set[str] = set()  # pairs that draw random numbers
        self._open_pair: tuple[str, ...] | None = None
        self._message = ""  # describes the first difference

    def compare(self) -> None:
        """Run the training step with full and with sliced layers and compare the values.

        Collective: every rank of the node must call it, in the same order.

        Raises:
            ValueError: The values differ. The message names the layer or module where the difference begins.
        """
        reason = self._reason_to_skip()
        if reason:
            rank_zero_info(
                f"slices: the first step was not compared with a step on full layers, because {reason}"
            )
            return

        whole_error = self._run(_WholeHooks(self), self._whole_layers())
        slice_error = self._run(_SliceHooks(self), nullcontext())
        self._raise_difference()
        if slice_error is not None and whole_error is None:
            self._raise_from_slices(slice_error)
        if whole_error is not None and not isinstance(whole_error, _BackwardReachedError):
            rank_zero_info(
                "slices: the comparison of the first step with a step on full layers ended at an error: "
                f"{short(whole_error)}"
            )
        if self._not_compared:
            pairs = ", ".join(sorted(self._not_compared))
            rank_zero_info(
                f"slices: {pairs} use random numbers outside of dropout, so they were not compared with full layers"
            )

    def _reason_to_skip(self) -> str:
        """Return the reason why the comparison must be skipped, or an empty string.

        All ranks of the node return the same reason.
        """
        for argument in (*self._args, *self._kwargs.values()):
            if isinstance(argument, Iterator):
                return "`training_step` takes an iterator"

        device = self.device
        if device.type == "cuda":
            num_free_bytes = torch.cuda.mem_get_info(device)[0]
            lacks_memory = num_free_bytes <= 2 * self._slices.num_whole_bytes
            lacks = self._slices.largest(torch.tensor(float(lacks_memory), device=device))
            if bool(lacks):
                return "one rank does not have enough memory for the full layers"
        return ""

    def _raise_difference(self) -> None:
        """Raise an error if any rank of the node has found a difference.

        A rank raises its own difference first, and otherwise the first one of another rank.

        Collective: every rank of the node must call it, in the same order.
        """
        if self._message:
            self._message += f"\nOn rank {self._slices.topology.rank}."
        messages: list[Any] = [None] * dist.get_world_size(self._slices.node)
        dist.all_gather_object(messages, self._message, group=self._slices.node)
        for message in (self._message, *messages):
            if message:
                raise ValueError(message)

    def _raise_from_slices(self, error: Exception) -> None:
        """Raise an error that occurred only with sliced layers, and add a note on the enclosing layer pair."""
        if self._open_pair is not None:
            names = " and ".join(f"`{name}`" for name in self._open_pair)
            num_slices = dist.get_world_size(self._slices.node)
            error.add_note(
                f"`node_slices` slices {names}, so between them each rank has 1/{num_slices} of the features. With "
                "full layers, this step runs without an error. Slice layers that run in parallel to these in the same "
                "way, or leave the names out."
            )
        raise error

    # ---- passes ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _whole_layers(self) -> Iterator[None]:
        self._slices.use_whole_layers()
        try:
            yield
        finally:
            self._slices.use_slices()

    def _run(self, hooks: _Hooks, layers: AbstractContextManager[None]) -> Exception | None:
        """Run `training_step` with the given hooks and layers, restore all state, and return any error."""
        module = self._module
        isolated_random_state = lightning_function("pytorch.utilities.seed.isolate_rng")
        requires_grad = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self._open_pair = None
        try:
            with (
                torch.no_grad(),
                isolated_random_state(),
                put_back(module),
                layers,
                temporary_attributes(
                    module, log=_ignore_call, log_dict=_ignore_call, manual_backward=_end_forward
                ),
                torch.compiler.set_stance("force_eager"),
                self._fit.precision.forward_context(),
                _WithoutDropout(),
                hooks.install(),
            ):
                args = [copy_batch(argument) for argument in self._args]
                kwargs = {name: copy_batch(argument) for name, argument in self._kwargs.items()}
                module.training_step(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            return error
        finally:
            for parameter, value in requires_grad:
                parameter.requires_grad_(value)
        return None

    # ---- records ---------------------------------------------------------------------------------------------------

    def groups(self) -> Iterator[tuple[tuple[str, ...], nn.Module, nn.Module, SlicedLayer]]:
        """Yield the names, first layer, last layer and replacement of each group of sliced layers.

        The replacement is that of the last layer.
        """
        for names in self._slices.groups:
            first = self._module.get_submodule(names[0])
            last = self._module.get_submodule(names[-1])
            if isinstance(vars(first).get("sliced"), HeadsAttention):
                # Full attention multiplies by the weight of `out_proj` without calling that layer, so hooks on
                # `out_proj` would not run.
                yield names, first, first, vars(first)["sliced"]
            else:
                yield names, first, last, vars(last)["sliced"]

    def whole_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the name and module of each submodule that is not sliced."""
        cut = set()
        for _, first, last, _ in self.groups():
            cut |= {first, last}
        for name, module in self._module.named_modules():
            if name and module not in cut:
                yield name, module

    def pair_begins(self, names: tuple[str, ...]) -> None:
        """Record that the forward pass is inside a layer pair, where features are sliced."""
        self._open_pair = names

    def pair_ends(self) -> None:
        """Record that the forward pass has left a layer pair, after which ranks hold all features again."""
        self._open_pair = None

    @property
    def is_inside_pair(self) -> bool:
        """True while the forward pass is inside a layer pair, where features are sliced."""
        return self._open_pair is not None

    def add_record(self, name: str, record: _PairRecord | _OutputRecord) -> None:
        """Store the record of a module call from the pass with full layers."""
        self._records[name].append(record)

    def next_record(self, name: str) -> Any:
        """Remove and return the next record of a module from the pass with full layers.

        Returns None if there was no such call.
        """
        records = self._records[name]
        if not records:
            return None
        return records.popleft()

    def compare_features(
        self, names: tuple[str, ...], sliced: SlicedLayer, features: Tensor, record: _PairRecord
    ) -> None:
        """Compare the input of a pair's last layer with the recorded input of the full layer.

        Only this rank's samples and the features of its slice are compared.
        """
        if record.draws:
            self._not_compared.add(" and ".join(f"`{name}`" for name in names))
            return
        assert record.features is not None
        weight_slice = sliced.slices["weight"]
        ranks = sliced.ranks
        expected = record.features
        if expected.shape[-1] == weight_slice.whole_shape[1]:
            expected = expected.index_select(-1, weight_slice.index.to(expected.device))
        num_rows = expected.shape[0]
        has_images_of_node = features.shape[0] == ranks.size * num_rows
        if has_images_of_node:
            features = features.narrow(0, ranks.rank * num_rows, num_rows)

        difference = self._difference(features, expected)
        if difference:
            first, last = names
            self._report(
                f"The input of `{last}` ({difference}) in the first training step is not the same as without "
                f"`node_slices` for `{first}` and `{last}`. Between these layers, only operations on single features "
                "are allowed, and attention must compute the number of heads with `view(b, t, -1, head_dim)` instead "
                "of `num_heads`. Move softmax, normalization and other operations over features out of the pair, or "
                "leave these names out."
            )

    def compare_output(self, name: str, output: Any, record: _PairRecord | _OutputRecord) -> None:
        """Compare the output of a module with the output recorded with full layers."""
        if isinstance(record, _PairRecord):
            difference = self._difference_of_outputs(output, record)
        else:
            difference = self._difference_of_records(_OutputRecord.of(output), record)
        if difference:
            names = ", ".join(self._slices.names)
            self._report(
                f"The output of `{name}` ({difference}) in the first training step is not the same as without "
                "`node_slices`. Code that reads the weight of a sliced layer, such as "
                "`F.linear(x, self.embedding.weight)`, gets the slice of one rank. Call the layer, or leave its name "
                f"out of `node_slices` (={names})."
            )

    def _difference_of_outputs(self, output: Any, record: _PairRecord) -> str:
        """Return a description of the first difference between two outputs, or an empty string."""
        for value, expected in zip(tree_leaves(output), tree_leaves(record.output), strict=True):
            if isinstance(value, Tensor) and not record.draws:
                difference = self._difference(value, expected)
                if difference:
                    return difference
        return ""

    def _difference(self, tensor: Tensor, expected: Tensor) -> str:
        """Return a description of the difference between two tensors, or an empty string."""
        if tensor.shape != expected.shape:
            return f"of shape {tuple(tensor.shape)} instead of {tuple(expected.shape)}"
        wide = expected.detach().double()
        norm = float(wide.norm())
        if not math.isfinite(norm):
            return ""  # because overflowed values cannot be compared
        norm_of_difference = float((tensor.detach().double() - wide).norm())
        relative = norm_of_difference / max(norm, torch.finfo(torch.float64).tiny)
        if relative <= _tolerance(expected):
            return ""
        return f"relative difference {relative:.2g}"

    def _difference_of_records(self, record: _OutputRecord, expected: _OutputRecord) -> str:
        if record.shapes != expected.shapes:
            text = f"of shape {record.shapes} instead of {expected.shapes}"
            return text.replace("[", "").replace("]", "")
        tolerance = max(MIN_TOLERANCE, TOLERANCE_IN_EPS * _eps_of_autocast(self.device.type))
        for norm, expected_norm in zip(record.norms, expected.norms, strict=True):
            is_close = math.isclose(norm, expected_norm, rel_tol=tolerance)
            if math.isfinite(expected_norm) and not is_close:
                return f"of norm {norm:.4g} instead of {expected_norm:.4g}"
        return ""

    def _report(self, message: str) -> None:
        if not self._message:
            self._message = message


# ---- hooks -----------------------------------------------------------------------------------------------------------


class _Hooks:
    """Base class of the forward hooks that are installed during one pass of the training step."""

    def __init__(self, step: FirstStep) -> None:
        self.step = step

    @contextmanager
    def install(self) -> Iterator[None]:
        """Temporarily install the hooks."""
        step = self.step
        with ExitStack() as handles:
            for names, first, last, sliced in step.groups():
                if len(names) == 2:
                    begin = _begin_hook(self, names, sliced)
                    handles.callback(first.register_forward_pre_hook(begin).remove)
                if len(names) == 2 and last is not first:
                    enter = _enter_hook(self, names, sliced)
                    handles.callback(last.register_forward_pre_hook(enter).remove)
                end = _end_hook(self, names, sliced)
                handles.callback(last.register_forward_hook(end).remove)
            for name, module in step.whole_modules():
                handles.callback(module.register_forward_hook(_module_hook(self, name)).remove)
            yield

    def begin_pair(self, names: tuple[str, ...], sliced: SlicedLayer, device: torch.device) -> None:
        """Record the beginning of a layer pair, before its first layer runs."""
        self.step.pair_begins(names)

    def enter_last(self, names: tuple[str, ...], sliced: SlicedLayer, features: Tensor) -> None:
        """Record or compare the input of a pair's last layer."""
        raise NotImplementedError

    def end_pair(self, names: tuple[str, ...], sliced: SlicedLayer, output: Any) -> Any:
        """Record the output of a pair's last layer, or return a replacement for it."""
        raise NotImplementedError

    def end_module(self, name: str, output: Any) -> None:
        """Record or compare the output of a module that is not sliced."""
        raise NotImplementedError


class _WholeHooks(_Hooks):
    """Hooks that record the inputs and outputs of full layers."""

    def __init__(self, step: FirstStep) -> None:
        super().__init__(step)
        self._features: Tensor | None = None
        self._draws = False

    def begin_pair(self, names: tuple[str, ...], sliced: SlicedLayer, device: torch.device) -> None:
        """Seed the random number generator as a pair of sliced layers would."""
        super().begin_pair(names, sliced, device)
        sliced.entrance.enter(device)

    def enter_last(self, names: tuple[str, ...], sliced: SlicedLayer, features: Tensor) -> None:
        """Record the input of a pair's last layer."""
        self._features = features.detach()
        self._draws = sliced.entrance.has_drawn()

    def end_pair(self, names: tuple[str, ...], sliced: SlicedLayer, output: Any) -> Any:
        """Record the output of a pair's last layer, and restore the random state from before the pair."""
        self.step.pair_ends()
        sliced.entrance.leave()
        record = _PairRecord(features=self._features, output=output, draws=self._draws)
        self.step.add_record(names[-1], record)
        self._features = None
        self._draws = False

    def end_module(self, name: str, output: Any) -> None:
        """Record the shapes and norms of a module's output."""
        self.step.add_record(name, _OutputRecord.of(output))


class _SliceHooks(_Hooks):
    """Hooks that compare the values of sliced layers with the recorded values of full layers.

    They also replace the outputs of sliced layers by those of full layers.
    """

    def __init__(self, step: FirstStep) -> None:
        super().__init__(step)
        self._record: _PairRecord | None = None

    def enter_last(self, names: tuple[str, ...], sliced: SlicedLayer, features: Tensor) -> None:
        """Compare the input of a pair's last layer with the recorded input."""
        self._record = self.step.next_record(names[-1])
        if self._record is not None:
            self.step.compare_features(names, sliced, features, self._record)

    def end_pair(self, names: tuple[str, ...], sliced: SlicedLayer, output: Any) -> Any:
        """Return the recorded output of the full layer, which replaces the sliced layer's output.

        The output of a layer that has no pair is compared first.
        """
        self.step.pair_ends()
        record = self._record
        self._record = None
        if record is None:
            record = self.step.next_record(names[-1])
        if record is None:
            return None
        if record.features is None:
            self.step.compare_output(names[-1], output, record)
        return record.output

    def end_module(self, name: str, output: Any) -> None:
        """Compare the output of a module with the recorded output."""
        record = self.step.next_record(name)
        if record is not None:
            self.step.compare_output(name, output, record)


def _begin_hook(hooks: _Hooks, names: tuple[str, ...], sliced: SlicedLayer) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        hooks.begin_pair(names, sliced, hooks.step.device)

    return hook


def _enter_hook(hooks: _Hooks, names: tuple[str, ...], sliced: SlicedLayer) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        hooks.enter_last(names, sliced, args[0])

    return hook


def _end_hook(hooks: _Hooks, names: tuple[str, ...], sliced: SlicedLayer) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return hooks.end_pair(names, sliced, output)

    return hook


def _module_hook(hooks: _Hooks, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not hooks.step.is_inside_pair:
            hooks.end_module(name, output)

    return hook


# ---- arithmetic ------------------------------------------------------------------------------------------------------


class _WithoutDropout(TorchFunctionMode):
    """Torch function mode that disables dropout in modules, functions and attention."""

    # Functions with an argument `training`.
    _WITH_TRAINING = frozenset(
        {
            F.dropout,
            F.dropout1d,
            F.dropout2d,
            F.dropout3d,
            F.alpha_dropout,
            F.feature_alpha_dropout,
            F.multi_head_attention_forward,
        }
    )

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        if function in self._WITH_TRAINING:
            bound = signature(function).bind(*args, **keywords)
            bound.arguments["training"] = False
            return function(*bound.args, **bound.kwargs)
        if function is F.scaled_dot_product_attention:
            # `dropout_p` is the fifth argument.
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                keywords["dropout_p"] = 0.0
        if function is torch.dropout:
            return args[0]
        return function(*args, **keywords)


def _tolerance(expected: Tensor) -> float:
    eps = max(torch.finfo(expected.dtype).eps, _eps_of_autocast(expected.device.type))
    return max(MIN_TOLERANCE, TOLERANCE_IN_EPS * eps)


def _eps_of_autocast(device_type: str) -> float:
    if not torch.is_autocast_enabled(device_type):
        return 0.0
    return torch.finfo(torch.get_autocast_dtype(device_type)).eps


def _ignore_call(*args: Any, **kwargs: Any) -> None:
    pass


def _end_forward(*args: Any, **kwargs: Any) -> None:
    raise _BackwardReachedError
