"""lightly's methods in Lightning, unchanged, under this strategy."""

import pytest

from tests.scenes import same

pytest.importorskip("lightly")
pytest.importorskip("torchvision")
pytestmark = [  # of theirs
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.* is deprecated"),
]

from tests.projects.methods import METHODS, NUM_STEPS, distance, runs_of  # noqa: E402


@pytest.fixture(scope="module", params=METHODS)
def method(request, rank_pool):
    return request.param, runs_of(rank_pool.ranks(2), request.param)


def test_in_fp32_a_method_has_the_bits_of_ddp(method):
    _, runs = method
    assert same(runs["hybrid"].weights, runs["ddp"].weights)
    assert runs["hybrid"].losses == runs["ddp"].losses
    assert len(runs["ddp"].losses) == NUM_STEPS


def test_in_fp16_a_method_ends_within_the_band_of_weights_changed_by_a_thousandth(method):
    """fp16 rounds weights by 2^-11 of each, in every step; two draws say little of a chaotic distance, hence 1.5."""
    name, runs = method
    band = max(distance(runs[f"shaken_{seed}"], runs, name) for seed in (1, 2))
    assert runs["fixed"].num_skipped == 0
    assert distance(runs["fixed"], runs, name) <= 1.5 * band


def test_a_method_loses_at_most_one_step_to_the_first_loss_scale(method):
    _, runs = method
    assert runs["dynamic"].num_skipped <= 1
