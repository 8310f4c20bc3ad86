"""Launchers, ports, interfaces and disks that cannot work: each gives an early error with its name and a remedy."""

import resource
import socket

import pytest

from recipes.cli import preflight
from tests.toy import error_of

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
}
TORCHRUN |= {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
TORCHRUN |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
SLURM = {
    "SLURM_NTASKS": "2",
    "SLURM_JOB_NAME": "train",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
}


WRONG = [
    (TORCHRUN, {"RANK": "4"}, r"`RANK` \(=4\) must be below `WORLD_SIZE` \(=4\)"),
    (TORCHRUN, {"RANK": "-1"}, r"`RANK` \(='-1'\) must be an integer of at least 0"),
    (TORCHRUN, {"RANK": "²"}, r"`RANK` \(='²'\) must be an integer of at least 0"),
    (TORCHRUN, {"LOCAL_RANK": "2"}, r"`LOCAL_RANK` \(=2\) must be below `LOCAL_WORLD_SIZE` \(=2\)"),
    (TORCHRUN, {"GROUP_RANK": "2"}, r"`GROUP_RANK` \(=2\) must be below"),
    (
        TORCHRUN,
        {"WORLD_SIZE": "5"},
        r"`WORLD_SIZE` \(=5\) must equal `LOCAL_WORLD_SIZE \* GROUP_WORLD_SIZE`",
    ),
    (TORCHRUN, {"LOCAL_RANK": None}, r"`LOCAL_RANK` must be set if `TORCHELASTIC_RUN_ID` is"),
    (TORCHRUN, {"MASTER_PORT": "70000"}, r"`MASTER_PORT` \(=70000\) must be a port"),
    (
        TORCHRUN,
        {"MASTER_ADDR": "no such host"},
        r"`MASTER_ADDR` \(=no such host\) cannot be reached from this host",
    ),
    (
        TORCHRUN,
        {"OMP_NUM_THREADS": "0"},
        r"`OMP_NUM_THREADS` \(='0'\) must be a positive integer",
    ),
    (
        TORCHRUN,
        {"WANDB_MODE": "ofline"},
        r"`WANDB_MODE` \(='ofline'\) must be online.* Set WANDB_MODE=offline\.$",
    ),
    (
        TORCHRUN,
        {"GLOO_SOCKET_IFNAME": "lo,eth99"},
        r"`GLOO_SOCKET_IFNAME` \(=lo,eth99\) contains eth99, which is not a network interface",
    ),
    (
        SLURM,
        {"SLURM_PROCID": "2"},
        r"`SLURM_PROCID` \(=2\) must be below `SLURM_NTASKS` \(=2\).* with srun",
    ),
    (SLURM, {"SLURM_PROCID": None}, r"`SLURM_PROCID` must be set if `SLURM_NTASKS` is"),
    # A leftover variable. Lightning would attribute it to a launcher, start no other rank, and wait for the others.
    (
        {},
        {"LOCAL_RANK": "1", "MASTER_PORT": "29500"},
        r"`LOCAL_RANK` \(=1\) must be set together with MASTER_ADDR and MASTER_PORT",
    ),
]


@pytest.mark.parametrize(("launcher", "changes", "message"), WRONG, ids=str)
def test_what_a_launcher_got_wrong_is_refused(launcher, changes, message):
    variables = {name: value for name, value in (launcher | changes).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        preflight.check_environment(None, variables)


def test_a_job_as_launchers_start_it_is_let_through(tmp_path):
    preflight.check_environment(tmp_path / "new" / "folder ä", TORCHRUN)
    assert list((tmp_path / "new" / "folder ä").iterdir()) == []  # no file is left behind
    by_srun = SLURM | {"OMP_NUM_THREADS": "4,2", "WANDB_MODE": "offline"}
    by_lightning = {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "bash"}  # in an interactive shell
    by_torchrun = TORCHRUN | {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train"}
    by_hand = {"LOCAL_RANK": "1", "MASTER_PORT": "29500", "MASTER_ADDR": "127.0.0.1"}
    for variables in (by_srun, by_lightning, by_torchrun, by_hand):
        assert error_of(preflight.check_environment, None, variables) == ""


def test_a_rank_beyond_the_trainers_world_is_refused():
    last_rank = {"local_rank": 1, "num_devices": 2, "node_rank": 2, "num_nodes": 3}
    preflight.check_place(**last_rank)
    for change, message in (
        (
            {"local_rank": 2},
            r"`LOCAL_RANK` \(=2\) must be below `trainer.devices` \(=2\).*`unset LOCAL_RANK`",
        ),
        (
            {"node_rank": 3},
            r"`NODE_RANK` \(=3\) must be below `trainer.num_nodes` \(=3\).*change trainer.num_nodes\.$",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            preflight.check_place(**last_rank | change)


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [
        ((64, 4096), 4096),
        ((64, -1), preflight.MANY_DESCRIPTORS),
        ((256, 256), None),
        ((-1, -1), None),
    ],
    ids=str,
)
def test_as_many_files_as_are_allowed_may_be_open(monkeypatch, limits, allowed):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: asked.append((which, both)))
    preflight.raise_descriptors()
    assert asked == ([] if allowed is None else [(resource.RLIMIT_NOFILE, (allowed, limits[1]))])
    # The error comes before ranks fail to connect.
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 255))
    with pytest.raises(ValueError, match=r"`ulimit -n` \(=255\) must be at least 256"):
        preflight.check_environment(None, {})


def test_a_port_that_is_taken_is_refused_where_it_would_be_opened():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        mine = {"MASTER_PORT": str(taken.getsockname()[1])}
        with pytest.raises(
            ValueError,
            match=r"`MASTER_PORT` \(=\d+\) cannot be used, because this process cannot listen on it",
        ):
            preflight.check_environment(None, mine)
        # the first node opens the port
        preflight.check_environment(None, mine | {"NODE_RANK": "1"})
        # Torchrun's agent has opened the port.
        preflight.check_environment(None, TORCHRUN | mine | {"RANK": "0", "LOCAL_RANK": "0"})


def test_nccls_own_way_of_naming_interfaces_is_let_through():
    """A list may begin with ^ (all except these) or = (exactly these names). Otherwise it has prefixes of names."""
    for names in ("^docker,eth99", "=eth99", "l", ""):
        preflight.check_environment(None, {"NCCL_SOCKET_IFNAME": names})
    with pytest.raises(
        ValueError,
        match=r"`NCCL_SOCKET_IFNAME` \(=lo,eth99\) contains eth99, which is not a network interface",
    ):
        preflight.check_environment(None, {"NCCL_SOCKET_IFNAME": "lo,eth99"})


def test_a_port_that_only_lingers_is_free():
    """Closed connections keep a port for a minute after a job, but torch's store can still open it."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            accepted.close()  # the side that closes first lingers
            client.recv(1)
    # without the option, the port is in use
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("", port))
    preflight.check_environment(None, {"MASTER_PORT": str(port)})


def test_a_run_directory_that_takes_no_files_is_found_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError,
        match=r"`hydra.run.dir` \(=.*\) cannot be written to: Not a",
    ):
        preflight.check_environment(tmp_path / "file" / "run", {})
