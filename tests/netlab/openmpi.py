"""Open MPI's all-reduce on an emulated cluster, beside torch's and ours of ``tests.netlab.bench``, in one command:

    python -m tests.netlab.openmpi --hosts 2 --ranks 4 --mbit 100 --delay-us 200 --python PYTHON_WITH_MPI4PY

Needs what ``tests.netlab`` needs, ``mpirun`` (Debian: openmpi-bin) and a Python with mpi4py and numpy. Prints one JSON
object: for each component of Open MPI's collectives and each size the median, least and most of the slowest rank's
milliseconds, and time over the byte bound.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.netlab.cluster import Cluster, why_not

PROGRAM = """
import json, statistics, sys, time
import numpy
from mpi4py import MPI
world = MPI.COMM_WORLD
found = {}
for num_bytes in map(int, sys.argv[2:]):
    ones, total = numpy.ones(num_bytes // 4, numpy.float32), numpy.empty(num_bytes // 4, numpy.float32)
    times_ms = []
    for _ in range(int(sys.argv[1]) + 1):
        world.Barrier()
        began_s = time.perf_counter()
        world.Allreduce(ones, total)
        times_ms.append(1e3 * world.allreduce(time.perf_counter() - began_s, MPI.MAX))
        assert (total == world.size).all()
    found[num_bytes] = [statistics.median(times_ms[1:]), min(times_ms[1:]), max(times_ms[1:])]
if world.rank == 0:
    print(json.dumps(found))
"""

COMPONENTS = {  # of Open MPI's collectives: what a user gets, and the one that knows nodes
    "tuned": ["--mca", "coll_hcoll_enable", "0"],
    "han": ["--mca", "coll_han_priority", "100"],
}


def agent(folder: Path, cluster: Cluster) -> Path:
    """A program that mpirun takes for ssh: it runs a command on an emulated host."""
    cases = "\n".join(f"{cluster.address(host)}) net={cluster.namespace(host)} ;;" for host in range(cluster.num_hosts))
    script = folder / "agent"
    # Ranks that share a host's name would be taken for neighbours.
    enter = 'exec nsenter --net="$net" -- unshare --uts -- sh -c "hostname $name; $*"'
    script.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}\nesac\nname=host-$(echo $1 | tr . -)\nshift\n{enter}\n')
    script.chmod(0o700)
    return script


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.netlab.openmpi", description=__doc__.partition(",")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each host")
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--delay-us", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bytes", type=int, nargs="+", default=[4096, 8 * 2**20])
    parser.add_argument("--python", default=sys.executable, help="one that can import mpi4py")
    asked = parser.parse_args()
    reason = why_not() or (None if shutil.which("mpirun") else "mpirun is not installed (Debian: openmpi-bin)")
    if reason:
        sys.exit(f"error: {reason}")
    found = {}
    with (
        tempfile.TemporaryDirectory(prefix="netlab-") as folder,
        Cluster(
            num_hosts=asked.hosts, ranks_per_host=asked.ranks, mbit_per_s=asked.mbit, delay_us=asked.delay_us
        ) as cluster,
    ):
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        hosts = ",".join(f"{cluster.address(host)}:{asked.ranks}" for host in range(asked.hosts))
        for name, options in COMPONENTS.items():
            ssh = str(agent(Path(folder), cluster))
            command = ["mpirun", "--allow-run-as-root", "--host", hosts, "--bind-to", "none"]
            command += ["--mca", "plm_rsh_agent", ssh]
            command += ["--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
            command += ["--mca", "btl", "tcp,vader,self", "--mca", "mpi_yield_when_idle", "1", *options]
            command += [asked.python, str(program), str(asked.rounds), *map(str, asked.bytes)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            command = [ssh, cluster.address(0), shlex.join(command)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
            if done.returncode:
                sys.exit(f"error: mpirun with {name} failed with status {done.returncode}:\n{done.stderr[-3000:]}")
            found[name] = json.loads(done.stdout.splitlines()[-1])
    bound_ms_per_byte = 2 * (asked.hosts - 1) / asked.hosts / (asked.mbit * 1e6 / 8) * 1e3
    for times_ms in found.values():
        for num_bytes, (median, least, most) in list(times_ms.items()):
            over = round(median / (int(num_bytes) * bound_ms_per_byte), 3)
            times_ms[num_bytes] = {"median_ms": median, "min_ms": least, "max_ms": most, "over_byte_bound": over}
    print(json.dumps({"asked": vars(asked) | {"python": None}, "float32": found}, indent=2))


if __name__ == "__main__":
    main()
