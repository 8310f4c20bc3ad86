"""Measurements in a format that simulator and strategy accept, and early errors for impossible ones."""

import json
from dataclasses import asdict, replace

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_hybrid import Comm
from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.calibration.measured_setup import read_measurements
from lightning_hybrid.planning.calibration.microbenchmarks import Measurement
from lightning_hybrid.planning.model.cluster import Cluster
from lightning_hybrid.planning.model.cost import Link
from lightning_hybrid.planning.model.cost_nccl import Nccl
from lightning_hybrid.planning.model.workload import StepWorkload
from lightning_hybrid.planning.report.pictures import draw_links
from lightning_hybrid.planning.report.tune_report import TuneReport
from recipes.cli import launch
from recipes.tune import check_tune_keys, configured_work, connect, usage_lines, words_of
from tests.checkout import ROOT
from tests.planning.calibration.planted_links import gloo_cluster, planted, world_of
from tests.recipes.composed import composed

WORK = StepWorkload(forward_s=0.0, gradients=((MIB, 0.01),) * 4)

launch.register_resolvers()


def configured(*overrides):
    return composed("tune", "run_dir=/nowhere", *overrides)


def report(cluster, *overrides, **settings):
    world = world_of(cluster, **settings)
    backend = "nccl" if world.on_cuda else "gloo_ring"
    samples = planted(cluster, world, backend=backend)
    words = words_of(configured(*overrides), "a net")
    return TuneReport.of(samples, world, WORK, CommPlan(), words)


def on_gpus():
    near = Link(latency_s=0.0, bytes_per_s=2e11)
    far = Link(latency_s=5e-6, bytes_per_s=2.5e10)
    return Cluster(
        num_nodes=2, ranks_per_node=4, inside=near, across=far, transport=Nccl(inside="nvlink")
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gloo", "nccl"])
def test_the_simulator_reads_the_description_by_its_name(tmp_path, kind):
    if kind == "gloo":
        result = report(gloo_cluster(2, 2), "name=ours")
    else:
        result = report(on_gpus(), "name=ours", on_cuda=True)
    result.write(tmp_path, {}, {})
    searched = f"hydra.searchpath=[file://{tmp_path}]"
    cfg = composed("simulate", searched, "cluster=ours", "num_nodes=16", "run_dir=/nowhere")
    read = instantiate(cfg.cluster.links)
    expected = replace(result.found.cluster, num_nodes=16)
    # Equal except for the six digits that a description has.
    for name in ("across", "inside", "transport"):
        expected_values = as_json(getattr(expected, name))
        for key, value in as_json(getattr(read, name)).items():
            if isinstance(value, float):
                assert value == pytest.approx(expected_values[key], rel=1e-5), f"{name}.{key}"
            else:
                assert value == expected_values[key], f"{name}.{key}"
    assert read.num_nodes == 16
    assert read.ranks_per_node == expected.ranks_per_node
    assert read.measured_nodes == 2
    assert read.curves == expected.curves
    assert cfg.cluster.on_cuda == (kind == "nccl")
    shipped_name = "netlab" if kind == "gloo" else "p40_roce"
    shipped = OmegaConf.load(ROOT / "conf" / "cluster" / f"{shipped_name}.yaml")
    assert set(cfg.cluster) >= set(shipped)


def as_json(link):
    return json.loads(json.dumps(asdict(link)))


@pytest.fixture(scope="module")
def tuned():
    """Return the report for two nodes at 100 Mbit/s and 5 ms, with a step that hides little communication."""
    return report(gloo_cluster(2, 2, mbit_per_s=100.0, latency_s=5e-3))


def test_the_strategy_takes_the_plan_and_the_summary_says_why(tuned, tmp_path):
    tuned.write(tmp_path, {"asked": 1}, {"torch": "2"})
    plan = Comm(plan=str(tmp_path / "plan.json")).made_plan()
    assert plan == tuned.plans[0].plan
    assert plan != CommPlan()
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["plan"] == asdict(plan)
    assert content["config"] == {"asked": 1}
    assert content["environment"] == {"torch": "2"}
    written_steps_s = [plan["step_s"] for plan in content["plans"]]
    assert written_steps_s == [candidate.step_s for candidate in tuned.plans]
    assert content["calibration"]["links"]["across"]["latency_interval_s"][0] > 0
    draw_links(tuned, tmp_path)
    assert "All-reduces: median prediction error " in (tmp_path / "tune.svg").read_text()
    table = (tmp_path / "table.md").read_text()
    assert "| between nodes |" in table
    assert "(the library's own)" in table
    assert content["cluster"] == json.loads(json.dumps(asdict(tuned.found.cluster)))


def test_a_codec_is_proposed_in_the_report_and_taken_by_nobody(tuned, tmp_path):
    """The plan is that without a codec. The written file gives the same fit again."""
    tuned.write(tmp_path, {}, {})
    content = json.loads((tmp_path / "summary.json").read_text())["compression"]
    assert content["proposal"] == "int4"
    assert content["codec_is_measured"] is True
    assert [step["name"] for step in content["steps"]] == [None, "int8", "int4"]
    assert content["steps"][0]["step_s"] == pytest.approx(tuned.plans[0].step_s)
    table = (tmp_path / "table.md").read_text()
    assert "To use it, set strategy.between_nodes.dtype=int4." in table
    assert "GB/s of float32 that a core encodes and decodes: int8 3.8" in table
    assert "int" not in (tmp_path / "plan.json").read_text()
    assert "dtype" not in usage_lines(tmp_path, tuned.name)
    samples, world = read_measurements(str(tmp_path / "summary.json"))
    assert samples == tuned.samples
    assert world == tuned.world
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"`samples` \(=.*other.json\) is not a summary.json"):
        read_measurements(str(tmp_path / "other.json"))


