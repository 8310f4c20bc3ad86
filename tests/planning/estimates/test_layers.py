"""Layers of a network, and the distribution of a step's arithmetic over them."""

import pytest

from lightning_hybrid.planning.estimates.layers import Layer, work_of


def layers(*rows: tuple[tuple[int, ...], int]) -> list[Layer]:
    return [
        Layer(name=str(index), numels=numels, forward_flops=flops)
        for index, (numels, flops) in enumerate(rows)
    ]


@pytest.mark.parametrize("tied_index", [0, 1, 2])
def test_a_layer_with_tied_weights_only_keeps_its_time(tied_index):
    """A head that shares the embedding's weight has no tensor of its own, but takes time in backward."""
    rows = [((100,), 10), ((200, 20), 30), ((300,), 60)]
    rows[tied_index] = ((), rows[tied_index][1])

    work = work_of(layers(*rows), batch_size=32, images_per_s=16.0)

    assert work.alone_s == pytest.approx(2.0)


def test_the_time_of_a_tied_head_delays_the_next_gradient():
    work = work_of(layers(((100,), 40), ((), 60)), batch_size=1, images_per_s=1.0)

    assert work.gradients == ((100, pytest.approx(2 / 3)),)
