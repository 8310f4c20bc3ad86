"""Aggregation of logged values and metrics over all hosts of an elastic run.

    sync_dist=True, metric states that are sums     summed over all shards and hosts in each step, so that every host
                                                    has the sums, and no values are lost with a host
    all other values                                taken from each rank's first shard, as on a rank under `ddp`

The first rank of each host keeps the sums and its other ranks keep zeros, because Lightning and torchmetrics sum over
the ranks of a host.
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
    """Torchmetrics metric, with the names of its summed states and of its other states."""

    name: str
    metric: Any
    sums: list[str]
    others: list[str]


def metrics_of(module: Any) -> list[StepMetric]:
    """Return all torchmetrics metrics of a module."""
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
    """Values logged so far in an epoch, which are sent to hosts that join or have missed a step.

    Args:
        module: The LightningModule.
        is_first: Whether this rank is the first rank of its host, which keeps the sums.
    """

    def __init__(self, module: Any, *, is_first: bool) -> None:
        self._metrics = metrics_of(module)
        self._warned_of: set[str] = set()  # metrics that are not summed over hosts
        self._trainer = module.trainer
        self._is_first = is_first
        # Epoch, and the values of the epoch that were received from another host.
        self._unseen: tuple[int, dict[str, Any]] = (
            -1,
            {},
        )
        # Values at the end of an epoch, kept until the next epoch's first step is complete.
        self._at_end: list[dict[str, Any]] = []

    def step(self) -> StepLogs:
        """Create a snapshot of the logged values at the beginning of a step."""
        epoch, unseen = self._unseen
        return StepLogs(
            self._trainer._results,
            self._metrics,
            unseen if epoch == self._trainer.current_epoch else {},
        )

    def warn_of(self, names: Sequence[str]) -> None:
        """Warn once per metric that its states cannot be summed over hosts."""
        for name in names:
            if name not in self._warned_of:
                self._warned_of.add(name)
                rank_zero_warn(
                    f"The metric `{name}` ({type(self._trainer.lightning_module.get_submodule(name)).__name__}) "
                    "describes only a part of the training data and differs between hosts, because an elastic run can "
                    "combine only states that are sums. Compute the metric in validation, where each host evaluates "
                    "the whole set, or use a metric whose states are sums."
                )

    def commit(self) -> None:
        """Copy the logged values after the last step of an epoch, and delete the copy after other steps.

        The copy is needed because Lightning resets the values at the end of the epoch, when another host may still be
        behind.
        """
        self._at_end = [self._now()] if self._trainer.is_last_batch else []

    def collected(self) -> list[dict[str, Any]]:
        """Collect the values logged in the current epoch, to be sent to another host.

        Call this method between two steps. Until an epoch's first step is complete, the list also contains the values
        at the end of the previous epoch.
        """
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
        """Replace this host's logged values with values received from another host.

        Args:
            several: Result of `collected` on the other host. The values of this rank's current epoch are used.
        """
        matching_key = next(
            (result for result in several if result["epoch"] == self._trainer.current_epoch),
            several[0],
        )
        for key, result in self._trainer._results.items():
            values = matching_key["values"].get(key, {})
            # Other ranks of the host keep only the step's values, not the sums.
            if not self._is_first:
                values = {
                    name: values[name]
                    for name in ("_forward_cache", "has_reset")
                    if _is_shared(result) and name in values
                }
            value = vars(result).get("value")
            # Lightning moves values between devices, and does not update `device` of their result.
            device = value.device if isinstance(value, Tensor) else result.device
            vars(result).update(_on_device(values, device))
        if not self._is_first:
            return
        self._unseen = matching_key["epoch"], matching_key["values"]
        for part, (states, count) in zip(self._metrics, matching_key["metrics"], strict=True):
            metric = part.metric
            # The received states are on the CPU, and the metric needs them on its device.
            metric.__dict__.update(
                _on_device(states, metric.device), _update_count=count, _computed=None
            )


class StepLogs:
    """Values that each data shard logs in a step, with a snapshot of the values before the step for rollback.

    Args:
        results: Values that Lightning has collected in the epoch.
        metrics: Metrics of the module.
        unseen: Values received from another host, by key. They are used once this host logs the key.
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
        self._of_shards: dict[str, list[Tensor]] = {}  # values with on_step=True of each shard

    def restore(self) -> None:
        """Restore all logged values and metric states from before the step."""
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
        """Record the values that a data shard has logged.

        For shards after the first one, only values with `sync_dist=True` are used. All other values are reset to those
        of the first shard.
        """
        for key, result in self._results.items():
            if _is_shared(result):
                if result.meta.on_step and isinstance(result._forward_cache, Tensor):
                    self._of_shards.setdefault(key, []).append(result._forward_cache.detach())
            elif key in self._first:
                vars(result).update(self._first[key])
            else:
                self._first[key] = dict(vars(result))

    def not_added_up(self) -> list[str]:
        """Return the names of metrics that were updated in this step but cannot be summed over hosts."""
        names = []
        for part, (_, count) in zip(self._metrics, self._states, strict=True):
            if part.others and part.metric._update_count != count:
                names.append(part.name)
        return names

    def share(
        self, add_up: Callable[[Tensor], None], *, num_shards: int, is_first_of_host: bool
    ) -> None:
        """Sum the step's logged values and metric states over the ranks of all hosts, in place.

        Collective if there are such values: every rank of the view must call it, in the same order.

        Args:
            add_up: Function that sums a tensor over all ranks, in place.
            num_shards: Number of shards of a step, by which means are divided.
            is_first_of_host: Whether this rank keeps the sums of its host.
        """
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
                continue  # maximum and minimum cover only one host
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
            if is_of_step or is_first_of_host:
                value = before + total
            else:
                value = before.clone()
            setattr(owner, name, value)


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
    if isinstance(state, Tensor):
        return state.clone()
    return list(state)  # a list to which the metric appends
