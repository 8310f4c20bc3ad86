"""Comparison of the first training step on slices with the same step on whole layers.

Code between the two layers of a pair is the user's, and so is code that reads a weight without calling its layer. It
may compute another function on slices without an error: softmax over the features of one slice, for example. Each rank
runs `training_step` twice before the first step, without gradients, on its own batch:

    whole layers    note what enters the last layer of each pair, and what every layer that is cut returns
    slices          compare, and replace the output of each layer by that of the whole one

As outputs are replaced, each pair computes from the same input both times, and the first difference is where it begins.
Dropout is off, because each rank draws masks of its own inside of a pair. Random numbers, buffers and attributes are
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

# Norm of a difference, relative to the norm of the whole. Matrix products of other shapes add in another order: 1e-6 in
# fp32, 1e-3 in TF32. In half precision a few elements round to the neighbouring number. A softmax over half of the
# features differs by 0.5.
MIN_TOLERANCE = 1e-3
TOLERANCE_IN_EPS = 4


@dataclass(frozen=True, kw_only=True)
class _PairRecord:
    """Values of one call of the last layer of a pair, or of a layer that is cut by itself, with whole layers."""

    features: Tensor | None  # the input of the pair's last layer
    output: Any
    draws: (
        bool  # whether code inside of the pair draws random numbers, which are the rank's own there
    )


@dataclass(frozen=True, kw_only=True)
class _OutputRecord:
    """Shapes and norms of the output of a module that is not cut."""

    shapes: list[tuple[int, ...]]
    norms: list[float]

    @classmethod
    def of(cls, output: Any) -> _OutputRecord:
        # Scalars are losses, to which a penalty on weights adds what a rank's slices have.
        leaves = [
            leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim() > 0
        ]
        leaves = [leaf for leaf in leaves if leaf.is_floating_point()]
        return cls(
            shapes=[tuple(leaf.shape) for leaf in leaves],
            norms=[float(leaf.detach().double().norm()) for leaf in leaves],
        )


class _BackwardReachedError(Exception):
    """The end of a forward in manual optimization."""


class FirstStep:
    """The first training step of a fit on one rank, which is run with whole layers and with slices, and compared."""

    def __init__(
        self, fit: RunningFit, slices: SlicedFit, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._fit = fit
        self._slices = slices
        self._args = args
        self._kwargs = kwargs
        self._module: nn.Module = fit.module
        self.device = fit.device
        self._records: defaultdict[str, deque[Any]] = defaultdict(deque)
        self._draws: set[str] = set()  # pairs that cannot be compared
        self._open_pair: tuple[str, ...] | None = None
        self._message = ""  # the first difference

    def compare(self) -> None:
        """Run both passes. Collective: every rank of the node must call it.

        Raises:
            ValueError: a difference, by the name of the layer or module where it begins.
        """
        reason = self._reason_to_skip()
        if reason:
            rank_zero_info(
                f"slices: the first step was not compared with that of whole layers: {reason}"
            )
            return

        whole_error = self._run(_WholeHooks(self), self._whole_layers())
        slice_error = self._run(_SliceHooks(self), nullcontext())
        if self._message:
            self._message += f"\nOn rank {self._slices.topology.rank}."
        messages: list[Any] = [None] * dist.get_world_size(self._slices.node)
        dist.all_gather_object(messages, self._message, group=self._slices.node)
        for message in (self._message, *messages):
            if message:
                raise ValueError(message)

        if slice_error is not None and whole_error is None:
            self._raise_from_slices(slice_error)
        if whole_error is not None and not isinstance(whole_error, _BackwardReachedError):
            rank_zero_info(
                f"slices: the first step was compared with that of whole layers up to an error: {short(whole_error)}"
            )
        if self._draws:
            rank_zero_info(
                f"slices: {', '.join(sorted(self._draws))} draw random numbers other than dropout and were not "
                "compared with whole layers"
            )

    def _reason_to_skip(self) -> str:
        """Return why the step cannot be compared, the same on all ranks of the node; empty if it can."""
        if any(
            isinstance(argument, Iterator) for argument in (*self._args, *self._kwargs.values())
        ):
            return "`training_step` takes an iterator"
        device = self.device
        if device.type == "cuda":
            has_memory = torch.cuda.mem_get_info(device)[0] > 2 * self._slices.num_whole_bytes
            lacks = self._slices.largest(torch.tensor(float(not has_memory), device=device))
            if bool(lacks):
                return "there is no memory for the whole layers on one rank"
        return ""

    def _raise_from_slices(self, error: Exception) -> None:
        if self._open_pair is not None:
            names = " and ".join(f"`{name}`" for name in self._open_pair)
            error.add_note(
                f"`node_slices` cuts {names}, and between them each rank has 1/{dist.get_world_size(self._slices.node)}"
                " of the features. Whole layers compute this step without an error: give layers that run in parallel "
                "to these the same cut, or leave the names out."
            )
        raise error

    # ---- passes ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _whole_layers(self) -> Iterator[None]:
        self._slices.gather()
        try:
            yield
        finally:
            self._slices.drop()

    def _run(self, hooks: _Hooks, layers: AbstractContextManager[None]) -> Exception | None:
        """Run `training_step` with these layers and restore all that it moves; return its error."""
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
                    module, log=_nothing, log_dict=_nothing, manual_backward=_end_forward
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
        """Yield the names of layers that are cut together, the first and the last of them, and who has the slice."""
        for names in self._slices.groups:
            first = self._module.get_submodule(names[0])
            last = self._module.get_submodule(names[-1])
            if isinstance(vars(first).get("sliced"), HeadsAttention):
                # With whole layers it multiplies by the weight of its `out_proj`, and does not call it.
                yield names, first, first, vars(first)["sliced"]
            else:
                yield names, first, last, vars(last)["sliced"]

    def other_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules that are not cut themselves, by name."""
        cut = set()
        for _, first, last, _ in self.groups():
            cut |= {first, last}
        for name, module in self._module.named_modules():
            if name and module not in cut:
                yield name, module

    def pair_begins(self, names: tuple[str, ...]) -> None:
        """Note that what is computed from here on is of one slice."""
        self._open_pair = names

    def pair_ends(self) -> None:
        """Note that what is computed from here on is whole."""
        self._open_pair = None

    @property
    def is_inside_pair(self) -> bool:
        """Whether features are those of one slice now."""
        return self._open_pair is not None

    def add(self, name: str, record: _PairRecord | _OutputRecord) -> None:
        """Add what a module has computed with whole layers."""
        self._records[name].append(record)

    def record_of(self, name: str) -> Any:
        """Return what the same call has computed with whole layers, or None if there was none."""
        return self._records[name].popleft() if self._records[name] else None

    def compare_features(
        self, names: tuple[str, ...], sliced: SlicedLayer, own: Tensor, record: _PairRecord
    ) -> None:
        """Compare the input of the last layer of a pair: own images, and the features of this rank's slice."""
        if record.draws:
            self._draws.add(" and ".join(f"`{name}`" for name in names))
            return
        assert record.features is not None
        cut = sliced.slices["weight"]
        ranks = sliced.ranks
        expected = record.features
        if expected.shape[-1] == cut.shape[1]:
            expected = expected.index_select(-1, cut.index.to(expected.device))
        num_rows = expected.shape[0]
        is_of_node = own.shape[0] == ranks.size * num_rows
        if is_of_node:
            own = own.narrow(0, ranks.rank * num_rows, num_rows)
        difference = self._difference(own, expected)
        if difference:
            first, last = names
            self._report(
                f"The input of `{last}` ({difference}) must be the same whether `node_slices` cuts `{first}` and "
                f"`{last}` or leaves them whole, and in the first training step it is another. Between them there may "
                "only be operations on single features, and attention whose heads are counted by `view(b, t, -1, "
                "head_dim)` and not by `num_heads`: move softmax, normalization and other operations over features out "
                "of the pair, or leave these names out."
            )

    def compare_output(self, name: str, own: Any, record: _PairRecord | _OutputRecord) -> None:
        """Compare the output of a module with that of whole layers."""
        difference = ""
        if isinstance(record, _PairRecord):
            values = zip(tree_leaves(own), tree_leaves(record.output), strict=True)
            for value, expected in values:
                if isinstance(value, Tensor) and not record.draws:
                    difference = difference or self._difference(value, expected)
        else:
            difference = self._difference_of_records(_OutputRecord.of(own), record)
        if difference:
            self._report(
                f"The output of `{name}` ({difference}) must be the same whether `node_slices` cuts layers or leaves "
                "them whole, and in the first training step it is another. Code that reads the weight of such a layer, "
                "as `F.linear(x, self.embedding.weight)` does, gets the slice of one rank: call the layer, or leave "
                f"its name out of `node_slices` (={', '.join(self._slices.names)})."
            )

    def _difference(self, own: Tensor, expected: Tensor) -> str:
        """Return a description of the difference of two tensors, or an empty string."""
        if own.shape != expected.shape:
            return f"of shape {tuple(own.shape)} for {tuple(expected.shape)}"
        wide = expected.detach().double()
        norm = float(wide.norm())
        if not math.isfinite(norm):
            return ""  # a step that overflows says nothing
        relative = float((own.detach().double() - wide).norm()) / max(
            norm, torch.finfo(torch.float64).tiny
        )
        return "" if relative <= _tolerance(expected) else f"relative difference {relative:.2g}"

    def _difference_of_records(self, own: _OutputRecord, expected: _OutputRecord) -> str:
        if own.shapes != expected.shapes:
            return f"of shape {own.shapes} for {expected.shapes}".replace("[", "").replace("]", "")
        tolerance = max(MIN_TOLERANCE, TOLERANCE_IN_EPS * _eps_of_autocast(self.device.type))
        for norm, expected_norm in zip(own.norms, expected.norms, strict=True):
            if math.isfinite(expected_norm) and not math.isclose(
                norm, expected_norm, rel_tol=tolerance
            ):
                return f"of norm {norm:.4g} for {expected_norm:.4g}"
        return ""

    def _report(self, message: str) -> None:
        if not self._message:
            self._message = message


