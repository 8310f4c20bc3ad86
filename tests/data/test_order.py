"""Order of an epoch: every image once, in equal steps for any number of ranks, and resumed under any other."""

import json

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_hybrid.data import EpochOrder, ResumableLoader
from lightning_hybrid.data.order import batch_size_per_rank, eval_shares


class Numbers(ResumableLoader):
    def _batches(self, epoch, shares):
        for share in shares:
            yield torch.from_numpy(share), torch.from_numpy(share)


def loader(
    *, ranks=1, rank=0, accumulate=1, num_images=103, global_batch_size=12, seed=3, **changes
) -> Numbers:
    order = EpochOrder(
        num_images=num_images,
        global_batch_size=global_batch_size,
        seed=seed,
        world_size=ranks,
        rank=rank,
        accumulate_grad_batches=accumulate,
    )
    return Numbers(order, **changes)


@st.composite
def worlds(draw):
    """Draw two pairs of ranks and accumulation that divide a global batch, its size, and counts of images and steps."""
    shares = [(draw(st.integers(1, 4)), draw(st.integers(1, 3))) for _ in range(2)]
    batches_per_step = np.lcm.reduce([ranks * accumulate for ranks, accumulate in shares])
    global_batch_size = int(batches_per_step) * draw(st.integers(1, 3))
    num_steps = draw(st.integers(1, 4))
    num_images = num_steps * global_batch_size + draw(st.integers(0, global_batch_size - 1))
    return shares, global_batch_size, num_images, num_steps


def steps_of(loaders, num_steps, accumulate) -> list[list[int]]:
    """Return the images of the next steps by (batch of the step, rank), which is the order of a single rank."""
    iterators = [iter(loader) for loader in loaders]
    steps = []
    for _ in range(num_steps):
        images = []
        for _ in range(accumulate):
            for iterator in iterators:
                images += next(iterator)[1].tolist()
        steps.append(images)
    return steps


@settings(deadline=None, max_examples=60)
@given(worlds(), st.integers(0, 5), st.integers(0, 2**31), st.data())
def test_any_ranks_continue_what_any_other_ranks_began(world, epoch, seed, data):
    """Stopping and resuming with other ranks and batches neither repeats nor loses an image."""
    shares, global_batch_size, num_images, num_steps = world
    sizes = {"num_images": num_images, "global_batch_size": global_batch_size, "seed": seed}
    stop = data.draw(st.integers(0, num_steps))
    ranks, accumulate = shares[0]
    resumed_ranks, resumed_accumulate = shares[1]

    loaders = [
        loader(ranks=ranks, rank=rank, accumulate=accumulate, **sizes) for rank in range(ranks)
    ]
    for reader in loaders:
        reader.set_epoch(epoch)
    before = steps_of(loaders, stop, accumulate)
    states = [reader.state_dict() for reader in loaders]
    assert all(state == states[0] for state in states)
    # Plain numbers, which any reader of the checkpoint can load.
    assert json.loads(json.dumps(states[0])) == states[0]

    resumed = [
        loader(ranks=resumed_ranks, rank=rank, accumulate=resumed_accumulate, **sizes)
        for rank in range(resumed_ranks)
    ]
    for reader in resumed:
        reader.load_state_dict(states[0])
        reader.set_epoch(epoch)  # as Lightning does after a resume
    after = []
    if stop < num_steps:
        after = steps_of(resumed, num_steps - stop, resumed_accumulate)

    expected = np.random.default_rng([seed, epoch, 0]).permutation(num_images)
    expected = expected[: num_steps * global_batch_size].reshape(num_steps, -1).tolist()
    assert before + after == expected
    assert [reader.state_dict()["steps_done"] for reader in resumed] == [num_steps] * resumed_ranks


def eval_share(world_size):
    return eval_shares(num_images=3, rank=2, batch_size_per_rank=2, world_size=world_size)


