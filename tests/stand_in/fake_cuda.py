"""Mock CUDA without a GPU: tensors with a device but no memory, and Triton kernels that only record their launches.

Torch raises an error if an operation mixes the devices of such tensors, or if the host would read one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ZERO = torch.device("cuda:0")
ONE = torch.device("cuda:1")


class Launches(TorchDispatchMode):
    """Mode that records what the host launches on a GPU: operations that compute or copy, and our kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
        name = str(func)
        is_no_work = name.startswith(("aten.empty", "aten.new_empty", "prim.device"))
        if "cuda" in devices and not is_no_work and not _is_view(func):
            self.names.append(name)
        return result


def _is_view(func: Any) -> bool:
    for returned in func._schema.returns:
        if returned.alias_info is not None and not returned.alias_info.is_write:
            return True
    return False


class FakeCuda:
    """Record of the mocks: `launched` kernels as (name, current device), and `num_copies`."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, Any]] = []
        self.num_copies = 0
        self.current: Any = ZERO

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Mock of `torch.cuda.device_of`."""
        before = self.current
        self.current = torch.device(device)
        try:
            yield
        finally:
            self.current = before

    def kernel(self, name: str) -> Any:
        """Return a mock of a Triton kernel, which accepts only tensors of the current device, as a GPU does."""

        def launch(*args: Any, **kwargs: Any) -> None:
            for arg in args:
                if isinstance(arg, Tensor):
                    assert arg.device == self.current, f"an argument of {name}"
            self.launched.append((name, self.current))

        return type("Kernel", (), {"__getitem__": lambda self, grid: launch})()

    def to_device_(self, target: Tensor, values: Tensor) -> None:
        """Mock of `option_table.to_device_`."""
        assert target.shape == values.shape
        self.num_copies += 1


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Make `torch.empty(..., device="cuda:1")` work, and let the optimizers find kernels."""
    from lightning_hybrid.optim import lamb
    from lightning_hybrid.optim.fused import contiguous, option_table, step
    from lightning_hybrid.optim.fused.cuda import lars, lars_kernels

    if not torch.backends.cuda.is_built():
        pytest.skip("without CUDA's kernels torch takes lists apart")
    fake = FakeCuda()

    def data_ptrs(*lists: Any) -> list[int]:
        return [id(tensor) // 16 * 16 for tensor in chain(*lists)]

    def count(step: Tensor, device: torch.device) -> float:
        """Read a count on the CPU, which does not wait. Fake counts have no value."""
        assert step.device.type == "cpu"
        return 1.0

    with monkeypatch.context() as patch, FakeTensorMode():
        for module in (contiguous, lars):
            patch.setattr(module, "data_ptrs", data_ptrs)
        for module in (option_table, lars):
            patch.setattr(module, "to_device_", fake.to_device_)
        patch.setattr(step, "has_kernels", lambda device_type: True)
        for name in ("norms", "finalize", "lars_update"):
            patch.setattr(lars_kernels, name, fake.kernel(name))
        patch.setattr(lamb, "_count", count)
        patch.setattr(torch.cuda, "device_of", lambda tensor: fake.device(tensor.device))
        yield fake


def parameter(
    *shape: int, device: torch.device = ZERO, grad_dtype: torch.dtype = torch.float32
) -> nn.Parameter:
    result = nn.Parameter(torch.empty(shape, device=device))
    result.grad_dtype = None
    result.grad = torch.empty(shape, device=device, dtype=grad_dtype)
    return result