# ---- hooks -----------------------------------------------------------------------------------------------------------


class _Hooks:
    """Forward hooks of one pass, on layers that are cut and on all other modules."""

    def __init__(self, step: FirstStep) -> None:
        self.step = step

    @contextmanager
    def install(self) -> Iterator[None]:
        """Install the hooks inside."""
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
            for name, module in step.other_modules():
                handles.callback(module.register_forward_hook(_other_hook(self, name)).remove)
            yield

    def begin_pair(self, names: tuple[str, ...], sliced: SlicedLayer, device: torch.device) -> None:
        self.step.pair_begins(names)

    def enter_last(self, names: tuple[str, ...], sliced: SlicedLayer, features: Tensor) -> None:
        raise NotImplementedError

    def end_pair(self, names: tuple[str, ...], sliced: SlicedLayer, output: Any) -> Any:
        raise NotImplementedError

    def end_other(self, name: str, output: Any) -> None:
        raise NotImplementedError


class _WholeHooks(_Hooks):
    """Hooks that note what whole layers compute."""

    def __init__(self, step: FirstStep) -> None:
        super().__init__(step)
        self._features: Tensor | None = None
        self._draws = False

    def begin_pair(self, names: tuple[str, ...], sliced: SlicedLayer, device: torch.device) -> None:
        """Draw from the generators as the entrance of a pair does on slices."""
        super().begin_pair(names, sliced, device)
        sliced.entrance.enter(device)

    def enter_last(self, names: tuple[str, ...], sliced: SlicedLayer, features: Tensor) -> None:
        """Keep the input of the last layer."""
        self._features = features.detach()
        self._draws = sliced.entrance.has_drawn()

    def end_pair(self, names: tuple[str, ...], sliced: SlicedLayer, output: Any) -> Any:
        """Keep the output of the last layer, and go on with random numbers from outside."""
        self.step.pair_ends()
        sliced.entrance.leave()
        self.step.add(
            names[-1], _PairRecord(features=self._features, output=output, draws=self._draws)
        )
        self._features = None
        self._draws = False

    def end_other(self, name: str, output: Any) -> None:
        """Keep norms of a module's output."""
        self.step.add(name, _OutputRecord.of(output))


