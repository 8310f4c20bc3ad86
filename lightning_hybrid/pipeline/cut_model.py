"""Distribution of the user's network across pipeline ranks, and restoration of the network after the run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hybrid.averaged_models import averaged_models_of
from lightning_hybrid.pipeline.options import blocks_of
from lightning_hybrid.pipeline.rank_layout import OtherStages, PipelineRanks
from lightning_hybrid.pipeline.whole_state import StateDictGuard, share_
from lightning_hybrid.placement import ignored_by_ddp


class CutModel:
    """Network divided into pipeline stages, with the blocks of other ranks on the meta device.

    Weight averages of the module that callbacks hold are divided in the same way.

    Every rank begins with the values of rank zero, as under DDP.

    Collective: every rank of WORLD must create it, in the same order.

    Args:
        module: The LightningModule. Callbacks of its trainer may hold weight averages of it.
        of: Name of the network in the module.
        places: Index of each stage's first block, followed by the number of blocks.
        ranks: Position of this rank.
        device: Device from which tensors are sent.
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
        share_(_tensors_of(self.blocks), owner=0, device=device)

        first_pipeline = ranks.pipelines[0]
        self._owners: list[int] = []  # the rank of the first pipeline that holds each block
        for stage in range(ranks.num_stages):
            num_blocks = places[stage + 1] - places[stage]
            self._owners += [first_pipeline[stage % ranks.num_ranks]] * num_blocks

        # One entry for the module, then one for each average.
        self._other_stages: list[OtherStages] = []
        rank = first_pipeline[ranks.position]
        for root, blocks in ((module, self.blocks), *self._averages()):
            local_blocks = [block for block, owner in self._with_owners(blocks) if owner == rank]
            other_blocks = [block for block, owner in self._with_owners(blocks) if owner != rank]
            needed = _local_buffers(root, local_blocks, other_blocks)
            for block in local_blocks:  # parameters may be tied to other stages
                needed += block.parameters()
            other_modules = _modules_of(other_blocks)
            self._other_stages.append(OtherStages(other_modules, needed=needed))
            if root is module:
                self.guard = StateDictGuard(other_modules)

    def _with_owners(self, blocks: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, int]]:
        return zip(blocks, self._owners, strict=True)

    def _averages(self) -> list[tuple[nn.Module, list[nn.Module]]]:
        """Return the averaged models of callbacks, each with a list of its blocks."""
        averages = []
        for model in averaged_models_of(self._module.trainer.callbacks):
            averages.append((model.module, blocks_of(model.module, self._of)))
        return averages

    def stage(self, index: int) -> list[nn.Module]:
        """Return the blocks of one pipeline stage."""
        return self.blocks[self.places[index] : self.places[index + 1]]

    def hidden(self) -> AbstractContextManager[None]:
        """Temporarily remove the meta tensors, so that the module can be moved to a device."""
        return self._other_stages[0].hidden()

    @property
    def bytes_elsewhere(self) -> int:
        """Size in bytes of the parameters and buffers of other stages, which this rank does not hold."""
        return sum(meta.numel() * meta.element_size() for meta in self._other_stages[0].tensors)

    @contextmanager
    def whole_on_first(
        self, ranks: PipelineRanks, group: Any, wait_for: Callable[[Callable[[], Any]], Any]
    ) -> Iterator[None]:
        """Temporarily load the whole network on the first rank of a pipeline.

        Collective: every rank of the pipeline must call it, in the same order.

        Args:
            ranks: Position of this rank in its pipeline.
            group: Process group of the pipeline.
            wait_for: Function that takes and calls a function, which blocks until other ranks respond.
        """
        values: dict[int, Tensor] = {}
        peers = ranks.peers
        for block, position in self._with_owners(self.blocks):
            if position == 0:
                continue
            tensors = _tensors_of([block])
            if ranks.position == position:
                block_values = _whole_values(block, tensors)
                wait_for(partial(dist.send_object_list, [block_values], dst=peers[0], group=group))
            elif ranks.position == 0:
                message: list[Any] = [None]
                wait_for(partial(dist.recv_object_list, message, src=peers[position], group=group))
                for tensor, value in zip(tensors, message[0], strict=True):
                    values[id(tensor)] = value
        with self._other_stages[0].filled(values, self._device):
            yield

    def make_whole(self, optimizers: Sequence[Optimizer]) -> None:
        """Restore the whole network and its averages on every rank, in host memory.

        Collective: every rank of WORLD must call it, in the same order.
        """
        for other_stages in self._other_stages:
            values = [torch.empty_like(meta, device="cpu") for meta in other_stages.tensors]
            other_stages.restore(values, optimizers)

        networks = [self.blocks]
        for _, blocks in self._averages():
            networks.append(blocks)
        for blocks in networks:
            for block, owner in self._with_owners(blocks):
                share_(_tensors_of([block]), owner=owner, device=self._device)
        self.guard.remove()

    def ignored_by_ddp(self) -> AbstractContextManager[None]:
        """Return a context in which Lightning broadcasts only weights outside of the blocks from rank zero.

        Each rank holds different blocks.
        """
        module = self._module
        block_tensor_ids = {id(tensor) for tensor in _tensors_of(self.blocks)}
        names = []
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if id(tensor) in block_tensor_ids:
                names.append(name)
        return ignored_by_ddp(module, names)


