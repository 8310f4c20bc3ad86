"""The moving average: of the weights, exact in fp32, through validation, a resumption and the end of training."""

from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from lightning_hybrid.callbacks import MasterWeightAveraging
from tests import toy
from tests.callbacks.support import Module, fit, seen
from tests.scenes import Saves

DECAY = 0.75  # exact in binary, and far from 0 and 1
NUM_PARAMETERS = len(list(toy.Toy().parameters()))


def tensors_of(module):
    return [*module.parameters(), *module.buffers()]


class ByHand(pl.Callback):
    """The average of the weights after every step, in fp32 and in torch's own order of operations."""

    def __init__(self):
        self.average = None
        self.validated = []

    def on_train_batch_end(self, trainer, module, *_):
        now = [tensor.detach().clone() for tensor in tensors_of(module)]
        if self.average is None:
            self.average = now
        else:
            pairs = zip(self.average, now, strict=True)
            self.average = [(DECAY * old + (1 - DECAY) * new).to(new.dtype) for old, new in pairs]

    def on_validation_epoch_end(self, trainer, module):
        """Record the weights of validation, before the hook of the average restores the trained ones."""
        self.validated.append([tensor.detach().clone() for tensor in tensors_of(module)])


def averaged(precision):
    by_hand = ByHand()
    module = fit(more=[by_hand, MasterWeightAveraging(decay=DECAY)], precision=precision)[1]
    return (
        by_hand.average,
        by_hand.validated,
        [tensor.detach().clone() for tensor in tensors_of(module)],
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "32-true"])
def test_the_average_is_that_of_the_fp32_weights_to_the_bit(two_ranks, precision):
    """Statistics are those of rank zero on every rank: DDP sends them while the module holds the average."""
    ranks = two_ranks.run(averaged, precision)
    statistics = ranks[0][0][NUM_PARAMETERS:]
    for average, validated, left in ranks:
        expected = average[:NUM_PARAMETERS] + statistics
        assert any(
            not torch.equal(tensor, tensor.half().float())
            for tensor in average
            if tensor.is_floating_point()
        )
        for tensor, validation, end in zip(expected, validated[-1], left, strict=True):
            assert torch.equal(end, tensor)
            assert torch.equal(validation, tensor)


def test_training_is_not_moved_by_it(two_ranks):
    with_average = seen(two_ranks, more=[partial(MasterWeightAveraging, decay=DECAY)])[0]
    without = seen(two_ranks)[0]
    assert with_average.losses == without.losses


def test_a_resumed_run_averages_on_to_the_bit(two_ranks, tmp_path):
    """Saved after four of eight steps. The checkpoint's weights are the average, in fp32, and rank zero's."""
    whole, resumed, saved, by_hand = two_ranks.run(whole_and_resumed, str(tmp_path))[0]
    assert toy.same_bits(whole, resumed)
    assert all(torch.equal(value, average) for value, average in zip(saved, by_hand, strict=True))


def whole_and_resumed(run_dir):
    def run(*more, ckpt_path=None):
        return fit(more=[MasterWeightAveraging(decay=DECAY), *more], ckpt_path=ckpt_path)[1]

    path = f"{run_dir}/some.ckpt"
    by_hand = ByHand()
    fit(more=[by_hand, MasterWeightAveraging(decay=DECAY)], max_epochs=1)
    whole = run(Saves(path, epoch=0))
    resumed = run(ckpt_path=path)
    checkpoint = torch.load(path, weights_only=True)["state_dict"]
    module = Module()
    saved = [checkpoint[name] for name, _ in (*module.named_parameters(), *module.named_buffers())]
    return toy.weights(whole), toy.weights(resumed), saved, by_hand.average


def test_a_decay_outside_its_range_is_refused():
    with pytest.raises(ValueError, match=r"`decay` \(=1\.5\) must be between 0 and 1"):
        MasterWeightAveraging(decay=1.5)


@pytest.mark.parametrize("precision", ["16-true", "32-true"])
def test_nothing_of_the_average_is_on_another_device_than_the_module(precision):
    """On "meta", which like a GPU takes no part in an operation of the CPU's, but copies."""
    module = toy.Toy().to("meta")
    meta = torch.device("meta")
    trainer = toy.trainer(precision=precision)
    module.trainer = trainer
    trainer.strategy._lightning_module = module
    trainer.precision_plugin.convert_module(module)
    if precision == "16-true":
        trainer.precision_plugin.follow_device(meta)
    ema = MasterWeightAveraging(decay=DECAY)
    ema.setup(SimpleNamespace(strategy=SimpleNamespace(root_device=meta)), module, "fit")
    for _ in range(2):
        ema._average_model.update_parameters(module)
    assert int(ema._average_model.n_averaged) == 2, (
        "the count is on the host, where nobody waits for it"
    )
    ema._swap_models(module)
    assert {tensor.device for tensor in tensors_of(module)} == {meta}
    ema._swap_models(module)
    ema._copy_average_to_current(module)
    assert {
        tensor.device for tensor in (*module.parameters(), *ema._average_model.parameters())
    } == {meta}
