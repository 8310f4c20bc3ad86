"""The strategy's side of `Mean(error_feedback=True)`: the outcome of each step, and residuals in checkpoints.

    checkpoint["error_feedback"]    `world_size`: ranks that wrote it
                                    `residuals`: float32 (nodes, *shape) by the name of each parameter

in the units of the sum of all ranks' gradients, unscaled. Row n is what the step of node n still owes. As many nodes as
wrote it take their own rows, and go on to the bit; another number of nodes take equal parts of the sum of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_hybrid.comm import CommEngine, HookState, Topology
from lightning_hybrid.comm.codec.block_format import BLOCK, num_blocks_of
from lightning_hybrid.comm.codec.codec import Codec
from lightning_hybrid.comm.codec.error_feedback import ErrorFeedback
from lightning_hybrid.comm.codec.padded_bucket import BlockNumbers, num_reals
from lightning_hybrid.precision.skipped_steps import OptimizerStepState
from lightning_hybrid.strategy.compatibility import in_precision, refuse_excluded
from lightning_hybrid.strategy.shard_update.shard_pairs import has_gaps

if TYPE_CHECKING:
    import lightning.pytorch as pl

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
        found["manual steps"] = f"`automatic_optimization` (=False) with precision {precision.precision!r}"
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


class FeedbackMixin:
    """Strategy mixin: tell residuals how each step ended, save them and load them."""

    # It derives from nothing: `super()` is the strategy that stands after it in the class line, `DDPStrategy`.

    _engine: CommEngine | None
    _dtype_across_nodes: torch.dtype | Codec | None
    _hook_state: HookState
    _blocks: BlockNumbers  # outlives the hook's state, as the residuals do
    _topology: Topology
    _feedback: ErrorFeedback | None = None  # kept after a fit: its checkpoint may be saved later
    _averaged_parameters: set[int] | None
    precision_plugin: Any
    lightning_module: Any
    root_device: torch.device
    is_global_zero: bool
    _ending_error: BaseException | None
    world_size: int

    @property
    def _step_state(self) -> OptimizerStepState | None:
        # Of the optimizer, where overflow may skip its steps.
        states = getattr(self.precision_plugin, "optimizer_steps", None)
        return None if not states or states[0].loss_scale is None else states[0]

    @property
    def _may_skip(self) -> bool:
        return self._step_state is not None

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up as DDP; where sums are fed back, after a check that the outcome of each step will be known."""
        codec = self._dtype_across_nodes
        is_on = trainer.state.fn == "fit" and isinstance(codec, Codec) and codec.error_feedback
        if is_on:
            refuse_unknown_outcomes(self.precision_plugin, self.lightning_module, may_skip=self._may_skip)
        super().setup(trainer)  # type: ignore[misc]
        if is_on and self._hook_state.feedback is not None:
            self._feedback, self._blocks = self._hook_state.feedback, self._hook_state.blocks
            self._feedback.may_skip = self._may_skip
        elif trainer.state.fn == "fit":
            self._feedback = None  # of an earlier fit

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start a batch as DDP; note the loss scale of its gradients."""
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        if self._feedback is not None:
            state = self._step_state
            self._feedback.begin_step(None if state is None or state.loss_scale is None else state.loss_scale.scale)

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step as DDP; note whether the step was skipped."""
        outputs = super().optimizer_step(optimizer, *args, **kwargs)  # type: ignore[misc]
        if self._feedback is not None and (state := self._step_state) is not None:
            self._feedback.end_step(state.num_in_a_row > 0)
        return outputs

    def teardown(self) -> None:
        """Tear down as DDP; residuals leave the device, for a checkpoint that is saved later."""
        if self._feedback is not None and self.root_device.type == "cuda":
            self._feedback.release_device()
        super().teardown()  # type: ignore[misc]

    def on_exception(self, exception: BaseException) -> None:
        """Report as DDP; residuals are lost, as other ranks may not come to collect them."""
        super().on_exception(exception)  # type: ignore[misc]
        if self._ending_error is not None:
            self._feedback = None

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save as DDP, with the residuals next to the state of optimizers. Collective where there are some."""
        has_some = self._feedback is not None and "optimizer_states" in checkpoint and dist.is_initialized()
        if has_some and (error := self._ending_error) is not None:
            rank_zero_warn(
                f"`between_nodes.error_feedback` (=True): a checkpoint that is saved while {type(error).__name__} "
                "ends this rank has no residuals, as other ranks may not come. A run that goes on from it begins with "
                "zeros."
            )
        elif has_some:
            assert self._feedback is not None
            residuals = self._collected(self._feedback)
            if self.is_global_zero:
                checkpoint[KEY] = {"world_size": self.world_size, "residuals": residuals}
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    @torch.no_grad()
    def _collected(self, feedback: ErrorFeedback) -> dict[str, Tensor]:
        # On rank zero those of all nodes, by name; elsewhere nothing.
        found: dict[str, Tensor] = {}
        nodes, own = self._topology.nodes, self._topology.node
        for slab in self._slabs():
            begin, last = slab[0][2], slab[-1]
            share = feedback.share(begin, last[2] + num_blocks_of(num_reals(last[1])), self.root_device)
            for index, node in enumerate(nodes):
                values = share if node == own else torch.zeros_like(share)
                dist.reduce(values, dst=0)  # over all ranks: ranks of a node have different blocks
                if not self.is_global_zero:
                    continue
                for name, parameter, first in slab:
                    if name not in found:
                        found[name] = torch.zeros(len(nodes), *_real(parameter).shape)
                    row = values[(first - begin) * BLOCK :][: num_reals(parameter)]
                    found[name][index] = _in_shape(row, parameter)
        return found

    def _load_residuals(self, checkpoint: Mapping[str, Any]) -> None:
        # Where the checkpoint has none they begin with zeros.
        if self._feedback is None or (saved := checkpoint.get(KEY)) is None:
            return
        nodes, blocks = self._topology.nodes, self._blocks
        place = {"node": nodes.index(self._topology.node), "num_nodes": len(nodes)}
        values = torch.zeros(blocks.num_blocks * BLOCK)
        for name, parameter, first in self._trained():
            if name in saved["residuals"]:
                rows = saved["residuals"][name].cpu()
                own = share_of_node(rows, growth=self.world_size / saved["world_size"], **place)
                row = values[first * BLOCK :][: num_reals(parameter)]
                _in_shape(row, parameter).copy_(own)
        self._feedback.load(values)

    def _trained(self) -> list[tuple[str, Tensor, int]]:
        # Parameters by name, each with the number of its first block.
        blocks = self._blocks
        named = self.lightning_module.named_parameters()
        return [(name, one, blocks.first_of(one)) for name, one in named if one.requires_grad]

    def _slabs(self) -> list[list[tuple[str, Tensor, int]]]:
        slabs: list[list[tuple[str, Tensor, int]]] = []
        for entry in self._trained():
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
    return row.view(like.shape) if has_gaps(like) else row.as_strided(like.shape, like.stride(), row.storage_offset())
