"""Network blocks from which pipeline stages are built, with their compute, memory and message sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from lightning_hybrid.pipeline.shapes import as_arguments
from lightning_hybrid.planning.estimates.activations import LiveBytes, example_of, meta_step

# Number of images on the meta device. Bytes that do not depend on the batch are then a small part of the total.
BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive modules of a network that always belong to the same pipeline stage.

    Args:
        name: Name of the first module.
        numels: Number of elements of each parameter.
        forward_flops: FLOPs of a forward pass of one image.
        input_bytes: Bytes of one image at the input, which a pipeline sends to a stage that begins here.
        kept_bytes: Bytes that the forward pass of one image keeps for the backward pass.
        num_tied: Number of elements that belong to an earlier block too. Another stage holds them once more.
    """

    name: str
    numels: tuple[int, ...]
    forward_flops: int
    input_bytes: float
    kept_bytes: float
    num_tied: int = 0


@dataclass(kw_only=True)
class _Mark:
    # The call of a module in forward. A pipeline may be cut before it if `is_cut` is still true after forward.
    name: str
    module: nn.Module
    address: int
    input_bytes: int
    flops: int
    live: int
    is_cut: bool = True


class _Uses(LiveBytes):
    """Tracker of the tensors that are used both before and after a possible pipeline cut.

    A cut is possible only if the input of the module after the cut is the only such tensor.
    """

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__(known)
        self.marks: list[_Mark] = []
        # The number of marks when the memory of a tensor was first seen.
        self._first_seen_at: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for value in tree_iter((args, kwargs)):
            if isinstance(value, Tensor):
                self.use(value)
        results = super().__torch_dispatch__(func, types, args, kwargs)
        for result in tree_iter(results):
            if isinstance(result, Tensor):
                self._first_seen_at.setdefault(result.untyped_storage()._cdata, len(self.marks))
        return results

    def use(self, tensor: Tensor) -> None:
        """Record a use of a tensor, and rule out all pipeline cuts between its first use and this one."""
        address = tensor.untyped_storage()._cdata
        # A parameter counts from its first use, so that no parameter is used on both sides of a cut.
        first_seen_at = self._first_seen_at.setdefault(address, len(self.marks))
        for mark in self.marks[first_seen_at:]:
            if mark.address != address:
                mark.is_cut = False

    def _free(self, address: int) -> None:
        super()._free(address)
        self._first_seen_at.pop(address, None)


def traced_blocks(
    model: nn.Module, image_shape: Sequence[int], *, precision: str = "16-true"
) -> list[Block]:
    """Return the blocks of a network in the order in which forward runs them.

    A network with `pipeline_blocks()` is divided as in a run. Any other network may be cut before each child, where an
    `nn.Sequential` is replaced by its children, if exactly one tensor crosses the cut. There is no cut inside a
    residual block, inside a shortcut of the network, or between two uses of one parameter.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Sequential(nn.Flatten(), nn.Linear(128, 2)))
    >>> [(block.name, sum(block.numels), block.forward_flops) for block in traced_blocks(net, (3, 4, 4))]
    [('0', 224, 6912), ('1', 0, 0), ('2.0', 0, 0), ('2.1', 258, 512)]
    """
    with meta_step(model, precision) as (shadow, dtype):
        images = example_of(shadow, BATCH, image_shape, dtype=dtype)
        pipeline_blocks: list[nn.Module] = getattr(shadow, "pipeline_blocks", list)()
        marks, end = _traced_marks(shadow, pipeline_blocks, images)

    modules = [mark.module for mark in marks]
    owned = _owned_numels(shadow, modules)
    num_tied = [0] * len(marks)
    if pipeline_blocks:
        num_tied = _num_tied(modules, owned)
    # Parameters that belong to none of the modules are counted in the first block.
    owned[0] += _numels_outside(shadow, modules)

    cuts = []
    for index, mark in enumerate(marks):
        if index == 0 or pipeline_blocks or mark.is_cut:
            cuts.append(index)
    boundaries = [*marks, end]
    blocks: list[Block] = []
    for first, after in itertools.pairwise([*cuts, len(marks)]):
        begin = boundaries[first]
        following = boundaries[after]
        numels = itertools.chain.from_iterable(owned[first:after])
        kept_bytes = (following.live - begin.live) / BATCH
        block = Block(
            name=begin.name,
            numels=tuple(numels),
            forward_flops=(following.flops - begin.flops) // BATCH,
            input_bytes=begin.input_bytes / BATCH,
            kept_bytes=max(0.0, kept_bytes),
            num_tied=sum(num_tied[first:after]),
        )
        blocks.append(block)
    return blocks


