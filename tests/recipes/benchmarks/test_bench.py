"""Benchmarks: measured quantities, and errors before any rank starts for what cannot be measured."""

from dataclasses import replace

import pytest
import torch
from hydra.utils import instantiate
from torch import nn

from recipes.bench import benches_of
from recipes.benchmarks.gradient_sets import GradientSet, linear_8mib_shapes
from recipes.benchmarks.report import HEADER, Timing, aligned, cells, markdown, write_bench
from recipes.cli import launch
from tests.recipes.composed import composed


def configured(*overrides):
    return composed("bench", "run_dir=/nowhere", *overrides)


MISTAKES = {
    "allreduce.dtypes=[int8]": r"`dtypes` \(=int8\) must contain only the dtypes float32",
    "steps.gradients=[vgg]": r"`gradients` \(=vgg\) must contain only these names: linear_8mib",
    "steps.overlap=ddp": r"`overlap` \(=ddp\) must be auto or the name of an all-reduce algorithm",
    "steps.num_warmup_steps=1": r"`num_warmup_steps` \(=1\) must be at least 2",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_in_one_message_before_anything_is_launched(mistake, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit, match=r"^error: .*" + MISTAKES[mistake]), launch.short_errors():
        instantiate(configured(mistake)[mistake.split(".")[0]])


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (
            ["steps=null"],
            r"`allreduce` \(=null\), `parts.gradients` \(=\[\]\) and `steps` \(=null\)",
        ),
        (["parts=null", "steps.gradients=[]"], r".*`steps.gradients` \(=\[\]\)"),
    ],
)
def test_a_bench_that_would_measure_nothing_is_refused(overrides, values):
    with pytest.raises(ValueError, match=rf"^{values} must not all be empty"):
        benches_of(configured("allreduce=null", *overrides))


@pytest.mark.parametrize(
    "overrides", [["steps=null"], ["allreduce=null", "steps=null", "parts.gradients=[resnet50]"]]
)
def test_one_section_is_enough_for_a_bench(overrides):
    kinds = {type(bench).__name__ for bench in benches_of(configured(*overrides))}
    assert kinds <= {"AllReduceBench", "PartsBench"}


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
    """Its gradients for two rows equal those of torch's layers."""
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


def test_the_report_says_what_was_hidden_and_compares_with_the_first_row_of_a_case(tmp_path):
    # 2 s of communication, of which 0.2 s remain after a backward of 2 s
    times_s = (3.0, 1.0, 3.2, 3.0)
    overlap = Timing(
        section="overlap", case="x", arm="auto", num_bytes=1, num_nodes=2, times_s=(0.0,)
    )
    rows = [replace(overlap, times_s=(time_s,)) for time_s in times_s]
    assert "x, auto: 90.0% of 2000 ms hidden" in markdown(rows, None)
    ddp = replace(overlap, section="step", arm="ddp", num_bytes=1000, times_s=(4.0,))
    auto = replace(ddp, arm="auto", num_bytes=500, times_s=(1.0, 2.0, 3.0))
    steps = [ddp, auto]
    assert [line[-2:] for line in cells(steps, 100.0)] == [["1.00", "0.400"], ["2.00", "0.400"]]
    header = aligned(HEADER)
    row = aligned(cells(steps, 100.0)[-1])
    assert "median ms" in header
    end_of_unit = header.index("median ms") + len("median ms")
    assert end_of_unit == row.index("2000") + len("2000"), "numbers below their unit"
    assert replace(steps[0], num_nodes=1).bound_s(100.0) is None  # one node has no byte bound
    write_bench(tmp_path, rows, link_bytes_per_s=None, config={}, title="t")
    assert ">overlap, x: 90% of the communication is" in (tmp_path / "bench.svg").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {
        "rows.jsonl",
        "table.csv",
        "table.md",
        "bench.svg",
    }
