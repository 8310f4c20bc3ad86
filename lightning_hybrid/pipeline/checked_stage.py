"""torch's pipeline stage with fp32 gradient sums, a check of shapes before each message, and located errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from lightning_hybrid.models.activation_checkpointing import checkpointed
from lightning_hybrid.pipeline.shapes import Boundary, as_arguments, check_shapes


class StageBody(nn.Module):
    """Blocks of one stage, which run one after the other.

    Args:
        blocks: Modules, each of which takes the previous one's output: a tensor, or the entries of
            a tuple.
        checkpoint_activations: Whether to store only the input of each block, and to recompute its
            inside in backward.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], *, checkpoint_activations: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.checkpoint_activations = checkpoint_activations

    def forward(self, *inputs: Tensor) -> Any:
        """Compute the output of the last block."""
        value: Any = tuple(_writable(tensor) for tensor in inputs)
        for block in self.blocks:
            arguments = as_arguments(value)
            if self.checkpoint_activations and torch.is_grad_enabled():
                # A block such as dropout draws random numbers. The second pass must draw the same
                # ones.
                value = checkpointed(block, *arguments, norms=block, preserve_rng_state=True)
            else:
                value = block(*arguments)
        return value


def _writable(tensor: Tensor) -> Tensor:
    """Return a tensor that a block may change in place, which autograd does not allow for a leaf."""
    if tensor.is_leaf and tensor.requires_grad:
        received: Tensor = _Received.apply(tensor)
        return received
    return tensor


