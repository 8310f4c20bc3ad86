"""What is measured is written so that the simulator and the strategy take it, and what cannot be is refused in time."""

import json
import os
from dataclasses import asdict, replace

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_hybrid import Comm
from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.comm.topology import Topology
from lightning_hybrid.planning.cluster import Cluster
from lightning_hybrid.planning.cost import Link
from lightning_hybrid.planning.cost_nccl import Nccl
from lightning_hybrid.planning.workload import StepWorkload
from recipes.cli import launch
from recipes.planning import tune_setup
from recipes.planning.calibration.microbenchmarks import Measurement
from recipes.planning.tune_report import TuneReport
from tests.checkout import ROOT
from tests.recipes.composed import composed
from tests.recipes.planning.calibration.planted_links import gloo_cluster, planted, world_of

WORK = StepWorkload(forward_s=0.0, gradients=((MIB, 0.01),) * 4)

launch.register_resolvers()


def configured(*overrides):
    return composed("tune", "run_dir=/nowhere", *overrides)


def report(cluster, *overrides, **more):
    world = world_of(cluster, **more)
    samples = planted(cluster, world, backend="nccl" if world.on_cuda else "gloo_ring")
    return TuneReport.of(samples, world, WORK, CommPlan(), configured(*overrides), network="a net")


