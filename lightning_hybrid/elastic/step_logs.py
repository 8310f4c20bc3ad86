"""Logged values and metrics of a step, equal for every number of hosts.

    sync_dist=True, states of metrics that are sums     of all shards of the step, added up over all hosts in the step;
                                                        every host then has them, and a lost one takes none away
    others                                              of a rank's first shard, as of a rank under `ddp`

Sums are kept by the first rank of each host, and zeros by its others: Lightning and torchmetrics add up over a host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_sum

_SUMS = ("value", "cumulated_batch_size")


class StepMetric(NamedTuple):
    """A torchmetric of the module, with the names of its states that are sums over ranks, and of all others."""

    name: str
    metric: Any
    sums: list[str]
    others: list[str]


def metrics_of(module: Any) -> list[StepMetric]:
    """Return the torchmetrics of a module."""
    metrics = []
    for name, metric in module.named_modules():
        if not isinstance(metric, Metric):
            continue
        sums = []
        other_metrics = []
        for state, reduction in metric._reductions.items():
            if reduction is dim_zero_sum:
                sums.append(state)
            else:
                other_metrics.append(state)
        metrics.append(StepMetric(name, metric, sums, other_metrics))
    return metrics


class EpochLogs:
    """Logged values that an epoch has collected so far, which a host that is behind takes over.

    Args:
        module: The LightningModule.
        is_first: Whether this rank is the first of its host, which keeps the sums.
    """

    def __init__(self, module: Any, *, is_first: bool) -> None:
        self._metrics = metrics_of(module)
        self._warned_of: set[str] = set()  # metrics that hosts do not add up
        self._trainer = module.trainer
        self._is_first = is_first
        self._unseen: tuple[int, dict[str, Any]] = (
            -1,
            {},
        )  # epoch, and values in it that this host has yet to log
        self._at_end: list[
            dict[str, Any]
        ] = []  # of the epoch before, until a step of the next is made

    def step(self) -> StepLogs:
        """Return the logs of a step that begins."""
        epoch, unseen = self._unseen
        return StepLogs(
            self._trainer._results,
            self._metrics,
            unseen if epoch == self._trainer.current_epoch else {},
        )

    def warn_of(self, names: Sequence[str]) -> None:
        """Warn, once for each, of metrics of a step with states that are no sums."""
        for name in names:
            if name not in self._warned_of:
                self._warned_of.add(name)
                rank_zero_warn(
                    f"`{name}` (={type(self._trainer.lightning_module.get_submodule(name)).__name__}) covers only "
                    "the first shard of each rank in an elastic run, because its states are not sums and cannot "
                    "be added over shards and hosts. Its value differs between hosts. Compute the metric in "
                    "validation, where each host evaluates the whole set, or use a metric whose states are sums."
                )

    def commit(self) -> None:
        """Note that a step is made. What an epoch has collected goes with its end, and a host may be behind by then."""
        self._at_end = [self._now()] if self._trainer.is_last_batch else []

    def collected(self) -> list[dict[str, Any]]:
        """Return the collected values, between two steps. At the start of an epoch those of the last one follow."""
        return [self._now(), *self._at_end]

    def _now(self) -> dict[str, Any]:
        values = {
            key: {
                name: now
                for name in (*_SUMS, "_forward_cache")
                if isinstance(now := vars(result).get(name), Tensor)
            }
            | {"has_reset": result.has_reset}
            for key, result in self._trainer._results.items()
        }
        states = []
        for part in self._metrics:
            values_of_part = {name: getattr(part.metric, name) for name in part.sums}
            states.append((values_of_part, part.metric._update_count))
        return {"epoch": self._trainer.current_epoch, "values": values, "metrics": states}

    def take(self, several: Sequence[dict[str, Any]]) -> None:
        """Take what another host has collected in place of the own."""
        matching_key = next(
            (result for result in several if result["epoch"] == self._trainer.current_epoch),
            several[0],
        )
        for key, result in self._trainer._results.items():
            values = matching_key["values"].get(key, {})
            if not self._is_first:  # the step's own is the same on all ranks
                values = {
                    name: values[name]
                    for name in ("_forward_cache", "has_reset")
                    if _is_shared(result) and name in values
                }
            value = vars(result).get("value")
            # Lightning moves values, and leaves `device` of what it logs as it was.
            device = value.device if isinstance(value, Tensor) else result.device
            vars(result).update(_on_device(values, device))
        if not self._is_first:
            return
        self._unseen = matching_key["epoch"], matching_key["values"]
        for part, (states, count) in zip(self._metrics, matching_key["metrics"], strict=True):
            metric = part.metric
            # They come by way of the CPU, and the metric adds what its device has.
            metric.__dict__.update(
                _on_device(states, metric.device), _update_count=count, _computed=None
            )


class StepLogs:
    """Values before a step, to go back to, and of its shards, to add up.

    `results`: what Lightning has collected in the epoch; `metrics`: of the module; `unseen`: what other hosts had
    collected before this one came, by key: it counts from when this host logs the key.
    """

    def __init__(
        self,
        results: dict[str, Any],
        metrics: Sequence[StepMetric],
        unseen: Mapping[str, dict[str, Tensor]],
    ) -> None:
        self._results = results
        self._metrics = metrics
        self._unseen = {key: values for key, values in unseen.items() if key not in results}
        self._before = {key: dict(vars(result)) for key, result in results.items()}
        self._states: list[tuple[dict[str, Any], int]] = []
        for part in metrics:
            states = {name: _copy(getattr(part.metric, name)) for name in part.metric._defaults}
            self._states.append((states, part.metric._update_count))
        self._first: dict[str, dict[str, Any]] = {}
        self._of_shards: dict[
            str, list[Tensor]
        ] = {}  # what is logged of the step, not of the epoch

    def restore(self) -> None:
        """Go back to before the step."""
        for key in list(self._results):
            if key not in self._before:
                del self._results[key]
            else:
                vars(self._results[key]).update(self._before[key])
        for part, (state, count) in zip(self._metrics, self._states, strict=True):
            metric = part.metric
            for name, value in state.items():
                setattr(metric, name, _copy(value))
            metric._update_count = count
        self._first = {}
        self._of_shards = {}

    def end_shard(self) -> None:
        """Note the values that a shard has logged. Of shards after the first, only averages over ranks count."""
        for key, result in self._results.items():
            if _is_shared(result):
                if result.meta.on_step and isinstance(result._forward_cache, Tensor):
                    self._of_shards.setdefault(key, []).append(result._forward_cache.detach())
            elif key in self._first:
                vars(result).update(self._first[key])
            else:
                self._first[key] = dict(vars(result))

    def not_added_up(self) -> list[str]:
        """Return the names of metrics that the step has moved, and that have states which are no sums."""
        names = []
        for part, (_, count) in zip(self._metrics, self._states, strict=True):
            if part.others and part.metric._update_count != count:
                names.append(part.name)
        return names

    def share(
        self, add_up: Callable[[Tensor], None], *, num_shards: int, is_first_of_host: bool
    ) -> None:
        """Add up over all ranks of a view by `add_up`, in place. Collective where something is logged or counted so."""
        added: list[tuple[Any, str, Any, Any, float]] = []  # owner, name, before, change, divisor
        for key, result in self._results.items():
            unseen = self._unseen.get(key, {})
            if not _is_shared(result):
                if result.meta.on_epoch and _is_sum(result):
                    vars(result).update(
                        {
                            name: getattr(result, name) + unseen[name]
                            for name in _SUMS
                            if name in unseen
                        }
                    )
                continue
            is_mean = result.meta.is_mean_reduction
            if not _is_sum(result):
                continue  # the largest and the smallest stay those of a host
            if shards := self._of_shards.get(key):
                total = torch.stack(shards).sum(0)
                added.append(
                    (
                        result,
                        "_forward_cache",
                        torch.zeros_like(total),
                        total,
                        num_shards if is_mean else 1,
                    )
                )
            for name in _SUMS if result.meta.on_epoch else ():
                if (now := getattr(result, name, None)) is not None:
                    before = self._before.get(key, {}).get(name, torch.zeros_like(now))
                    added.append((result, name, before + unseen.get(name, 0), now - before, 1))
        for part, (state, _) in zip(self._metrics, self._states, strict=True):
            for name in part.sums:
                change = getattr(part.metric, name) - state[name]
                added.append((part.metric, name, state[name], change, 1))
        if not added:
            return
        flat = torch.cat([change.double().flatten() for *_, change, _ in added])
        add_up(flat)
        parts = flat.split([change.numel() for *_, change, _ in added])
        for part, (owner, name, before, change, divisor) in zip(parts, added, strict=True):
            is_of_step = name == "_forward_cache"
            total = (part / divisor).view_as(change).to(change.dtype)
            setattr(
                owner, name, before + total if is_of_step or is_first_of_host else before.clone()
            )


def _is_shared(one: Any) -> bool:
    return bool(one.is_tensor and one.meta.sync.should)


def _is_sum(one: Any) -> bool:
    return bool(one.is_tensor and (one.meta.is_mean_reduction or one.meta.is_sum_reduction))


def _on_device(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    moved = {}
    for name, value in values.items():
        moved[name] = value.to(device) if isinstance(value, Tensor) else value
    return moved


def _copy(state: Any) -> Any:
    return (
        state.clone() if isinstance(state, Tensor) else list(state)
    )  # of what a metric appends to
