"""Variants of the parts benchmark: each reduces the gradients in its own buckets, with the planner's prediction."""

import json
import math
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from hydra.utils import instantiate
from lightning.fabric import Fabric

from lightning_hybrid.comm import CommEngine, CommPlan, Topology
from lightning_hybrid.planning.model.cluster import Cluster
from lightning_hybrid.planning.model.cost import Link
from lightning_hybrid.planning.model.cost_gloo import Gloo
from recipes.benchmarks.gradient_sets import GRADIENT_SETS
from recipes.benchmarks.parts import ALGORITHMS, PLANNED, ArmSums, PartsArm, PartsBench, check, fill
from recipes.benchmarks.report import HEADER, PARTS_HEADER, Timing, aligned, cells, header, markdown
from recipes.cli import launch
from tests.checkout import ROOT
from tests.recipes.composed import composed

CLAIMS = ROOT / "recipes/records/claims"
RECORD = CLAIMS / "2026-11-29_allreduce_parts_2-core-cpu"

NUMELS = (300_000, 513, 7, 64, 70_001)
MISTAKES = {
    "parts.gradients=[vgg]": r"`gradients` \(=vgg\) must contain only these names: linear_8mib",
    "parts.arms=[ring]": r"`arms` \(=ring\) must contain only these names: per_tensor_ring, fused_ring",
    "parts.dtypes=[int8]": r"`dtypes` \(=int8\) must contain only these names: float32",
    "parts.gradients=[resnet50] parts.arms=[planned]": r"`arms` \(=planned\) needs a `cluster`",
}


def cluster_without_software(num_nodes, ranks_per_node, latency_s):
    """Return a cluster in which only latencies between nodes matter."""
    fast = Link(latency_s=0.0, bytes_per_s=1e15)
    return Cluster(
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        inside=fast,
        across=Link(latency_s=latency_s, bytes_per_s=1e15),
        transport=Gloo(stage_s=0.0, message_s=0.0, segment_s=0.0),
    )