_NOTES = {
    r"\bmeta\b.*(tensor|device)|(tensor|device).*\bmeta\b": (
        "This rank has only {stages} of the pipeline, and parameters of other stages are on the meta device during a "
        "run. Call the network on all ranks in `training_step`, validation, test or prediction, or call it after the "
        "run. To get the full weights, call `trainer.save_checkpoint(path)`."
    ),
    r"not have been used in the graph|does not require grad": (
        "In a pipeline, the network's input is not connected to its output in `training_step`, because each stage has "
        "its own autograd graph. To train with a gradient penalty, use strategy='hybrid_allreduce'."
    ),
}


def add_cause(error: BaseException, *, stages: str) -> None:
    """Add a note to torch's errors that explains why a tensor or a graph is missing on this rank.

    Args:
        error: The error.
        stages: Text that names the stages of this rank.
    """
    if not isinstance(error, RuntimeError):
        return
    for pattern, note in _NOTES.items():
        if re.search(pattern, str(error), re.IGNORECASE | re.DOTALL):
            error.add_note(note.format(stages=stages))


@contextmanager
def example_hidden(module: Any) -> Iterator[None]:
    """Temporarily set a module's `example_input_array` to None.

    If the module had an example input, Lightning's model summary and loggers of graphs would run a
    forward pass on this rank only.

    Raises:
        ValueError: The attribute cannot be set.
    """
    example = module.example_input_array
    is_instance_attribute = "example_input_array" in vars(module)
    if example is None:
        yield
        return

    try:
        module.example_input_array = None
    except AttributeError:
        raise ValueError(
            f"`example_input_array` is a property of {type(module).__name__} without a setter, but a pipeline must "
            "set it to None during a run, so that Lightning's model summary does not run the whole network on one "
            "rank. Assign `example_input_array` in `__init__` instead."
        ) from None
    try:
        yield
    finally:
        if is_instance_attribute or "example_input_array" not in vars(module):
            module.example_input_array = example
        else:  # None has hidden the attribute of the class
            del module.example_input_array


def _local_buffers(
    root: nn.Module, local_blocks: Sequence[nn.Module], other_blocks: Sequence[nn.Module]
) -> list[Tensor]:
    """Return the buffers of this rank's blocks and of modules outside of all blocks."""
    seen = {id(block) for block in (*local_blocks, *other_blocks)}
    waiting = [root]
    modules = _modules_of(local_blocks)
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        waiting.extend(module.children())
        # All parameters are in blocks, so a layer with parameters belongs to a block under a second
        # name.
        if not list(module.parameters(recurse=False)):
            modules.append(module)

    buffers: list[Tensor] = []
    for module in modules:
        buffers += module.buffers(recurse=False)
    return buffers


def _modules_of(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for block in blocks:
        modules += block.modules()
    return modules


def _tensors_of(blocks: Sequence[nn.Module]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for block in blocks:
        tensors += block.parameters()
        tensors += block.buffers()
    return tensors


def _whole_values(block: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy a block's tensors to host memory, using the full tensors of tensor-parallel layers."""
    # While a tensor-parallel layer is whole, an attribute of its module hides the parameter of the
    # same name.
    whole_tensors: dict[int, Tensor] = {}
    for module in block.modules():
        for name, parameter in module.named_parameters(recurse=False):
            whole_tensors[id(parameter)] = vars(module).get(name, parameter)

    values = []
    for tensor in tensors:
        values.append(whole_tensors.get(id(tensor), tensor).detach().cpu())
    return values