class _SliceHooks(_Hooks):
    """Hooks that compare what slices compute, and replace it by what whole layers computed."""

    def __init__(self, step: FirstStep) -> None:
        super().__init__(step)
        self._record: _PairRecord | None = None

    def enter_last(self, names: tuple[str, ...], sliced: SlicedLayer, features: Tensor) -> None:
        """Compare the input of the last layer."""
        self._record = self.step.record_of(names[-1])
        if self._record is not None:
            self.step.compare_features(names, sliced, features, self._record)

    def end_pair(self, names: tuple[str, ...], sliced: SlicedLayer, output: Any) -> Any:
        """Return the output of whole layers."""
        self.step.pair_ends()
        record = self._record if self._record is not None else self.step.record_of(names[-1])
        self._record = None
        if record is None:
            return None
        if record.features is None:
            self.step.compare_output(names[-1], output, record)
        return record.output

    def end_other(self, name: str, output: Any) -> None:
        """Compare the output of a module."""
        record = self.step.record_of(name)
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


def _other_hook(hooks: _Hooks, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not hooks.step.is_inside_pair:
            hooks.end_other(name, output)

    return hook


# ---- arithmetic ------------------------------------------------------------------------------------------------------


class _WithoutDropout(TorchFunctionMode):
    """A context without dropout, in modules, functions and attention."""

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
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            keywords |= {"dropout_p": 0.0} if len(args) <= 4 else {}
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


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _end_forward(*args: Any, **kwargs: Any) -> None:
    raise _BackwardReachedError
