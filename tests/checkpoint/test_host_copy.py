"""Copies of checkpoints: equal, untouched by later steps, and in memory that is taken once."""

import io

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lightning_hybrid.checkpoint.host_copy import HostCopies

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def of_every_kind(device):
    counted = torch.arange(24, device=device)
    return {
        "of two dimensions": counted.float().reshape(4, 6),
        "channels last": counted.half().reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "transposed": counted.bfloat16().reshape(4, 6).t(),
        "a part": counted[5:7],
        "every second": counted[::2],
        "one value many times": torch.ones(1, device=device).expand(5),
        "a number": torch.tensor(3.5, dtype=torch.float64, device=device),
        "bits": counted > 5,
        "complex": torch.view_as_complex(counted.float().reshape(12, 2)).conj(),
        "negative": torch.view_as_complex(counted.float().reshape(12, 2)).conj().imag,
        "a parameter": torch.nn.Parameter(counted.float()),
        "empty": torch.empty(0, 3, device=device),
        "sparse": torch.eye(3, device=device).to_sparse(),
    }


def dense(tensor):
    return tensor.to_dense() if tensor.is_sparse else tensor


class NothingIsNoted(TorchFunctionMode):
    """Refuses to copy what is conjugate or negative by a note alone: from CUDA to page-locked memory torch drops it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            assert not args[1].is_conj()
            assert not args[1].is_neg()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_is_equal_and_takes_no_more_room_in_a_file_than_its_elements(device):
    host, tensors = HostCopies(), of_every_kind(device)
    before = {name: dense(tensor).detach().clone().cpu() for name, tensor in tensors.items()}
    with NothingIsNoted():
        copies = host.take(tensors)
    host.wait()
    for name, tensor in tensors.items():
        if name != "one value many times":
            (tensor._values() if tensor.is_sparse else tensor.detach()).zero_()
        found = copies[name]
        assert found.device.type == (device if name in ("sparse", "a parameter") else "cpu")
        assert type(found) is type(tensor)
        assert found.requires_grad == tensor.requires_grad
        assert torch.equal(dense(found).cpu(), before[name]), name
        if not found.is_sparse:
            assert found.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize, name
    assert copies["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert copies["transposed"].stride() == (1, 6)


@pytest.mark.parametrize("device", DEVICES)
def test_curves_that_grow_and_metrics_that_come_take_no_memory_anew(device):
    """All copies are held, so what has another address has other memory: a block of 12,096 bytes, one of an eighth more
    than the 12,160 that come next, and one of an eighth more than the 13,696 of the end."""
    host, weights, copies = HostCopies(), torch.ones(3000, device=device), []
    for step in range(1, 101):
        late = {"late": torch.ones(8, device=device)} if step > 50 else {}
        curve = torch.full((step, 2), float(step), dtype=torch.float64, device=device)
        copies.append(host.take({**late, "curve": curve, "weights": weights}))
        host.wait()
        assert torch.equal(copies[-1]["curve"], curve.cpu())
        assert torch.equal(copies[-1]["weights"], weights.cpu())
    ends = [copy["weights"].data_ptr() - copy["curve"].data_ptr() for copy in copies]
    assert ends == [-(-16 * step // 64) * 64 for step in range(1, 101)]  # one behind the other
    blocks = [copy["late" if "late" in copy else "curve"].data_ptr() for copy in copies]
    assert len(set(blocks)) == 3
    assert host.num_bytes == 13_696 * 9 // 8


def test_tensors_that_are_one_stay_one_in_the_file():
    weights = torch.ones(10_000)
    file = io.BytesIO()
    torch.save(HostCopies().take({"one": weights, "other": weights.detach(), "part": weights[:10]}), file)
    found = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert found["one"].data_ptr() == found["other"].data_ptr()
    assert 40_000 < len(file.getvalue()) < 45_000


@pytest.mark.gpu
def test_from_cuda_the_memory_is_page_locked():
    copies = HostCopies().take({"weights": torch.ones(10, device="cuda"), "counter": torch.ones(1)})
    assert copies["weights"].is_pinned()
    assert not copies["counter"].is_pinned()
