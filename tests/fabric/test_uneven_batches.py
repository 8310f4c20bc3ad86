"""`uneven_batches="join"` in a user's own loop, with ranks whose loaders have 7, 5, 5 and 3 batches."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_hybrid.flavours.fabric import HybridAllReduceStrategy
from tests import toy
from tests.fabric.support import fabric_of, play
from tests.strategy.uneven_batches import support
from tests.strategy.uneven_batches.support import (
    BATCH_SIZE,
    NUM_BATCHES,
    NUM_SAMPLES,
    Numbered,
    OwnLoader,
    Stream,
    largest_error,
    numbers_of,
    same_weights,
)

FP32_ERROR = 1e-6
FP16_ERROR = 2.0**-9
STREAM = partial(support.loader, Stream)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return support.network()


def set_up(net, loader, precision="32-true", **options):
    fabric = fabric_of(precision, HybridAllReduceStrategy(**{"uneven_batches": "join", **options}))
    sgd = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    model, optimizer = fabric.setup(net, sgd)
    if isinstance(loader, DataLoader):
        loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    return fabric, model, optimizer, fabric.strategy.join_loader(loader)


def epoch_of(fabric, model, optimizer, batches, after_step=None):
    """Train an epoch, and return the samples, weights and gradients of each step."""
    steps = []
    for numbers, features, targets in batches:
        fabric.backward(F.cross_entropy(model(features), targets))
        parameters = list(model.module.parameters())
        steps.append(
            {
                "numbers": [] if batches.repeats_batch else numbers.tolist(),
                "weights": support.copies(parameters),
                "gradients": support.copies(parameter.grad for parameter in parameters),
            }
        )
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(len(steps))
    return steps


def loop(train=support.loader, num_epochs=1, precision="32-true", **options):
    net = network()
    fabric, model, optimizer, batches = set_up(net, train(), precision, **options)
    steps = []
    for _ in range(num_epochs):
        steps += epoch_of(fabric, model, optimizer, batches)
    return {"steps": steps, "weights": toy.weights(net)}


def check(results, max_error, num_epochs=1):
    assert sorted(numbers_of(results)) == sorted([*range(sum(NUM_SAMPLES))] * num_epochs)
    for rank, result in enumerate(results):
        assert len(result["steps"]) == max(NUM_BATCHES) * num_epochs, f"rank {rank}"
    assert largest_error(results) < max_error
    assert same_weights(results)


@pytest.mark.parametrize(
    ("precision", "max_error"), [("32-true", FP32_ERROR), ("16-true", FP16_ERROR)]
)
def test_all_samples_are_trained_once_with_the_gradients_of_the_global_batch(
    four_ranks, precision, max_error
):
    results = four_ranks.run(play, partial(loop, num_epochs=2, precision=precision))
    check(results, max_error, num_epochs=2)


@pytest.mark.parametrize("train", [STREAM, OwnLoader], ids=["stream", "own loader"])
def test_loaders_without_a_length(four_ranks, train):
    check(four_ranks.run(play, partial(loop, train)), FP32_ERROR)


def test_a_strategy_without_the_option_refuses_to_join_a_loader():
    strategy = HybridAllReduceStrategy()
    with pytest.raises(
        ValueError, match=r"^`uneven_batches` \(='error'\) must be 'join' to use `join"
    ):
        strategy.join_loader([])


# ---- accumulation, layer state, loss terms outside of the module ---------------------------------------------------


def two_batches_of_a_step(precision):
    net = network()
    fabric, model, optimizer, batches = set_up(net, support.loader(), precision)
    steps = []
    numbers_of_step = []
    weights = support.copies(net.parameters())
    for index, (numbers, features, targets) in enumerate(batches):
        numbers_of_step.append([] if batches.repeats_batch else numbers.tolist())
        is_last = index % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(F.cross_entropy(model(features), targets) / 2)
        if is_last:
            gradients = support.copies(parameter.grad for parameter in net.parameters())
            steps.append((weights, numbers_of_step, gradients))
            optimizer.step()
            optimizer.zero_grad()
            weights = support.copies(net.parameters())
            numbers_of_step = []
    return steps


@pytest.mark.parametrize(("precision", "max_error"), [("32-true", FP32_ERROR), ("bf16-true", 0.02)])
def test_accumulated_gradients_are_means_of_global_batches(four_ranks, precision, max_error):
    results = four_ranks.run(play, two_batches_of_a_step, precision)
    assert len(results[0]) == 3
    for of_ranks in zip(*results, strict=True):
        weights = of_ranks[0][0]
        expected = 0.0
        for batch in range(2):
            numbers = []
            for _, numbers_of_rank, _ in of_ranks:
                numbers += numbers_of_rank[batch]
            expected = expected + flat(support.mean_gradients(weights, numbers)) / 2
        for rank, (_, _, gradients) in enumerate(of_ranks):
            error = (flat(gradients).double() - expected).norm() / expected.norm()
            assert error < max_error, f"rank {rank}"


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def statistics_and_outside_terms(precision):
    """Train a network with BatchNorm and loss terms of its fp32 weights, which are computed outside of forward.

    The parameter `log_var` is used only in these terms.
    """
    net = nn.Sequential(network(), nn.BatchNorm1d(support.NUM_CLASSES))
    net.register_parameter("log_var", nn.Parameter(torch.zeros(())))
    samples = Numbered(dist.get_rank(), (27, 18, 20, 10))  # avoids batches of one sample
    loader = DataLoader(samples, batch_size=BATCH_SIZE)
    options = {"loss_scale": 1024} if precision == "16-true" else {}
    fabric, model, _, batches = set_up(net, loader, precision, **options)
    seen = []
    for _, features, targets in batches:
        before = toy.weights(net)
        penalty = net[0][0].weight.square().sum()
        loss = F.cross_entropy(model(features), targets)
        if batches.repeats_batch:
            loss = loss * float("nan")
        loss = (-net.log_var).exp() * loss + net.log_var
        fabric.backward(loss + penalty)
        after = toy.weights(net)
        statistics = before["1.running_mean"], after["1.running_mean"]
        gradient = flat([net[0][0].weight.grad, net.log_var.grad])
        seen.append((batches.repeats_batch, *statistics, gradient))
        net.zero_grad()
    return seen


@pytest.mark.parametrize("precision", ["32-true", "16-true"])
def test_a_repeated_batch_changes_no_statistics_and_no_gradient(four_ranks, precision):
    results = four_ranks.run(play, statistics_and_outside_terms, precision)
    for rank, seen in enumerate(results):
        for step, (is_repeated, _, after, gradient) in enumerate(seen):
            place = f"rank {rank}, step {step}"
            assert is_repeated == (step >= NUM_BATCHES[rank]), place
            # DDP broadcasts rank zero's statistics to all ranks before the forward pass.
            sent_by_rank_zero = results[0][step][1]
            assert torch.equal(after, sent_by_rank_zero) == is_repeated, place
            assert torch.isfinite(gradient).all(), place
            assert torch.equal(gradient, results[0][step][3]), place


def leaves_early_and_goes_on():
    net = network()
    fabric, model, optimizer, batches = set_up(net, support.loader())
    for index, _ in enumerate(batches):
        if index == 4:
            break
    assert not batches.repeats_batch
    features = torch.full((2, support.NUM_FEATURES), 1.0 + fabric.global_rank)
    fabric.backward(model(features).mean())
    plain = flat(support.copies(parameter.grad for parameter in net.parameters()))
    optimizer.zero_grad()
    steps = epoch_of(fabric, model, optimizer, batches)
    return plain, {"steps": steps, "weights": toy.weights(net)}


def test_a_loop_that_is_left_early_begins_again_and_other_backwards_are_plain_means(four_ranks):
    results = four_ranks.run(play, leaves_early_and_goes_on)
    check([result for _, result in results], FP32_ERROR)
    net = network()
    loss = 0.0
    for rank in range(4):
        loss = loss + net(torch.full((2, support.NUM_FEATURES), 1.0 + rank)).mean() / 4
    loss.backward()
    expected = flat(support.copies(parameter.grad for parameter in net.parameters()))
    for rank, (plain, _) in enumerate(results):
        assert torch.allclose(plain, expected, rtol=1e-5, atol=1e-7), f"rank {rank}"


# ---- resume --------------------------------------------------------------------------------------------------------


def of_rank(sizes, is_stream=False):
    samples = Numbered(dist.get_rank(), sizes)
    if is_stream:
        return DataLoader(Samples(samples), batch_size=BATCH_SIZE)
    generator = torch.Generator().manual_seed(5)
    return DataLoader(samples, batch_size=BATCH_SIZE, shuffle=True, generator=generator)


class Samples(torch.utils.data.IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return (self.samples[index] for index in range(len(self.samples)))


def whole_and_resumed(folder, train, precision, saved_steps):
    """Train two epochs of seven steps, and resume the rest of them from each checkpoint."""

    def paths(step):
        return f"{folder}/{step}.ckpt"

    net = network()
    fabric, model, optimizer, batches = set_up(net, train(), precision)
    state = {"model": model, "optimizer": optimizer, "loader": batches, "epoch": 0}
    whole = []
    for epoch in range(2):
        state["epoch"] = epoch

        def save(step):
            num_steps = 7 * state["epoch"] + step
            if num_steps in saved_steps:
                fabric.save(paths(num_steps), state)

        whole += epoch_of(fabric, model, optimizer, batches, after_step=save)
    final = toy.weights(net)

    differences = []
    for saved in saved_steps:
        net = network()
        fabric, model, optimizer, batches = set_up(net, train(), precision)
        state = {"model": model, "optimizer": optimizer, "loader": batches, "epoch": 0}
        fabric.load(paths(saved), state)
        rest = []
        num_done = saved // 7
        for _ in range(num_done, 2):
            rest += epoch_of(fabric, model, optimizer, batches)
        numbers = [step["numbers"] for step in rest]
        if numbers != [step["numbers"] for step in whole[saved:]]:
            differences.append(f"samples after step {saved}: {numbers}")
        if not toy.same_bits(toy.weights(net), final):
            differences.append(f"weights after step {saved}")
    return differences


# Three whole batches, after which another request would make a sampler draw again.
@pytest.mark.parametrize(
    ("sizes", "is_stream", "precision", "saved_steps"),
    [
        pytest.param((12, 27), False, "32-true", (2, 3, 5, 7, 12), id="first rank ends"),
        pytest.param((27, 12), False, "16-true", (3, 5, 11), id="fp16"),
        pytest.param((12, 27), True, "32-true", (3, 5, 12), id="stream"),
    ],
)
def test_a_loop_resumed_in_the_tail_of_an_epoch_has_the_bits_of_one_that_was_not_interrupted(
    two_ranks, tmp_path, sizes, is_stream, precision, saved_steps
):
    train = partial(of_rank, sizes, is_stream)
    results = two_ranks.run(play, whole_and_resumed, str(tmp_path), train, precision, saved_steps)
    for rank, differences in enumerate(results):
        assert differences == [], f"rank {rank}"


def save_in_the_tail(path):
    fabric, model, optimizer, batches = set_up(network(), of_rank((12, 27)))

    def save(step):
        if step == 5:
            fabric.save(path, {"loader": batches})

    epoch_of(fabric, model, optimizer, batches, after_step=save)


def error_of_loading(path):
    fabric, _, _, batches = set_up(network(), DataLoader(Numbered(0), batch_size=BATCH_SIZE))
    return toy.error_of(fabric.load, path, {"loader": batches})


def test_a_tail_is_not_resumed_on_another_number_of_ranks(two_ranks, one_rank, tmp_path):
    path = str(tmp_path / "5.ckpt")
    two_ranks.run(play, save_in_the_tail, path)
    (error,) = one_rank.run(play, error_of_loading, path)
    assert "because the loader of rank 0 had ended" in error
    assert "(=2, now 1) to finish the epoch" in error


# ---- errors --------------------------------------------------------------------------------------------------------


def error_of_two_loaders():
    fabric, _, _, batches = set_up(network(), support.loader())
    others = fabric.strategy.join_loader(support.loader())
    for _ in batches:
        return toy.error_of(next, iter(others))


def error_of_local_sums():
    fabric, model, _, batches = set_up(network(), support.loader(), "16-true")
    for _, features, targets in batches:
        with fabric.no_backward_sync(model):
            loss = F.cross_entropy(model(features), targets)
            return toy.error_of(fabric.backward, loss)


def error_of_a_gather():
    fabric, model, _, batches = set_up(network(), support.loader())
    for _, features, _ in batches:
        fabric.all_gather(features)  # of values without gradients
        return toy.error_of(fabric.all_gather, model(features), sync_grads=True)


def error_of_synced_statistics():
    net = nn.Sequential(network(), nn.SyncBatchNorm(support.NUM_CLASSES))
    return toy.error_of(set_up, net, support.loader())


def error_of_texts():
    *_, batches = set_up(network(), DataLoader(["a", "b"], batch_size=2))
    return toy.error_of(next, iter(batches))


def error_of_half_a_sample():
    fabric, *_ = set_up(network(), support.loader())
    batches = fabric.strategy.join_loader(support.loader(), count_samples=lambda batch: 0.5)
    return toy.error_of(next, iter(batches))


# Lightning gathers with a function that torch has deprecated.
of_lightning = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is")


CANNOT_WORK = {
    error_of_two_loaders: "A second training loader in a loop and `uneven_batches` (='join')",
    error_of_local_sums: "`fabric.no_backward_sync` with 16-true and `uneven_batches` (='join')",
    error_of_a_gather: "`fabric.all_gather(sync_grads=True)` and `uneven_batches` (='join')",
    error_of_synced_statistics: "`1` (=SyncBatchNorm) and `uneven_batches` (='join') cannot be",
    error_of_texts: "contains no tensor. Pass a function that returns the number",
    error_of_half_a_sample: "`count_samples(batch)` (=0.5) must be a whole number of samples",
}


@of_lightning
@pytest.mark.parametrize("case", CANNOT_WORK)
def test_what_cannot_work_is_refused_by_name(one_rank, case):
    (error,) = one_rank.run(play, case)
    assert CANNOT_WORK[case] in error
