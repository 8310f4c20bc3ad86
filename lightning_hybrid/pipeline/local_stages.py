"""Pipeline stages of one rank, with comparisons between ranks and a forward pass through all stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.pipeline.microbatches import (
    digest_of,
    microbatches,
    only_tensors,
    rows_if_known,
)
from lightning_hybrid.pipeline.pipeline_watchdog import PipelineWatchdog
from lightning_hybrid.pipeline.rank_layout import PipelineGroups, PipelineRanks, TiedWeights
from lightning_hybrid.pipeline.shapes import (
    Boundaries,
    Boundary,
    as_arguments,
    boundary_of,
    check_shapes,
    output_of,
)


@dataclass(frozen=True)
class _Send:
    """Send operation that may still be in progress.

    Attributes:
        work: Handle of the operation.
        message: Elements to send, which must stay alive until they are sent.
    """

    work: dist.Work | None
    message: Tensor


@dataclass(kw_only=True)
class Stages:
    """Pipeline stages of this rank, with the process groups that connect them to other stages.

    Attributes:
        module: The LightningModule.
        net: The network of the module.
        bodies: `StageBody` of each stage of this rank, by index of the stage.
        wrapped: Stages wrapped in DistributedDataParallel if other ranks hold replicas, by index.
        ranks: Position of this rank.
        groups: Process groups of the pipeline.
        tied: Parameters that several ranks share.
        watchdog: Watchdog of the run.
        device: Device of this rank.
        num_microbatches: Number of micro-batches of a step.
        whole_layers: Function that returns a context in which tensor-parallel layers are whole.
            Collective.
        require_backward_grad_sync: Whether the current backward is a stage's last one of its step.
            The name is the same as in DDP.
    """

    module: Any
    net: nn.Module
    bodies: Mapping[int, Any]
    wrapped: Mapping[int, nn.Module]
    ranks: PipelineRanks
    groups: PipelineGroups
    tied: TiedWeights
    watchdog: PipelineWatchdog
    device: torch.device
    num_microbatches: int
    whole_layers: Callable[[], AbstractContextManager[None]]
    require_backward_grad_sync: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._boundaries: dict[Any, list[Boundaries]] = {}
        self._are_joined: dict[Any, bool] = {}

    def set_last_backward(self, is_last: bool) -> None:
        """Record whether the next backward pass is the last one of its stage in the current step."""
        self.require_backward_grad_sync = is_last

    # ---- agreement -----------------------------------------------------------------------------

    def compare_digests(self, subject: str, digest: int, describe: Callable[[], Any]) -> None:
        """Raise `ValueError` if a digest differs between the ranks of a pipeline.

        Collective: every rank of the pipeline must call it, in the same order.

        Args:
            subject: Name of the compared value, for the error.
            digest: Digest of this rank's value.
            describe: Function that returns a description of this rank's value, for the error.

        Raises:
            ValueError: On every rank, with each rank's description.
        """
        local_digest = torch.tensor([digest])
        digests = [torch.empty_like(local_digest) for _ in range(self.ranks.num_ranks)]
        self.watchdog.wait_for(
            lambda: dist.all_gather(digests, local_digest, group=self.groups.agree)
        )
        different_digests = {int(value) for value in digests}
        if len(different_digests) == 1:
            return

        description_by_rank = self.gather(describe())
        descriptions = []
        for rank, description in zip(self.ranks.peers, description_by_rank, strict=True):
            descriptions.append(f"rank {rank}: {description}")
        raise ValueError(
            f"{subject} must be the same on all ranks of a pipeline ({'; '.join(descriptions)}), because the first "
            "stage reads the images and the last stage reads the labels. Use a sampler that Lightning can replace, "
            "or pass `trainer.strategy.distributed_sampler_kwargs` to your sampler or `IterableDataset`."
        )

    def agree_on_batch(self, batch: Any, *, with_values: bool = True) -> None:
        """Raise `ValueError` if the shapes or labels of a batch differ between the ranks of a pipeline.

        Labels are compared if `with_values` is True.

        Collective: every rank of the pipeline must call it, in the same order.

        Raises:
            ValueError: On every rank, if batches differ.
        """
        digest = digest_of(batch, with_values=with_values)

        def describe() -> str:
            num_rows = rows_if_known(batch)
            if num_rows is None:
                return f"digest of labels and shapes: {digest:x}"
            return f"{num_rows} samples, digest of labels and shapes: {digest:x}"

        self.compare_digests("The batch", digest, describe)

    def gather(self, value: Any) -> list[Any]:
        """Gather a value from all ranks of the pipeline, in the order of stages.

        Collective: every rank of the pipeline must call it, in the same order.
        """
        values: list[Any] = [None] * self.ranks.num_ranks
        self.watchdog.wait_for(
            lambda: dist.all_gather_object(values, value, group=self.groups.agree)
        )
        return values

    def largest(self, found_inf: Tensor) -> Tensor:
        """Replace this rank's overflow flag by the maximum over all stages, in place.

        Collective: every rank of the pipeline must call it, in the same order.
        """
        self.watchdog.wait_for(
            lambda: dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self.groups.pipe)
        )
        return found_inf

    # ---- shapes --------------------------------------------------------------------------------

    def boundaries(self, key: Any, inputs: Callable[[], tuple[Tensor, ...]]) -> list[Boundaries]:
        """Return the tensor specifications of every stage's inputs and of the last stage's outputs.

        Collective if the key is new: every rank of the pipeline must call it, in the same order.

        Args:
            key: Key under which the result is cached.
            inputs: Function that returns the network's inputs. Only the first stage calls it.

        Raises:
            ValueError: On every rank, if one rank cannot find its shapes.
        """
        if key not in self._boundaries:
            with self.whole_layers():
                self._boundaries[key] = self._find_boundaries(inputs)
        return self._boundaries[key]

    def _find_boundaries(self, inputs: Callable[[], tuple[Tensor, ...]]) -> list[Boundaries]:
        first_rank = self.ranks.peers[0]
        find_inputs = partial(_boundaries_of, inputs)
        boundaries = [self._broadcast_found(find_inputs, first_rank, "the network's input")]
        for stage in range(self.ranks.num_stages):
            owner = self.ranks.peers[stage % self.ranks.num_ranks]
            find_outputs = partial(self._outputs_of, stage, boundaries[-1])
            outputs = self._broadcast_found(find_outputs, owner, f"stage {stage}")
            boundaries.append(outputs)
        return boundaries

    def _broadcast_found(
        self, find: Callable[[], Boundaries | str], owner: int, source: str
    ) -> Boundaries:
        """Find specifications on one rank, and broadcast them to all ranks of the pipeline.

        Collective: every rank of the pipeline must call it, in the same order.

        Args:
            find: Function that returns the specifications or an error message. Only the owner calls it.
            owner: Global rank that finds the specifications.
            source: Name of the tensors in the error.

        Raises:
            ValueError: On every rank, if the owner cannot find the specifications.
        """
        message: list[Any] = [None]
        if owner == self.ranks.rank:
            message = [_result_or_error(find)]
        self.watchdog.wait_for(
            lambda: dist.broadcast_object_list(message, src=owner, group=self.groups.agree)
        )
        result = message[0]
        if isinstance(result, str):
            raise ValueError(f"Rank {owner} cannot determine the shapes of {source}: {result}")
        return result

    def _outputs_of(self, stage: int, inputs: Boundaries) -> Boundaries | str:
        outputs = output_of(self.bodies[stage].blocks, inputs, self.device)
        is_last = stage + 1 == self.ranks.num_stages
        if is_last and len(outputs) != 1:
            return f"the last block must return one tensor, but returned {len(outputs)}"
        if is_last and not outputs[0].shape:
            return (
                "the last block must return a tensor with one row per sample, because the outputs of micro-batches "
                "are joined by rows, but returned a single number. To compute the loss in the last block, return the "
                'loss of each sample (reduction="none"), and its mean from `training_step`'
            )
        return outputs

    def are_outputs_joined(
        self, key: Any, boundaries: Sequence[Boundaries], num_parts: int
    ) -> bool:
        """Return whether the outputs of micro-batches, joined by rows, have the shape of the whole batch's output.

        They do not if the samples are in another dimension than the first, as in `[tokens, samples, features]`.
        Values would then be joined in the wrong order.

        Collective if the key is new: every rank of the pipeline must call it, in the same order.

        Args:
            key: Key under which the result is cached.
            boundaries: Specifications of the tensors of one micro-batch, as `boundaries` returns them.
            num_parts: Number of micro-batches.
        """
        if num_parts == 1:
            return True
        if key not in self._are_joined:
            with self.whole_layers():
                self._are_joined[key] = self._find_whether_joined(boundaries, num_parts)
        return self._are_joined[key]

    def _find_whether_joined(self, boundaries: Sequence[Boundaries], num_parts: int) -> bool:
        num_rows = boundaries[0][0].shape[:1]

        def whole_inputs() -> tuple[Tensor, ...]:
            inputs = []
            for boundary in boundaries[0]:
                shape = boundary.shape
                if shape[:1] == num_rows:  # otherwise it is a constant
                    shape = (num_parts * shape[0], *shape[1:])
                inputs.append(torch.empty(shape, dtype=boundary.dtype, device="meta"))
            return tuple(inputs)

        try:
            whole_boundaries = self._find_boundaries(whole_inputs)
        except ValueError:  # a block may accept only the number of rows of a micro-batch
            return True
        # An output of another number of rows, such as one loss per micro-batch, can be joined too.
        return whole_boundaries[-1][0].shape[1:] == boundaries[-1][0].shape[1:]

    # ---- forward -------------------------------------------------------------------------------

    def evaluate(self, num_samples: int | None, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the network's output on every rank of the pipeline, in place of `net.forward`.

        Collective: every rank of the pipeline must call it, in the same order.

        Args:
            num_samples: Number of samples of the batch. None: unknown.
            *args: Inputs of the network.
            **kwargs: Further inputs, which raise an error.
        """
        inputs = only_tensors(args, kwargs)
        # Memory layouts may differ between ranks. The layout of the first stage counts.
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)

        def describe() -> str:
            return ", ".join(f"{shape} of {dtype}" for shape, dtype in shapes)

        num_parts = self._num_parts_of(inputs, num_samples)
        # Ranks must also agree on the number of micro-batches.
        digest = digest_of(inputs, with_values=False) ^ num_parts
        self.compare_digests("The input of the network", digest, describe)

        parts = [inputs]
        if num_parts > 1:
            parts = microbatches(inputs, num_parts)
        boundaries = self.boundaries((shapes, num_parts), lambda: parts[0])
        if not self.are_outputs_joined((shapes, num_parts), boundaries, num_parts):
            parts = [inputs]
            boundaries = self.boundaries((shapes, 1), lambda: inputs)
        output_boundary = boundaries[-1][0]
        with self.watchdog.in_schedule():
            output = self._forward(parts, boundaries)
            return self.shared_output(output, len(parts), output_boundary)

    def _num_parts_of(self, inputs: tuple[Tensor, ...], num_samples: int | None) -> int:
        """Return into how many micro-batches the network's inputs are split in an evaluation.

        Several micro-batches keep all stages busy.
        """
        # With two stages per rank, NCCL would need another order of messages.
        if self.ranks.stages_per_rank > 1:
            return 1
        num_rows = rows_if_known(inputs)
        # Inputs with another number of rows than the batch may have the samples in another dimension, such as
        # `[tokens, samples]`. A block may combine their rows, so they must not be split.
        if num_rows is None or num_rows != num_samples or num_rows % self.num_microbatches:
            return 1
        return self.num_microbatches

    def _forward(
        self, parts: Sequence[tuple[Tensor, ...]], boundaries: Sequence[Boundaries]
    ) -> Tensor | None:
        """Run the micro-batches of a batch through the stages of this rank.

        Collective: every rank of the pipeline must call it with the same number of micro-batches.

        Returns:
            The outputs of all micro-batches on the last stage, None on other stages.
        """
        sends: list[_Send] = []
        outputs: list[Tensor] = []
        for stage in self.ranks.stages:
            for index, part in enumerate(parts):
                inputs = part
                if stage > 0:
                    inputs = self._receive(stage, boundaries[stage], index)
                self.watchdog.note(f"in forward of part {index} of the batch on stage {stage}")
                output = self.bodies[stage](*inputs)
                check_shapes(boundaries[stage + 1], output, f"the output of stage {stage}")
                if stage + 1 == self.ranks.num_stages:
                    outputs.append(output)
                else:
                    sends += self._send(stage, boundaries[stage + 1], output)

        self.watchdog.note("waiting for the outputs of the last stage", is_waiting=True)
        for send in sends:
            if send.work is not None:
                self.watchdog.wait_for(send.work.wait)
        if not outputs:
            return None
        return torch.cat(outputs)

    def _receive(self, stage: int, boundaries: Boundaries, part_index: int) -> tuple[Tensor, ...]:
        """Receive the inputs of a stage from the previous stage."""
        self.watchdog.note(
            f"waiting for part {part_index} of the batch on stage {stage}", is_waiting=True
        )
        source = self.ranks.peers[(stage - 1) % self.ranks.num_ranks]
        tensors = tuple(boundary.empty(self.device) for boundary in boundaries)
        for boundary, tensor in zip(boundaries, tensors, strict=True):
            message = boundary.message(tensor)
            receive = partial(dist.recv, message, src=source, group=self.groups.pipe)
            self.watchdog.wait_for(receive)
        return tensors

    def _send(self, stage: int, boundaries: Boundaries, output: Any) -> list[_Send]:
        """Start sending a stage's output to the next stage, and return the pending operations."""
        target = self.ranks.peers[(stage + 1) % self.ranks.num_ranks]
        tensors = as_arguments(output)
        sends = []
        for boundary, tensor in zip(boundaries, tensors, strict=True):
            message = boundary.message(tensor)
            work = dist.isend(message, dst=target, group=self.groups.pipe)
            sends.append(_Send(work, message))
        return sends

    def shared_output(self, output: Tensor | None, num_parts: int, boundary: Boundary) -> Tensor:
        """Broadcast the last stage's outputs to every rank of the pipeline.

        Collective: every rank of the pipeline must call it, in the same order.

        Args:
            output: The outputs on the last stage, None on other stages.
            num_parts: Number of micro-batches of the batch.
            boundary: Specification of the output of one micro-batch.
        """
        if output is None:
            rows_of_part, *features = boundary.shape
            shape = (num_parts * rows_of_part, *features)
            output = torch.empty(shape, dtype=boundary.dtype, device=self.device)
        shared = output.detach().contiguous()
        last_rank = self.ranks.peers[-1]
        self.watchdog.wait_for(
            lambda: dist.broadcast(shared, src=last_rank, group=self.groups.pipe)
        )
        return shared


def _boundaries_of(inputs: Callable[[], tuple[Tensor, ...]]) -> Boundaries:
    return tuple(boundary_of(tensor) for tensor in inputs())


def _result_or_error(find: Callable[[], Boundaries | str]) -> Boundaries | str:
    """Call `find`, and return its result, or the error message if it raises."""
    try:
        return find()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
