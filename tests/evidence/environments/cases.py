"""Environments, and the promise for each; see `trials`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Environment, and the expected end of a program in it.

    `names`: texts that must all be in the output. `goes_on`: exit code 0; otherwise the program must end in an error
    message. `variables`: environment of all processes; None: unset. `ranks`: further variables of each process.
    `wrapper`: a command that the program's is appended to. `needs`: tools of the machine. In variables and overrides
    <FREE> and <TAKEN> are ports, <RUN> the run directory, <SHIM> a library whose clock is a year ahead.
    """

    fault: str
    names: tuple[str, ...] = ()
    goes_on: bool = False
    phase: str = "start"
    program: str = "train"
    lost: str = "nothing"
    overrides: tuple[str, ...] = ()
    variables: Mapping[str, str | None] = field(default_factory=dict)
    ranks: tuple[Mapping[str, str], ...] = ({},)
    wrapper: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    run_dir: str = "run"
    limit_s: float = 180.0


def _sh(script: str, *before: str) -> tuple[str, ...]:
    return (*before, "bash", "-c", script, "bash")


def _rank(rank: int, world_size: int, **more: str) -> dict[str, str]:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    variables |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "<FREE>", "TORCHELASTIC_RUN_ID": "trial"}
    return {**{name: str(value) for name, value in variables.items()}, **where, **more}


