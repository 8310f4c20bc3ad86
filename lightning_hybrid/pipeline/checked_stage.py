"""torch's pipeline stage, with what it lacks: fp32 sums, a check before each message, and a place for errors."""

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
from lightning_hybrid.pipeline.shapes import Boundary, as_arguments, check


class StageBody(nn.Module):
    """The blocks of one stage, one after the other.

    Args:
        blocks: modules, each of which takes what the one before returns: a tensor, or the entries of a tuple.
        checkpoint_activations: store only the input of each block, and compute its inside again in backward.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], *, checkpoint_activations: bool = False
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.checkpoint_activations = checkpoint_activations

    def forward(self, *xs: Tensor) -> Any:
        """Compute the output of the last block."""
        # Autograd lets no block begin with an operation in place on a leaf.
        value: Any = tuple(_Received.apply(x) if x.is_leaf and x.requires_grad else x for x in xs)
        for block in self.blocks:
            if self.checkpoint_activations and torch.is_grad_enabled():
                # A block may draw random numbers, as dropout does: the second pass has to draw the same.
                value = checkpointed(
                    block, *as_arguments(value), norms=block, preserve_rng_state=True
                )
            else:
                value = block(*as_arguments(value))
        return value


class _Received(torch.autograd.Function):
    """The input of a stage as a result: the same memory, which is read by this stage alone, once per micro-batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()  # a view of another kind would be as read-only as the leaf

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@contextmanager
def plain_backward(parameters: Sequence[nn.Parameter], *, is_last: bool) -> Iterator[None]:
    """Run a backward inside whose gradients torch adds to `p.grad` by itself, in the precision of the parameters."""
    yield


@dataclass(frozen=True, kw_only=True)
class StageSetting:
    """What a stage needs to know besides its module."""

    index: int
    num_stages: int
    device: torch.device
    group: dist.ProcessGroup
    # Around each backward, with the parameters that get gradients: `MicrobatchMixin.backward_of_microbatch`.
    around_backward: Callable[..., AbstractContextManager[None]] = plain_backward
    note: Callable[..., None]  # `PipelineWatchdog.note`
    note_last: Callable[[bool], object] = (
        bool  # gets, before each backward, whether it is the stage's last of a step
    )


