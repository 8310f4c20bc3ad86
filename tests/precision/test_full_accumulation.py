"""Products add up in fp32 while it lasts, and the user's own flags are back afterwards. The flags need no GPU."""

import pytest
import torch

from lightning_hybrid.precision.full_accumulation import FullAccumulation

MATMUL, FLAGS = torch.backends.cuda.matmul, [f"allow_{one}_reduced_precision_reduction" for one in ("fp16", "bf16")]


def test_nothing_is_added_in_half_precision_and_the_users_choice_is_back_at_the_end(monkeypatch):
    chosen, full = [True, False], FullAccumulation()
    for flag, value in zip(FLAGS, chosen, strict=True):
        monkeypatch.setattr(MATMUL, flag, value)
    for change, expected in ((full.begin, [False, False]), (full.end, chosen)):
        change()
        change()
        assert [getattr(MATMUL, flag) for flag in FLAGS] == expected


def test_a_product_that_must_not_be_split_stays_so(monkeypatch):
    if not hasattr(MATMUL, f"{FLAGS[0]}_split_k"):
        pytest.skip("this torch knows no such choice")
    full, before = FullAccumulation(), getattr(MATMUL, FLAGS[0])
    monkeypatch.setattr(MATMUL, FLAGS[0], before)  # it is put back
    setattr(MATMUL, FLAGS[0], (False, False))
    full.begin()
    full.end()
    assert (getattr(MATMUL, FLAGS[0]), getattr(MATMUL, f"{FLAGS[0]}_split_k")) == (False, False)
