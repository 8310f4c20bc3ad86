"""The step of LARS along the orthogonalised momentum, on lists of tensors."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.optim.foreach_ops import add_scaled_, as_dtype
from lightning_hybrid.optim.gradients import decayed_gradients, dense_gradients, is_together, lr_of, state_dtype
from lightning_hybrid.optim.layerwise import LayerwiseOptimizer
from lightning_hybrid.optim.orthogonal import is_matrix, orthogonalized_all
from lightning_hybrid.optim.trust_ratio import tensor_norms, trust_ratio
from lightning_hybrid.placement import Part


class OrthogonalStep(LayerwiseOptimizer):
    """What `LARS` does in groups of `direction="orthogonal"`."""

    work_group: dist.ProcessGroup | None = None  # ranks that share the work

    def _orthogonalize(self) -> None:
        # All tensors at once, so that ranks can share the work and equal shapes one multiplication.
        self._orthogonal: dict[Tensor, Tensor] = {}
        found: dict[Any, list[tuple[Tensor, Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            if group["direction"] == "orthogonal":
                for _, (param, grad) in dense_gradients(group):
                    if is_matrix(param):
                        key = param.device, state_dtype(param.dtype), is_together(group, param)
                        found.setdefault(key, []).append((param, grad, group))
        for (device, dtype, together), entries in found.items():
            results = orthogonalized_all(
                [param.shape for param, _, _ in entries],
                partial(self._moment_of, entries),
                dtype=dtype,
                device=device,
                together=together,
                group=self.work_group,
            )
            self._orthogonal |= {param: result for (param, _, _), result in zip(entries, results, strict=True)}

    def _moment_of(self, entries: list[tuple[Tensor, Tensor, dict[str, Any]]], index: int) -> Tensor:
        param, grad, group = entries[index]
        return self._moments(group, [param], [grad])[0][0]

    def _moments(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Compute what is orthogonalised, and the next momentum, None without one; nothing is written."""
        weights, scaling = as_dtype(params, state_dtype(params[0].dtype)), self._scaling.to(params[0].device)
        directions = decayed_gradients(weights, grads, group=group, scaling=scaling)
        if group["momentum"] == 0:
            return directions, None
        (buffers,) = self.state_lists(params, "momentum_buffer")
        news = list(torch._foreach_add(torch._foreach_mul(buffers, group["momentum"]), directions))
        if not group["nesterov"]:
            return news, news
        return list(torch._foreach_add(directions, news, alpha=group["momentum"])), news

    def _orthogonal_update(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        lr, scaling = lr_of(group, params[0].device), self._scaling
        moments, news = self._moments(group, params, grads)
        steps = [
            self._orthogonal[param].to(moment.dtype) if param in self._orthogonal else moment
            for param, moment in zip(params, moments, strict=True)
        ]
        if group["trust_ratio"]:
            weight_norms, coefficient = tensor_norms(params), group["trust_coefficient"]
            ratios = trust_ratio(weight_norms, tensor_norms(steps), trust_coefficient=coefficient)
            sizes: Any = ratios.to(steps[0].dtype).unbind()
            # A ratio of 1, where a norm is zero, is of the momentum, as in the other direction.
            is_moving = (weight_norms > 0).unbind()
            steps = [torch.where(*each) for each in zip(is_moving, steps, moments, strict=True)]
        else:
            sizes = [1.0 if step is moment else _muon_size(step) for step, moment in zip(steps, moments, strict=True)]
        steps = list(torch._foreach_mul(steps, sizes))
        weights = scaling.scratch(params, moments[0].dtype)
        add_scaled_(weights, steps, -lr)
        if news is not None:
            scaling.commit_(self.state_lists(params, "momentum_buffer")[0], news)
        scaling.commit_(params, weights)
        # From the weights as they are stored: after a skipped step this writes what was there.
        if copies := self._copies_of(params):
            torch._foreach_copy_(copies, params)


def _muon_size(step: Tensor) -> float:
    """Return sqrt(max(1, rows / columns)), by which `torch.optim.Muon` multiplies a matrix."""
    return float(max(1.0, step.shape[0] ** 2 / step.numel()) ** 0.5)


def refuse_part(part: Part) -> NoReturn:
    """Raise the error for a part of a tensor: its direction is of the matrix, of which no part is one."""
    raise ValueError(
        f'`direction` (="orthogonal") needs whole tensors, and here is a part of one (={part.begin} to {part.end} of '
        f"{part.numel} elements): the singular values are those of the whole matrix. Leave `shard_update` out; "
        "`work_group` shares the work of whole tensors among the ranks of a node."
    )
