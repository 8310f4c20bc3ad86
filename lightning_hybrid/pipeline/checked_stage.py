"""Subclass of torch's `PipelineStage` with fp32 gradient accumulation and shape checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from lightning_hybrid.models.activation_checkpointing import checkpointed
from lightning_hybrid.pipeline.shapes import Boundary, as_arguments, check_shapes


class StageBody(nn.Module):
    """Sequence of the blocks of one pipeline stage.

    Args:
        blocks: Modules, each of which takes the previous module's output as arguments: a tensor, or
            the entries of a tuple.
        checkpoint_activations: Whether to store only the input of each block, and to recompute its
            activations in backward.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], *, checkpoint_activations: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.checkpoint_activations = checkpoint_activations

    def forward(self, *inputs: Tensor) -> Any:
        """Run the blocks in order, and return the output of the last block."""
        value: Any = tuple(_writable(tensor) for tensor in inputs)
        for block in self.blocks:
            arguments = as_arguments(value)
            if self.checkpoint_activations and torch.is_grad_enabled():
                # A block such as dropout draws random numbers. The recomputation must draw the same
                # numbers.
                value = checkpointed(block, *arguments, norms=block, preserve_rng_state=True)
            else:
                value = block(*arguments)
        return value


def _writable(tensor: Tensor) -> Tensor:
    """Return a non-leaf alias of a leaf tensor that requires a gradient, and any other tensor unchanged.

    A block may change the result in place. Autograd does not allow this for a leaf that requires a gradient.
    """
    if tensor.is_leaf and tensor.requires_grad:
        received: Tensor = _Received.apply(tensor)
        return received
    return tensor


class _Received(torch.autograd.Function):
    """Autograd function that returns a stage's leaf input as a non-leaf tensor with the same memory.

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
    """Enter a context in which gradients accumulate in the parameters' dtype, as torch does by default."""
    yield


@dataclass(frozen=True, kw_only=True)
class StageSetting:
    """Settings of a pipeline stage, such as its position, its device and the functions that it calls.

    Attributes:
        index: Index of the stage.
        num_stages: Number of stages of the pipeline.
        device: Device of this rank.
        group: Process group for messages between stages.
        around_backward: Context for each backward, called with the parameters that get gradients
            and `is_last`: `MicrobatchMixin.backward_of_microbatch`.
        note: `PipelineWatchdog.note`.
        set_last_backward: Function called before each backward with True if it is the stage's last
            backward of a step, otherwise with False.
    """

    index: int
    num_stages: int
    device: torch.device
    group: dist.ProcessGroup
    around_backward: Callable[..., AbstractContextManager[None]] = plain_backward
    note: Callable[..., None]
    set_last_backward: Callable[[bool], object] = bool


class CheckedStage(PipelineStage):
    """Pipeline stage whose gradients are bit-identical to those of gradient accumulation.

    With half precision, gradients are summed in fp32 and rounded once, in the backward pass of the
    last micro-batch.

    torch's stage only supports tensors that receive a gradient. This class sends all other tensors
    between stages in separate messages.

    Args:
        body: The module of the stage, possibly wrapped in DistributedDataParallel.
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
        self._microbatch = 0  # index of the micro-batch whose forward pass is running
        # Tensors without gradient, by micro-batch. torch's stage does not handle them.
        self._received: dict[int, list[Tensor]] = {}
        self._sent: dict[int, list[Tensor]] = {}

        # Without example tensors, torch would run a forward pass to infer shapes. Only tensors that
        # receive a gradient require one.
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
        """Run the forward pass of one micro-batch.

        The first stage gets its input from `input_of`.
        """
        self._note("in forward", fwd_chunk_id)
        if self.is_first:
            args = self._input_of(fwd_chunk_id)
            check_shapes(self._inputs, args, f"the input of micro-batch {fwd_chunk_id}")
        self._microbatch = fwd_chunk_id
        try:
            # Activation checkpoints save this random state for the recomputation.
            with self._random_state_of(fwd_chunk_id):
                output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        except RuntimeError as error:
            if error.__cause__ is None or "failed to run forward" not in str(error):
                raise
            # torch wraps the user's error in its own. Raise the user's error instead, with the
            # stage and micro-batch.
            error.__cause__.add_note(self._location("in forward", fwd_chunk_id))
            raise error.__cause__ from None
        return output

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Any) -> Any:
        """Run the stage's forward pass, and set aside outputs without gradient, because they are sent separately."""
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
        """Run the backward pass of one micro-batch.

        Shapes are not checked, because autograd gives gradients the shapes and dtypes of the
        inputs.
        """
        self._note("in backward", bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False
    ) -> Any:
        """Run the stage's backward pass, and replace missing gradients of its inputs by zeros.

        With half precision, the gradients of parameters are added to those of earlier micro-batches
        in fp32.
        """
        setting = self._setting
        setting.set_last_backward(last_backward)
        parameters = list(self.submod.parameters())
        if backward_type == "input":
            # The later "weight" backward computes the gradients of the parameters.
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

        # An input that does not influence the loss has no gradient. torch 2.13 and earlier would not
        # send a message for it.
        gradients = []
        for value, gradient in zip(bwd_kwargs["input_values"], results[0], strict=True):
            gradients.append(torch.zeros_like(value) if gradient is None else gradient)
        return tuple(gradients), *results[1:]

    # ---- messages ------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the point-to-point operations that receive a micro-batch's input."""
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
        """Return the point-to-point operations that receive the gradient of a micro-batch's output."""
        self._note("waiting for the gradient", bwd_chunk_id, is_waiting=True)
        with_gradient = _with_gradient(self._outputs)
        if not self.is_last:
            self._lay_out(self.grad_recv_info[bwd_chunk_id], with_gradient)
        return _flatten_messages(super().get_bwd_recv_ops(bwd_chunk_id), with_gradient)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the point-to-point operations that send a micro-batch's output."""
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
        """Return the point-to-point operations that send the gradient of a micro-batch's input."""
        return _flatten_messages(
            super().get_bwd_send_ops(bwd_chunk_id), _with_gradient(self._inputs)
        )

    def _ops(
        self, op: Any, tensors: Sequence[Tensor], boundaries: Sequence[Boundary], stage: int
    ) -> list[dist.P2POp]:
        """Return one point-to-point send or receive operation for each tensor."""
        group = self._setting.group
        peer = dist.get_global_rank(group, self.stage_index_to_group_rank[stage])
        ops = []
        for boundary, tensor in zip(boundaries, tensors, strict=True):
            ops.append(dist.P2POp(op, boundary.message(tensor), peer, group))
        return ops

    def _lay_out(self, infos: Sequence[Any], boundaries: Sequence[Boundary]) -> None:
        """Reallocate receive buffers whose memory layout differs from the agreed layout.

        torch 2.11 always allocates contiguous buffers.
        """
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
    """Flatten the tensor of each point-to-point operation to 1-D, in the agreed memory layout.

    `ops` may be empty.
    """
    for op, boundary in zip(ops, boundaries, strict=bool(ops)):
        op.tensor = boundary.message(op.tensor)
    return ops