def batch_of_two_ranks(global_batch_size):
    return batch_size_per_rank(
        global_batch_size=global_batch_size, world_size=2, accumulate_grad_batches=2
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: loader(ranks=2, rank=2), r"^`rank` \(=2\) must be from 0 to `world_size - 1`"),
        (
            lambda: batch_of_two_ranks(0),
            r"needs a positive whole number of images, not 0\.00\. Set global_batch_size=4\.",
        ),
        (
            lambda: eval_share(world_size=4),
            r"^`world_size` \(=4\) must be at most the number of images to evaluate",
        ),
        (
            lambda: resumed_from({"seed": 4}),
            r"^`seed` \(=.*must equal the value in the checkpoint.*Set ",
        ),
        (lambda: resumed_from({"global_batch_size": 24}), r"^`global_batch_size` \(="),
        (lambda: resumed_from({"num_images": 104}), r"^`num_images` \(="),
        (
            lambda: loader().load_state_dict({"epoch": 1, "batches_done": 3}),
            r"^`\w+` was not found in the checkpoint's state",
        ),
    ],
)
def test_loaders_and_states_that_cannot_be_read_in_order_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert eval_share(world_size=3)[0].tolist() == [2]


def resumed_from(change):
    loader(**change).load_state_dict(loader().state_dict())


@pytest.mark.parametrize(
    ("change", "name"),
    [({"accumulate": 3}, "accumulate_grad_batches"), ({"ranks": 3}, "world_size")],
)
def test_the_middle_of_a_step_is_refused_to_other_ranks_and_batches(change, name):
    stopped = loader(ranks=2, accumulate=2)
    changed = {"ranks": 2, "accumulate": 2} | change
    iterator = iter(stopped)
    for _ in range(3):
        next(iterator)
    state = stopped.state_dict()
    assert (state["steps_done"], state["batches_done_of_step"]) == (1, 1)
    with pytest.raises(ValueError, match=rf"^`{name}` \(=3\).*middle of a step \(1 of 2 batches\)"):
        loader(**changed).load_state_dict(state)
    next(iterator)
    loader(**changed).load_state_dict(stopped.state_dict())


def test_without_a_trainer_only_the_epoch_after_the_resumed_one_may_follow():
    """If Lightning counts an epoch twice it requests another epoch, and images would silently be skipped."""
    first = loader()
    iterator = iter(first)
    for _ in range(3):
        next(iterator)
    within = first.state_dict()
    assert len(list(iterator)) == 5
    at_the_end = first.state_dict()
    resumed_within = loader()
    resumed_at_the_end = loader()
    for resumed, state in ((resumed_within, within), (resumed_at_the_end, at_the_end)):
        resumed.load_state_dict(state)
        resumed.set_epoch(0)
        assert resumed.state_dict() == state

    with pytest.raises(
        RuntimeError,
        match=r"^`epoch` \(=1\) must match .*batch 3 of 8 in epoch 0.*trainer=trainer",
    ):
        resumed_within.set_epoch(1)
    next(iter(resumed_within))
    resumed_within.set_epoch(1)  # after its first read, the caller may continue with any epoch

    resumed_at_the_end.set_epoch(1)
    with pytest.raises(RuntimeError, match=r"^`epoch` \(=2\) must match .*batch 0 of 8 in epoch 1"):
        resumed_at_the_end.set_epoch(2)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 9))
@example(31, 3, 1)  # shares of 11, 10 and 10
@example(7, 2, 3)  # shares of 4 and 3
def test_evaluation_takes_every_image_once_in_equally_many_batches(
    num_images, ranks, batch_size_per_rank
):
    ranks = min(ranks, num_images)
    batches_of_ranks = [
        eval_shares(
            num_images=num_images,
            world_size=ranks,
            rank=rank,
            batch_size_per_rank=batch_size_per_rank,
        )
        for rank in range(ranks)
    ]
    assert len({len(batches) for batches in batches_of_ranks}) == 1
    largest = batch_size_per_rank
    if len(batches_of_ranks[0]) == num_images // ranks:
        # One more batch would be empty on some rank, so a batch may have one more image.
        largest += 1
    images = []
    for batches in batches_of_ranks:
        for batch in batches:
            assert 1 <= len(batch) <= largest
            images += batch.tolist()
    assert sorted(images) == list(range(num_images))
