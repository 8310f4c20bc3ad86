"""The stand-in for a move to a GPU does to objects what a move does, and where Lightning does it."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from lightning_hybrid import HybridAllReduceStrategy
from tests import toy
from tests.stand_in import moving_device


def install(monkeypatch):
    for owner, name in ((HybridAllReduceStrategy, "model_to_device"), (HybridAllReduceStrategy, "teardown")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for owner in (moving_device.ddp, moving_device.strategy):
        monkeypatch.setattr(owner, "_optimizers_to_device", owner._optimizers_to_device)
    moving_device.install()


@pytest.fixture(autouse=True)
def not_twice(pytestconfig):
    if pytestconfig.getoption("--moving-device"):
        pytest.skip("these tests move devices themselves")


@pytest.fixture
def moving(monkeypatch):
    install(monkeypatch)


def places(module):
    buffers = {name: (id(buffer), buffer.data_ptr()) for name, buffer in module.named_buffers()}
    return {name: (id(p), p.data_ptr()) for name, p in module.named_parameters()}, buffers


def test_parameters_keep_their_identity_and_buffers_do_not(moving):
    """As `nn.Module.to` to another device does; only addresses of what is still held can be compared."""
    module = toy.Toy()
    values, held = toy.weights(module), [*module.buffers(), *(p.data for p in module.parameters())]
    parameters, buffers = places(module)
    module._apply(moving_device.TwoMemories().moved)
    moved_parameters, moved_buffers = places(module)
    for name, (identity, address) in parameters.items():
        assert moved_parameters[name][0] == identity
        assert moved_parameters[name][1] != address
    assert all(moved_buffers[name][0] != identity for name, (identity, _) in buffers.items())
    assert toy.same_bits(values, toy.weights(module))
    assert len(held) == len(parameters) + len(buffers)


@pytest.mark.parametrize("algorithm", ["SGD", "AdamW"])
def test_in_fp32_a_fit_on_such_a_device_is_one_on_the_cpu(one_rank, algorithm):
    there, here = (one_rank.run(weights_after_a_fit, algorithm, is_moving)[0] for is_moving in (True, False))
    assert toy.same_bits(there, here)


class WithABuffer(toy.Toy):
    """A third is rounded in every half precision."""

    def __init__(self):
        super().__init__()
        self.register_buffer("third", torch.full((5,), 1 / 3))
        self.net[5].register_buffer("weights_of_classes", torch.full((3,), 1 / 3))

    def buffers_by_bits(self):
        return {name: buffer.tolist() for name, buffer in self.named_buffers() if buffer.shape in ((3,), (5,))}


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_a_module_ends_in_fp32_with_the_bits_of_its_buffers(one_rank, tmp_path, precision):
    """Buffers are new objects after each move: whoever knows them by identity knows them no more."""
    for found, saved in one_rank.run(buffers_after_each, precision, str(tmp_path / "last.ckpt")):
        exact = WithABuffer().buffers_by_bits()
        assert len(exact) == 2
        assert found == [exact] * 4
        assert saved == exact


class Saves(pl.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(self.path)


def buffers_after_each(precision, path):
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        module, found = WithABuffer(), []
        toy.trainer(precision=precision, max_epochs=1, callbacks=[Saves(path)]).fit(module, toy.loader())
        found.append(module.buffers_by_bits())
        for what in ("validate", "test", "predict"):
            getattr(toy.trainer(precision=precision), what)(module, toy.loader())
            assert {tensor.dtype for tensor in module.parameters()} == {torch.float32}
            found.append(module.buffers_by_bits())
    state = torch.load(path, weights_only=True)["state_dict"]
    return found, {name: state[name].tolist() for name in found[0]}


def weights_after_a_fit(algorithm, is_moving):
    with pytest.MonkeyPatch.context() as patch:
        if is_moving:
            install(patch)
        module = toy.Toy(optimizer=algorithm, lr=0.01)
        held = [id(buffer) for buffer in module.buffers()]
        toy.trainer(precision="32-true").fit(module, toy.loader())
    assert ([id(buffer) for buffer in module.buffers()] != held) is is_moving
    return toy.weights(module)


def test_an_operation_on_what_moved_and_what_did_not_is_refused():
    one, other = torch.ones(3), torch.ones(3)
    with moving_device.TwoMemories() as memories:
        moved = memories.moved(one)
        assert memories.moved(moved) is moved
        with pytest.raises(moving_device.AcrossMemoriesError, match=r"same device.*aten\.add"):
            moved + other
        with pytest.raises(moving_device.AcrossMemoriesError):
            torch.equal(moved, one)
        both = other.to(torch.device("cpu")) + moved + torch.ones(3) + other.to(moved) + torch.ones(())
        other.copy_(both)
        assert memories.has(both)
        assert not memories.has(other + other)
    assert other.tolist() == [5.0] * 3
