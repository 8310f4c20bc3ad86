"""Launchers, ports, interfaces, disks that cannot work: refused before anything starts, by name and with a cure."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import surroundings

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def in_namespaces(*, script: str, flags: str) -> str:
    """What a script prints in namespaces of its own; it sees no torch, so it starts at once."""
    code = f"from recipes import surroundings\ntry:\n    {script}\nexcept ValueError as error:\n    print(error)"
    if subprocess.run(["unshare", *flags.split(), "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("namespaces need root")
    done = subprocess.run(
        ["unshare", *flags.split(), "bash", "-c", f'{MOUNT if "-m" in flags else ""} "{sys.executable}" -'],
        input=code,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


MOUNT = "mount -t tmpfs -o size=8k none /mnt &&"


def test_a_job_as_torchrun_starts_it_is_let_through(tmp_path):
    surroundings.check(tmp_path / "new" / "folder ä", TORCHRUN)
    assert list((tmp_path / "new" / "folder ä").iterdir()) == []  # nothing is left behind


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, r"`RANK` \(=4\) must be below `WORLD_SIZE` \(=4\)"),
        ({"RANK": "-1"}, r"`RANK` \(='-1'\) must be a whole number, at least 0"),
        ({"LOCAL_RANK": "2"}, r"`LOCAL_RANK` \(=2\) must be below `LOCAL_WORLD_SIZE` \(=2\)"),
        ({"GROUP_RANK": "2"}, r"`GROUP_RANK` \(=2\) must be below"),
        ({"WORLD_SIZE": "5"}, r"`WORLD_SIZE` \(=5\) must be `LOCAL_WORLD_SIZE \* GROUP_WORLD_SIZE` \(=2 \* 2\)"),
        ({"WORLD_SIZE": "many"}, r"`WORLD_SIZE` \(='many'\) must be a whole number"),
        ({"LOCAL_RANK": None}, r"`LOCAL_RANK` must be set, as `TORCHELASTIC_RUN_ID` is"),
        ({"MASTER_PORT": "70000"}, r"`MASTER_PORT` \(=70000\) must be a port"),
        ({"MASTER_PORT": "http"}, r"`MASTER_PORT` \(='http'\) must be a whole number"),
        ({"MASTER_ADDR": "no such host"}, r"`MASTER_ADDR` \(=no such host\) must be an address that this host can"),
        ({"GLOO_SOCKET_IFNAME": "lo,eth99"}, r"`GLOO_SOCKET_IFNAME` \(=lo,eth99\) must name interfaces.*eth99 is none"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_a_launcher_got_wrong_is_refused(change, message):
    variables = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        surroundings.check(None, variables)


def test_a_port_that_is_taken_is_refused_where_it_would_be_opened():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        mine = {"MASTER_PORT": str(taken.getsockname()[1])}
        with pytest.raises(ValueError, match=r"`MASTER_PORT` \(=\d+\) must be a port that this process may open"):
            surroundings.check(None, mine)
        surroundings.check(None, mine | {"NODE_RANK": "1"})  # the first node opens it
        surroundings.check(None, TORCHRUN | mine | {"RANK": "0", "LOCAL_RANK": "0"})  # torchrun's agent has


def test_a_run_directory_that_takes_no_files_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`hydra.run.dir` \(=.*\) must be a directory that can be written to: Not a"):
        surroundings.check(tmp_path / "file" / "run", {})
    with pytest.raises(ValueError, match=r"`hydra.run.dir`"):
        surroundings.check("/proc/nowhere", {})


def test_a_full_disk_is_found_before_training():
    told = in_namespaces(script='surroundings.check("/mnt/run", {})', flags="-m")
    assert "`hydra.run.dir` (=/mnt/run) must be a directory that can be written to: No space left" in told


def test_a_host_without_any_interface_is_found_before_training():
    told = in_namespaces(script="surroundings.check(None, {})", flags="-n")
    assert "`MASTER_ADDR` (=127.0.0.1) must be an address that this host can reach: Network is unreachable" in told