def test_a_description_of_one_node_says_that_it_is_of_one(tmp_path):
    result = report(gloo_cluster(1, 4))
    assert result.compression is None
    assert "Gradient compression" not in result.markdown()
    assert "num_nodes: 1 #" in result.description()
    assert result.about == "1 node x 4 ranks, CPU, Gloo, measured, one node only"
    assert (
        "links between nodes were not measured, because the job had only one node. Measure on several"
        in (result.markdown())
    )


class Unconnected:
    """Launcher whose ranks do not find each other."""

    world_size = 4

    def launch(self):
        raise RuntimeError("Unable to find address for: ib7\nmore")


def test_what_cannot_be_measured_is_refused_before_anything_starts(tmp_path):
    two = ["world.devices=2", "world.num_nodes=1"]
    file = tmp_path / "file"
    file.write_text("")
    for ask, words in (
        (
            ["world.devices=1", "world.num_nodes=1"],
            r"`world.devices` \(=1\) and `world.num_nodes` \(=1\) must give at least two ranks",
        ),
        ([*two, "name=a/b"], r"`name` \(=a/b\) must consist of letters, digits and _"),
        (
            [*two, f"run_dir={file}/inside"],
            r"`hydra.run.dir` \(=.*\) cannot be written to",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            check_tune_keys(configured(*ask))
    check_tune_keys(configured(*two, f"run_dir={tmp_path}/new"))
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(
        ValueError, match=r"`world` \(=4 ranks\) cannot connect: Unable .* ib7\. .*IFNAME"
    ):
        connect(Unconnected(), Measurement())


def test_the_step_to_plan_for_is_the_models_from_its_end_and_at_the_rate_that_is_given():
    keys = ("model=alexnet_bn", "image_shape=[1,16,16]")
    bare = configured_work(configured(*keys))
    paced = configured_work(configured(*keys, "images_per_s=64"))
    assert [numel for numel, _ in bare.gradients] == [numel for numel, _ in paced.gradients]
    assert bare.alone_s == 0.0
    assert paced.alone_s == pytest.approx(1.0)
    model = instantiate(configured("model=alexnet_bn").model)
    assert bare.gradients[0][0] == list(model.parameters())[-1].numel()
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    assert sum(numel for numel, _ in bare.gradients) == num_weights
