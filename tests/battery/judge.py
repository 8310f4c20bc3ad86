"""Judgement of a run under `hybrid_allreduce` by the same run under `ddp`."""

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
    """Return the verdict on a row (bit-equal, close, refused, deliberately different, fails) and the reason."""
    refused = kind.refused.get(precision)
    different = kind.different.get(precision)
    if refused is not None:
        is_said = any(refused in result.error for result in ours) and all(
            result.error for result in ours
        )
        said = errors_of(ours) or ["nothing: it trains"]
        if is_said:
            return ("refused in words", [])
        return ("fails", [f"must be refused with {refused!r}, not {said}"])
    bits = bits_that_differ(reference, ours)
    if precision == "32-true" or not bits:
        faults = bits
    else:
        faults = what_is_not_close(kind, precision, reference, ours)
    if different is not None:
        if faults:
            others = [fault for fault in faults if different not in fault]
        else:
            others = [f"nothing has {different!r}"]
        if others:
            return ("fails", others)
        return ("deliberately different", [])
    if faults:
        return ("fails", faults)
    return ("close" if bits else "bit-equal", [])


def fault_of_reference(kind: Any, reference: list[Result]) -> str:
    """Why nothing can be said with this reference. Empty if all is well."""
    for rank, result in enumerate(reference):
        if result.error:
            return f"ddp does not train it: {result.error}"
        first = mean(result.losses[:3])
        last = mean(result.losses[-3:])
        if not last < kind.falls_to * first:
            return (
                f"ddp learns nothing on rank {rank}: the loss goes from {first:.4g} to {last:.4g}"
            )
    is_one = len(reference) > 1 and reference[0].losses == reference[1].losses
    if is_one:
        return "ranks must see different data"
    return ""


def bits_that_differ(reference: list[Result], ours: list[Result]) -> list[str]:
    """Return the names of values that differ in a bit from `ddp`."""
    results = []
    for rank, (first, second) in enumerate(zip(reference, ours, strict=True)):
        if second.error:
            return errors_of(ours)
        if first.losses != second.losses:
            results.append(f"rank {rank}: losses {shown(second.losses)} for {shown(first.losses)}")
        names = [
            n
            for n in first.state
            if n not in second.state or not same(first.state[n], second.state[n])
        ]
        if names or first.state.keys() != second.state.keys():
            results.append(
                f"rank {rank}: state of {names or first.state.keys() ^ second.state.keys()}"
            )
        results += facts_that_differ(rank, first, second)
    return results


def what_is_not_close(
    kind: Any, precision: str, reference: list[Result], ours: list[Result]
) -> list[str]:
    """Return the values that rounding does not explain, that have another dtype, or that differ between ranks."""
    results = []
    allowed = kind.roundings * UNIT[precision]
    for rank, (first, second) in enumerate(zip(reference, ours, strict=True)):
        if second.error:
            return errors_of(ours)
        bound = allowed * max(map(abs, first.losses))
        if not (gap := gap_of(first, second)) <= bound:  # also where it is nan
            results.append(
                f"rank {rank}: gap {gap:.3g} > {bound:.3g}: {shown(second.losses)} for {shown(first.losses)}"
            )
        if first.state.keys() != second.state.keys():
            results.append(f"rank {rank}: state of {first.state.keys() ^ second.state.keys()}")
            continue
        dtypes = {
            n: second.state[n].dtype
            for n in first.state
            if first.state[n].dtype is not second.state[n].dtype
        }
        if dtypes:
            results.append(f"rank {rank}: {dtypes}")
        others = [
            [n]
            for n in first.start.keys() & first.state.keys() - set(first.trained)
            if has_digits(first.state[n])
        ]
        for names in [[n for n in first.trained if n in first.start and n in first.state], *others]:
            way = way_between(first.start, first.state, names)
            gap = way_between(first.state, second.state, names)
            if not gap <= WAY * allowed * way + 1e-6:
                results.append(
                    f"rank {rank}: weights {names[:4]}: {gap:.3g} from those of ddp, which went {way:.3g}"
                )
        results += facts_that_differ(rank, first, second)
    if not results and len(ours) > 1:
        names = [n for n in ours[0].trained if parts(ours, n) and not parts(reference, n)]
        results += [f"ranks differ in {names}"] if names else []
    return results


