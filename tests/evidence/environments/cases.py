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


def ends(fault: str, *names: str, **more: Any) -> Environment:
    """Return a case that must end in an error with these words."""
    return Environment(fault=fault, names=names, **more)


def goes_on(fault: str, *names: str, **more: Any) -> Environment:
    """Return a case that must go on to its end."""
    return Environment(fault=fault, names=names, goes_on=True, **more)


def variable(fault: str, *names: str, **more: Any) -> Environment:
    """Return a case of the variable that `fault` sets."""
    name, _, value = fault.partition("=")
    return ends(fault, *names, variables={name: value}, **more)


TAKEN, SLOW = {"MASTER_PORT": "<TAKEN>"}, {"phase": "rendezvous", "overrides": (*CSV, SOON)}
READ_ONLY = _disk("8m", 'mount -o remount,ro "$RUN_DIR" && exec "$@"')
FILLS: dict[str, Any] = {"phase": "training", **_disk("40m")}
NO_PLACE = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TRITON_CACHE_DIR"), "/proc/none")
SHORT = ("num_steps=2", "scaling_ranks=[1]", "search.algorithms=[flat]", "search.bucket_bytes=[4194304]")
LAUNCHERS = [
    variable("WORLD_SIZE=abc", "`WORLD_SIZE` (='abc') must be a whole number"),
    ends("RANK=2 of WORLD_SIZE=2", "`RANK` (=2) must be below `WORLD_SIZE` (=2)", ranks=(_rank(2, 2),)),
    ends("LOCAL_RANK left over", "`LOCAL_RANK` (=1) must come with", variables={"LOCAL_RANK": "1"}),
    ends("NODE_RANK beyond the nodes", "`NODE_RANK` (=1) must be below", variables={"NODE_RANK": "1"}),
    ends(
        "SLURM has other tasks than the trainer",
        *("`devices=2`", "trainer.devices=2"),
        overrides=(*CSV, "trainer.devices=2"),
        variables=SLURM | {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "4"},
    ),
    ends("SLURM_PROCID missing", "`SLURM_PROCID` must be set", variables=SLURM | {"SLURM_PROCID": None}),
    variable("OMP_NUM_THREADS=abc", "`OMP_NUM_THREADS` (='abc')"),
    ends("ulimit -n 64", "`ulimit -n` (=64) must be at least", wrapper=_sh('ulimit -n 64; exec "$@"')),
]
NETWORK = [
    *(
        ends("MASTER_PORT taken", "`MASTER_PORT` (=", "in use", variables=TAKEN, program=program)
        for program in ("train", "bench")
    ),
    variable("MASTER_PORT=70000", "`MASTER_PORT` (=70000)"),
    ends(
        "MASTER_ADDR cannot be resolved",
        "`MASTER_ADDR` (=no.such.host.invalid) must be",
        variables={"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "<FREE>"},
    ),
    *(
        ends(
            "GLOO_SOCKET_IFNAME names no interface",
            "`GLOO_SOCKET_IFNAME` (=eth99)",
            variables={"GLOO_SOCKET_IFNAME": "eth99"},
            program=program,
        )
        for program in ("train", "tune")
    ),
    ends("no interface is up", "ip link set lo up", wrapper=("unshare", "--net"), needs=("--net",)),
    ends(
        "rank 2 of 3 never starts",
        *("`WORLD_SIZE` (=3) ranks must meet", "rank 2 did not come"),
        ranks=(_rank(0, 3), _rank(1, 3)),
        **SLOW | {"overrides": (*CSV, SOON, "global_batch_size=126")},
    ),
    ends("rank 0 never starts", "rank 1 on host", "no answer there within 9 s", ranks=(_rank(1, 2),), **SLOW),
    ends(
        "rank 1 is started twice",
        "`RANK` (=1) must be another one on each process",
        ranks=(_rank(0, 2), _rank(1, 2), _rank(1, 2)),
        **SLOW | {"overrides": CSV},
    ),
    ends(
        "rank 0 is started twice",
        *("`MASTER_PORT` (=", "rank 1 did not come"),
        ranks=(_rank(0, 2), _rank(0, 2)),
        **SLOW,
    ),
]
ONE: dict[str, Any] = {"overrides": ("trainer.devices=1",)}
SERVER = "`logger.offline` (=False) needs a W&B server"
TRACKER = [
    variable("WANDB_MODE=ofline", "`WANDB_MODE` (='ofline')"),
    ends(
        "W&B: key in the configuration",
        "`logger.settings.api_key` must not be in the configuration",
        overrides=("+logger.settings.api_key=" + "0123456789" * 4,),
    ),
    ends("W&B: key too short", SERVER, "WANDB_API_KEY invalid", variables=ONLINE | {"WANDB_API_KEY": "short"}, **ONE),
    ends("W&B: online without a network", SERVER, variables=ONLINE, **ONE, **NO_NETWORK),
    goes_on("W&B: offline without a network", "test accuracy", **NO_NETWORK),
]
PLACES = [
    goes_on("HOME unset", overrides=ALONE, variables={"HOME": None}),
    goes_on("no HOME, no place for caches, no compiler", variables={**NO_PLACE, "PATH": "/none", "CXX": "none"}, **ONE),
    goes_on("TMPDIR missing", overrides=ALONE, variables={"TMPDIR": "/proc/none"}),
    goes_on("LC_ALL=C, run directory `ä ☃ b`", variables={"LC_ALL": "C"}, run_dir="ä ☃ b", **ONE),
    ends("run directory read-only", "`hydra.run.dir`", "Read-only file system", **READ_ONLY),
    ends("run directory on a full disk", "`hydra.run.dir`", "No space left", **_disk("8k")),
    ends("run directory read-only", "`hydra.run.dir`", "Read-only file system", program="simulate", **READ_ONLY),
    ends("run directory on a full disk", "`hydra.run.dir`", "No space left", program="search", **_disk("8k")),
    ends(
        "disk fills up, on_error=raise",
        "was not written (No space left on device)",
        overrides=("trainer.devices=1", FULL),
        lost="the steps since the last checkpoint",
        **FILLS,
    ),
    *(
        goes_on(
            f"disk fills up, on_error=warn, logger={logger}",
            *("was not written (No space left on device)", "test accuracy", *words),
            overrides=(f"logger={logger}", "trainer.devices=1", "strategy.checkpoint_io.on_error=warn", FULL),
            lost="what the disk did not take",
            **FILLS,
        )
        for logger, words in (
            ("csv", ("takes no more rows", "rows of metrics are not in")),
            ("wandb", ("W&B's files of this run are not whole",)),
        )
    ),
]
STREAMS = [
    *(
        goes_on(f"standard {name} closed", overrides=CSV, wrapper=_sh(f'exec "$@" {sign}'))
        for name, sign in (("input", "<&-"), ("output", ">&-"), ("error", "2>&-"))
    ),
    goes_on(
        "standard output full",
        "standard output takes no more (No space left on device)",
        phase="end",
        overrides=ALONE,
        wrapper=_sh('exec "$@" >/dev/full'),
    ),
    # of what: a warning may come before the accuracy
    goes_on("| head -1", phase="end", overrides=ALONE, wrapper=_sh('set -o pipefail; "$@" | head -n 1')),
    goes_on(
        "| true",
        "standard output takes no more (Broken pipe)",
        program="simulate",
        phase="end",
        overrides=SHORT,
        wrapper=_sh('set -o pipefail; "$@" | true'),
    ),
]
CLOCKS = [
    goes_on(
        "clock of rank 1 a year ahead",
        "test accuracy",
        phase="training",
        overrides=CSV,
        ranks=(_rank(0, 2), _rank(1, 2, LD_PRELOAD="<SHIM>")),
        needs=("cc",),
    ),
    goes_on(
        "ranks with other PYTHONHASHSEED",
        "test accuracy",
        phase="training",
        overrides=CSV,
        ranks=(_rank(0, 2, PYTHONHASHSEED="1"), _rank(1, 2, PYTHONHASHSEED="2")),
    ),
]

CASES = [*LAUNCHERS, *NETWORK, *TRACKER, *PLACES, *STREAMS, *CLOCKS]
