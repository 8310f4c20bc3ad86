"""Values from configuration tools, such as Hydra's lists and numbers as text."""

import math

import pytest
import torch
from torch import nn

from lightning_hybrid import HybridAllReduceStrategy, LocalSteps
from lightning_hybrid.flavours import fabric

pytest.importorskip("hydra", reason="Hydra hands over the values")

from hydra.utils import instantiate
from omegaconf import OmegaConf

PACKAGE = "lightning_hybrid"

# Class, arguments as text and lists, and the resulting attributes, which are plain numbers and tuples.
CASES = [
    ("Comm", {"bucket_bytes": "1048576"}, {"bucket_bytes": 1048576}),
    (
        "LocalSteps",
        {"every": "8", "from_step": "2", "outer_lr": "0.7", "outer_momentum": "0.9"},
        {"every": 8, "from_step": 2, "outer_lr": 0.7, "outer_momentum": 0.9},
    ),
    (
        "Report",
        {"link_bytes_per_s": "1.25e8", "trace_dir": "2026"},
        {"link_bytes_per_s": 1.25e8, "trace_dir": "2026"},
    ),
    ("StaticLossScale", {"loss_scale": "1024"}, {"value": 1024.0}),
    (
        "DynamicLossScale",
        {"init_scale": "256", "growth_interval": "100", "max_scale": "65536.0", "hysteresis": "2"},
        {"value": 256.0, "growth_interval": 100, "max_scale": 65536.0, "hysteresis": 2},
    ),
    (
        "MasterWeightPrecision",
        {"precision": "16-true", "loss_scale": "1024"},
        {"loss_scale.value": 1024.0},
    ),
    ("DurableCheckpointIO", {"max_in_memory": "3", "timeout_s": "60"}, {"timeout_s": 60}),
    (
        "HybridAllReduceStrategy",
        {"loss_scale": "1024", "ranks_per_node": "2", "timeout": "60", "bucket_cap_mb": "5"},
        {
            "_options.ranks_per_node": 2,
            "_options.plan.bucket_bytes": 5 * 2**20,
            "_timeout.seconds": 60,
        },
    ),
    (
        "HybridPipelineStrategy",
        {"num_stages": "3", "num_microbatches": "12", "cuts": [1, "2"]},
        {"num_stages": 3, "num_microbatches": 12, "cuts": (1, 2)},
    ),
    (
        "comm.CommPlan",
        {"bucket_bytes": "1048576", "num_buckets": "4", "chunk_bytes": "4096"},
        {"num_buckets": 4},
    ),
    (
        "pipeline.cuts.BlockProfile",
        {"seconds": ["1", 2.5], "held_bytes": [1, 2], "most_bytes": "1e9"},
        {"seconds": (1, 2.5), "held_bytes": (1, 2), "most_bytes": 1e9},
    ),
    (
        "data.EpochOrder",
        {"num_images": "10", "global_batch_size": "4", "seed": "0"},
        {"num_steps": 2},
    ),
    (
        "contrastive.InfoNCE",
        {"temperature": "0.2", "block": "64"},
        {"temperature": 0.2, "block": 64},
    ),
    ("contrastive.SigLIP", {"block": "64"}, {"block": 64}),
    (
        "contrastive.BarlowTwins",
        {"off_diagonal": "5e-3", "eps": "1e-5"},
        {"off_diagonal": 5e-3, "eps": 1e-5},
    ),
    (
        "contrastive.GlobalBatch",
        {"loss": {"_target_": "lightning_hybrid.contrastive.SigLIP"}, "chunk": "32"},
        {"chunk": 32},
    ),
    ("callbacks.HalfPrecisionReport", {"num_batches": "3"}, {}),
    (
        "callbacks.MasterWeightAveraging",
        {"decay": "0.99", "update_every_n_steps": "2"},
        {"update_every_n_steps": 2},
    ),
    ("callbacks.NumericsMonitor", {"patience": "5"}, {"patience": 5}),
    ("callbacks.RecalibrateBatchNorm", {"num_images": "64"}, {"num_images": 64}),
    ("callbacks.ReplicaCheck", {"every_n_steps": "10"}, {"every_n_steps": 10}),
    (
        "callbacks.StopOnSignal",
        {"signals": ["SIGTERM"], "every_n_steps": "10"},
        {"every_n_steps": 10},
    ),
    (
        "callbacks.StragglerMonitor",
        {"every_n_steps": "10", "min_share": "0.2", "num_windows": "3"},
        {"every_n_steps": 10, "min_share": 0.2, "num_windows": 3},
    ),
    ("callbacks.TimeToAccuracy", {"target": "0.75"}, {"target": 0.75}),
    (
        "callbacks.TrainingMetrics",
        {"skip_steps": "3", "flops_per_image": "1e9", "peak_flops_per_s": "1e12"},
        {"skip_steps": 3, "flops_per_image": 1e9, "peak_flops_per_s": 1e12},
    ),
]


