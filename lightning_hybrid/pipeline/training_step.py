"""One step of training: the user's `training_step` on every micro-batch, carried out by a schedule over the stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_hybrid.batch_rows import copy_batch
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
from lightning_hybrid.pipeline.shapes import Boundary
from lightning_hybrid.precision.optimizer_protocol import temporary_attributes
from lightning_hybrid.precision.plugin import MasterWeightMixin

# Batches of each epoch and loader whose labels are compared over a pipeline. Few: on CUDA each waits for the batch.
NUM_COMPARED = 4


class TrainingStep:
    """The micro-batches of a step, through all stages. Collective: every rank of WORLD must make it.

    `precision` is Lightning's plugin; `seed` is of random numbers outside the network, the same on every rank of a
    pipeline; `cut` has the network, for its loss in one piece.
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
        self._schedules: dict[int, Callable[[], Tensor | None]] = {}
        self._muting = Muting(stages.module)
        self._parts: Sequence[Any] = ()
        self._rest: tuple[Any, ...] = ()
        self._scale: Tensor | None = None
        self._place: tuple[int, ...] = ()
        self._num_rows = 0
        self._has_warned = False
        self._eps = torch.finfo(torch.float32 if self._half is None else self._half.dtype).eps
        # Until the first step: the loss in one piece on the first rank, and in stages on the last.
        self._is_first_step = True
        self._has_compared_logs = False
        self._loss_in_stages = math.nan
        fits = torch.tensor(
            float(free_bytes(stages.device) > 2 * cut.bytes_elsewhere), device=stages.device
        )
        stages.watchdog.wait_for(lambda: dist.all_reduce(fits, dist.ReduceOp.MIN))
        self._fits = bool(fits)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of this rank's stages."""
        return [
            parameter for body in self._stages.bodies.values() for parameter in body.parameters()
        ]

    def run(self, batch: Any, rest: tuple[Any, ...], *, place: tuple[int, int]) -> Tensor:
        """Run forward and backward of all micro-batches; return the outputs of the whole batch. Collective.

        `rest`: further arguments of `training_step`. `place`: epoch and batch. Gradients are those of the mean over
        micro-batches, averaged over data ranks, in `p.grad`; with half precision fp32 and unscaled.
        """
        stages = self._stages
        self._parts = microbatches(batch, stages.num_microbatches)
        self._rest = rest
        # A function of the place in the run: one that is resumed draws the same.
        self._place = (self._seed, stages.ranks.data_rank, *place)
        shapes = digest_of(batch, with_values=False)
        stages.agree_on_batch(batch, with_values=place[1] < NUM_COMPARED)
        with self._schedule_context() as self._scale:
            whole = self._loss_in_one_piece() if self._is_first_step else None
            boundaries = stages.boundaries((shapes, "training"), self._first_input)
            self._num_rows = stages.num_microbatches * boundaries[0][0].shape[0]
            if shapes not in self._schedules:
                # That of the last shapes alone: each holds memory for the messages of all micro-batches.
                self._schedules = {shapes: self._new_schedule(boundaries)}
            with stages.watchdog.in_schedule(), waits_of_schedules(stages.watchdog):
                output = self._schedules[shapes]()
        with stages.watchdog.in_schedule():
            # With half precision each rank's sum over micro-batches is fp32 by now.
            stages.watchdog.note("waiting for the gradients of tied weights", is_waiting=True)
            stages.watchdog.wait_for(stages.tied.sum_gradients_)
            stages.watchdog.note("waiting for the outputs of the last stage", is_waiting=True)
            output = stages.shared_output(output, stages.num_microbatches, boundaries[-1][0])
        self._parts = ()
        if whole is not None:
            self._compare(whole)
        return output

    def _schedule_context(self) -> AbstractContextManager[Tensor | None]:
        """Return the context of a schedule's forwards and backwards, which yields the loss scale or None."""
        if self._half is not None:
            return self._half.schedule_context()
        context: AbstractContextManager[None] = self._precision.train_step_context()
        return context

    def _loss_in_one_piece(self) -> float | str:
        stages = self._stages
        cut = self._cut
        if not self._fits:
            return "there is no memory for the whole network on one rank"

        def run() -> Tensor:
            apart = in_stages(
                stages.net, cut.blocks, cut.places, lambda stage: self.draws(0, stage=stage)
            )
            with self.draws(0), self._muting.muted(), apart:
                return loss_in(
                    stages.module.training_step(copy_batch(self._parts[0]), *self._rest)
                ).detach()

        with stages.whole():
            whole = cut.whole_on_first(stages.ranks, stages.groups.agree)
            if stages.ranks.is_first:
                return loss_of_whole(stages.module, stages.net, whole, run, eps=self._eps)
            with whole:
                return ""  # the first rank's counts

    def _compare(self, whole: float | str) -> None:
        self._is_first_step = False
        (whole, _), *_, (_, in_stages) = self._stages.told((whole, self._loss_in_stages))
        if isinstance(whole, str):
            rank_zero_info(
                f"pipeline: the loss in stages was not compared with that of the whole network: {whole}"
            )
        else:
            check_loss(whole, in_stages, net=self._stages.net, eps=self._eps)

    def compare_logged(self, results: Mapping[str, Any]) -> None:
        """Warn of values that hooks have logged until the first step, if stages' differ. Collective, once."""
        if self._has_compared_logs:
            return
        self._has_compared_logs = True
        found = self._stages.told(
            {each.meta.name: f"{each.value:.4g}" for each in results.values() if each.is_tensor}
        )
        values = {name: [each[name] for each in found if name in each] for name in found[0]}
        if apart := [
            f"{name} (= {', '.join(each)})" for name, each in values.items() if len(set(each)) > 1
        ]:
            rank_zero_warn(
                f"Logged values differ among the stages of a pipeline: {'; '.join(apart)}. Outside of `training_step` "
                "a hook sees gradients and weights of its own stages alone, and loggers write those of rank zero: a "
                "norm is not the network's."
            )

    @contextmanager
    def on_whole_batch(self, output: Tensor) -> Iterator[None]:
        """Let `training_step` on the whole batch get `output` from the network, for what it logs.

        Raises:
            ValueError: its micro-batches gave the network other rows.
        """

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            given = only_tensors(args, kwargs)[0]
            if given.dim() == 0 or given.shape[0] != self._num_rows:
                raise ValueError(
                    f"The network's input for a whole batch (of shape {tuple(given.shape)}) must have the rows of its "
                    f"micro-batches (= {self._num_rows}): what is logged would be of other rows than what was trained. "
                    "Let the rows that `training_step` gives to the network follow from those of the batch."
                )
            return output

        # Of the place in the run as well: ranks that drew otherwise would log otherwise, and part at a schedule.
        before = self._buffers_outside()
        with self.draws(None) as has_drawn, temporary_attributes(self._stages.net, forward=forward):
            yield
            after = self._buffers_outside()
            none = (None, 0)
            if names := [
                name
                for name, (buffer, num) in after.items()
                if before.get(name, none)[0] is not buffer or before[name][1] != num
            ]:
                raise ValueError(
                    f"Buffers outside of the network (`{'`, `'.join(names[:3])}`) must not be moved in `training_step` "
                    "in a pipeline: the first and the last stage run it for each micro-batch, and every rank for the "
                    "whole batch, so ranks would part. Move them in `on_train_batch_end`, from what `training_step` "
                    "returns: it is the same on all ranks there."
                )
            if not self._has_warned and self._place[-1] < NUM_COMPARED and has_drawn():
                self._has_warned = True
                rank_zero_warn(
                    "`training_step` draws random numbers: in a pipeline the values that it logs are of the outputs "
                    "that were trained and of another draw, made for the whole batch. Gradients are right. Draw in "
                    "the loader, or log in validation."
                )

    def _buffers_outside(self) -> dict[str, tuple[Tensor, int]]:
        # With their counts of writes: no memory is read.
        inside = set(map(id, self._stages.net.buffers()))
        named = self._stages.module.named_buffers()
        return {name: (each, each._version) for name, each in named if id(each) not in inside}

    def _new_schedule(
        self, boundaries: Sequence[tuple[Boundary, ...]]
    ) -> Callable[[], Tensor | None]:
        # Here: it takes a second.
        from lightning_hybrid.pipeline.checked_stage import (
            CheckedStage,
            StageSetting,
            plain_backward,
            schedule_of,
        )

        around_backward = (
            plain_backward if self._half is None else self._half.backward_of_microbatch
        )
        mine = self._stages
        made = []
        for index in mine.ranks.stages:
            setting = StageSetting(
                index=index,
                num_stages=mine.ranks.num_stages,
                device=mine.device,
                group=mine.groups.pipe,
                around_backward=around_backward,
                note=mine.watchdog.note,
                note_last=partial(setattr, mine, "require_backward_grad_sync"),
            )
            ends = {"given": boundaries[index], "returned": boundaries[index + 1]}
            draws = partial(self.draws, stage=index)
            made.append(
                CheckedStage(
                    mine.wrapped[index], setting, input_of=self._input_of, draws=draws, **ends
                )
            )
        return schedule_of(
            self._schedule, made, num_microbatches=mine.num_microbatches, loss_of=self._loss_of
        )

    def draws(
        self, number: int | None, *, stage: int | None = None
    ) -> AbstractContextManager[Callable[[], bool]]:
        """Draw a micro-batch's random numbers inside: those of a stage, which are its own, or those outside of all.

        Of the whole batch where `number` is None.
        """
        own = (-1 if number is None else number, -1 if stage is None else stage)
        return random_state((*self._place, *own), self._stages.device)

    def _first_input(self) -> tuple[Tensor, ...]:
        with put_back(self._stages.module):
            return self._input_of(0)

    def _input_of(self, number: int) -> tuple[Tensor, ...]:
        module = self._stages.module
        part = copy_batch(self._parts[number])
        with torch.no_grad(), self.draws(number), self._muting.muted():
            return input_of_net(self._stages.net, lambda: module.training_step(part, *self._rest))

    def _loss_of(self, output: Tensor, number: int) -> Tensor:
        self._stages.watchdog.note(f"in the loss of micro-batch {number}")
        loss = self._user_loss(copy_batch(self._parts[number]), output, number)
        if self._is_first_step and number == 0:
            self._loss_in_stages = float(loss.detach())
        # In the order of accumulation: Lightning divides, then the loss is scaled.
        loss = loss / self._stages.num_microbatches
        return loss if self._scale is None else loss.float() * self._scale

    def _user_loss(self, part: Any, output: Tensor, number: int) -> Tensor:
        module = self._stages.module
        calls = list[int]()

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            calls.append(number)
            if len(calls) > 1:
                raise ValueError(
                    "`training_step` must call the network that `of` names once: its stages compute each micro-batch "
                    "once. Join the inputs of both calls into one."
                )
            return output

        with (
            self.draws(number),
            self._muting.muted(),
            temporary_attributes(self._stages.net, forward=forward),
        ):
            return loss_in(module.training_step(part, *self._rest))