def _traced_marks(
    network: nn.Module, pipeline_blocks: Sequence[nn.Module], images: Any
) -> tuple[list[_Mark], _Mark]:
    # Run forward on the meta device. Return a mark for each module, and one for the end of forward.
    uses = _Uses([*network.parameters(), *network.buffers()])

    def begin(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        tensors = [value for value in tree_iter(args) if isinstance(value, Tensor)]
        storage = tensors[0].untyped_storage()
        mark = _Mark(
            name=name,
            module=module,
            address=storage._cdata,
            input_bytes=sum(tensor.nbytes for tensor in tensors),
            flops=uses.flops,
            live=uses.now,
            is_cut=len(tensors) == 1,
        )
        uses.marks.append(mark)
        for tensor in tensors[1:]:
            uses.use(tensor)

    if pipeline_blocks:
        named_modules = list(_named(pipeline_blocks, network))
    else:
        named_modules = list(units(network)) or [("", network)]
    handles = []
    for name, module in named_modules:

        def hook(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            begin(name, module, args)

        handles.append(module.register_forward_pre_hook(hook))

    with uses:
        first_image_tensor = next(iter(tree_iter(images)))
        uses.use(first_image_tensor)
        # The result stays alive until the end is marked, because the loss needs it.
        if pipeline_blocks:
            result = images
            for block in pipeline_blocks:
                result = block(*as_arguments(result))
        else:
            result = network(images)
    end = _Mark(name="", module=network, address=0, input_bytes=0, flops=uses.flops, live=uses.now)
    del result
    for handle in handles:
        handle.remove()
    return uses.marks, end


def _owned_numels(network: nn.Module, modules: Sequence[nn.Module]) -> list[list[int]]:
    # Numbers of elements of each module's parameters. A shared parameter belongs to the first module that has it.
    unassigned = {id(parameter) for parameter in network.parameters()}
    owned: list[list[int]] = []
    for module in modules:
        numels: list[int] = []
        for parameter in module.parameters():
            if id(parameter) in unassigned:
                unassigned.remove(id(parameter))
                numels.append(parameter.numel())
        owned.append(numels)
    return owned


def _num_tied(modules: Sequence[nn.Module], owned: Sequence[Sequence[int]]) -> list[int]:
    # Number of elements of each module that belong to an earlier module.
    num_tied: list[int] = []
    for module, numels in zip(modules, owned, strict=True):
        num_elements = sum(parameter.numel() for parameter in module.parameters())
        num_tied.append(num_elements - sum(numels))
    return num_tied


def _numels_outside(network: nn.Module, modules: Sequence[nn.Module]) -> list[int]:
    # Numbers of elements of the parameters that belong to none of the modules.
    inside: set[int] = set()
    for module in modules:
        inside.update(id(parameter) for parameter in module.parameters())
    numels: list[int] = []
    for parameter in network.parameters():
        if id(parameter) not in inside:
            numels.append(parameter.numel())
    return numels


def _named(blocks: Sequence[nn.Module], network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    # A block is named after the first of its modules that the network itself has.
    names = {id(module): name for name, module in network.named_modules()}
    for index, block in enumerate(blocks):
        name = f"block {index}"
        for module in block.modules():
            if id(module) in names:
                name = names[id(module)]
                break
        yield name, block


def units(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of a network with their names, descending into `nn.Sequential` modules.

    An `nn.Sequential`, or an only child with children, is replaced by its children.
    """
    children = dict(module.named_children())
    for name, child in children.items():
        if isinstance(child, nn.Sequential) or (len(children) == 1 and list(child.children())):
            yield from units(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