def attribute(instance, path):
    for name in path.split("."):
        instance = getattr(instance, name)
    return instance


@pytest.mark.parametrize(
    ("name", "arguments", "attributes"), CASES, ids=[name for name, _, _ in CASES]
)
def test_hydra_builds_every_public_class_from_lists_and_text(name, arguments, attributes):
    instance = instantiate(OmegaConf.create({"_target_": f"{PACKAGE}.{name}", **arguments}))
    for path, value in attributes.items():
        assert attribute(instance, path) == value
        assert type(attribute(instance, path)) is type(value), path


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        (
            "LARS",
            {"lr": "1e-1", "momentum": "0.9", "trust_clip": "1"},
            {"lr": 0.1, "momentum": 0.9, "trust_clip": 1},
        ),
        (
            "LAMB",
            {
                "lr": "1e-3",
                "betas": [0.9, "0.99"],
                "weight_norm_bounds": [0.0, 10.0],
                "max_grad_norm": "1.0",
            },
            {
                "lr": 0.001,
                "betas": (0.9, 0.99),
                "weight_norm_bounds": (0.0, 10.0),
                "max_grad_norm": 1.0,
            },
        ),
    ],
)
def test_hydra_builds_an_optimizer_and_a_group_from_lists_and_text(name, arguments, options):
    config = OmegaConf.create(
        {"_target_": f"{PACKAGE}.optim.{name}", "_partial_": True, **arguments}
    )
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = instantiate(config)([weight])
    group = {key: value for key, value in OmegaConf.create(arguments).items() if key != "lr"}
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **group})
    for of_group in optimizer.param_groups:
        assert options.items() <= of_group.items()
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.isfinite(weight).all()


def test_hydra_builds_the_schedule_from_text():
    schedule = {
        "_target_": f"{PACKAGE}.optim.WarmupPolynomialDecay",
        "_partial_": True,
        "power": "2",
        "end_lr": "1e-4",
    }
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    built = instantiate(OmegaConf.create(schedule))(optimizer, total_steps="10", warmup_steps="2")
    assert (built.total_steps, built.warmup_steps, built.power, built.end_lr) == (10, 2, 2, 1e-4)


@pytest.mark.parametrize("kind", [HybridAllReduceStrategy, fabric.HybridAllReduceStrategy])
def test_a_loss_scale_as_text_is_the_number(kind):
    strategy = kind(loss_scale="1024")
    assert strategy._options.loss_scale.value == 1024.0
    with pytest.raises(ValueError, match=r"^`loss_scale` \(=1000.0\) must be a power of two"):
        kind(loss_scale="1000")


@pytest.mark.parametrize("value", ["fast", "", "0x10", "1,5"])
def test_other_text_is_refused_by_its_name(value):
    with pytest.raises(
        ValueError, match=rf"^`between_nodes.every` \(='{value}'\) must be a whole number"
    ):
        LocalSteps(every=value)


def test_text_that_is_no_finite_number_is_refused():
    for text in ("nan", "inf", str(-math.inf)):
        with pytest.raises(ValueError, match=r"^`between_nodes.outer_lr` \(=(nan|-?inf)\)"):
            LocalSteps(every=2, outer_lr=text)
