"""A network as a sequence of blocks between which a pipeline may be cut: what each computes, holds, keeps and sends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from lightning_hybrid.pipeline.shapes import as_arguments
from lightning_hybrid.planning.estimates.activations import LiveBytes, example_of, meta_step

BATCH = 8  # images on the meta device: what does not depend on the batch is a small part of what is counted


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive modules between two places at which a pipeline may be cut.

    Args:
        name: The first of them.
        numels: Elements of each parameter.
        forward_flops: Of one image's forward.
        input_bytes: Of one image, of what comes in: what a pipeline sends to a stage that begins here.
        kept_bytes: Of one image, what forward keeps for backward.
        num_tied: Elements of parameters that an earlier block has too: another stage holds them once more.
    """

    name: str
    numels: tuple[int, ...]
    forward_flops: int
    input_bytes: float
    kept_bytes: float
    num_tied: int = 0


@dataclass(kw_only=True)
class _Mark:
    # The begin of a module in forward: a place for a cut, as long as `is_cut`.
    name: str
    module: nn.Module
    address: int
    input_bytes: int
    flops: int
    live: int
    is_cut: bool = True


class _Uses(LiveBytes):
    """Uses of tensors on both sides of a mark. A cut is possible only if the mark's input is the only one."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__(known)
        self.marks: list[_Mark] = []
        self._made_at: dict[int, int] = {}  # number of marks when a tensor's memory was first seen

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
                self._made_at.setdefault(result.untyped_storage()._cdata, len(self.marks))
        return results

    def use(self, tensor: Tensor) -> None:
        """Note that the tensor is needed here."""
        address = tensor.untyped_storage()._cdata
        # Parameters are made before all marks; the first use counts, so that none is used on both sides of a cut.
        for mark in self.marks[self._made_at.setdefault(address, len(self.marks)) :]:
            mark.is_cut = mark.is_cut and mark.address == address

    def _free(self, address: int) -> None:
        super()._free(address)
        self._made_at.pop(address, None)


def traced_blocks(
    model: nn.Module, image_shape: Sequence[int], *, precision: str = "16-true"
) -> list[Block]:
    """Return the blocks in the order in which forward runs them.

    They are the network's own `pipeline_blocks()`, as for a run. Without, modules are looked at that are no
    `nn.Sequential`, in which their children are. Between two of them is a place for a cut where nothing but one tensor
    goes on: not inside a residual block, nor inside a shortcut of the network's own, nor between two uses of one
    parameter.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Sequential(nn.Flatten(), nn.Linear(128, 2)))
    >>> [(block.name, sum(block.numels), block.forward_flops) for block in traced_blocks(net, (3, 4, 4))]
    [('0', 224, 6912), ('1', 0, 0), ('2.0', 0, 0), ('2.1', 258, 512)]
    """
    with meta_step(model, precision) as (shadow, dtype):
        images = example_of(shadow, BATCH, image_shape, dtype=dtype)
        uses = _Uses([*shadow.parameters(), *shadow.buffers()])

        def begin(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
            tensors = [value for value in tree_iter(args) if isinstance(value, Tensor)]
            first = tensors[0]
            uses.marks.append(
                _Mark(
                    name=name,
                    module=module,
                    address=first.untyped_storage()._cdata,
                    input_bytes=sum(tensor.nbytes for tensor in tensors),
                    flops=uses.flops,
                    live=uses.now,
                    is_cut=len(tensors) == 1,
                )
            )
            for tensor in tensors[1:]:
                uses.use(tensor)

        pipeline_blocks: list[nn.Module] = getattr(shadow, "pipeline_blocks", list)()
        handles = [
            module.register_forward_pre_hook(
                lambda module, args, name=name: begin(name, module, args)
            )
            for name, module in list(
                _named(pipeline_blocks, shadow) if pipeline_blocks else units(shadow)
            )
            or [("", shadow)]
        ]
        with uses:
            uses.use(next(iter(tree_iter(images))))
            logits = images
            for module in pipeline_blocks or [shadow]:
                logits = module(*as_arguments(logits)) if pipeline_blocks else module(logits)
        end = _Mark(
            name="", module=shadow, address=0, input_bytes=0, flops=uses.flops, live=uses.now
        )
        del logits
        for handle in handles:
            handle.remove()
    places = [
        mark
        for index, mark in enumerate(uses.marks)
        if pipeline_blocks or mark.is_cut or index == 0
    ] + [end]
    # Parameters that belong to none of the modules are counted in the first block.
    left = {id(parameter): parameter.numel() for parameter in shadow.parameters()}
    tied = [sum(p.numel() for p in mark.module.parameters()) for mark in uses.marks]
    of_mark = [
        [left.pop(id(p)) for p in mark.module.parameters() if id(p) in left] for mark in uses.marks
    ]
    tied = (
        [total - sum(numels) for total, numels in zip(tied, of_mark, strict=True)]
        if pipeline_blocks
        else [0] * len(tied)
    )
    of_mark[0] += left.values()
    blocks: list[Block] = []
    inside = zip([*uses.marks, end], [*of_mark, []], [*tied, 0], strict=True)
    mark, of_module, following = next(inside)
    for first, after in itertools.pairwise(places):
        numels: list[int] = []
        num_tied = 0
        while mark is not after:
            numels += of_module
            num_tied += following
            mark, of_module, following = next(inside)
        blocks.append(
            Block(
                name=first.name,
                numels=tuple(numels),
                forward_flops=(after.flops - first.flops) // BATCH,
                input_bytes=first.input_bytes / BATCH,
                kept_bytes=max(0.0, (after.live - first.live) / BATCH),
                num_tied=num_tied,
            )
        )
    return blocks


def _named(blocks: Sequence[nn.Module], network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    # By the first module in a block that the network itself has.
    names = {id(module): name for name, module in network.named_modules()}
    for index, block in enumerate(blocks):
        yield (
            next(
                (names[id(submodule)] for submodule in block.modules() if id(submodule) in names),
                f"block {index}",
            ),
            block,
        )


def units(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of the network, and in place of an `nn.Sequential`, or of an only child, its children."""
    children = dict(module.named_children())
    for name, child in children.items():
        if isinstance(child, nn.Sequential) or (len(children) == 1 and list(child.children())):
            yield from units(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
