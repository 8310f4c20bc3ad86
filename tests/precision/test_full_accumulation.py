"""Context in which matrix products accumulate in fp32. The user's flags are restored afterwards. No GPU needed."""

import pytest
import torch

from lightning_hybrid.precision.full_accumulation import FullAccumulation

FLAGS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def flags():
    return tuple(getattr(torch.backends.cuda.matmul, flag) for flag in FLAGS)


@pytest.fixture(autouse=True)
def as_before():
    before = flags()
    yield
    for flag, value in zip(FLAGS, before, strict=True):
        setattr(torch.backends.cuda.matmul, flag, value)


def test_nothing_is_added_in_half_precision_and_the_users_choice_is_back_at_the_end():
    chosen = (True, False)
    full = FullAccumulation()
    for flag, value in zip(FLAGS, chosen, strict=True):
        setattr(torch.backends.cuda.matmul, flag, value)
    full.begin()
    full.begin()
    assert flags() == (False, False)
    full.end()
    full.end()
    assert flags() == chosen


def test_a_product_that_must_not_be_split_stays_so():
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, f"{FLAGS[0]}_split_k"):
        pytest.skip("this torch knows no such choice")
    full = FullAccumulation()
    setattr(matmul, FLAGS[0], (False, False))
    full.begin()
    full.end()
    assert (getattr(matmul, FLAGS[0]), getattr(matmul, f"{FLAGS[0]}_split_k")) == (False, False)
