"""Moving average of the weights, exact in fp32, through validation, a resumed run and the end of training."""

from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from lightning_hybrid.callbacks import MasterWeightAveraging
from tests import toy
from tests.callbacks.support import Module, fit, seen
from tests.scenes import Saves, same

DECAY = 0.75  # exact in binary, and far from 0 and 1
NUM_PARAMETERS = len(list(toy.Toy().parameters()))


def tensors_of(module):
    return [*module.parameters(), *module.buffers()]


class ByHand(pl.Callback):
    """Average of the weights after every step, in fp32 and in torch's order of operations."""

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
    callbacks = [by_hand, MasterWeightAveraging(decay=DECAY)]
    _, module, _ = fit(callbacks=callbacks, precision=precision)
    end = [tensor.detach().clone() for tensor in tensors_of(module)]
    return by_hand.average, by_hand.validated, end


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["16-true", "bf16-true", "32-true"])
def test_the_average_is_that_of_the_fp32_weights_to_the_bit(two_ranks, precision):
    """All ranks have rank zero's statistics, because DDP broadcasts them while the module holds the average."""
    results = two_ranks.run(averaged, precision)
    average_of_rank_0, _, _ = results[0]
    statistics = average_of_rank_0[NUM_PARAMETERS:]
    for rank, (average, validated, end) in enumerate(results):
        expected = average[:NUM_PARAMETERS] + statistics
        weights = [tensor for tensor in average if tensor.is_floating_point()]
        rounded = [weight.half().float() for weight in weights]
        assert not same(weights, rounded), "half precision could not hold the average"
        assert same(end, expected), f"rank {rank}"
        assert same(validated[-1], expected), f"rank {rank}"


def test_losses_are_the_same_with_and_without_the_average(two_ranks):
    averaged_runs = seen(two_ranks, callbacks=[partial(MasterWeightAveraging, decay=DECAY)])
    plain_runs = seen(two_ranks)
    for rank in range(2):
        assert averaged_runs[rank].losses == plain_runs[rank].losses, f"rank {rank}"


def test_a_resumed_run_averages_on_to_the_bit(two_ranks, tmp_path):
    """A run saved after four of eight steps resumes exactly.

    The checkpoint's weights are the fp32 average, and its running statistics those of rank zero.
    """
    rank_0, _ = two_ranks.run(whole_and_resumed, str(tmp_path))
    whole, resumed, saved, by_hand = rank_0
    assert toy.same_bits(whole, resumed)
    assert same(saved, by_hand)


def whole_and_resumed(run_dir):
    def run(*callbacks, ckpt_path=None):
        callbacks = [MasterWeightAveraging(decay=DECAY), *callbacks]
        _, module, _ = fit(callbacks=callbacks, ckpt_path=ckpt_path)
        return module

    path = f"{run_dir}/some.ckpt"
    by_hand = ByHand()
    fit(callbacks=[by_hand, MasterWeightAveraging(decay=DECAY)], max_epochs=1)
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
    """Like a GPU, the device "meta" allows copies from the CPU but no operations with CPU tensors."""
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
    assert int(ema._average_model.n_averaged) == 2  # on the host, so no one waits for the device
    ema._swap_models(module)
    assert {tensor.device for tensor in tensors_of(module)} == {meta}
    ema._swap_models(module)
    ema._copy_average_to_current(module)
    parameters = (*module.parameters(), *ema._average_model.parameters())
    assert {parameter.device for parameter in parameters} == {meta}