def on_gpus():
    near, far = Link(latency_s=0.0, bytes_per_s=2e11), Link(latency_s=5e-6, bytes_per_s=2.5e10)
    return Cluster(num_nodes=2, ranks_per_node=4, inside=near, across=far, transport=Nccl(inside="nvlink"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gloo", "nccl"])
def test_the_simulator_reads_the_description_by_its_name(tmp_path, kind):
    cluster, more = (gloo_cluster(2, 2), {}) if kind == "gloo" else (on_gpus(), {"on_cuda": True})
    found = report(cluster, "name=ours", **more)
    found.write(tmp_path, {})
    searched = f"hydra.searchpath=[file://{tmp_path}]"
    cfg = composed("simulate", searched, "cluster=ours", "num_nodes=16", "run_dir=/nowhere")
    read = instantiate(cfg.cluster.links)
    expected = replace(found.found.cluster, num_nodes=16)
    for name in ("across", "inside", "transport"):  # equal but for the six digits that a description has
        one, other = (json.loads(json.dumps(asdict(getattr(each, name)))) for each in (read, expected))
        for key, value in one.items():
            assert value == (pytest.approx(other[key], rel=1e-5) if isinstance(value, float) else other[key]), key
    assert (read.num_nodes, read.ranks_per_node, read.measured_nodes) == (16, expected.ranks_per_node, 2)
    assert read.curves == expected.curves
    assert cfg.cluster.on_cuda == (kind == "nccl")
    shipped = OmegaConf.load(ROOT / "conf" / "cluster" / f"{'netlab' if kind == 'gloo' else 'p40_roce'}.yaml")
    assert set(cfg.cluster) >= set(shipped)


@pytest.fixture(scope="module")
def found():
    """At 100 Mbit/s and 5 ms, of a step of which little is hidden."""
    return report(gloo_cluster(2, 2, mbit_per_s=100.0, latency_s=5e-3))


def test_the_strategy_takes_the_plan_and_the_summary_says_why(found, tmp_path):
    found.write(tmp_path, {"asked": 1})
    plan = Comm(plan=str(tmp_path / "plan.json")).made_plan()
    assert plan == found.plans[0].plan
    assert plan != CommPlan()
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["plan"] == asdict(plan)
    assert content["config"] == {"asked": 1}
    assert [one["step_s"] for one in content["plans"]] == [one.step_s for one in found.plans]
    assert content["calibration"]["links"]["across"]["latency_interval_s"][0] > 0
    assert "Sums: predicted " in (tmp_path / "tune.svg").read_text()
    table = (tmp_path / "table.md").read_text()
    assert "| between nodes |" in table
    assert "(the library's own)" in table
    assert content["cluster"] == json.loads(json.dumps(asdict(found.found.cluster)))


def test_a_codec_is_proposed_in_the_report_and_taken_by_nobody(found, tmp_path):
    """The plan is the one without, and knows no codec. From the file that is written the same is fitted again."""
    found.write(tmp_path, {})
    content = json.loads((tmp_path / "summary.json").read_text())["compression"]
    assert (content["proposal"], content["codec_is_measured"]) == ("int4", True)
    assert [step["name"] for step in content["steps"]] == [None, "int8", "int4"]
    assert content["steps"][0]["step_s"] == pytest.approx(found.plans[0].step_s)
    table = (tmp_path / "table.md").read_text()
    assert "so they are never on by themselves: strategy.between_nodes.dtype=int4." in table
    assert "GB/s of float32 that a core encodes and decodes: int8 3.8" in table
    assert "int" not in (tmp_path / "plan.json").read_text()
    assert "comm_dtype" not in found.usage(tmp_path)
    samples, world = tune_setup.read_measurements(str(tmp_path / "summary.json"))
    assert (samples, world) == (found.samples, found.world)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"`samples` \(=.*other.json\) must be the summary.json"):
        tune_setup.read_measurements(str(tmp_path / "other.json"))


def test_a_description_of_one_node_says_that_it_is_of_one(tmp_path):
    found = report(gloo_cluster(1, 4))
    assert found.compression is None
    assert "Fewer bits" not in found.markdown()
    assert "num_nodes: 1 #" in found.description()
    assert found.about.endswith("one node only")
    assert "links between nodes were not measured" in found.markdown()


class Unconnected:
    """A launcher whose ranks do not find each other."""

    world_size = 4

    def launch(self):
        raise RuntimeError("Unable to find address for: ib7\nmore")


def test_what_cannot_be_measured_is_refused_before_anything_starts(tmp_path):
    two, file = ["world.devices=2", "world.num_nodes=1"], tmp_path / "file"
    file.write_text("")
    for ask, words in (
        (["world.devices=1", "world.num_nodes=1"], r"`world.devices` \(=1\) must make two ranks or more"),
        ([*two, "name=a/b"], r"`name` \(=a/b\) must be letters, digits and _"),
        ([*two, f"run_dir={file}/inside"], r"`hydra.run.dir` \(=.*\) must be a folder that can be written"),
    ):
        with pytest.raises(ValueError, match=words):
            tune_setup.check_tune_keys(configured(*ask))
    tune_setup.check_tune_keys(configured(*two, f"run_dir={tmp_path}/new"))
    assert not list((tmp_path / "new").iterdir())
    content = [asdict(Measurement()), asdict(Measurement(limit_s=3.0))]
    with pytest.raises(ValueError, match=r"`measure.limit_s` \(=3.0 on rank 1\) must be the same on all ranks"):
        tune_setup.check_same_on_all_ranks(content)
    tune_setup.check_same_on_all_ranks(content[:1] * 2)
    with pytest.raises(ValueError, match=r"`world` \(=4 ranks\) must be able to connect: Unable .* ib7\. .*IFNAME"):
        tune_setup.connect(Unconnected(), Measurement())


LOG = """\
node0:1:2 [0] NCCL INFO NCCL version 2.27.5+cuda12.9
node0:1:2 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 12, bw 30.000000/30.000000, type NVL/PIX, sameChannels 1
node0:1:2 [0] NCCL INFO Pattern 3, crossNic 0, nChannels 0, bw 0.000000/0.000000, type LOC/PIX, sameChannels 1
node0:1:2 [0] NCCL INFO 24 coll channels, 0 collnet channels, 0 nvls channels, 8 p2p channels, 2 p2p channels per peer
"""
"""Lines as in issues 1189 and 1197 of github.com/NVIDIA/nccl, with another host's name."""


def test_channels_come_from_a_log_of_nccl(tmp_path):
    (tmp_path / "log").write_text(LOG)
    assert tune_setup.read_nccl_log(str(tmp_path / "log")) == {"channels": 12, "nccl_version": "2.27.5"}
    (tmp_path / "log").write_text(LOG.replace("Pattern 4", "Pattern 1"))
    with pytest.raises(ValueError, match=r"`nccl_log` \(=.*log\) must be a log of NCCL with its graph"):
        tune_setup.read_nccl_log(str(tmp_path / "log"))


def world_on_rank():
    asked = Measurement(dtype="float32")
    topology = Topology(rank=torch.distributed.get_rank(), nodes=((0, 2), (1, 3)))
    return tune_setup.world_of(topology, torch.device("cpu"), asked, inside="pci")


def test_ranks_of_one_machine_share_its_cores(four_ranks):
    found = four_ranks.run(world_on_rank, timeout_s=180.0)  # each imports Lightning first
    assert all(world == found[0] for world in found)
    assert found[0].num_shared_cores == len(os.sched_getaffinity(0))
    assert found[0].is_interleaved
    assert (found[0].num_nodes, found[0].ranks_per_node, found[0].itemsize) == (2, 2, 4)


def test_the_step_to_plan_for_is_the_models_from_its_end_and_at_the_rate_that_is_given():
    bare = tune_setup.configured_work(configured("model=alexnet_bn", "image_shape=[1,16,16]"))
    paced = tune_setup.configured_work(configured("model=alexnet_bn", "image_shape=[1,16,16]", "images_per_s=64"))
    assert [numel for numel, _ in bare.gradients] == [numel for numel, _ in paced.gradients]
    assert bare.alone_s == 0.0
    assert paced.alone_s == pytest.approx(1.0)
    model = instantiate(configured("model=alexnet_bn").model)
    assert bare.gradients[0][0] == list(model.parameters())[-1].numel()
    assert sum(numel for numel, _ in bare.gradients) == sum(p.numel() for p in model.parameters())