def errors_of(results: list[Result]) -> list[str]:
    """Each once. Those of ranks that only lost the others come last."""
    errors = {
        result.error: "onnection closed" in result.error for result in results if result.error
    }
    return sorted(errors, key=lambda error: errors[error])


def parts(results: list[Result], name: str) -> bool:
    """Return whether two ranks end with different values of this parameter."""
    one, other = (result.state.get(name) for result in results)
    return one is None or other is None or not same(one, other)


def gap_of(one: Result, other: Result) -> float:
    """The largest distance of two loss curves. Inf if they have different lengths or one is not finite."""
    if len(one.losses) != len(other.losses) or not all(map(math.isfinite, other.losses)):
        return math.inf
    return max((abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)), default=0.0)


def facts_that_differ(rank: int, one: Result, other: Result) -> list[str]:
    keys = sorted(one.facts.keys() | other.facts.keys())
    pairs = [(key, other.facts.get(key), one.facts.get(key)) for key in keys]
    return [
        f"rank {rank}: {key} is {ours!r}, not {theirs!r}"
        for key, ours, theirs in pairs
        if ours != theirs
    ]


def way_between(start: dict[str, Tensor], end: dict[str, Tensor], names: list[str]) -> float:
    pairs = [(start[n], end[n]) for n in names if start[n].shape == end[n].shape]
    return math.sqrt(sum(float((a.cdouble() - b.cdouble()).abs().square().sum()) for a, b in pairs))


def has_digits(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


def mean(values: list[float]) -> float:
    if values:
        return sum(values) / len(values)
    return math.nan


def shown(losses: list[float]) -> str:
    text = [f"{loss:.4g}" for loss in losses]
    return " ".join(text if len(text) < 9 else [*text[:4], "..", *text[-4:]])


def plain(value: Any, *, folder: Path, is_exact: bool) -> Any:
    """Make what was seen comparable between processes and strategies: objects by type, tensors by dtype and value.

    Without `is_exact` numbers that are computed in the precision are left out, and the width of floating dtypes.
    """
    again = functools.partial(plain, folder=folder, is_exact=is_exact)
    if isinstance(value, Tensor):
        if is_exact or not value.is_floating_point():
            width = str(value.dtype)
        else:
            width = "floating"
        if is_exact or not value.is_floating_point():
            content = value.tolist()
        else:
            content = None
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
        return type(value).__name__, [(again(key), again(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        if isinstance(value, set | frozenset):
            each = sorted(map(again, value), key=repr)
        else:
            each = map(again, value)
        return type(value).__name__, list(each)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return again(value.__qualname__)
    return again(f"<{type(value).__name__}>")


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Describe the differences of two observations."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        parts = [(name, one[name], other[name]) for name in one]
    elif type(one) is type(other) and isinstance(one, list | tuple) and len(one) == len(other):
        parts = [
            (_name_of(a, number), a, b)
            for number, (a, b) in enumerate(zip(one, other, strict=True))
        ]
    else:
        if one == other:
            return []
        return [f"{place}: ddp {_shortened(one)}, ours {_shortened(other)}"]
    return [result for name, a, b in parts for result in differences(a, b, f"{place}.{name}")]


def _name_of(item: Any, number: int) -> Any:
    if isinstance(item, tuple) and item and isinstance(item[0], str):
        return item[0]
    return number


def _shortened(value: Any) -> str:
    text = repr(value)
    if len(text) < 400:
        return text
    return f"{text[:200]} ... {text[-200:]}"
