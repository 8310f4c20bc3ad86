"""Extension for `Mean(error_feedback=True)`, which handles skipped steps and saves the residuals.

    checkpoint["error_feedback"]    `world_size`: number of ranks that wrote it
                                    `residuals`: float32 (nodes, *shape) by the name of each parameter

Residuals have the unit of the sum of all ranks' gradients, unscaled. Row n is the rounding error that node n has not
added to its gradients yet. If the same number of nodes resumes, each node loads its own row and continues bit for bit.
Otherwise every node loads the sum of all rows, divided by the number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

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

# Number of elements that are gathered at a time, which take 64 MiB.
SLAB_NUMEL = 1 << 24


class NumberedParameter(NamedTuple):
    """Trained parameter with its name and the index of its first codec block."""

    name: str
    parameter: Tensor
    first_block: int


class Slab:
    """Group of parameters with adjacent codec blocks, whose residuals are gathered in one collective."""

    def __init__(self, first: NumberedParameter) -> None:
        self.parameters = [first]
        self.first_block = first.first_block

    def has_room_for(self, entry: NumberedParameter) -> bool:
        """Return whether the parameter can be added without exceeding `SLAB_NUMEL` elements."""
        end = entry.first_block * BLOCK + num_reals(entry.parameter)
        return end - self.first_block * BLOCK <= SLAB_NUMEL

    @property
    def end_block(self) -> int:
        """Index of the first codec block after the slab."""
        last = self.parameters[-1]
        return last.first_block + num_blocks_of(num_reals(last.parameter))

    def rows(self, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and a view of its values with the parameter's shape."""
        for name, parameter, first_block in self.parameters:
            begin = (first_block - self.first_block) * BLOCK
            yield name, _view_as_parameter(values[begin:], parameter)


def refuse_unknown_outcomes(precision: Any, module: Any, *, may_skip: bool) -> None:
    """Raise if the strategy cannot find out whether an optimizer step was applied or skipped.

    Raises:
        ValueError: Lightning's gradient scaler or user code decides which steps are skipped.
    """
    features = in_precision(precision)
    features["error feedback"] = "`between_nodes.error_feedback` (=True)"
    if may_skip and not module.automatic_optimization:
        features["manual steps"] = (
            f"`automatic_optimization` (=False) with precision {precision.precision!r}"
        )
    refuse_excluded(features)


def share_of_node(rows: Tensor, *, node: int, num_nodes: int, growth: float) -> Tensor:
    """Compute one node's error-feedback residual from the residuals of all nodes in a checkpoint.

        same number of nodes    r_n <- growth * rows_n
        otherwise               r_n <- growth * sum(rows) / num_nodes

    Args:
        rows: The saved residuals; float32 (nodes, ...).
        node: The index of the node.
        num_nodes: The current number of nodes.
        growth: The current number of ranks, divided by the number of ranks that wrote the checkpoint. It keeps the
            error of the mean gradient unchanged.

    >>> rows = torch.tensor([[1.0], [5.0]])
    >>> [share_of_node(rows, node=0, num_nodes=num, growth=num / 2).tolist() for num in (1, 2, 4)]
    [[3.0], [1.0], [3.0]]
    """
    if len(rows) == num_nodes:
        return rows[node] * growth
    return (rows.double().sum(0) * growth / num_nodes).float()