class _Received(torch.autograd.Function):
    """Identity that turns the input of a stage into a result with the same memory.

    Only this stage reads the memory, once per micro-batch.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()  # other kinds of views would be as read-only as the leaf

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@contextmanager
def plain_backward(parameters: Sequence[nn.Parameter], *, is_last: bool) -> Iterator[None]:
    """Run a backward inside, in which torch adds gradients to `p.grad` in the dtype of the parameters."""
    yield


@dataclass(frozen=True, kw_only=True)
class StageSetting:
    """Position of a stage in its pipeline, and the functions around its backwards.

    Attributes:
        index: Index of the stage.
        num_stages: Number of stages of the pipeline.
        device: Device of this rank.
        group: Process group for messages between stages.
        around_backward: Context for each backward, called with the parameters that get gradients
            and `is_last`: `MicrobatchMixin.backward_of_microbatch`.
        note: `PipelineWatchdog.note`.
        set_last_backward: Function that gets, before each backward, whether it is the stage's last
            one of a step.
    """

    index: int
    num_stages: int
    device: torch.device
    group: dist.ProcessGroup
    around_backward: Callable[..., AbstractContextManager[None]] = plain_backward
    note: Callable[..., None]
    set_last_backward: Callable[[bool], object] = bool


class CheckedStage(PipelineStage):
    """Pipeline stage whose micro-batch gradients add up bit for bit as those of accumulated batches.

    With half precision, gradients are summed in fp32 and rounded once, in the last micro-batch's
    backward.

    torch's stage only supports tensors for which a gradient comes back. All other tensors between
    stages have messages of their own.

    Args:
        body: The module, or the module in DistributedDataParallel.
        setting: Position of the stage.
        inputs: Specifications of the stage's inputs.
        outputs: Specifications of the stage's outputs.
        input_of: Function that returns the input of a micro-batch. Only the first stage calls it.
        random_state_of: Function that returns the context with the random numbers of a micro-batch
            in this stage.
    """

    def __init__(
        self,
        body: nn.Module,
        setting: StageSetting,
        *,
        inputs: Sequence[Boundary],
        outputs: Sequence[Boundary],
        input_of: Callable[[int], tuple[Tensor, ...]],
        random_state_of: Callable[[int], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._setting = setting
        self._inputs = inputs
        self._outputs = outputs
        self._input_of = input_of
        self._random_state_of = random_state_of
        self._microbatch = 0  # the micro-batch in forward
        # By micro-batch: the tensors without gradient, which torch's stage does not know.
        self._received: dict[int, list[Tensor]] = {}
        self._sent: dict[int, list[Tensor]] = {}

        # Without example tensors torch would find shapes by a forward of its own. Only tensors that
        # get a gradient require one.
        examples = inputs
        if setting.index > 0:
            examples = _with_gradient(inputs)
        super().__init__(
            body,
            setting.index,
            setting.num_stages,
            setting.device,
            input_args=tuple(
                boundary.empty("meta", requires_grad=boundary.has_gradient) for boundary in examples
            ),
            output_args=tuple(
                boundary.empty("meta", requires_grad=True) for boundary in _with_gradient(outputs)
            ),
            group=setting.group,
        )

    # ---- forward and backward ------------------------------------------------------------------

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: Any = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Compute one micro-batch. The first stage takes the input from `input_of`."""
        self._note("in forward", fwd_chunk_id)
        if self.is_first:
            args = self._input_of(fwd_chunk_id)
            check_shapes(self._inputs, args, f"the input of micro-batch {fwd_chunk_id}")
        self._microbatch = fwd_chunk_id
        try:
            # Activation checkpoints save this random state for their second pass.
            with self._random_state_of(fwd_chunk_id):
                output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        except RuntimeError as error:
            if error.__cause__ is None or "failed to run forward" not in str(error):
                raise
            # torch wraps the user's error in one of its own. The user's error is raised instead,
            # with the location.
            error.__cause__.add_note(self._location("in forward", fwd_chunk_id))
            raise error.__cause__ from None
        return output

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Any) -> Any:
        """Compute the outputs, and set those without gradient aside for messages of their own."""
        if not self.is_first:
            with_gradient = iter(args)
            without_gradient = iter(self._received.pop(self._microbatch))
            arguments = []
            for boundary in self._inputs:
                source = with_gradient if boundary.has_gradient else without_gradient
                arguments.append(next(source))
            args = tuple(arguments)

        output = super().forward_maybe_with_nosync(*args, **kwargs)
        check_shapes(self._outputs, output, f"the output of stage {self.stage_index}")
        if self.is_last:
            return output

        outputs_with_gradient = []
        outputs_without_gradient = []
        for boundary, tensor in zip(self._outputs, as_arguments(output), strict=True):
            if boundary.has_gradient:
                outputs_with_gradient.append(tensor)
            else:
                outputs_without_gradient.append(tensor)
        self._sent[self._microbatch] = outputs_without_gradient
        return tuple(outputs_with_gradient)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Compute one micro-batch's gradients.

        Autograd gives them the shape and dtype of the inputs.
        """
        self._note("in backward", bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False
    ) -> Any:
        """Run a backward.

        With half precision its gradients are added to those of earlier micro-batches in fp32.
        """
        setting = self._setting
        setting.set_last_backward(last_backward)
        parameters = list(self.submod.parameters())
        if backward_type == "input":
            # Gradients of the parameters come later, in the "weight" part.
            parameters = []
        with (
            setting.around_backward(parameters, is_last=last_backward),
            torch.autocast(setting.device.type, enabled=False),  # as Lightning runs backward
        ):
            results = super().backward_maybe_with_nosync(
                backward_type, bwd_kwargs, last_backward=last_backward
            )
        if self.is_first or backward_type == "weight":
            return tuple(results)

        # An input that does not influence the loss has no gradient, which torch 2.13 and earlier do
        # not send.
        gradients = []
        for value, gradient in zip(bwd_kwargs["input_values"], results[0], strict=True):
            gradients.append(torch.zeros_like(value) if gradient is None else gradient)
        return tuple(gradients), *results[1:]

    # ---- messages ------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the input of a micro-batch."""
        self._note("waiting for the input", fwd_chunk_id, is_waiting=True)
        if self.is_first:
            return []
        with_gradient = _with_gradient(self._inputs)
        without_gradient = _without_gradient(self._inputs)
        self._lay_out(self.args_recv_info[fwd_chunk_id], with_gradient)
        tensors = [boundary.empty(self.device) for boundary in without_gradient]
        self._received[fwd_chunk_id] = tensors
        extra_ops = self._ops(dist.irecv, tensors, without_gradient, self.stage_index - 1)
        return [
            *_flatten_messages(super().get_fwd_recv_ops(fwd_chunk_id), with_gradient),
            *extra_ops,
        ]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that receive the gradient of a micro-batch's output."""
        self._note("waiting for the gradient", bwd_chunk_id, is_waiting=True)
        with_gradient = _with_gradient(self._outputs)
        if not self.is_last:
            self._lay_out(self.grad_recv_info[bwd_chunk_id], with_gradient)
        return _flatten_messages(super().get_bwd_recv_ops(bwd_chunk_id), with_gradient)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send the output of a micro-batch."""
        if self.is_last:
            return []
        with_gradient = _with_gradient(self._outputs)
        without_gradient = _without_gradient(self._outputs)
        tensors = self._sent.pop(fwd_chunk_id)
        extra_ops = self._ops(dist.isend, tensors, without_gradient, self.stage_index + 1)
        return [
            *_flatten_messages(super().get_fwd_send_ops(fwd_chunk_id), with_gradient),
            *extra_ops,
        ]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send the gradient of a micro-batch's input."""
        return _flatten_messages(
            super().get_bwd_send_ops(bwd_chunk_id), _with_gradient(self._inputs)
        )

    def _ops(
        self, op: Any, tensors: Sequence[Tensor], boundaries: Sequence[Boundary], stage: int
    ) -> list[dist.P2POp]:
        """Return an operation for each tensor without gradient, to or from a stage."""
        group = self._setting.group
        peer = dist.get_global_rank(group, self.stage_index_to_group_rank[stage])
        ops = []
        for boundary, tensor in zip(boundaries, tensors, strict=True):
            ops.append(dist.P2POp(op, boundary.message(tensor), peer, group))
        return ops

    def _lay_out(self, infos: Sequence[Any], boundaries: Sequence[Boundary]) -> None:
        """Replace receive buffers of another layout: torch 2.11 always makes contiguous ones."""
        for info, boundary in zip(infos, boundaries, strict=True):
            buffer = getattr(info, "buffer", None)
            if buffer is not None and not boundary.has_layout_of(buffer):
                info.buffer = boundary.empty(self.device, requires_grad=buffer.requires_grad)

    # ---- location ------------------------------------------------------------------------------

    def _note(self, activity: str, microbatch: int, *, is_waiting: bool = False) -> None:
        self._setting.note(self._location(activity, microbatch), is_waiting=is_waiting)

    def _location(self, activity: str, microbatch: int) -> str:
        return (
            f"{activity} of micro-batch {microbatch} on stage {self.stage_index} of "
            f"{self.num_stages}"
        )


