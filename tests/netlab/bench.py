"""``recipes/bench.py`` or ``recipes/tune.py`` on an emulated cluster, in one command:

    python -m tests.netlab.bench --hosts 2 --ranks 2 --mbit 100 --delay-us 200 allreduce.max_bytes=8388608
    python -m tests.netlab.bench --recipe tune --hosts 2 --ranks 2 --mbit 100 --delay-us 200 measure.limit_s=40

Arguments after the options are passed to the recipe, as on a real cluster. ``bench`` also receives the bandwidth and
delay of the links for its byte bound and its predictions, unless the command has its own ``cluster=``. ``tune`` does
not receive them. Write ``--`` before a ``--config-dir`` with the output of ``tune``.
"""

import argparse
import sys
from pathlib import Path

from tests.netlab.cluster import Cluster, ClusterError, why_not

RECIPES = Path(__file__).parents[2] / "recipes"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.netlab.bench", description=__doc__.partition(":")[0]
    )
    parser.add_argument("--recipe", choices=["bench", "tune"], default="bench")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument(
        "--mbit",
        default="100",
        help="rate of links in each direction, Mbit/s; 100,25: of each host's",
    )
    parser.add_argument("--delay-us", type=float, default=200.0, help="one way")
    parser.add_argument(
        "--interleave", action="store_true", help="ranks go round the hosts instead of host by host"
    )
    parser.add_argument("--limit-s", type=float, default=3600.0, help="then everything is ended")
    parser.add_argument("overrides", nargs="*", help="of the recipe's configuration")
    asked = parser.parse_args()
    if reason := why_not():
        sys.exit(f"error: {reason}")
    if asked.interleave:
        order = "interleaved"
    else:
        order = "host by host"
    about = f"emulated: {asked.hosts} hosts x {asked.ranks} ranks {order}, {asked.mbit} Mbit/s, {asked.delay_us:g} us"
    rates = [float(rate) for rate in asked.mbit.split(",")]
    known = [f"about='{about}'"]
    if asked.recipe == "bench":
        bytes_per_s = min(rates) * 1e6 / 8
        known.append(f"link_bytes_per_s={bytes_per_s:g}")
        if not any(override.startswith("cluster=") for override in asked.overrides):
            known += description_of(asked, bytes_per_s)
    with Cluster(
        num_hosts=asked.hosts,
        ranks_per_host=asked.ranks,
        mbit_per_s=rates,
        delay_us=asked.delay_us,
        interleave=asked.interleave,
    ) as cluster:
        try:
            command = [
                sys.executable,
                str(RECIPES / f"{asked.recipe}.py"),
                *known,
                *asked.overrides,
            ]
            cluster.run(command, timeout_s=asked.limit_s, show_rank_zero=True)
        except ClusterError as error:
            sys.exit(f"error: {error}")
        sent = ", ".join(f"{num_bytes / 1e6:.1f}" for num_bytes in cluster.traffic().sent_bytes)
        print(f"sent by each host: {sent} MB")


def description_of(asked: argparse.Namespace, bytes_per_s: float) -> list[str]:
    """Return the overrides that describe these hosts and links: ``conf/cluster/netlab.yaml`` with their values."""
    overrides = [
        "cluster=netlab",
        f"cluster.links.ranks_per_node={asked.ranks}",
        f"cluster.links.across.bytes_per_s={bytes_per_s:g}",
        f"cluster.links.across.latency_s={asked.delay_us / 1e6:g}",
    ]
    if asked.interleave:
        overrides.append("+cluster.links.is_interleaved=true")
    return overrides


if __name__ == "__main__":
    main()
