"""The benchmark measures what it says, on real ranks, and refuses what it cannot measure before it starts any."""

from __future__ import annotations

import pytest
import torch
from hydra.utils import instantiate
from torch import nn

from recipes.benchmarks.gradient_sets import GRADIENT_SETS, GradientSet, linear_8mib_shapes
from recipes.benchmarks.report import Timing, cells, markdown, write_bench
from recipes.cli import launch
from tests.recipes.composed import composed


def configured(*overrides):
    return composed("bench", "run_dir=/nowhere", *overrides)


def row(arm, *times_s, num_bytes=1000, num_nodes=2, **more):
    return Timing(section="step", case="x", arm=arm, num_bytes=num_bytes, num_nodes=num_nodes, times_s=times_s, **more)


MISTAKES = {
    "allreduce.dtypes=[int8]": r"`dtypes` \(=int8\) must be some of float32",
    "allreduce.min_bytes=0": r"`min_bytes`, `max_bytes`, `factor` \(=0, ",
    "allreduce.algorithms=[ring]": r"`algorithm` \(='ring'\)",
    "steps.gradients=[vgg]": r"`gradients` \(=vgg\) must be one of linear_8mib",
    "steps.arms=[ring]": r"`algorithm` \(='ring'\)",
    "steps.overlap=ddp": r"`overlap` \(=ddp\) must be a hybrid arm",
    "steps.num_warmup_steps=1": r"`num_warmup_steps` \(=1\) must be 2 or more",
    "steps.bucket_bytes=0": r"`bucket_bytes` \(=0\)",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_in_one_message_before_anything_is_launched(mistake, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit, match=r"^error: .*" + MISTAKES[mistake]), launch.short_errors():
        instantiate(configured(mistake)[mistake.split(".")[0]])


def test_a_backward_that_computes_cannot_wait_for_the_communication():
    with pytest.raises(Exception, match=r"`overlap` \(=auto\) must be null with `gradients`"):
        instantiate(configured("steps.gradients=[linear_8mib_arithmetic]", "steps.overlap=auto").steps)


def test_a_benchmark_can_be_left_out():
    cfg = configured("allreduce=null", "steps=null")
    assert cfg.allreduce is None
    assert cfg.steps is None


@pytest.mark.parametrize("name", GRADIENT_SETS)
def test_a_convolution_is_known_by_its_shape_and_a_weight_by_its_bias(name):
    """Torch's own layers make the same tensors."""
    for weight, bias in zip(GRADIENT_SETS[name](), GRADIENT_SETS[name]()[1:], strict=False):
        if len(weight) > 1 and len(bias) == 1:
            assert bias[0] == weight[0]


def test_gradients_are_ready_from_the_last_to_the_first_and_scale_with_the_loss():
    module = GradientSet(linear_8mib_shapes())
    module._noise = torch.arange(512.0 * 512)
    order = []
    for index, parameter in enumerate(module.layers):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: order.append(index))
    loss = module.training_step(torch.zeros(1), 0)
    assert loss.dtype == torch.float32
    (loss * 8).backward()
    assert order == list(range(16))[::-1]
    assert torch.equal(module.layers[2].grad, 8 * torch.arange(512.0 * 512).view(512, 512))


def test_a_set_with_arithmetic_is_a_network_of_linear_layers():
    """Its gradients are those of torch's own layers, for two rows."""
    module = GradientSet(linear_8mib_shapes(), has_arithmetic=True)
    module._noise = torch.arange(512.0 * 512).sin()
    net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    with torch.no_grad():
        for theirs, ours in zip(net.parameters(), module.layers, strict=True):
            theirs.copy_(ours)
    module.training_step(torch.zeros(1), 0).backward()
    (net(module._noise[:1024].view(2, 512)) - 1).square().mean().backward()
    for theirs, ours in zip(net.parameters(), module.layers, strict=True):
        assert torch.equal(ours.grad, theirs.grad)
        assert ours.grad.count_nonzero() > 0.9 * ours.numel()


def test_the_reference_of_a_case_is_its_first_row():
    rows = [row("ddp", 4.0), row("auto", 1.0, 2.0, 3.0, num_bytes=500)]
    assert [line[-2:] for line in cells(rows, 100.0)] == [["1.00", "0.400"], ["2.00", "0.400"]]
    assert [line[-1] for line in cells(rows, None)] == ["", ""]


def test_one_node_has_no_byte_bound():
    assert row("auto", 1.0, num_nodes=1).bound_s(100.0) is None


def test_the_report_says_what_was_hidden(tmp_path):
    times_s = (3.0, 1.0, 3.2, 3.0)  # 2 s of communication; 0.2 s remain next to a backward of 2 s
    rows = [Timing(section="overlap", case="x", arm="auto", num_bytes=1, num_nodes=2, times_s=(t,)) for t in times_s]
    assert "x, auto: 90.0% of 2000 ms hidden" in markdown(rows, None)
    write_bench(tmp_path, rows, link_bytes_per_s=None, config={}, title="t")
    assert ">overlap, x: 90% of the communication is" in (tmp_path / "bench.svg").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "table.csv", "table.md", "bench.svg"}