def _with_gradient(boundaries: Sequence[Boundary]) -> list[Boundary]:
    return [boundary for boundary in boundaries if boundary.has_gradient]


def _without_gradient(boundaries: Sequence[Boundary]) -> list[Boundary]:
    return [boundary for boundary in boundaries if not boundary.has_gradient]


def _flatten_messages(ops: list[dist.P2POp], boundaries: Sequence[Boundary]) -> list[dist.P2POp]:
    """Replace the tensors of operations by rows in the agreed layout. `ops` may be empty."""
    for op, boundary in zip(ops, boundaries, strict=bool(ops)):
        op.tensor = boundary.message(op.tensor)
    return ops


_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


def schedule_of(
    name: str,
    stages: Sequence[CheckedStage],
    *,
    num_microbatches: int,
    loss_of: Callable[[Tensor, int], Tensor],
) -> Callable[[], Tensor | None]:
    """Return a function that runs one step of a torch schedule.

    The function returns the outputs of all micro-batches on the last stage, and None on other
    stages.

    Args:
        name: Name of the schedule.
        stages: Stages of this rank.
        num_microbatches: Number of micro-batches of a step.
        loss_of: Function of the output and the index of a micro-batch that returns its loss,
            already divided: the gradients of all losses add up to those of the step.
    """

    def loss(output: Tensor, index: Tensor) -> Tensor:
        return loss_of(output, int(index))

    # torch's schedules with one stage per rank take the stage itself.
    schedule_stages: Any = list(stages)
    if name in ("gpipe", "1f1b"):
        schedule_stages = stages[0]
    schedule = _SCHEDULES[name](
        schedule_stages,
        n_microbatches=num_microbatches,
        loss_fn=loss,
        # torch would divide gradients after the sum, while gradient accumulation divides each loss.
        scale_grads=False,
    )
    # The target of a micro-batch is its index.
    indices = torch.arange(num_microbatches)
    holds_last_stage = any(stage.is_last for stage in stages)

    def step() -> Tensor | None:
        output: Tensor | None
        if holds_last_stage:
            output = schedule.step(target=indices)
        else:
            output = schedule.step()
        return output

    return step