CSV, ALONE = ("logger=csv",), ("logger=csv", "trainer.devices=1")
ONLINE = {"WANDB_MODE": "online", "WANDB_API_KEY": "0123456789" * 4}
NO_NETWORK: dict[str, Any] = {"wrapper": _sh('ip link set lo up; exec "$@"', "unshare", "--net"), "needs": ("--net",)}
SLURM = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "5"}
SLURM |= {"SLURM_JOB_NAME": "train", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SLURM |= {"SLURM_NODELIST": "localhost"}
SOON = "strategy.timeout.minutes=0.15"
FULL = "+callbacks.full={_target_: tests.evidence.environments.trials.FillDisk, folder: '${run_dir}', step: 1}"


def _disk(size: str, script: str = 'exec "$@"') -> dict[str, Any]:
    mounted = f'mount -t tmpfs -o size={size} none "$RUN_DIR" && {script}'
    return {"wrapper": _sh(mounted, "unshare", "--mount"), "needs": ("--mount",)}


LAUNCHERS = [
    Environment(
        fault="WORLD_SIZE=abc", names=("`WORLD_SIZE` (='abc') must be a whole number",), variables={"WORLD_SIZE": "abc"}
    ),
    Environment(
        fault="RANK=2 of WORLD_SIZE=2", names=("`RANK` (=2) must be below `WORLD_SIZE` (=2)",), ranks=(_rank(2, 2),)
    ),
    Environment(
        fault="LOCAL_RANK left over", names=("`LOCAL_RANK` (=1) must come with",), variables={"LOCAL_RANK": "1"}
    ),
    Environment(
        fault="NODE_RANK beyond the nodes", names=("`NODE_RANK` (=1) must be below",), variables={"NODE_RANK": "1"}
    ),
    Environment(
        fault="SLURM has other tasks than the trainer",
        names=("`devices=2`", "trainer.devices=2"),
        overrides=(*CSV, "trainer.devices=2"),
        variables=SLURM | {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4"},
    ),
    Environment(
        fault="SLURM_PROCID missing", names=("`SLURM_PROCID` must be set",), variables=SLURM | {"SLURM_PROCID": None}
    ),
    Environment(
        fault="OMP_NUM_THREADS=abc", names=("`OMP_NUM_THREADS` (='abc')",), variables={"OMP_NUM_THREADS": "abc"}
    ),
    Environment(
        fault="ulimit -n 64", names=("`ulimit -n` (=64) must be at least",), wrapper=_sh('ulimit -n 64; exec "$@"')
    ),
]

NETWORK = [
    Environment(fault="MASTER_PORT taken", names=("`MASTER_PORT` (=", "in use"), variables={"MASTER_PORT": "<TAKEN>"}),
    Environment(
        fault="MASTER_PORT taken",
        program="bench",
        names=("`MASTER_PORT` (=", "in use"),
        variables={"MASTER_PORT": "<TAKEN>"},
    ),
    Environment(fault="MASTER_PORT=70000", names=("`MASTER_PORT` (=70000)",), variables={"MASTER_PORT": "70000"}),
    Environment(
        fault="MASTER_ADDR cannot be resolved",
        names=("`MASTER_ADDR` (=no.such.host.invalid) must be",),
        variables={"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "<FREE>"},
    ),
    Environment(
        fault="GLOO_SOCKET_IFNAME names no interface",
        names=("`GLOO_SOCKET_IFNAME` (=eth99)",),
        variables={"GLOO_SOCKET_IFNAME": "eth99"},
    ),
    Environment(
        fault="GLOO_SOCKET_IFNAME names no interface",
        program="tune",
        names=("`GLOO_SOCKET_IFNAME` (=eth99)",),
        variables={"GLOO_SOCKET_IFNAME": "eth99"},
    ),
    Environment(
        fault="no interface is up", names=("ip link set lo up",), wrapper=("unshare", "--net"), needs=("--net",)
    ),
    Environment(
        fault="rank 2 of 3 never starts",
        phase="rendezvous",
        names=("`WORLD_SIZE` (=3) ranks must meet", "rank 2 did not come"),
        overrides=(*CSV, SOON, "global_batch_size=126"),
        ranks=(_rank(0, 3), _rank(1, 3)),
    ),
    Environment(
        fault="rank 0 never starts",
        phase="rendezvous",
        names=("rank 1 on host", "no answer there within 9 s"),
        overrides=(*CSV, SOON),
        ranks=(_rank(1, 2),),
    ),
    Environment(
        fault="rank 1 is started twice",
        phase="rendezvous",
        names=("`RANK` (=1) must be another one on each process",),
        overrides=CSV,
        ranks=(_rank(0, 2), _rank(1, 2), _rank(1, 2)),
    ),
    Environment(
        fault="rank 0 is started twice",
        phase="rendezvous",
        names=("`MASTER_PORT` (=", "rank 1 did not come"),
        overrides=(*CSV, SOON),
        ranks=(_rank(0, 2), _rank(0, 2)),
    ),
]

TRACKER = [
    Environment(fault="WANDB_MODE=ofline", names=("`WANDB_MODE` (='ofline')",), variables={"WANDB_MODE": "ofline"}),
    Environment(
        fault="W&B: key in the configuration",
        names=("`logger.settings.api_key` must not be in the configuration",),
        overrides=("+logger.settings.api_key=" + "0123456789" * 4,),
    ),
    Environment(
        fault="W&B: key too short",
        names=("`logger.offline` (=False) needs a W&B server", "WANDB_API_KEY invalid"),
        overrides=("trainer.devices=1",),
        variables=ONLINE | {"WANDB_API_KEY": "short"},
    ),
    Environment(
        fault="W&B: online without a network",
        names=("`logger.offline` (=False) needs a W&B server",),
        overrides=("trainer.devices=1",),
        variables=ONLINE,
        **NO_NETWORK,
    ),
    Environment(fault="W&B: offline without a network", goes_on=True, names=("test accuracy",), **NO_NETWORK),
]

PLACES = [
    Environment(fault="HOME unset", goes_on=True, overrides=ALONE, variables={"HOME": None}),
    Environment(
        fault="no HOME, no place for caches, no compiler",
        goes_on=True,
        overrides=("trainer.devices=1",),
        variables={
            **dict.fromkeys(("HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR"), "/proc/none"),
            **{"PATH": "/none", "CXX": "none"},
        },
    ),
    Environment(fault="TMPDIR missing", goes_on=True, overrides=ALONE, variables={"TMPDIR": "/proc/none"}),
    Environment(
        fault="LC_ALL=C, run directory `ä ☃ b`",
        goes_on=True,
        overrides=("trainer.devices=1",),
        variables={"LC_ALL": "C"},
        run_dir="ä ☃ b",
    ),
    Environment(
        fault="run directory read-only",
        names=("`hydra.run.dir`", "Read-only file system"),
        **_disk("8m", 'mount -o remount,ro "$RUN_DIR" && exec "$@"'),
    ),
    Environment(fault="run directory on a full disk", names=("`hydra.run.dir`", "No space left"), **_disk("8k")),
    Environment(
        fault="run directory read-only",
        program="simulate",
        names=("`hydra.run.dir`", "Read-only file system"),
        **_disk("8m", 'mount -o remount,ro "$RUN_DIR" && exec "$@"'),
    ),
    Environment(
        fault="run directory on a full disk",
        program="search",
        names=("`hydra.run.dir`", "No space left"),
        **_disk("8k"),
    ),
    Environment(
        fault="disk fills up, on_error=raise",
        phase="training",
        names=("was not written (No space left on device)",),
        overrides=("trainer.devices=1", FULL),
        lost="the steps since the last checkpoint",
        **_disk("40m"),
    ),
    *(
        Environment(
            fault=f"disk fills up, on_error=warn, logger={logger}",
            phase="training",
            goes_on=True,
            names=("was not written (No space left on device)", "test accuracy", *words),
            overrides=(f"logger={logger}", "trainer.devices=1", "strategy.checkpoint_io.on_error=warn", FULL),
            lost="what the disk did not take",
            **_disk("40m"),
        )
        for logger, words in (
            ("csv", ("takes no more rows", "rows of metrics are not in")),
            ("wandb", ("W&B's files of this run are not whole",)),
        )
    ),
]

STREAMS = [
    Environment(fault="standard input closed", goes_on=True, overrides=CSV, wrapper=_sh('exec "$@" <&-')),
    Environment(fault="standard output closed", goes_on=True, overrides=CSV, wrapper=_sh('exec "$@" >&-')),
    Environment(fault="standard error closed", goes_on=True, overrides=CSV, wrapper=_sh('exec "$@" 2>&-')),
    Environment(
        fault="standard output full",
        goes_on=True,
        phase="end",
        names=("standard output takes no more (No space left on device)",),
        overrides=ALONE,
        wrapper=_sh('exec "$@" >/dev/full'),
    ),
    Environment(
        fault="| head -1",  # of what: a warning may come before the accuracy
        goes_on=True,
        phase="end",
        overrides=ALONE,
        wrapper=_sh('set -o pipefail; "$@" | head -n 1'),
    ),
    Environment(
        fault="| true",
        program="simulate",
        goes_on=True,
        phase="end",
        names=("standard output takes no more (Broken pipe)",),
        overrides=("num_steps=2", "scaling_ranks=[1]", "search.algorithms=[flat]", "search.bucket_bytes=[4194304]"),
        wrapper=_sh('set -o pipefail; "$@" | true'),
    ),
]

CLOCKS = [
    Environment(
        fault="clock of rank 1 a year ahead",
        phase="training",
        goes_on=True,
        names=("test accuracy",),
        overrides=CSV,
        ranks=(_rank(0, 2), _rank(1, 2, LD_PRELOAD="<SHIM>")),
        needs=("cc",),
    ),
    Environment(
        fault="ranks with other PYTHONHASHSEED",
        phase="training",
        goes_on=True,
        names=("test accuracy",),
        overrides=CSV,
        ranks=(_rank(0, 2, PYTHONHASHSEED="1"), _rank(1, 2, PYTHONHASHSEED="2")),
    ),
]

CASES = [*LAUNCHERS, *NETWORK, *TRACKER, *PLACES, *STREAMS, *CLOCKS]
