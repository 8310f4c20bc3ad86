"""Whether 8 or 4 bits between nodes would pay on described clusters, by the model.

`python -m tests.evidence.planner.compression_rows` prints the table of lightning_hybrid/planning/README.md. Nothing is
measured.
"""

from dataclasses import dataclass, replace

from lightning_hybrid.comm.plan import MIB, CommPlan
from lightning_hybrid.planning.plan_search import chosen
from recipes.planning.compression_report import CompressionReport
from recipes.planning.scenario import Scenario, Search
from tests.evidence.planner.known_clusters import cluster_of, network

SEARCH = Search(  # that of conf/simulate.yaml
    algorithms=[None, "flat", "hierarchical", "two_level"],
    bucket_bytes=[size * MIB for size in (1, 4, 16, 25, 64, 1024)],
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network on a cluster of conf/cluster. `gbit_per_s`: of a node's card, where it is another one's."""

    cluster: str
    num_nodes: int
    images_per_s: float
    network: str = "resnet50"
    gbit_per_s: float | None = None

    def report(self) -> CompressionReport:
        """Simulate steps of 64 images a GPU with fp16 gradients."""
        cluster = cluster_of(self.cluster, self.num_nodes)
        if self.gbit_per_s is not None:
            cluster = replace(cluster, across=replace(cluster.across, bytes_per_s=self.gbit_per_s * 1.25e8))
        scenario = Scenario(
            layers=network(self.network),
            images_per_s=self.images_per_s,
            batch_size_per_rank=64,
            cluster=cluster,
            plan=CommPlan(),
            itemsize=2,
            on_cuda=True,
        )
        found = SEARCH.run(scenario)
        plans = list(dict.fromkeys([scenario.plan, chosen(found, on_cuda=True).plan, found[0].plan]))
        plain = min((replace(scenario, plan=plan).run() for plan in plans[:2]), key=lambda outcome: outcome.step_s)
        known = CompressionReport.of(plain, scenario.work(), cluster, plans, itemsize=2, on_cuda=True)
        assert known is not None  # several nodes
        return known

    def row(self) -> str:
        """Format what it says."""
        found = self.report()
        rate = "" if self.gbit_per_s is None else f" with {self.gbit_per_s:g} Gbit/s"
        times = [found.plain.step_s, found.plain.exposed_s, *(step.step_s for step in found.steps)]
        cells = [f"{self.cluster}{rate}, {self.num_nodes} nodes", f"{self.network} at {self.images_per_s:g}"]
        cells += [*(f"{1e3 * time_s:.3g}" for time_s in times), found.proposal or "no"]
        return f"| {' | '.join(cells)} |"


CASES = (
    Case(cluster="dgx_h100", num_nodes=16, images_per_s=7162),
    Case(cluster="cloud_100gbe", num_nodes=4, images_per_s=1200),
    Case(cluster="cloud_25gbe", num_nodes=4, images_per_s=1200),
    Case(cluster="cloud_25gbe", num_nodes=4, images_per_s=1200, gbit_per_s=10),
    Case(cluster="cloud_25gbe", num_nodes=4, images_per_s=1200, gbit_per_s=1),
    Case(cluster="cloud_25gbe", num_nodes=4, images_per_s=400, network="vgg16"),
    Case(cluster="p40_roce", num_nodes=128, images_per_s=218),
)
HEAD = "| cluster | network, images/s of a GPU | a step, ms | exposed, ms | int8, ms | int4, ms | it pays |"

if __name__ == "__main__":
    print(HEAD, "|---" * HEAD.count(" | ") + "|---|", *(case.row() for case in CASES), sep="\n")
