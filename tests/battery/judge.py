"""Comparison of a run under `hybrid_allreduce` with the same run under `ddp`."""

import dataclasses
import enum
import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

UNIT = {"16-true": 2.0**-11, "bf16-true": 2.0**-8}
"""The relative error of one rounding."""

WAY = 4
"""How many times as far, as part of their way, weights and buffers may be from those of fp32 as losses are: steps
cancel each other in part, their roundings do not."""

OWN_NAMES = re.compile(
    r"HybridAllReduceStrategy|DDPStrategy|hybrid_allreduce|\bddp\b|DurableCheckpointIO|TorchCheckpointIO"
    r"|MasterWeightPrecision|HalfPrecision"
)


@dataclasses.dataclass(kw_only=True)
class Result:
    """Result of training a row on one rank."""

    error: str = ""
    losses: list[float] = dataclasses.field(default_factory=list)
    start: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    state: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    trained: list[str] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def judge(
    kind: Any, precision: str, reference: list[Result], ours: list[Result]
) -> tuple[str, list[str]]:
    """Return the verdict on a row (bit-equal, close, refused, deliberately different, fails) and the reasons."""
    refused = kind.refused.get(precision)
    different = kind.different.get(precision)
    if refused is not None:
        all_fail = all(result.error for result in ours)
        if all_fail and any(refused in result.error for result in ours):
            return ("refused in words", [])
        errors = errors_of(ours) or ["nothing: it trains"]
        return ("fails", [f"must be refused with {refused!r}, not {errors}"])
    bits = bits_that_differ(reference, ours)
    if precision == "32-true" or not bits:
        faults = bits
    else:
        faults = what_is_not_close(kind, precision, reference, ours)
    if different is not None:
        if not faults:
            return ("fails", [f"nothing has {different!r}"])
        unexpected = [fault for fault in faults if different not in fault]
        if unexpected:
            return ("fails", unexpected)
        return ("deliberately different", [])
    if faults:
        return ("fails", faults)
    return ("close" if bits else "bit-equal", [])


def fault_of_reference(kind: Any, reference: list[Result]) -> str:
    """Return the reason why this reference cannot be used, or an empty string."""
    for rank, result in enumerate(reference):
        if result.error:
            return f"ddp does not train it: {result.error}"
        first = mean(result.losses[:3])
        last = mean(result.losses[-3:])
        if not last < kind.falls_to * first:
            return (
                f"ddp learns nothing on rank {rank}: the loss goes from {first:.4g} to {last:.4g}"
            )
    if len(reference) > 1 and reference[0].losses == reference[1].losses:
        return "ranks must see different data"
    return ""


def bits_that_differ(reference: list[Result], ours: list[Result]) -> list[str]:
    """Return the names of values that differ from `ddp` in any bit."""
    results = []
    for rank, (first, second) in enumerate(zip(reference, ours, strict=True)):
        if second.error:
            return errors_of(ours)
        if first.losses != second.losses:
            results.append(f"rank {rank}: losses {shown(second.losses)} for {shown(first.losses)}")
        names = []
        for name, tensor in first.state.items():
            if name not in second.state or not same(second.state[name], tensor):
                names.append(name)
        only_in_one = first.state.keys() ^ second.state.keys()
        if names or only_in_one:
            results.append(f"rank {rank}: state of {names or only_in_one}")
        results += facts_that_differ(rank, first, second)
    return results


def what_is_not_close(
    kind: Any, precision: str, reference: list[Result], ours: list[Result]
) -> list[str]:
    """Return the values with differences beyond rounding, with another dtype, or that differ between ranks."""
    results = []
    allowed = kind.roundings * UNIT[precision]
    for rank, (first, second) in enumerate(zip(reference, ours, strict=True)):
        if second.error:
            return errors_of(ours)
        bound = allowed * max(map(abs, first.losses))
        if not (gap := gap_of(first, second)) <= bound:  # also true for nan
            results.append(
                f"rank {rank}: gap {gap:.3g} > {bound:.3g}: {shown(second.losses)} for {shown(first.losses)}"
            )
        if first.state.keys() != second.state.keys():
            results.append(f"rank {rank}: state of {first.state.keys() ^ second.state.keys()}")
            continue
        dtypes = {}
        for name, tensor in second.state.items():
            if tensor.dtype is not first.state[name].dtype:
                dtypes[name] = tensor.dtype
        if dtypes:
            results.append(f"rank {rank}: {dtypes}")
        comparable = first.start.keys() & first.state.keys()
        # All trained tensors together, and each other tensor separately.
        tensor_groups = [[name for name in first.trained if name in comparable]]
        for name in comparable - set(first.trained):
            if has_digits(first.state[name]):
                tensor_groups.append([name])
        for names in tensor_groups:
            way = way_between(first.start, first.state, names)
            gap = way_between(first.state, second.state, names)
            if not gap <= WAY * allowed * way + 1e-6:
                results.append(
                    f"rank {rank}: weights {names[:4]}: {gap:.3g} from those of ddp, which went {way:.3g}"
                )
        results += facts_that_differ(rank, first, second)
    if not results and len(ours) > 1:
        names = []
        for name in ours[0].trained:
            if ranks_differ(ours, name) and not ranks_differ(reference, name):
                names.append(name)
        if names:
            results.append(f"ranks differ in {names}")
    return results


