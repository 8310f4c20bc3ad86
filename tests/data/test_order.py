"""Order: every image once, in the same steps for any number of ranks, and from any step on under any other number."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_hybrid.data import EpochOrder, ResumableLoader
from lightning_hybrid.data.order import batch_size_per_rank, eval_shares

IMAGENET = 1_281_167


class Numbers(ResumableLoader):
    """Batches that are the images' own numbers, twice."""

    def _batches(self, epoch, shares):
        for share in shares:
            yield torch.from_numpy(share), torch.from_numpy(share)


def loader(*, ranks=1, rank=0, accumulate=1, num_images=103, global_batch_size=12, seed=3, **changes) -> Numbers:
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
    """A global batch, an image set, and two ways to share the batch among 1 to 4 ranks and 1 to 3 batches of each."""
    shares = [(draw(st.integers(1, 4)), draw(st.integers(1, 3))) for _ in range(2)]
    parts = np.lcm.reduce([ranks * accumulate for ranks, accumulate in shares])
    global_batch_size = int(parts) * draw(st.integers(1, 3))
    num_steps = draw(st.integers(1, 4))
    num_images = num_steps * global_batch_size + draw(st.integers(0, global_batch_size - 1))
    return shares, global_batch_size, num_images, num_steps


def steps_of(loaders, num_steps, accumulate) -> list[list[int]]:
    """The images of the next steps, in the order (batch of the step, rank): what one rank alone would read."""
    iterators = [iter(own) for own in loaders]
    steps = []
    for _ in range(num_steps):
        rounds = [[next(iterator)[1].tolist() for iterator in iterators] for _ in range(accumulate)]
        steps.append([image for own in rounds for batch in own for image in batch])
    return steps


@settings(deadline=None, max_examples=60)
@given(worlds(), st.integers(0, 5), st.integers(0, 2**31), st.data())
def test_any_ranks_continue_what_any_other_ranks_began(world, epoch, seed, data):
    """Stop after some steps of an epoch, resume with another number of ranks and batches: no image twice, none lost."""
    shares, global_batch_size, num_images, num_steps = world
    given = {"num_images": num_images, "global_batch_size": global_batch_size, "seed": seed}
    stop = data.draw(st.integers(0, num_steps))
    (ranks, accumulate), (other_ranks, other_accumulate) = shares

    first = [loader(ranks=ranks, rank=rank, accumulate=accumulate, **given) for rank in range(ranks)]
    for own in first:
        own.set_epoch(epoch)
    before = steps_of(first, stop, accumulate)
    states = [own.state_dict() for own in first]
    assert all(state == states[0] for state in states)
    assert json.loads(json.dumps(states[0])) == states[0]  # plain numbers, whatever reads the checkpoint

    second = [loader(ranks=other_ranks, rank=rank, accumulate=other_accumulate, **given) for rank in range(other_ranks)]
    for own in second:
        own.load_state_dict(states[0])
        own.set_epoch(epoch)  # as Lightning does after a resume
    after = steps_of(second, num_steps - stop, other_accumulate) if stop < num_steps else []

    expected = np.random.default_rng([seed, epoch, 0]).permutation(num_images)
    expected = expected[: num_steps * global_batch_size].reshape(num_steps, -1).tolist()
    assert before + after == expected
    assert [own.state_dict()["steps_done"] for own in second] == [num_steps] * other_ranks


@settings(deadline=None, max_examples=30)
@given(worlds(), st.data())
def test_a_step_under_way_continues_with_the_same_ranks(world, data):
    shares, global_batch_size, num_images, num_steps = world
    ranks, accumulate = shares[0]
    given = {
        "num_images": num_images,
        "global_batch_size": global_batch_size,
        "ranks": ranks,
        "accumulate": accumulate,
    }
    stop = data.draw(st.integers(0, num_steps * accumulate - 1))
    for rank in range(ranks):
        whole = [batch.tolist() for _, batch in loader(rank=rank, **given)]
        first = loader(rank=rank, **given)
        iterator = iter(first)
        before = [next(iterator)[1].tolist() for _ in range(stop)]
        second = loader(rank=rank, **given)
        second.load_state_dict(first.state_dict())
        assert before + [batch.tolist() for _, batch in second] == whole


def test_after_the_last_batch_comes_the_next_epoch():
    own = loader()
    first = [batch.tolist() for _, batch in own]
    second = [batch.tolist() for _, batch in own]
    assert (own.epoch, len(first), len(second)) == (1, 8, 8)
    read = [{image for batch in batches for image in batch} for batches in (first, second)]
    assert read[0] != read[1]  # 7 of 103 are left out, other ones each epoch
    later = loader()
    later.set_epoch(1)
    assert [batch.tolist() for _, batch in later] == second


def test_another_epoch_begins_at_its_start_and_the_same_one_goes_on():
    own, fresh = loader(), loader()
    iterator = iter(own)
    for _ in range(3):
        next(iterator)
    own.set_epoch(0)
    assert (own.epoch, own.batches_done) == (0, 3)
    own.set_epoch(2)
    fresh.set_epoch(2)
    assert [batch.tolist() for _, batch in own] == [batch.tolist() for _, batch in fresh]


@pytest.mark.parametrize(("ranks", "rank"), [(2, 2), (2, -1), (1, 1)])
def test_a_rank_that_is_not_there_is_refused(ranks, rank):
    with pytest.raises(ValueError, match=rf"^`rank` \(={rank}\) must be from 0 to `world_size - 1`"):
        loader(ranks=ranks, rank=rank)


@pytest.mark.parametrize("global_batch_size", [0, -12])
def test_a_batch_of_nothing_is_refused(global_batch_size):
    with pytest.raises(ValueError, match=r"whole number above zero\. Nearest that fit: global_batch_size=4\."):
        batch_size_per_rank(global_batch_size=global_batch_size, world_size=2, accumulate_grad_batches=2)


