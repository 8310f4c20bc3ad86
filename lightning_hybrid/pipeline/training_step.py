"""Training step of a pipeline, which passes micro-batches through all stages and the user's `training_step`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_hybrid.batch_rows import copy_batch
from lightning_hybrid.comm.health.tensor_hash import Fingerprint
from lightning_hybrid.module_state import put_back
from lightning_hybrid.pipeline.cut_model import CutModel
from lightning_hybrid.pipeline.local_stages import Stages
from lightning_hybrid.pipeline.loss_check import check_loss, free_bytes, in_stages, loss_of_whole
from lightning_hybrid.pipeline.microbatches import (
    Muting,
    digest_of,
    input_of_net,
    loss_in,
    microbatches,
    only_tensors,
    random_state,
)
from lightning_hybrid.pipeline.pipeline_watchdog import waits_of_schedules
from lightning_hybrid.pipeline.shapes import Boundaries
from lightning_hybrid.precision.optimizer_protocol import temporary_attributes
from lightning_hybrid.precision.plugin import MasterWeightMixin

NUM_COMPARED = 4
"""Batches of each epoch and loader whose labels are compared over a pipeline.

They are few because on CUDA each comparison waits for the batch.
"""


class _FirstLoss(NamedTuple):
    """Loss of the first micro-batch, computed both by the whole network and by the pipeline."""

    whole: float | str  # with the whole network, or a reason if unknown, valid on the first rank
    in_stages: float  # valid on the last rank


class _BufferRecord(NamedTuple):
    """State of a buffer at one time, used to find out whether user code has written to it."""

    buffer: Tensor
    num_writes: int  # torch's version counter
    # Fingerprint of the values, because the counter misses writes through `buffer.data`.
    fingerprint: Tensor | None

    def is_same_as(self, other: _BufferRecord) -> bool:
        if self.buffer is not other.buffer or self.num_writes != other.num_writes:
            return False
        if self.fingerprint is None or other.fingerprint is None:
            return True
        return torch.equal(self.fingerprint, other.fingerprint)


class TrainingStep:
    """Training step that runs all micro-batches forward and backward through the pipeline stages.

    Collective: every rank of WORLD must create it, in the same order.

    Args:
        stages: The stages of this rank.
        schedule: Name of the schedule.
        precision: Lightning's precision plugin.
        seed: Seed of all random numbers of a step, the same on every rank of a pipeline.
        cut: The network divided into stages, which computes the first loss with all stages on one rank.
    """

    def __init__(
        self, stages: Stages, *, schedule: str, precision: Any, seed: int, cut: CutModel
    ) -> None:
        self._stages = stages
        self._schedule = schedule
        self._seed = seed
        self._cut = cut
        self._precision = precision
        self._half = precision if isinstance(precision, MasterWeightMixin) else None
        dtype = torch.float32 if self._half is None else self._half.dtype
        self._eps = torch.finfo(dtype).eps
        self._schedules: dict[int, Callable[[], Tensor | None]] = {}  # by digest of shapes
        self._muting = Muting(stages.module)

        # State of the current step: micro-batches, further arguments of `training_step`, loss scale,
        # seed, rows of the batch.
        self._microbatches: Sequence[Any] = ()
        self._step_arguments: tuple[Any, ...] = ()
        self._scale: Tensor | None = None
        self._step_seed: tuple[int, ...] = ()
        self._num_rows = 0

        self._has_warned = False
        self._is_first_step = True
        self._has_compared_logs = False
        self._first_loss_in_stages = math.nan
        self._fits_on_one_rank = self._find_whether_network_fits()

    def _find_whether_network_fits(self) -> bool:
        """Return whether every rank has enough memory for the whole network.

        Collective: every rank must call it, in the same order.
        """
        stages = self._stages
        fits = free_bytes(stages.device) > 2 * self._cut.bytes_elsewhere
        fits_everywhere = torch.tensor(float(fits), device=stages.device)
        stages.watchdog.wait_for(lambda: dist.all_reduce(fits_everywhere, dist.ReduceOp.MIN))
        return bool(fits_everywhere)

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters of this rank's stages."""
        parameters: list[Tensor] = []
        for body in self._stages.bodies.values():
            parameters += body.parameters()
        return parameters

    # ---- the step ------------------------------------------------------------------------------

    def run(
        self, batch: Any, step_arguments: tuple[Any, ...], *, epoch: int, batch_index: int
    ) -> Tensor:
        """Run the forward and backward passes of all micro-batches, and return the outputs of the whole batch.

        Afterwards `p.grad` holds the gradients of the mean over micro-batches, averaged over data
        ranks. With half precision they are fp32 and unscaled.

        Collective: every rank of WORLD must call it, in the same order.

        Args:
            batch: The batch of this data-parallel rank.
            step_arguments: Further arguments of `training_step`.
            epoch: Index of the epoch.
            batch_index: Index of the batch in its epoch.
        """
        stages = self._stages
        self._microbatches = microbatches(batch, stages.num_microbatches)
        self._step_arguments = step_arguments
        # Random numbers depend only on the position in the run, so a resumed run draws the same numbers.
        self._step_seed = (self._seed, stages.ranks.data_rank, epoch, batch_index)
        shapes_digest = digest_of(batch, with_values=False)
        stages.agree_on_batch(batch, with_values=batch_index < NUM_COMPARED)

        with self._schedule_context() as self._scale:
            whole_loss = None
            if self._is_first_step:
                whole_loss = self._loss_in_one_piece()
            boundaries = stages.boundaries((shapes_digest, "training"), self._first_input)
            self._num_rows = stages.num_microbatches * boundaries[0][0].shape[0]
            if shapes_digest not in self._schedules:
                self._check_outputs(shapes_digest, boundaries)
                # Keep only the schedule of the latest shapes, because each one holds memory for the
                # messages of all micro-batches.
                self._schedules = {shapes_digest: self._new_schedule(boundaries)}
            with stages.watchdog.in_schedule(), waits_of_schedules(stages.watchdog):
                output = self._schedules[shapes_digest]()

        with stages.watchdog.in_schedule():
            # With half precision each rank's sum over micro-batches is fp32 by now.
            stages.watchdog.note("waiting for the gradients of tied weights", is_waiting=True)
            stages.watchdog.wait_for(stages.tied.sum_gradients_)
            stages.watchdog.note("waiting for the outputs of the last stage", is_waiting=True)
            output = stages.shared_output(output, stages.num_microbatches, boundaries[-1][0])

        self._microbatches = ()
        if whole_loss is not None:
            self._compare_first_loss(whole_loss)
        return output

    def _check_outputs(self, shapes_digest: int, boundaries: Sequence[Boundaries]) -> None:
        num_parts = self._stages.num_microbatches
        if not self._stages.are_outputs_joined((shapes_digest, "training"), boundaries, num_parts):
            raise ValueError(
                f"The network's output (of shape {boundaries[-1][0].shape} for a micro-batch) must have one row per "
                "sample in its first dimension, because the outputs of all micro-batches are concatenated along it "
                "before values are logged. Transpose the output in the last block."
            )

    def _schedule_context(self) -> AbstractContextManager[Tensor | None]:
        """Return the precision context for the forward and backward passes of a schedule.

        The context yields the loss scale, or None.
        """
        if self._half is not None:
            return self._half.schedule_context()
        context: AbstractContextManager[None] = self._precision.train_step_context()
        return context

    def _new_schedule(self, boundaries: Sequence[Boundaries]) -> Callable[[], Tensor | None]:
        # Imported here, as it takes a second.
        from lightning_hybrid.pipeline.checked_stage import (
            CheckedStage,
            StageSetting,
            plain_backward,
        )
        from lightning_hybrid.pipeline.schedules import schedule_of

        around_backward: Callable[..., AbstractContextManager[None]] = plain_backward
        if self._half is not None:
            around_backward = self._half.backward_of_microbatch

        stages = self._stages
        checked_stages = []
        for index in stages.ranks.stages:
            setting = StageSetting(
                index=index,
                num_stages=stages.ranks.num_stages,
                device=stages.device,
                group=stages.groups.pipe,
                around_backward=around_backward,
                note=stages.watchdog.note,
                set_last_backward=stages.set_last_backward,
            )
            checked_stage = CheckedStage(
                stages.wrapped[index],
                setting,
                inputs=boundaries[index],
                outputs=boundaries[index + 1],
                input_of=self._input_of,
                random_state_of=partial(self._random_state, stage=index),
            )
            checked_stages.append(checked_stage)
        return schedule_of(
            self._schedule,
            checked_stages,
            num_microbatches=stages.num_microbatches,
            loss_of=self._loss_of,
        )

    # ---- calls of the user's `training_step` ---------------------------------------------------

    def _random_state(
        self, microbatch: int | None, *, stage: int | None = None
    ) -> AbstractContextManager[Callable[[], bool]]:
        """Return a context that seeds the random number generators for a micro-batch.

        Args:
            microbatch: Index of the micro-batch. None: the whole batch.
            stage: Stage that draws the numbers. None: code outside of the network.
        """
        microbatch_seed = -1 if microbatch is None else microbatch
        stage_seed = -1 if stage is None else stage
        return random_state((*self._step_seed, microbatch_seed, stage_seed), self._stages.device)

    def _first_input(self) -> tuple[Tensor, ...]:
        with put_back(self._stages.module):
            return self._input_of(0)

    def _input_of(self, index: int) -> tuple[Tensor, ...]:
        """Return the network's input for one micro-batch."""
        module = self._stages.module
        microbatch = copy_batch(self._microbatches[index])

        def run() -> Any:
            return module.training_step(microbatch, *self._step_arguments)

        with torch.no_grad(), self._random_state(index), self._muting.muted():
            return input_of_net(self._stages.net, run)

    def _loss_of(self, output: Tensor, index: int) -> Tensor:
        """Return a micro-batch's loss, divided by the number of micro-batches.

        With half precision, the loss is also multiplied by the loss scale.
        """
        self._stages.watchdog.note(f"in the loss of micro-batch {index}")
        loss = self._user_loss(copy_batch(self._microbatches[index]), output, index)
        if self._is_first_step and index == 0:
            self._first_loss_in_stages = float(loss.detach())
        # The order of gradient accumulation: Lightning divides the loss, then the loss is scaled.
        loss = loss / self._stages.num_microbatches
        if self._scale is None:
            return loss
        return loss.float() * self._scale

    def _user_loss(self, microbatch: Any, output: Tensor, index: int) -> Tensor:
        """Run the user's `training_step` with `output` as the network's output, and return its loss."""
        module = self._stages.module
        num_calls = 0

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 1:
                raise ValueError(
                    "`training_step` must call the network that `of` names exactly once, because each micro-batch "
                    "passes through the stages once. Concatenate the inputs of all calls into one."
                )
            return output

        with (
            self._random_state(index),
            self._muting.muted(),
            temporary_attributes(self._stages.net, forward=forward),
        ):
            return loss_in(module.training_step(microbatch, *self._step_arguments))

    # ---- comparison of the first loss ----------------------------------------------------------

    def _loss_in_one_piece(self) -> float | str:
        """Return the first micro-batch's loss, computed with the whole network, or the reason why it is unknown.

        Only the first rank's value is meaningful. Collective: every rank of the pipeline must call
        it.
        """
        if not self._fits_on_one_rank:
            return "one rank does not have enough memory for the whole network"

        stages = self._stages
        with stages.whole_layers():
            whole_network = self._cut.whole_on_first(
                stages.ranks, stages.groups.agree, stages.watchdog.wait_for
            )
            if stages.ranks.is_first:
                return loss_of_whole(
                    stages.module,
                    stages.net,
                    whole_network,
                    self._first_loss_of_whole,
                    eps=self._eps,
                )
            with whole_network:
                return ""

    def _first_loss_of_whole(self) -> Tensor:
        stages = self._stages
        stage_states = in_stages(
            stages.net,
            self._cut.blocks,
            self._cut.places,
            lambda stage: self._random_state(0, stage=stage),
        )
        with self._random_state(0), self._muting.muted(), stage_states:
            microbatch = copy_batch(self._microbatches[0])
            return loss_in(stages.module.training_step(microbatch, *self._step_arguments)).detach()

    def _compare_first_loss(self, whole_loss: float | str) -> None:
        """Compare the losses of the pipeline and of the whole network for the first micro-batch.

        Collective: every rank must call it, in the same order.
        """
        self._is_first_step = False
        losses = self._stages.gather(_FirstLoss(whole_loss, self._first_loss_in_stages))
        whole_loss = losses[0].whole
        if isinstance(whole_loss, str):
            rank_zero_info(
                f"pipeline: the loss in stages was not compared with the loss of the whole network ({whole_loss})"
            )
        else:
            check_loss(whole_loss, losses[-1].in_stages, net=self._stages.net, eps=self._eps)

    # ---- logging -------------------------------------------------------------------------------

    def compare_logged(self, results: Mapping[str, Any]) -> None:
        """Warn if logged values differ between the stages of a pipeline after the first step.

        Collective: every rank of the pipeline must call it. Later calls do nothing.
        """
        if self._has_compared_logs:
            return
        self._has_compared_logs = True
        logged = {}
        for result in results.values():
            if result.is_tensor:
                logged[result.meta.name] = f"{result.value:.4g}"
        logged_by_rank = self._stages.gather(logged)

        differing = []
        for name in logged_by_rank[0]:
            values = [rank_values[name] for rank_values in logged_by_rank if name in rank_values]
            if len(set(values)) > 1:
                differing.append(f"{name} (= {', '.join(values)})")
        if differing:
            rank_zero_warn(
                f"Logged values differ between the stages of a pipeline: {'; '.join(differing)}. Outside of "
                "`training_step`, a hook sees only the gradients and weights of its rank's stages, but loggers "
                "write only the values of rank zero. A norm that is computed in a hook is therefore not the norm of "
                "the whole network."
            )

    @contextmanager
    def on_whole_batch(self, output: Tensor) -> Iterator[None]:
        """Temporarily make the network return `output`, so that `training_step` can log values.

        `training_step` then runs on the whole batch.

        Raises:
            ValueError: The network's input has another number of rows than the micro-batches have
                together, or a buffer outside of the network changes.
        """

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            self._check_rows(only_tensors(args, kwargs)[0])
            return output

        # These random numbers depend on the position in the run too. Otherwise ranks would log
        # different values, and a schedule that reads them would make the ranks diverge.
        buffers_before = self._buffers_outside()
        with (
            self._random_state(None) as has_drawn,
            temporary_attributes(self._stages.net, forward=forward),
        ):
            yield
            self._check_buffers(buffers_before)
            is_compared = self._step_seed[-1] < NUM_COMPARED
            if not self._has_warned and is_compared and has_drawn():
                self._has_warned = True
                rank_zero_warn(
                    "`training_step` draws random numbers. In a pipeline, logged values use other random numbers "
                    "than training, but the gradients are correct. Draw random numbers in the loader, or log in "
                    "validation."
                )

    def _check_rows(self, net_input: Tensor) -> None:
        if net_input.dim() == 0 or net_input.shape[0] != self._num_rows:
            raise ValueError(
                f"The network's input for a whole batch (of shape {tuple(net_input.shape)}) must have as many rows as "
                f"all of its micro-batches together (= {self._num_rows}), because values would otherwise be logged "
                "for other rows than those used in training. Compute the rows that `training_step` passes to the "
                "network from the rows of the batch."
            )

    def _buffers_outside(self) -> dict[str, _BufferRecord]:
        """Return records of the buffers outside of the network. Values are read only in the first batches."""
        reads_values = self._step_seed[-1] < NUM_COMPARED
        fingerprint_of = Fingerprint(self._stages.device).of
        net_buffer_ids = {id(buffer) for buffer in self._stages.net.buffers()}
        buffers = {}
        for name, buffer in self._stages.module.named_buffers():
            if id(buffer) not in net_buffer_ids:
                fingerprint = None
                if reads_values:
                    fingerprint = fingerprint_of(buffer)
                buffers[name] = _BufferRecord(buffer, buffer._version, fingerprint)
        return buffers

    def _check_buffers(self, buffers_before: Mapping[str, _BufferRecord]) -> None:
        changed = []
        for name, record in self._buffers_outside().items():
            if name not in buffers_before or not record.is_same_as(buffers_before[name]):
                changed.append(name)
        if changed:
            raise ValueError(
                f"`training_step` has changed buffers outside of the network (`{'`, `'.join(changed[:3])}`). The "
                "ranks of a pipeline call `training_step` a different number of times, so the buffers would diverge. "
                "Change them in `on_train_batch_end`, where the output of `training_step` is the same on all ranks."
            )
