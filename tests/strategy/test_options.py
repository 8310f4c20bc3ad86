"""Options as values, and the values that each option accepts."""

import pytest
import torch

from lightning_hybrid import (
    Comm,
    HybridAllReduceStrategy,
    HybridPipelineStrategy,
    LocalSteps,
    Mean,
    Report,
)
from lightning_hybrid.flavours import fabric
from lightning_hybrid.planning.model.cluster import Cluster

REFUSED = [
    (
        Mean,
        {"dtype": "int2"},
        r"`between_nodes.dtype` \(='int2'\) must be None or one of .*bf16, int8, int4\. Did you mean 'int8'\?$",
    ),
    (
        Mean,
        {"error_feedback": True},
        r"`between_nodes.error_feedback` \(=True\) needs a codec .* Set dtype='int8' or 'int4'",
    ),
    (
        Mean,
        {"dtype": "int8", "error_feedback": "nearest"},
        r"`between_nodes.error_feedback` \(='nearest'\) must be",
    ),
    (
        LocalSteps,
        {"every": 1},
        r"`between_nodes.every` \(=1\) must be a whole number of steps, 2 or more",
    ),
    (
        LocalSteps,
        {"every": 4, "from_step": -1},
        r"`between_nodes.from_step` \(=-1\) must be .* 0 or more",
    ),
    (
        LocalSteps,
        {"every": 4, "outer_lr": 0},
        r"`between_nodes.outer_lr` \(=0\) must be a number in \(0, inf\)",
    ),
    (
        LocalSteps,
        {"every": 4, "outer_momentum": 1},
        r"`between_nodes.outer_momentum` \(=1\) must be .* in \[0, 1\)",
    ),
    (
        LocalSteps,
        {"every": 4, "dtype": "fp16"},
        r"`between_nodes.dtype` \(='fp16'\) cannot be used for weight changes",
    ),
    (Comm, {"algorithm": "ring"}, r"`algorithm` \(='ring'\).* Set algorithm='auto'"),
    (
        Comm,
        {"plan": "no/such/plan.json"},
        r"`comm.plan` \(='no/such/plan.json'\) cannot be read as a plan",
    ),
    (
        Comm,
        {"plan": __file__},
        r"`comm.plan` \(=.*test_options.py'\) cannot be read as a plan",
    ),
    (
        Comm,
        {"plan": Cluster},
        r"`comm.plan` \(=Cluster\) is a class, .* Set comm=Comm\(plan=Cluster\(\.\.\.\)\)",
    ),
    (
        Comm,
        {"dtype": "int8"},
        r"`comm.dtype` \(='int8'\) must be None or one of .* between_nodes=Mean\(dtype='int8'\)",
    ),
    (
        Report,
        {"link_bytes_per_s": 0},
        r"`report.link_bytes_per_s` \(=0\) must be a number in \(0, inf\): it is the bandwidth",
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
        (
            {"comm": "flat"},
            r"`comm` \(='flat'\) must be a Comm object\. Did you mean comm=Comm\(algorithm='flat'\)\?",
        ),
        ({"comm": "fp16"}, r".* Did you mean comm=Comm\(dtype='fp16'\)\?"),
        ({"comm": 2**20}, r".* Did you mean comm=Comm\(bucket_bytes=1048576\)\?"),
        (
            {"comm": {"algorithm": "flat", "dtype": "fp16"}},
            r".* mean comm=Comm\(algorithm='flat', dtype='fp16'\)\?",
        ),
        ({"comm": Comm}, r"`comm` \(=Comm\) must be a Comm object\. Did you mean comm=Comm\(\)\?"),
        (
            {"comm": "ring"},
            r"`comm` \(='ring'\) must be a Comm object\. Set comm=Comm\(algorithm='flat'\), for example\.",
        ),
        (
            {"between_nodes": "adasum"},
            r".* must be a Mean, Adasum or LocalSteps object\. .* between_nodes=Adasum\(\)\?",
        ),
        (
            {"between_nodes": "local_steps"},
            r".* Did you mean between_nodes=LocalSteps\(every=8\)\?",
        ),
        ({"between_nodes": "int8"}, r".* Did you mean between_nodes=Mean\(dtype='int8'\)\?"),
        ({"between_nodes": 16}, r".* Did you mean between_nodes=LocalSteps\(every=16\)\?"),
        (
            {"report": "traces"},
            r".* must be a Report object\. Did you mean report=Report\(trace_dir='traces'\)\?",
        ),
    ],
)
def test_a_plain_value_in_place_of_an_object_is_answered_with_the_object_to_write(
    argument, message
):
    with pytest.raises(ValueError, match=f"^{message}"):
        HybridAllReduceStrategy(**argument)


def test_the_first_field_may_be_given_without_its_name():
    assert Mean("int8") == Mean(dtype="int8")
    assert LocalSteps(8) == LocalSteps(every=8)
    assert Comm("flat") == Comm(algorithm="flat")
    with pytest.raises(TypeError):
        Mean("int8", True)


def test_yaml_reads_off_as_a_boolean():
    for setting in ("cluster", True):
        with pytest.raises(
            ValueError, match=r"`shard_update` \(=.*\) must be one of 'off', 'node', 'world', False"
        ):
            HybridAllReduceStrategy(shard_update=setting)
    assert HybridAllReduceStrategy(shard_update=False)._options.shard_update == "off"


@pytest.mark.parametrize(
    "kind", [HybridAllReduceStrategy, HybridPipelineStrategy, fabric.HybridAllReduceStrategy]
)
def test_every_strategy_takes_the_same_values(kind):
    assert kind(comm=Comm(dtype="bf16"))._options.comm.on_wire is torch.bfloat16


def test_a_field_that_is_given_as_an_argument_is_refused_with_the_value_that_has_it():
    with pytest.raises(
        ValueError, match=r"`algorithm` .* is not an option .* mean `comm=Comm\(algorithm="
    ):
        HybridAllReduceStrategy(algorithm="flat")
