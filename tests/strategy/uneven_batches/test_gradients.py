"""Ranks with 7, 5, 5 and 3 batches: the gradients of each step equal those of its global batch."""

from functools import partial

import pytest
import torch

from lightning_hybrid import Comm, Mean
from lightning_hybrid.optim import LARS
from tests.strategy.uneven_batches import support
from tests.strategy.uneven_batches.support import (
    NUM_BATCHES,
    NUM_SAMPLES,
    Network,
    OwnLoader,
    Stream,
    fits,
    largest_error,
    loader,
    numbers_of,
    same_weights,
)

FP32_ERROR = 1e-6
FP16_ERROR = 2.0**-9
STREAM = partial(loader, Stream)


class WithLars(Network):
    def configure_optimizers(self):
        return LARS(self.parameters(), lr=0.5)


class OwnLoop(Network):
    """Module with manual optimization that steps after each batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class NeverZeroes(Network):
    """Module with manual optimization that accumulates gradients over the first two batches."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


def check(results, *, num_steps, max_error=FP32_ERROR, num_epochs=1):
    """Check that each epoch trains all samples once, and that all ranks take the same steps and have equal weights."""
    assert sorted(numbers_of(results)) == sorted([*range(sum(NUM_SAMPLES))] * num_epochs)
    assert largest_error(results) < max_error
    assert same_weights(results)
    for rank in results:
        assert rank["batch_indices"] == [*range(max(NUM_BATCHES))] * num_epochs
        assert rank["global_step"] == num_steps
        assert rank["num_skipped"] == 0


def test_all_samples_are_trained_once_with_the_gradients_of_the_global_batch(four_ranks):
    check(fits(four_ranks), num_steps=7)


def test_loaders_without_a_length_and_a_last_step_of_one_batch(four_ranks):
    check(fits(four_ranks, train=STREAM, accumulate_grad_batches=2), num_steps=4)


def test_fp16_gradients_stay_within_their_rounding(four_ranks):
    results = fits(four_ranks, precision="16-true", loss_scale=1024, accumulate_grad_batches=2)
    check(results, num_steps=4, max_error=FP16_ERROR)


def test_int8_between_nodes_with_lars(four_ranks):
    results = fits(four_ranks, WithLars, between_nodes=Mean("int8"), ranks_per_node=2)
    check(results, num_steps=7, max_error=0.03)


def equal_loader():
    numbers = support.Numbered(torch.distributed.get_rank(), (12, 12, 12, 12))
    return torch.utils.data.DataLoader(numbers, batch_size=4)


def test_loaders_of_equal_batches_train_to_the_same_bits_as_without_the_option(two_ranks):
    scene = {"train": equal_loader, "accumulate_grad_batches": 3, "max_epochs": 2}
    with_option = fits(two_ranks, **scene)
    without = fits(two_ranks, uneven_batches="error", **scene)
    for first, second in zip(with_option, without, strict=True):
        assert torch.equal(flat(first["weights"]), flat(second["weights"]))


def flat(weights):
    return torch.cat([value.flatten() for value in weights.values()])


SCENES = {
    "own loader": ({"train": OwnLoader}, 7, FP32_ERROR),
    "workers": ({"train": partial(loader, num_workers=1)}, 7, FP32_ERROR),
    "accumulation": ({"accumulate_grad_batches": 3}, 3, FP32_ERROR),
    "shared node update": ({"shard_update": "node", "ranks_per_node": 2}, 7, FP32_ERROR),
    "shared world update": ({"shard_update": "world", "precision": "16-true"}, 7, FP16_ERROR),
    "unused parameters": ({"find_unused_parameters": True}, 7, FP32_ERROR),
    "static graph": ({"static_graph": True}, 7, FP32_ERROR),
    "views of buckets": ({"gradient_as_bucket_view": True}, 7, FP32_ERROR),
    "clipping": ({"gradient_clip_val": 100.0}, 7, FP32_ERROR),
    "own loop": ({"module": OwnLoop}, 7, FP32_ERROR),
    "own loop in fp16": ({"module": OwnLoop, "precision": "16-true"}, 7, FP16_ERROR),
    "LARS": ({"module": WithLars, "accumulate_grad_batches": 2}, 4, FP32_ERROR),
    "LARS in fp16": ({"module": WithLars, "precision": "16-true"}, 7, FP16_ERROR),
    "bf16": ({"precision": "bf16-true"}, 7, 2.0**-6),
    "bf16-mixed": ({"precision": "bf16-mixed"}, 7, 2.0**-6),
    "int4": ({"between_nodes": Mean("int4"), "ranks_per_node": 1}, 7, 0.5),
    "stream in fp16": ({"train": STREAM, "precision": "16-true"}, 7, FP16_ERROR),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize("name", SCENES)
def test_other_settings_have_the_gradients_of_the_global_batch(four_ranks, name):
    scene, num_steps, max_error = SCENES[name]
    check(fits(four_ranks, **scene), num_steps=num_steps, max_error=max_error)


@pytest.mark.long
def test_several_epochs(four_ranks):
    check(fits(four_ranks, max_epochs=3), num_steps=21, num_epochs=3)


@pytest.mark.long
def test_gradients_that_are_scattered_have_the_same_divisor(four_ranks):
    """Without code that reads gradients, each rank receives only the gradients of its shard."""
    scene = {"precision": "16-true", "loss_scale": 1024, "ranks_per_node": 2}
    scene["comm"] = Comm("two_level", bucket_bytes=2**15)  # the last bucket is not scattered
    whole = fits(four_ranks, UnwatchedLars, **scene)
    shared = fits(four_ranks, UnwatchedLars, shard_update="node", **scene)
    for first, second in zip(whole, shared, strict=True):
        assert torch.equal(flat(first["weights"]), flat(second["weights"]))


class UnwatchedLars(support.Unwatched):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(support.NUM_FEATURES, 16),
                torch.nn.Linear(16, 4096),  # large enough to be sharded
                torch.nn.Linear(4096, support.NUM_CLASSES),
            )

    def configure_optimizers(self):
        return LARS(self.parameters(), lr=0.5, fused=True)


def sum_of_two_means(results):
    """Return the largest error of steps whose gradients are sums of the means of two global batches."""
    errors = []
    for index in range(len(results[0]["steps"])):
        steps = [rank["steps"][index] for rank in results]
        exact = 0.0
        for half in (slice(0, 4), slice(4, None)):
            numbers = [number for step in steps for number in step["numbers"][half]]
            exact = exact + flat_of(support.mean_gradients(steps[0]["weights"], numbers))
        gradient = flat_of(steps[0]["gradients"]).double()
        errors.append(float((gradient - exact).norm() / exact.norm()))
    return max(errors)


def flat_of(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def test_gradients_that_a_users_loop_adds_up_keep_the_earlier_average(two_ranks):
    """As under `ddp`, the second backward averages the sum of the first average and the new gradients."""
    results = fits(two_ranks, NeverZeroes)
    assert sum_of_two_means(results) < FP32_ERROR
    assert same_weights(results)
