"""A network of which a rank holds its own stages, until it is whole again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.averaged_models import average_models
from lightning_hybrid.pipeline.options import blocks_of
from lightning_hybrid.pipeline.rank_layout import OtherStages, PipelineRanks
from lightning_hybrid.pipeline.whole_state import StateDictGuard, share_
from lightning_hybrid.placement import ignored_by_ddp


class CutModel:
    """The blocks of a module and of its averages; those of other ranks are on the meta device.

    Collective: every rank of WORLD must make it. Every rank begins with the values of rank zero, as under DDP.

    `module`: the LightningModule, whose trainer's callbacks may keep averages of it; `of`: name of its network;
    `places`: first block of each stage, and the number of blocks; `device`: where tensors are sent from.
    """

    def __init__(
        self,
        module: Any,
        of: str,
        *,
        places: Sequence[int],
        ranks: PipelineRanks,
        device: torch.device,
    ) -> None:
        self._module = module
        self._of = of
        self._device = device
        self.places = places
        self.blocks = blocks_of(module, of)
        share_(_tensors(self.blocks), owner=0, device=device)
        self._owner_of = [
            ranks.pipelines[0][stage % ranks.num_ranks]
            for stage in range(ranks.num_stages)
            for _ in range(places[stage], places[stage + 1])
        ]
        mine = ranks.pipelines[0][ranks.position]
        self._others = []
        for root, some in ((module, self.blocks), *self._averages()):
            others = [block for block, owner in self._owned(some) if owner != mine]
            own = [block for block, owner in self._owned(some) if owner == mine]
            modules = [each for block in others for each in block.modules()]
            tied = [parameter for block in own for parameter in block.parameters()]
            self._others.append(
                OtherStages(modules, needed=[*_buffers_of(root, own, others), *tied])
            )
            if root is module:
                self.guard = StateDictGuard(modules)

    def _owned(self, blocks: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, int]]:
        return zip(blocks, self._owner_of, strict=True)

    def _averages(self) -> list[tuple[nn.Module, list[nn.Module]]]:
        # Averages of the weights that callbacks keep are cut as the module is. Each with its blocks.
        models = average_models(self._module.trainer.callbacks)
        return [(model.module, blocks_of(model.module, self._of)) for model in models]

    def stage(self, number: int) -> list[nn.Module]:
        """Return the blocks of a stage."""
        return self.blocks[self.places[number] : self.places[number + 1]]

    def hidden(self) -> AbstractContextManager[None]:
        """Take the tensors of other ranks out of the module, so that it can be moved."""
        return self._others[0].hidden()

    @property
    def bytes_elsewhere(self) -> int:
        """What parameters and buffers of other stages would take here."""
        return sum(meta.numel() * meta.element_size() for meta in self._others[0].tensors)

    @contextmanager
    def whole_on_first(self, ranks: PipelineRanks, group: Any) -> Iterator[None]:
        """Let the first rank of a pipeline hold the whole network, inside. Collective: every rank of that pipeline."""
        values = dict[int, Tensor]()
        peers = ranks.pipelines[ranks.data_rank]
        for block, position in self._owned(self.blocks):
            tensors = _tensors([block])
            message = list[Any]([None])
            if 0 < position == ranks.position:
                # Of a layer that is cut over ranks the whole, which is an attribute now.
                held = {
                    id(one): vars(each).get(name, one)
                    for each in block.modules()
                    for name, one in each.named_parameters(recurse=False)
                }
                values_here = [held.get(id(one), one).detach().cpu() for one in tensors]
                dist.send_object_list([values_here], dst=peers[0], group=group)
            elif 0 < position != ranks.position == 0:
                dist.recv_object_list(message, src=peers[position], group=group)
                values |= dict(zip(map(id, tensors), message[0], strict=True))
        with self._others[0].filled(values, self._device):
            yield

    def make_whole(self, optimizers: Sequence[Optimizer]) -> None:
        """Give every rank all values, in host memory. Collective: every rank of WORLD."""
        for others in self._others:
            others.restore(
                [torch.empty_like(meta, device="cpu") for meta in others.tensors], optimizers
            )
        for blocks in (self.blocks, *(blocks for _, blocks in self._averages())):
            for block, owner in self._owned(blocks):
                share_(_tensors([block]), owner=owner, device=self._device)
        self.guard.remove()

    def ignored_by_ddp(self) -> AbstractContextManager[None]:
        """Keep Lightning from giving every rank rank zero's values: each has other blocks."""
        module = self._module
        own = set(map(id, _tensors(self.blocks)))
        names = [
            name
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            if id(tensor) in own
        ]
        return ignored_by_ddp(module, names)


_NOTES = {
    r"\bmeta\b.*(tensor|device)|(tensor|device).*\bmeta\b": (
        "This rank holds {stages} of a pipeline alone; while it runs, parameters of other stages are on the meta "
        "device. Call the network in `training_step`, validation, test or prediction, on all ranks, or after the run; "
        "whole weights are in the file that `trainer.save_checkpoint(path)` writes."
    ),
    r"not have been used in the graph|does not require grad": (
        "In a pipeline the network's input is not connected to its output in `training_step`: each stage has a graph "
        "of its own. A gradient penalty cannot be trained; take strategy='hybrid_allreduce'."
    ),
}


def add_cause(error: BaseException, *, stages: str) -> None:
    """Add to torch's errors why a tensor or a graph is not here. `stages`: of this rank, in words."""
    for pattern, note in _NOTES.items():
        if isinstance(error, RuntimeError) and re.search(
            pattern, str(error), re.IGNORECASE | re.DOTALL
        ):
            error.add_note(note.format(stages=stages))


@contextmanager
def example_hidden(module: Any) -> Iterator[None]:
    """Leave a module without its `example_input_array`.

    With one, Lightning's summary, which every Trainer has, and loggers of graphs run a forward on this rank alone.

    Raises:
        ValueError: it cannot be set.
    """
    before = module.example_input_array
    is_own = "example_input_array" in vars(module)
    if before is None:
        yield
        return
    try:
        module.example_input_array = None
    except AttributeError:
        raise ValueError(
            f"`example_input_array` (a property of {type(module).__name__}) must have a setter: a pipeline hides it "
            "during a run, as Lightning's summary would run the whole network on one rank. Assign it in `__init__`."
        ) from None
    try:
        yield
    finally:
        if is_own or "example_input_array" not in vars(module):
            module.example_input_array = before
        else:  # it hid that of the class
            del module.example_input_array


def _buffers_of(
    root: nn.Module, own: Sequence[nn.Module], others: Sequence[nn.Module]
) -> list[Tensor]:
    """Return the buffers that a rank computes with: of its own blocks, and of what is outside of all blocks."""
    seen = set(map(id, (*own, *others)))
    waiting = [root]
    modules = [module for block in own for module in block.modules()]
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        waiting.extend(module.children())
        # Parameters are in blocks: a layer that has some is part of a block under a second name.
        if not any(True for _ in module.parameters(recurse=False)):
            modules.append(module)
    return [buffer for module in modules for buffer in module.buffers(recurse=False)]


def _tensors(blocks: Sequence[nn.Module]) -> list[Tensor]:
    return [tensor for block in blocks for tensor in (*block.parameters(), *block.buffers())]