class CheckedStage(PipelineStage):
    """A stage whose gradients of several micro-batches add up as those of accumulated batches do, bit for bit.

    With half precision they are summed in fp32 and rounded once, into the last micro-batch's backward. torch knows of
    the tensors for which a gradient comes back, as it takes no others; the rest has messages of its own.

    `body`: the module, or the module in DistributedDataParallel; `input_of` returns the input of a micro-batch, for the
    first stage; `draws`: random numbers of a micro-batch in this stage, as a context.
    """

    def __init__(
        self,
        body: nn.Module,
        setting: StageSetting,
        *,
        given: Sequence[Boundary],
        returned: Sequence[Boundary],
        input_of: Callable[[int], tuple[Tensor, ...]],
        draws: Callable[[int], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._setting = setting
        self._given = given
        self._returned = returned
        self._input_of = input_of
        self._draws = draws
        # By micro-batch: the tensors that torch does not know.
        self._received = dict[int, list[Tensor]]()
        self._sent = dict[int, list[Tensor]]()
        super().__init__(
            body,
            setting.index,
            setting.num_stages,
            setting.device,
            # Without them torch would find shapes by a forward of its own. Only what gets a gradient requires one.
            input_args=tuple(
                one.empty("meta", requires_grad=one.has_gradient)
                for one in (_known(given) if setting.index > 0 else given)
            ),
            output_args=tuple(one.empty("meta", requires_grad=True) for one in _known(returned)),
            group=setting.group,
        )

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: Any = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Compute one micro-batch; on the first stage, of the user's input."""
        self._note("in forward", fwd_chunk_id)
        if self.is_first:
            args = self._input_of(fwd_chunk_id)
            check(self._given, args, f"the input of micro-batch {fwd_chunk_id}")
        self._number = fwd_chunk_id
        try:
            with self._draws(
                fwd_chunk_id
            ):  # activation checkpoints keep the state inside for their second pass
                output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        except RuntimeError as error:
            if error.__cause__ is None or "failed to run forward" not in str(error):
                raise
            # torch hides the user's error in one of its own: it stays itself, with the place.
            error.__cause__.add_note(self._place("in forward", fwd_chunk_id))
            raise error.__cause__ from None
        return output

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Any) -> Any:
        """Compute the output; put aside what torch does not know."""
        if not self.is_first:
            known = iter(args)
            others = iter(self._received.pop(self._number))
            args = tuple(next(known if one.has_gradient else others) for one in self._given)
        output = super().forward_maybe_with_nosync(*args, **kwargs)
        check(self._returned, output, f"the output of stage {self.stage_index}")
        if self.is_last:
            return output
        pairs = list(zip(self._returned, as_arguments(output), strict=True))
        self._sent[self._number] = [each for one, each in pairs if not one.has_gradient]
        return tuple(each for one, each in pairs if one.has_gradient)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Compute one micro-batch's gradients."""
        self._note("in backward", bwd_chunk_id)
        super().backward_one_chunk(
            bwd_chunk_id, *args, **kwargs
        )  # autograd gives the input's shape and dtype

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives the input of a micro-batch."""
        self._note("waiting for the input", fwd_chunk_id, is_waiting=True)
        if self.is_first:
            return []
        known = _known(self._given)
        others = [one for one in self._given if not one.has_gradient]
        self._lay_out(self.args_recv_info[fwd_chunk_id], known)
        self._received[fwd_chunk_id] = tensors = [one.empty(self.device) for one in others]
        apart = self._ops(dist.irecv, tensors, others, self.stage_index - 1)
        return [*_flat(super().get_fwd_recv_ops(fwd_chunk_id), known), *apart]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives the gradient of a micro-batch's output."""
        self._note("waiting for the gradient", bwd_chunk_id, is_waiting=True)
        if not self.is_last:
            self._lay_out(self.grad_recv_info[bwd_chunk_id], _known(self._returned))
        return _flat(super().get_bwd_recv_ops(bwd_chunk_id), _known(self._returned))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what sends the output of a micro-batch."""
        if self.is_last:
            return []
        others = [one for one in self._returned if not one.has_gradient]
        apart = self._ops(dist.isend, self._sent.pop(fwd_chunk_id), others, self.stage_index + 1)
        return [*_flat(super().get_fwd_send_ops(fwd_chunk_id), _known(self._returned)), *apart]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what sends the gradient of a micro-batch's input."""
        return _flat(super().get_bwd_send_ops(bwd_chunk_id), _known(self._given))

    def _ops(
        self, op: Any, tensors: Sequence[Tensor], boundaries: Sequence[Boundary], stage: int
    ) -> list[dist.P2POp]:
        group = self._setting.group
        peer = dist.get_global_rank(group, self.stage_index_to_group_rank[stage])
        messages = [one.message(tensor) for one, tensor in zip(boundaries, tensors, strict=True)]
        return [dist.P2POp(op, message, peer, group) for message in messages]

    def _lay_out(self, infos: Sequence[Any], boundaries: Sequence[Boundary]) -> None:
        # torch 2.11 makes contiguous buffers, whatever the tensor that it was given.
        for info, boundary in zip(infos, boundaries, strict=True):
            buffer = getattr(info, "buffer", None)
            if buffer is not None and not boundary.has_layout_of(buffer):
                info.buffer = boundary.empty(self.device, requires_grad=buffer.requires_grad)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False
    ) -> Any:
        """Run backward; with half precision its gradients are added to those of earlier micro-batches in fp32."""
        setting = self._setting
        setting.note_last(last_backward)
        parameters = list(self.submod.parameters())
        if backward_type == "input":
            # Gradients of the parameters come later, in the "weight" part.
            parameters = []
        around = setting.around_backward(parameters, is_last=last_backward)
        with (
            around,
            torch.autocast(setting.device.type, enabled=False),
        ):  # as Lightning runs backward
            gradients, *rest = super().backward_maybe_with_nosync(
                backward_type, bwd_kwargs, last_backward=last_backward
            )
        if not self.is_first and backward_type != "weight":
            # One that the loss does not depend on has none, which torch 2.13 and before do not send.
            pairs = zip(bwd_kwargs["input_values"], gradients, strict=True)
            gradients = tuple(
                torch.zeros_like(value) if each is None else each for value, each in pairs
            )
        return gradients, *rest

    def _note(self, what: str, microbatch: int, *, is_waiting: bool = False) -> None:
        self._setting.note(self._place(what, microbatch), is_waiting=is_waiting)

    def _place(self, what: str, microbatch: int) -> str:
        return (
            f"{what} of micro-batch {microbatch} on stage {self.stage_index} of {self.num_stages}"
        )


def _known(boundaries: Sequence[Boundary]) -> list[Boundary]:
    return [one for one in boundaries if one.has_gradient]


def _flat(ops: list[dist.P2POp], boundaries: Sequence[Boundary]) -> list[dist.P2POp]:
    for op, boundary in zip(ops, boundaries, strict=bool(ops)):
        op.tensor = boundary.message(op.tensor)
    return ops


def schedule_of(
    name: str,
    stages: Sequence[CheckedStage],
    *,
    num_microbatches: int,
    loss_of: Callable[[Tensor, int], Tensor],
) -> Callable[[], Tensor | None]:
    """Make a schedule of torch's; call it for one step. It returns the outputs of all micro-batches on the last stage.

    `loss_of(output, i)` is the loss of micro-batch i whose gradients add up to those of the step: divided already.
    """

    def loss(output: Tensor, number: Tensor) -> Tensor:
        return loss_of(output, int(number))

    # `scale_grads` would divide after the sum, where accumulation divides each loss.
    options: dict[str, Any] = {
        "n_microbatches": num_microbatches,
        "loss_fn": loss,
        "scale_grads": False,
    }
    schedule: Any
    if name in ("gpipe", "1f1b"):
        schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name](stages[0], **options)
    else:
        kinds = {
            "interleaved": ScheduleInterleaved1F1B,
            "zero_bubble": ScheduleInterleavedZeroBubble,
        }
        schedule = kinds[name](list(stages), **options)
    # The target of a micro-batch is its number.
    numbers = torch.arange(num_microbatches)
    return lambda: (
        schedule.step(target=numbers) if any(stage.is_last for stage in stages) else schedule.step()
    )
