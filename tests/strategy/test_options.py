"""Options as values: what each accepts, and what keywords of 0.2 become."""

import pytest
import torch

import lightning_hybrid
from lightning_hybrid import Adasum, Comm, HybridAllReduceStrategy, HybridPipelineStrategy, LocalSteps, Mean, Report
from lightning_hybrid.comm import CommPlan
from lightning_hybrid.flavours import fabric

REFUSED = [
    (Mean, {"dtype": "int2"}, r"`between_nodes.dtype` \(='int2'\) must be None or one of .*bf16, int8, int4\.$"),
    (
        Mean,
        {"error_feedback": True},
        r"`between_nodes.error_feedback` \(=True\) needs a codec .* Write dtype='int8' or 'int4'",
    ),
    (Mean, {"dtype": "int8", "error_feedback": "nearest"}, r"`between_nodes.error_feedback` \(='nearest'\) must be"),
    (LocalSteps, {"every": 1}, r"`between_nodes.every` \(=1\) must be a whole number of steps, 2 or more"),
    (LocalSteps, {"every": 4, "from_step": -1}, r"`between_nodes.from_step` \(=-1\) must be .* 0 or more"),
    (LocalSteps, {"every": 4, "outer_lr": 0}, r"`between_nodes.outer_lr` \(=0\) must be a number in \(0, inf\)"),
    (LocalSteps, {"every": 4, "outer_momentum": 1}, r"`between_nodes.outer_momentum` \(=1\) must be .* in \[0, 1\)"),
    (LocalSteps, {"every": 4, "dtype": "fp16"}, r"`between_nodes.dtype` \(='fp16'\) cannot carry what weights have"),
    (Comm, {"algorithm": "ring"}, r"`algorithm` \(='ring'\).* Write algorithm='auto'"),
    (Comm, {"plan": "no/such/plan.json"}, r"`comm.plan` \(='no/such/plan.json'\) must be the path of a plan"),
    (Comm, {"plan": __file__}, r"`comm.plan` \(=.*test_options.py'\) must be the path of a plan"),
    (Comm, {"dtype": "int8"}, r"`comm.dtype` \(='int8'\) must be None or one of .* between_nodes=Mean\(dtype='int8'\)"),
    (Comm, {"tune": "yes"}, r"`comm.tune` \(='yes'\) must be one of 'auto', 'on', 'off', True, False"),
    (
        Report,
        {"link_bytes_per_s": 0},
        r"`report.link_bytes_per_s` \(=0\) must be a number in \(0, inf\): it is the bytes",
    ),
    (Report, {"trace_dir": 5}, r"`report.trace_dir` \(=5\) must be the path of a folder, or None"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED)
def test_a_value_that_cannot_work_is_refused_where_it_is_made(kind, fields, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(**fields)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"comm": "flat"}, r"`comm` \(='flat'\) must be a Comm object\. Did you mean comm=Comm\(algorithm='flat'\)\?"),
        ({"comm": "fp16"}, r".* Did you mean comm=Comm\(dtype='fp16'\)\?"),
        ({"comm": "off"}, r".* Did you mean comm=Comm\(tune='off'\)\?"),
        ({"comm": 2**20}, r".* Did you mean comm=Comm\(bucket_bytes=1048576\)\?"),
        ({"comm": {"algorithm": "flat", "tune": "off"}}, r".* mean comm=Comm\(algorithm='flat', tune='off'\)\?"),
        ({"comm": Comm}, r"`comm` \(=Comm\) must be a Comm object\. Did you mean comm=Comm\(\)\?"),
        (
            {"comm": "ring"},
            r"`comm` \(='ring'\) must be a Comm object\. Write for example comm=Comm\(algorithm='flat'\)\.",
        ),
        (
            {"between_nodes": "adasum"},
            r".* must be a Mean, Adasum or LocalSteps object\. .* between_nodes=Adasum\(\)\?",
        ),
        ({"between_nodes": "local_steps"}, r".* Did you mean between_nodes=LocalSteps\(every=8\)\?"),
        ({"between_nodes": "int8"}, r".* Did you mean between_nodes=Mean\(dtype='int8'\)\?"),
        ({"between_nodes": 16}, r".* Did you mean between_nodes=LocalSteps\(every=16\)\?"),
        ({"report": "traces"}, r".* must be a Report object\. Did you mean report=Report\(trace_dir='traces'\)\?"),
    ],
)
def test_a_plain_value_in_place_of_an_object_is_answered_with_the_object_to_write(argument, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        HybridAllReduceStrategy(**argument)


def test_the_first_field_may_be_given_without_its_name():
    assert Mean("int8") == Mean(dtype="int8")
    assert LocalSteps(8) == LocalSteps(every=8)
    assert Comm("flat") == Comm(algorithm="flat")
    with pytest.raises(TypeError):
        Mean("int8", True)


def test_yaml_reads_on_and_off_as_booleans():
    for setting in ("cluster", True):
        with pytest.raises(ValueError, match=r"`shard_update` \(=.*\) must be one of 'off', 'node', 'world', False"):
            HybridAllReduceStrategy(shard_update=setting)
    strategy = HybridAllReduceStrategy(comm=Comm(tune=True), shard_update=False)
    assert (strategy._comm.tune, strategy._comm.shard_update) == ("on", "off")


PLAN = CommPlan(algorithm="flat")
STEPS = LocalSteps(every=8, from_step=2, dtype="int8", outer_lr=0.7, outer_momentum=0.9)
OLD = [
    ({"algorithm": "flat", "bucket_bytes": 2**20}, {"comm": Comm(algorithm="flat", bucket_bytes=2**20)}),
    ({"plan": PLAN, "tune": "off", "comm_dtype": "fp16"}, {"comm": Comm(plan=PLAN, tune="off", dtype="fp16")}),
    ({"trace_dir": "a", "link_bytes_per_s": 1e9}, {"report": Report(trace_dir="a", link_bytes_per_s=1e9)}),
    (
        {"comm_dtype_across_nodes": "int8", "error_feedback": True},
        {"between_nodes": Mean(dtype="int8", error_feedback=True)},
    ),
    ({"reduction": "adasum"}, {"between_nodes": Adasum()}),
    (
        {
            "sync_across_nodes_every": 8,
            "sync_across_nodes_from_step": 2,
            "comm_dtype_across_nodes": "int8",
            "outer_step": {"lr": 0.7, "momentum": 0.9},
        },
        {"between_nodes": STEPS},
    ),
    # As files of 0.2 have it in full.
    (
        {"reduction": "mean", "error_feedback": False, "sync_across_nodes_every": 1, "sync_across_nodes_from_step": 0},
        {},
    ),
    ({"tune_cache_dir": "cache"}, {}),
]


def state_of(strategy):
    return {name: text for name, value in vars(strategy).items() if " object at 0x" not in (text := str(value))}


@pytest.mark.parametrize(("old", "new"), OLD)
def test_a_keyword_of_the_last_release_is_its_value_and_warns_with_the_line_to_write(old, new):
    with pytest.warns(FutureWarning, match="gone with the next release") as caught:
        strategy = HybridAllReduceStrategy(**old, ranks_per_node=1)
    text = str(caught[0].message)
    assert caught[0].filename == __file__
    assert all(f"`{name}` (=" in text for name in old)
    assert state_of(strategy) == state_of(HybridAllReduceStrategy(**new, ranks_per_node=1))
    if new:
        line = text.partition("Write ")[2].partition(", with classes")[0]
        names = {name: getattr(lightning_hybrid, name) for name in lightning_hybrid.__all__}
        assert eval(f"dict({line})", {**names, "CommPlan": CommPlan}) == new  # as it is pasted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tune": "off", "comm": Comm(algorithm="flat")}, r"^`tune` \(='off'\) and `comm` \(=Comm\("),
        ({"reduction": "adasum", "between_nodes": STEPS}, r"^`reduction` \(='adasum'\) and `between_nodes` \(=Loc"),
        ({"reduction": "sum"}, r"^`reduction` \(='sum'\) must be one of 'mean', 'adasum'"),
        ({"reduction": "adasum", "comm_dtype_across_nodes": "int8"}, r"^`comm_dtype_across_nodes` .* with Adasum"),
        ({"sync_across_nodes_every": 4, "error_feedback": True}, r"^`error_feedback` .* no effect with LocalSteps"),
        ({"sync_across_nodes_from_step": 3}, r"^`sync_across_nodes_from_step` \(=3\) has no effect with Mean"),
        ({"sync_across_nodes_every": 4, "outer_step": {"rate": 1}}, r"^`outer_step` \(=.*\) must be a mapping"),
    ],
)
def test_a_keyword_of_the_last_release_that_contradicts_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        HybridAllReduceStrategy(**options)


def test_fabric_and_the_pipeline_take_the_same_values_and_keywords():
    for kind in (fabric.HybridAllReduceStrategy, HybridPipelineStrategy):
        with pytest.warns(FutureWarning, match=r"Write comm=Comm\(dtype='bf16'\), with"):
            old = kind(comm_dtype="bf16")
        assert old._comm._comm_dtype is kind(comm=Comm(dtype=torch.bfloat16))._comm._comm_dtype is torch.bfloat16
    assert HybridPipelineStrategy()._comm.tune == "off"
