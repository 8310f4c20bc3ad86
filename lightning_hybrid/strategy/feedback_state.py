"""`Mean(error_feedback=True)` as an extension: the outcome of each step, and residuals in checkpoints.

    checkpoint["error_feedback"]    `world_size`: ranks that wrote it
                                    `residuals`: float32 (nodes, *shape) by the name of each parameter

in the units of the sum of all ranks' gradients, unscaled. Row n is what the step of node n still owes. As many nodes as
wrote it take their own rows, and go on to the bit; another number of nodes take equal parts of the sum of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.comm.codec.block_format import BLOCK, num_blocks_of
from lightning_hybrid.comm.codec.error_feedback import ErrorFeedback
from lightning_hybrid.comm.codec.padded_bucket import BlockNumbers, num_reals
from lightning_hybrid.placement import has_gaps
from lightning_hybrid.precision.skipped_steps import OptimizerStepState
from lightning_hybrid.strategy.compatibility import in_precision, refuse_excluded
from lightning_hybrid.strategy.extension import FitContext, FitExtension, RunningFit

KEY = "error_feedback"

# Elements that are collected at a time: 64 MiB.
SLAB_NUMEL = 1 << 24


def refuse_unknown_outcomes(precision: Any, module: Any, *, may_skip: bool) -> None:
    """Check that the strategy learns of each sum whether the optimizer has used it.

    Raises:
        ValueError: a gradient scaler of Lightning's decides, or user code does.
    """
    found = in_precision(precision) | {"error feedback": "`between_nodes.error_feedback` (=True)"}
    if may_skip and not module.automatic_optimization:
        found["manual steps"] = (
            f"`automatic_optimization` (=False) with precision {precision.precision!r}"
        )
    refuse_excluded(found)


def share_of_node(rows: Tensor, *, node: int, num_nodes: int, growth: float) -> Tensor:
    """Return the residual of one of `num_nodes` nodes from those of the nodes that wrote a checkpoint.

        as many nodes    r_n <- growth * rows_n
        other            r_n <- growth * sum(rows) / num_nodes

    `rows`: float32 (nodes, ...). `growth`: the number of ranks by that of the ranks that wrote it, so that the mean
    gradient is owed the same.

    >>> rows = torch.tensor([[1.0], [5.0]])
    >>> [share_of_node(rows, node=0, num_nodes=num, growth=num / 2).tolist() for num in (1, 2, 4)]
    [[3.0], [1.0], [3.0]]
    """
    if len(rows) == num_nodes:
        return rows[node] * growth
    return (rows.double().sum(0) * growth / num_nodes).float()


class ErrorFeedbackExtension(FitExtension):
    """Tells residuals how each step ended, loads them, and saves them unless an elastic run begins with zeros."""

    def __init__(self, fit: FitContext, *, saves: bool = True) -> None:
        self._saves = saves
        refuse_unknown_outcomes(fit.precision, fit.module, may_skip=_step_state(fit) is not None)
        self._feedback: ErrorFeedback | None = (
            None  # kept after a fit: its checkpoint may be saved later
        )
        self._blocks: BlockNumbers  # outlives the hook's state, as the residuals do

    def after_setup(self, fit: RunningFit) -> None:
        """Take the residuals of DDP's hook, which has some on several nodes."""
        if fit.hook_state.feedback is not None:
            self._feedback, self._blocks = fit.hook_state.feedback, fit.hook_state.blocks
            self._feedback.may_skip = _step_state(fit) is not None

    def before_batch(self, fit: RunningFit, batch_idx: int) -> None:
        """Note the loss scale of the batch's gradients."""
        if self._feedback is not None:
            state = _step_state(fit)
            self._feedback.begin_step(
                None if state is None or state.loss_scale is None else state.loss_scale.scale
            )

    def step(self, fit: RunningFit, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Note whether the step was skipped."""
        outputs = run()
        if self._feedback is not None and (state := _step_state(fit)) is not None:
            self._feedback.end_step(state.num_in_a_row > 0)
        return outputs

    def failed(self, fit: FitContext, error: BaseException) -> None:
        """Lose the residuals, as other ranks may not come to collect them."""
        if fit.failures.ending_error is not None:
            self._feedback = None

    def end(self, fit: RunningFit, error: BaseException | None) -> None:
        """Take the residuals from the device, for a checkpoint that is saved later."""
        if self._feedback is not None and fit.device.type == "cuda":
            self._feedback.release_device()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, fit: FitContext, checkpoint: dict[str, Any]) -> None:
        """Add the residuals of all nodes. Collective, unless this rank is failing."""
        if self._feedback is None or not self._saves or not dist.is_initialized():
            return
        if (error := fit.failures.ending_error) is not None:
            rank_zero_warn(
                f"`between_nodes.error_feedback` (=True): a checkpoint that is saved while {type(error).__name__} "
                "ends this rank has no residuals, as other ranks may not come. A run that goes on from it begins with "
                "zeros."
            )
            return
        residuals = self.collected(fit)
        if fit.topology.rank == 0:
            checkpoint[KEY] = {"world_size": fit.topology.world_size, "residuals": residuals}

    @torch.no_grad()
    def collected(self, fit: FitContext) -> dict[str, Tensor]:
        """Return the residuals of all nodes by name, on rank zero; elsewhere nothing. Collective."""
        assert self._feedback is not None
        found: dict[str, Tensor] = {}
        nodes, own = fit.topology.nodes, fit.topology.node
        for slab in self._slabs(fit.module):
            begin, last = slab[0][2], slab[-1]
            share = self._feedback.share(
                begin, last[2] + num_blocks_of(num_reals(last[1])), fit.device
            )
            for index, node in enumerate(nodes):
                values = share if node == own else torch.zeros_like(share)
                dist.reduce(values, dst=0)  # over all ranks: ranks of a node have different blocks
                if fit.topology.rank != 0:
                    continue
                for name, parameter, first in slab:
                    if name not in found:
                        found[name] = torch.zeros(len(nodes), *_real(parameter).shape)
                    row = values[(first - begin) * BLOCK :][: num_reals(parameter)]
                    found[name][index] = _in_shape(row, parameter)
        return found

    def load(self, fit: RunningFit, checkpoint: Mapping[str, Any]) -> None:
        """Take this node's residuals; where the checkpoint has none they begin with zeros."""
        if self._feedback is None or (saved := checkpoint.get(KEY)) is None:
            return
        nodes, blocks = fit.topology.nodes, self._blocks
        place = {"node": nodes.index(fit.topology.node), "num_nodes": len(nodes)}
        values = torch.zeros(blocks.num_blocks * BLOCK)
        for name, parameter, first in self._trained(fit.module):
            if name in saved["residuals"]:
                rows = saved["residuals"][name].cpu()
                own = share_of_node(
                    rows, growth=fit.topology.world_size / saved["world_size"], **place
                )
                row = values[first * BLOCK :][: num_reals(parameter)]
                _in_shape(row, parameter).copy_(own)
        self._feedback.load(values)

    def _trained(self, module: nn.Module) -> list[tuple[str, Tensor, int]]:
        # Parameters by name, each with the number of its first block.
        blocks, named = self._blocks, module.named_parameters()
        return [(name, one, blocks.first_of(one)) for name, one in named if one.requires_grad]

    def _slabs(self, module: nn.Module) -> list[list[tuple[str, Tensor, int]]]:
        slabs: list[list[tuple[str, Tensor, int]]] = []
        for entry in self._trained(module):
            _, parameter, first = entry
            end = first * BLOCK + num_reals(parameter)
            if slabs and end - slabs[-1][0][2] * BLOCK <= SLAB_NUMEL:
                slabs[-1].append(entry)
            else:
                slabs.append([entry])
        return slabs


def _real(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return torch.view_as_real(parameter) if parameter.is_complex() else parameter


def _in_shape(row: Tensor, parameter: Tensor) -> Tensor:
    # A view of a gradient's elements, which are in the order of the parameter's memory, in the parameter's shape.
    like = _real(parameter)
    return (
        row.view(like.shape)
        if has_gaps(like)
        else row.as_strided(like.shape, like.stride(), row.storage_offset())
    )


def _step_state(fit: FitContext) -> OptimizerStepState | None:
    # Of the optimizer, where overflow may skip its steps.
    states = fit.optimizer_steps
    return None if not states or states[0].loss_scale is None else states[0]
