"""Mock of a move to a GPU: effects on objects, and the points at which Lightning moves."""

import pytest
import torch

from lightning_hybrid import HybridAllReduceStrategy
from tests import toy
from tests.scenes import Saves, fit
from tests.stand_in import moving_device


def install(monkeypatch):
    for owner, name in (
        (HybridAllReduceStrategy, "model_to_device"),
        (HybridAllReduceStrategy, "teardown"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for owner in (moving_device.ddp, moving_device.strategy):
        monkeypatch.setattr(owner, "_optimizers_to_device", owner._optimizers_to_device)
    moving_device.install()


@pytest.fixture(autouse=True)
def not_twice(pytestconfig):
    if pytestconfig.getoption("--moving-device"):
        pytest.skip("these tests move devices themselves")


class WithABuffer(toy.Toy):
    """Toy with buffers of 1/3, which every half precision rounds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("third", torch.full((5,), 1 / 3))
        self.net[5].register_buffer("weights_of_classes", torch.full((3,), 1 / 3))

    def buffers_by_bits(self):
        return {
            name: buffer.tolist()
            for name, buffer in self.named_buffers()
            if buffer.shape in ((3,), (5,))
        }


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_a_module_ends_in_fp32_with_the_bits_of_its_buffers(one_rank, tmp_path, precision):
    """Buffers are new objects after each move, so they can no longer be found by identity."""
    for result, saved in one_rank.run(buffers_after_each, precision, str(tmp_path / "last.ckpt")):
        exact = WithABuffer().buffers_by_bits()
        assert len(exact) == 2
        assert result == [exact] * 4
        assert saved == exact


def buffers_after_each(precision, path):
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        results = []
        module = WithABuffer()
        for call in ("fit", "validate", "test", "predict"):
            fit(
                None,
                module,
                call=call,
                precision=precision,
                max_epochs=1,
                callbacks=[Saves(path, epoch=0)],
            )
            assert {tensor.dtype for tensor in module.parameters()} == {torch.float32}
            results.append(module.buffers_by_bits())
    state = torch.load(path, weights_only=True)["state_dict"]
    return results, {name: state[name].tolist() for name in results[0]}