def errors_of(results: list[Result]) -> list[str]:
    """Return each error once. Errors of ranks that only lost the connection come last."""
    errors = dict.fromkeys(result.error for result in results if result.error)
    return sorted(errors, key=lambda error: "onnection closed" in error)


def ranks_differ(results: list[Result], name: str) -> bool:
    """Return whether two ranks end with different values of this parameter."""
    on_rank_0, on_rank_1 = (result.state.get(name) for result in results)
    if on_rank_0 is None or on_rank_1 is None:
        return True
    return not same(on_rank_0, on_rank_1)


def gap_of(expected: Result, result: Result) -> float:
    """Return the largest distance of two loss curves, or inf if their lengths differ or a loss is not finite."""
    if len(expected.losses) != len(result.losses) or not all(map(math.isfinite, result.losses)):
        return math.inf
    pairs = zip(expected.losses, result.losses, strict=True)
    return max((abs(loss - expected_loss) for expected_loss, loss in pairs), default=0.0)


def facts_that_differ(rank: int, reference: Result, result: Result) -> list[str]:
    """Return a line for each fact that differs from the reference."""
    lines = []
    for key in sorted(reference.facts.keys() | result.facts.keys()):
        ours = result.facts.get(key)
        theirs = reference.facts.get(key)
        if ours != theirs:
            lines.append(f"rank {rank}: {key} is {ours!r}, not {theirs!r}")
    return lines


def way_between(start: dict[str, Tensor], end: dict[str, Tensor], names: list[str]) -> float:
    """Return the distance between two states over these tensors."""
    squares = 0.0
    for name in names:
        if start[name].shape == end[name].shape:
            difference = start[name].cdouble() - end[name].cdouble()
            squares += float(difference.abs().square().sum())
    return math.sqrt(squares)


def has_digits(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def same(tensor: Tensor, expected: Tensor) -> bool:
    return tensor.dtype is expected.dtype and torch.equal(tensor, expected)


def mean(values: list[float]) -> float:
    if values:
        return sum(values) / len(values)
    return math.nan


def shown(losses: list[float]) -> str:
    text = [f"{loss:.4g}" for loss in losses]
    if len(text) >= 9:
        text = [*text[:4], "..", *text[-4:]]
    return " ".join(text)


def plain(value: Any, *, folder: Path, is_exact: bool) -> Any:
    """Make an observation comparable between processes and strategies: objects by type, tensors by dtype and value.

    Without `is_exact`, values that depend on the precision and the width of floating dtypes are omitted.
    """
    again = functools.partial(plain, folder=folder, is_exact=is_exact)
    if isinstance(value, Tensor):
        width = "floating"
        content = None
        if is_exact or not value.is_floating_point():
            width = str(value.dtype)
            content = value.tolist()
        return "tensor", width, str(value.device), tuple(value.shape), value.requires_grad, content
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, float):
        return ("float", repr(value) if is_exact else None)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, str | Path):
        text = re.sub(r"<[\w.]*?(\w+) object at 0x\w+>", r"<\1>", str(value))
        text = OWN_NAMES.sub("<own>", text.replace(str(folder), "<folder>"))
        if is_exact:
            return text
        return re.sub(r"torch\.(float|b?float16|float32)\b", "floating", text)
    if isinstance(value, torch.dtype):
        if is_exact or not value.is_floating_point:
            return str(value)
        return "floating"
    if isinstance(value, Mapping):
        return type(value).__name__, [(again(key), again(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        items = list(map(again, value))
        if isinstance(value, set | frozenset):
            items.sort(key=repr)
        return type(value).__name__, items
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return again(value.__qualname__)
    return again(f"<{type(value).__name__}>")


def differences(theirs: Any, ours: Any, path: str = "") -> list[str]:
    """Describe the differences of two observations."""
    lines = []
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        for name, their_value in theirs.items():
            lines += differences(their_value, ours[name], f"{path}.{name}")
        return lines
    are_sequences = type(theirs) is type(ours) and isinstance(theirs, list | tuple)
    if are_sequences and len(theirs) == len(ours):
        for number, (their_item, our_item) in enumerate(zip(theirs, ours, strict=True)):
            lines += differences(their_item, our_item, f"{path}.{_name_of(their_item, number)}")
        return lines
    if theirs == ours:
        return []
    return [f"{path}: ddp {_shortened(theirs)}, ours {_shortened(ours)}"]


def _name_of(item: Any, number: int) -> Any:
    if isinstance(item, tuple) and item and isinstance(item[0], str):
        return item[0]
    return number


def _shortened(value: Any) -> str:
    text = repr(value)
    if len(text) < 400:
        return text
    return f"{text[:200]} ... {text[-200:]}"
