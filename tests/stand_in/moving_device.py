"""Mock device to which modules move as to a GPU, so that CPU tests see the effect of moves on objects.

`pytest --moving-device` runs the selected tests with it. `.to("cuda")` and `.cpu()` give `data` of every parameter and
its gradient new memory, and replace every buffer by a new object. On a CPU, `.to("cpu")` does nothing. Lightning moves
the module when it sets up the strategy, and back in its teardown, before the teardown of the precision plugin.
Optimizer state also moves both times. During a move, and until the strategy's part is done, moved and unmoved tensors
are in different memories. An operation on both is an error, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.strategies import ddp, strategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hybrid import HybridAllReduceStrategy

_ORIGINAL = {
    name: getattr(HybridAllReduceStrategy, name) for name in ("model_to_device", "teardown")
}
_COPIES = frozenset({torch.ops.aten.copy_, torch.ops.aten._to_copy, torch.ops.aten._foreach_copy_})


class AcrossMemoriesError(RuntimeError):
    """Error for an operation on tensors of both memories, which a GPU would reject."""


class TwoMemories(TorchDispatchMode):
    """Mode that tracks which memory has been moved."""

    def __init__(self) -> None:
        super().__init__()
        self._moved: dict[int, Tensor] = {}  # kept alive, so that no other memory gets the address
        self._moves = _Moves(self)

    def __enter__(self) -> TwoMemories:
        self._moves.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._moves.__exit__(*error)

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a copy in the other memory, or the tensor itself if it is already there."""
        if self.has(tensor):
            return tensor
        with torch._C._DisableTorchDispatch():
            copy = tensor.detach().clone()
        self._note([copy])
        return copy

    def has(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided:
            return tensor._values().untyped_storage()._cdata in self._moved
        return tensor.untyped_storage()._cdata in self._moved

    def _note(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self._moved[tensor.untyped_storage()._cdata] = tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        are_moved = {self.has(tensor) for tensor in inputs if tensor.dim() > 0}
        if len(are_moved) > 1 and func.overloadpacket not in _COPIES:
            raise AcrossMemoriesError(
                f"Expected all tensors to be on the same device, but found two, in {func}"
            )
        result = func(*args, **(kwargs or {}))
        if are_moved == {True} or not inputs:
            self._note(tree_leaves(result))
        return result


class _Moves(TorchFunctionMode):
    """Mode in which `tensor.to(device)` and `tensor.cpu()` move tensors that have not been moved."""

    def __init__(self, memories: TwoMemories) -> None:
        super().__init__()
        self.memories = memories

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cpu or (func is Tensor.to and self._is_move(args, kwargs)):
            args = (self.memories.moved(args[0]), *args[1:])
        return func(*args, **kwargs)

    def _is_move(self, args: Any, kwargs: Any) -> bool:
        """Return whether the arguments of `to` name a device, or a tensor that has been moved."""
        if any(isinstance(value, torch.device) for value in (*args[1:], *kwargs.values())):
            return True
        return len(args) > 1 and isinstance(args[1], Tensor) and self.memories.has(args[1])


def model_to_device(self: HybridAllReduceStrategy) -> None:
    """Move the module at the same point as Lightning, before the strategy works on the moved tensors."""
    assert isinstance(self.model, nn.Module)
    with TwoMemories() as memories, _instead_of(self.model, "to", memories):
        _ORIGINAL["model_to_device"](self)


def teardown(self: HybridAllReduceStrategy) -> None:
    """Move the module back at the same point as Lightning, and check that all tensors were moved."""
    module = self.lightning_module
    if module is None:
        _ORIGINAL["teardown"](self)
        return
    with TwoMemories() as memories, _instead_of(module, "cpu", memories):
        _ORIGINAL["teardown"](self)
        left = [
            name
            for name, tensor in module.state_dict(keep_vars=True).items()
            if not memories.has(tensor)
        ]
        assert not left, f"after a fit the whole module must be on the CPU, and {left} are not"


@contextmanager
def _instead_of(module: nn.Module, name: str, memories: TwoMemories) -> Iterator[None]:
    num_calls = []

    def method(*args: Any, **kwargs: Any) -> nn.Module:
        num_calls.append(None)
        return module._apply(memories.moved)

    object.__setattr__(module, name, method)
    try:
        yield
        assert num_calls, f"Lightning did not call `{name}`: the stand-in stands at the wrong place"
    finally:
        object.__delattr__(module, name)


def optimizers_to_device(optimizers: Any, device: torch.device) -> None:
    """Replace the tensors in the state by new ones with the same values."""
    _optimizers_to_device(optimizers, device)
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = apply_to_collection(state, Tensor, torch.clone)


def install() -> None:
    """Install the device in this process permanently."""
    HybridAllReduceStrategy.model_to_device = model_to_device
    HybridAllReduceStrategy.teardown = teardown
    ddp._optimizers_to_device = strategy._optimizers_to_device = optimizers_to_device