def test_more_ranks_than_images_to_evaluate_are_refused():
    with pytest.raises(ValueError, match=r"^`world_size` \(=4\) must be at most the number of images to evaluate"):
        eval_shares(num_images=3, world_size=4, rank=0, batch_size_per_rank=2)
    assert eval_shares(num_images=3, world_size=3, rank=2, batch_size_per_rank=2)[0].tolist() == [2]


@pytest.mark.parametrize(
    ("change", "name"),
    [({"seed": 4}, "seed"), ({"global_batch_size": 24}, "global_batch_size"), ({"num_images": 104}, "num_images")],
)
def test_a_state_of_another_order_is_refused(change, name):
    with pytest.raises(ValueError, match=rf"^`{name}` \(=.*must be that of the checkpoint.*Set "):
        loader(**change).load_state_dict(loader().state_dict())


@pytest.mark.parametrize(
    ("change", "name"), [({"accumulate": 3}, "accumulate_grad_batches"), ({"ranks": 3}, "world_size")]
)
def test_the_middle_of_a_step_is_refused_to_other_ranks_and_batches(change, name):
    own = loader(ranks=2, accumulate=2)
    iterator = iter(own)
    for _ in range(3):
        next(iterator)
    state = own.state_dict()
    assert (state["steps_done"], state["batches_done_of_step"]) == (1, 1)
    with pytest.raises(ValueError, match=rf"^`{name}` \(=3\).*middle of a step \(1 of 2 batches\)"):
        loader(**{"ranks": 2, "accumulate": 2} | change).load_state_dict(state)
    next(iterator)
    loader(**{"ranks": 2, "accumulate": 2} | change).load_state_dict(own.state_dict())


def test_without_a_trainer_only_the_epoch_after_the_resumed_place_may_follow():
    """Lightning asks for another where it counts an epoch twice, and images would be left out in silence."""
    own = loader()
    iterator = iter(own)
    for _ in range(3):
        next(iterator)
    states = [own.state_dict()]
    assert len(list(iterator)) == 5
    states.append(own.state_dict())
    resumed = [loader(), loader()]
    for each, state in zip(resumed, states, strict=True):
        each.load_state_dict(state)
        each.set_epoch(0)
        assert each.state_dict() == state
    with pytest.raises(
        RuntimeError, match=r"^`epoch` \(=1\) must follow .* 3 of 8 batches of epoch 0.*trainer=trainer"
    ):
        resumed[0].set_epoch(1)
    next(iter(resumed[0]))
    resumed[0].set_epoch(1)  # where its caller goes on is his own business
    resumed[1].set_epoch(1)
    with pytest.raises(RuntimeError, match=r"^`epoch` \(=2\) must follow .* 0 of 8 batches of epoch 1"):
        resumed[1].set_epoch(2)


def test_a_state_of_another_loader_is_refused():
    with pytest.raises(ValueError, match=r"^`\w+` must be in the checkpoint's state of the training loader"):
        loader().load_state_dict({"epoch": 1, "batches_done": 3})


@pytest.mark.clock
def test_an_epoch_of_imagenet_is_shuffled_in_a_blink():
    """0.02 to 0.07 s on a core of 2022; a list shuffled in Python takes over 0.5 s. Here: less than half of that."""
    part = list(range(IMAGENET // 10))
    start = time.thread_time()
    random.Random(0).shuffle(part)
    shuffled_s = 10 * (time.thread_time() - start)
    order = EpochOrder(num_images=IMAGENET, global_batch_size=65_536, seed=0, world_size=1024, rank=1023)
    times_s = []
    for epoch in range(3):
        start = time.thread_time()
        permutation = order.permutation(epoch)
        last = order.share(permutation, order.num_batches - 1)
        times_s.append(time.thread_time() - start)
    assert min(times_s) < shuffled_s / 2
    assert (order.num_steps, len(last)) == (19, 64)
    assert np.array_equal(np.sort(permutation), np.arange(IMAGENET))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 9))
@example(31, 3, 1)  # shares of 11, 10 and 10
@example(7, 2, 3)  # shares of 4 and 3
def test_evaluation_takes_every_image_once_in_equally_many_batches(num_images, ranks, batch_size_per_rank):
    ranks = min(ranks, num_images)
    own = [
        eval_shares(num_images=num_images, world_size=ranks, rank=rank, batch_size_per_rank=batch_size_per_rank)
        for rank in range(ranks)
    ]
    assert len({len(shares) for shares in own}) == 1
    has_one_each = len(own[0]) == num_images // ranks  # no further batch without one that is empty: then one more image
    assert all(1 <= len(share) <= batch_size_per_rank + has_one_each for shares in own for share in shares)
    assert sorted(image for shares in own for share in shares for image in share) == list(range(num_images))


def images_read(num_images, global_batch_size, accumulate):
    own = loader(
        ranks=dist.get_world_size(),
        rank=dist.get_rank(),
        accumulate=accumulate,
        num_images=num_images,
        global_batch_size=global_batch_size,
    )
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [batch.tolist() for _, batch in own])
    return gathered


def test_processes_that_know_only_their_own_rank_share_an_epoch(four_ranks, three_ranks):
    read = four_ranks.run(images_read, 100, 24, 2)[0]
    others = three_ranks.run(images_read, 100, 24, 1)[0]
    flat = [image for own in read for batch in own for image in batch]
    assert len(set(flat)) == len(flat) == 96
    for step in range(4):
        one = {image for own in read for batch in own[2 * step : 2 * step + 2] for image in batch}
        assert one == {image for own in others for image in own[step]}