@pytest.mark.parametrize("mistakes", MISTAKES)
def test_a_mistake_is_refused_before_anything_is_launched(mistakes, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    cfg = composed("bench", "run_dir=/nowhere", *mistakes.split())
    with pytest.raises(SystemExit, match=r"^error: .*" + MISTAKES[mistakes]), launch.short_errors():
        instantiate(cfg.parts)


def test_a_description_of_other_nodes_is_refused_before_anything_is_measured():
    cluster = cluster_without_software(2, 4, latency_s=1e-3)
    bench = PartsBench(
        gradients=["linear_8mib"],
        arms=["hybrid"],
        dtypes=["float32"],
        num_rounds=1,
        cluster=cluster,
    )
    topology = Topology.from_ranks_per_node(rank=0, world_size=8, ranks_per_node=2)
    with pytest.raises(
        ValueError, match=r"`cluster` \(=2 nodes x 4 ranks\) does not match this job"
    ):
        next(bench.run(SimpleNamespace(), topology))


def sums_of_different_gradients(name, dtype):
    """Return, on each rank, the sums of one variant and the sums in float64."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    topology = Topology.from_ranks_per_node(rank=rank, world_size=world_size, ranks_per_node=1)
    plan = CommPlan(algorithm=ALGORITHMS[name], bucket_bytes=2**18, num_buckets=1)
    arm = PartsArm(name=name, plan=plan, numels=NUMELS, is_fused="per_tensor" not in name)
    engine = CommEngine(
        topology=topology,
        plan=plan,
        timeout=timedelta(seconds=30),
        device=torch.device("cpu"),
    )
    try:
        arm_sums = ArmSums(engine, arm.bucket_numels(dtype.itemsize, topology.num_nodes))
        gradients = []
        for other_rank in range(world_size):
            gradients.append(torch.arange(sum(NUMELS), dtype=torch.float64) % (97 + other_rank))
        flat = gradients[rank].to(dtype)
        buckets = arm_sums.buckets(flat)
        arm_sums.sum_all(buckets)
    finally:
        engine.close()
    return [bucket.numel() for bucket in buckets], flat.double(), sum(gradients)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_variant_gives_the_exact_sum_of_different_gradients(two_ranks, name):
    per_rank = two_ranks.run(sums_of_different_gradients, name, torch.float16)
    for bucket_numels, result, expected in per_rank:
        assert torch.equal(result, expected)
        if "per_tensor" in name:
            assert tuple(bucket_numels) == NUMELS
        else:
            assert len(bucket_numels) < len(NUMELS)
            assert sum(bucket_numels) == sum(NUMELS)


def measured_rows(arms):
    """Return, on each rank, the rows of a small benchmark."""
    fabric = Fabric(strategy="ddp", accelerator="cpu", devices=2)
    fabric.launch()
    topology = Topology.from_ranks_per_node(
        rank=fabric.global_rank, world_size=fabric.world_size, ranks_per_node=1
    )
    bench = PartsBench(
        gradients=["linear_8mib"],
        arms=arms,
        dtypes=["float16"],
        num_rounds=2,
        num_warmup_rounds=0,
        cluster=cluster_without_software(2, 1, latency_s=1e-3),
    )
    return list(bench.run(fabric, topology))


def test_a_row_has_every_sample_and_on_rank_zero_the_prediction(two_ranks):
    arms = ["per_tensor_ring", "hybrid", PLANNED]
    per_rank = two_ranks.run(measured_rows, arms)
    for rows in per_rank:
        assert [row.arm for row in rows] == arms
        for row in rows:
            assert (row.section, row.case, row.num_bytes) == (
                "parts",
                "linear_8mib float16",
                2 * 8 * (512 * 512 + 512),
            )
            assert len(row.times_s) == 2
            assert min(row.times_s) > 0
            assert min(row.cpu_s) > 0
    # Each time is that of the slowest rank.
    assert [row.times_s for row in per_rank[0]] == [row.times_s for row in per_rank[1]]
    assert [row.predicted_s is None for row in per_rank[1]] == [True] * 3
    # 16 rings of two ranks have 4 latencies each.
    assert per_rank[0][0].predicted_s == pytest.approx(16 * 4 * 1e-3, rel=0.01)


def test_a_wrong_sum_is_an_error_with_the_bucket():
    buckets = [torch.empty(3), torch.empty(2)]
    fill(buckets, rank=1)
    assert [bucket.tolist() for bucket in buckets] == [[1, 1, 1], [0, 0]]
    buckets[1].fill_(2)  # on ranks 0 and 2 of three it contains ones
    check(buckets, 3, "flat")
    buckets[1][0] = 1
    with pytest.raises(
        RuntimeError,
        match=r"`flat` computed a wrong result for the all-reduce of bucket 1.* but all should be 2",
    ):
        check(buckets, 3, "flat")


def test_fusion_and_hierarchy_each_save_the_latencies_of_their_formula():
    """Rings of 16 ranks have 60 latencies per all-reduce. A hierarchy of 4 nodes has one message and its consent."""
    cluster = cluster_without_software(4, 4, latency_s=1e-3)
    numels = (16,) * 10

    def predicted_s(algorithm, is_fused):
        plan = CommPlan(algorithm=algorithm, num_parallel_groups=1)
        arm = PartsArm(name="", plan=plan, numels=numels, is_fused=is_fused)
        return arm.predicted_s(cluster, itemsize=4)

    assert predicted_s("flat", is_fused=False) == pytest.approx(10 * 60e-3)
    assert predicted_s("flat", is_fused=True) == pytest.approx(60e-3)
    assert predicted_s("hierarchical", is_fused=False) == pytest.approx(10 * 2e-3)
    assert predicted_s("auto", is_fused=True) == pytest.approx(2e-3)


def test_the_table_has_prediction_and_processor_time_next_to_each_time():
    row = Timing(
        section="parts",
        case="resnet50 float16",
        arm="hybrid",
        num_bytes=100,
        num_nodes=4,
        times_s=(2.0, 3.0, 4.0),
        cpu_s=(0.5, 0.25, 0.125),
        predicted_s=1.5,
    )
    assert header([row]) == PARTS_HEADER
    (line,) = cells([row], None)
    assert line[PARTS_HEADER.index("median ms")] == "3000"
    assert line[-3:] == ["1500", "2.00", "0.25"]
    assert "| predicted ms | x predicted | CPU s |" in markdown([row], None)
    assert aligned(PARTS_HEADER).index("CPU s") + len("CPU s") == len(aligned(line))
    of_step = Timing(section="step", case="x", arm="ddp", num_bytes=1, num_nodes=1, times_s=(1.0,))
    assert header([of_step]) == HEADER
    assert len(cells([of_step], None)[0]) == len(HEADER)


def recorded():
    """Return the described cluster of each run of the record, and all rows."""
    clusters = {}
    rows = []
    for line in (RECORD / "rows.jsonl").read_text().splitlines():
        content = json.loads(line)
        if "links" not in content:
            rows.append(content)
            continue
        links = content["links"]
        for algorithm, curve in links["curves"].items():  # JSON keys are not numbers
            links["curves"][algorithm] = {float(size): ratio for size, ratio in curve.items()}
        clusters[content["run"]] = instantiate(links)
    return clusters, rows


def test_the_page_has_the_medians_and_predictions_of_the_record():
    page = (CLAIMS / "README.md").read_text()
    _, rows = recorded()
    by_case = {}
    for row in rows:
        by_case.setdefault((row["run"], row["case"]), {})[row["arm"]] = row
    assert len(by_case) == 11
    for variants in by_case.values():
        texts = []
        for name in ALGORITHMS:
            median_s = variants[name]["median_s"]
            texts.append(f"{median_s:.3g} ({variants[name]['predicted_s']:.3g})")
        ratio = variants["per_tensor_ring"]["median_s"] / variants["hybrid"]["median_s"]
        assert f"| {' | '.join(texts)} | {ratio:.2f} |" in page


@pytest.mark.long
def test_the_planner_predicts_the_record_as_it_says():
    """At 100 Mbit/s, where links dominate, predictions are within 15 %."""
    clusters, rows = recorded()
    for row in rows:
        if row["arm"] == PLANNED:
            continue
        gradients, dtype = row["case"].split()
        shapes = reversed(GRADIENT_SETS[gradients]())
        arm = PartsArm(
            name=row["arm"],
            plan=CommPlan(algorithm=ALGORITHMS[row["arm"]]),
            numels=tuple(math.prod(shape) for shape in shapes),
            is_fused="per_tensor" not in row["arm"],
        )
        cluster = clusters[row["run"]]
        predicted_s = arm.predicted_s(cluster, getattr(torch, dtype).itemsize)
        assert predicted_s == pytest.approx(row["predicted_s"], rel=1e-6)
        if cluster.across.bytes_per_s == 12.5e6:
            assert row["median_s"] == pytest.approx(predicted_s, rel=0.15)