class ErrorFeedbackExtension(FitExtension):
    """Extension for error feedback, which tracks skipped steps and saves and restores residuals.

    Args:
        fit: The description of the training run.
        saves: Whether checkpoints contain the residuals. An elastic run does not save them and begins with zeros.
    """

    def __init__(self, fit: FitContext, *, saves: bool = True) -> None:
        self._saves = saves
        refuse_unknown_outcomes(fit.precision, fit.module, may_skip=_step_state(fit) is not None)
        # Both are kept after a run, because a checkpoint may be saved later.
        self._feedback: ErrorFeedback | None = None
        self._blocks: BlockNumbers

    def after_setup(self, fit: RunningFit) -> None:
        """Store a reference to the error-feedback residuals if there are several nodes."""
        if fit.hook_state.feedback is not None:
            self._feedback = fit.hook_state.feedback
            self._blocks = fit.hook_state.blocks
            self._feedback.may_skip = _step_state(fit) is not None

    def before_batch(self, fit: RunningFit, batch_idx: int) -> None:
        """Pass the current loss scale to the error feedback, which rescales the residuals if the scale has changed."""
        if self._feedback is None:
            return
        state = _step_state(fit)
        scale = None
        if state is not None and state.loss_scale is not None:
            scale = state.loss_scale.scale
        self._feedback.begin_step(scale)

    def step(self, fit: RunningFit, optimizer: Optimizer, run: Callable[[], Any]) -> Any:
        """Run the optimizer step, and record for the error feedback whether it was skipped."""
        outputs = run()
        if self._feedback is not None:
            state = _step_state(fit)
            if state is not None:
                self._feedback.end_step(state.num_in_a_row > 0)
        return outputs

    def failed(self, fit: FitContext, error: BaseException) -> None:
        """Discard the residuals, because the other ranks may no longer take part in gathering them."""
        if fit.failures.ending_error is not None:
            self._feedback = None

    def end(self, fit: RunningFit, error: BaseException | None) -> None:
        """Move the residuals from the GPU to host memory, so that a later checkpoint can contain them."""
        if self._feedback is not None and fit.device.type == "cuda":
            self._feedback.release_device()

    # ---- checkpoints -------------------------------------------------------------------------

    def save(self, fit: FitContext, checkpoint: dict[str, Any]) -> None:
        """Add the residuals of all nodes to a checkpoint.

        Collective, unless this rank is failing.
        """
        if self._feedback is None or not self._saves or not dist.is_initialized():
            return
        error = fit.failures.ending_error
        if error is not None:
            rank_zero_warn(
                "`between_nodes.error_feedback` (=True): a checkpoint that is saved after this rank failed with "
                f"{type(error).__name__} contains no residuals, because the other ranks may not take part in the "
                "save. A run that resumes from it starts with residuals of zero."
            )
            return
        residuals = self.collected(fit)
        if fit.topology.rank == 0:
            checkpoint[KEY] = {"world_size": fit.topology.world_size, "residuals": residuals}

    @torch.no_grad()
    def collected(self, fit: FitContext) -> dict[str, Tensor]:
        """Gather the residuals of all nodes on rank zero, as a dictionary with parameter names as keys.

        Other ranks get an empty dictionary.

        Collective: every rank of the group must call it, in the same order.
        """
        assert self._feedback is not None
        residuals: dict[str, Tensor] = {}
        nodes = fit.topology.nodes
        for slab in self._slabs(fit.module):
            share = self._feedback.share(slab.first_block, slab.end_block, fit.device)
            for index, node in enumerate(nodes):
                values = share
                if node != fit.topology.node:
                    values = torch.zeros_like(share)
                # Over all ranks, because the ranks of a node have different blocks.
                dist.reduce(values, dst=0)
                if fit.topology.rank != 0:
                    continue
                for name, row in slab.rows(values):
                    if name not in residuals:
                        residuals[name] = torch.zeros(len(nodes), *row.shape)
                    residuals[name][index] = row
        return residuals

    def load(self, fit: RunningFit, checkpoint: Mapping[str, Any]) -> None:
        """Restore this node's residuals from a checkpoint. If the checkpoint has none, the residuals stay zero."""
        saved = checkpoint.get(KEY)
        if self._feedback is None or saved is None:
            return
        nodes = fit.topology.nodes
        node = nodes.index(fit.topology.node)
        values = torch.zeros(self._blocks.num_blocks * BLOCK)
        for name, parameter, first_block in self._trained(fit.module):
            if name not in saved["residuals"]:
                continue
            share = share_of_node(
                saved["residuals"][name].cpu(),
                node=node,
                num_nodes=len(nodes),
                growth=fit.topology.world_size / saved["world_size"],
            )
            _view_as_parameter(values[first_block * BLOCK :], parameter).copy_(share)
        self._feedback.load(values)

    def _trained(self, module: nn.Module) -> list[NumberedParameter]:
        trained: list[NumberedParameter] = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                first_block = self._blocks.first_of(parameter)
                trained.append(NumberedParameter(name, parameter, first_block))
        return trained

    def _slabs(self, module: nn.Module) -> list[Slab]:
        slabs: list[Slab] = []
        for entry in self._trained(module):
            if slabs and slabs[-1].has_room_for(entry):
                slabs[-1].parameters.append(entry)
            else:
                slabs.append(Slab(entry))
        return slabs


def _view_as_parameter(values: Tensor, parameter: Tensor) -> Tensor:
    """Return a view of the first elements of `values` with the parameter's shape and memory layout."""
    row = values[: num_reals(parameter)]
    real = parameter.detach()
    if real.is_complex():
        real = torch.view_as_real(real)
    if has_gaps(real):
        return row.view(real.shape)
    return row.as_strided(real.shape, real.stride(), row.storage_offset())


def _step_state(fit: FitContext) -> OptimizerStepState | None:
    """Return the step state of the first optimizer, or None if no loss scale can skip steps."""
    states = fit.optimizer_steps
    if not states or states[0].loss_scale is None:
        return None
    return states[0]
