"""Checks of launcher variables, rendezvous address, file limits and directories before a job starts.

Without these checks, an error would appear only when processes already wait for each other. The result would be a hang
until a timeout, or an error of a library that does not know the cause.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import resource
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipes.datasets import fashion_mnist_files

PROBE_BYTES = 65536
"""Number of bytes of the file that tests whether a disk is full (our choice).

A full disk may still accept an empty file.
"""

MIN_DESCRIPTORS = 256
"""Minimum limit of open files and sockets per process (our choice).

With the default recipe on two ranks, one rank has 66 and the other 54. Each further rank adds some on all ranks.
"""

MANY_DESCRIPTORS = 1 << 16  # used if there is no hard limit

LAUNCH_VARIABLES = (
    "LOCAL_RANK NODE_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT PL_GLOBAL_SEED PL_SEED_WORKERS".split()
)
"""Environment variables that Lightning sets in the process that starts the ranks.

Lightning's launcher and `seed_everything` set them.
"""

# Names of dtypes that Lightning does not accept as a precision, and the precision that is probably meant.
DTYPE_NAMES = {"fp16": "16-true", "float16": "16-true", "half": "16-true", "bfloat16": "bf16-true"}
DTYPE_NAMES |= {"fp32": "32-true", "float32": "32-true", "fp64": "64-true", "float64": "64-true"}

WANDB_MODES = ("online", "offline", "disabled", "dryrun", "run", "shared")

_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SECRETS = ("api_key", "apikey", "password", "secret", "access_token")
"""Endings of key names that contain secrets."""

_OF_SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_COUNTS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
)


def check_environment(
    run_dir: str | Path | None, variables: Mapping[str, str] = os.environ
) -> None:
    """Raise if environment variables, file limits or the run directory would make the job fail.

    Args:
        run_dir: Directory that this process writes to. None if it writes nothing.
        variables: Environment variables.

    Raises:
        ValueError: The message names the variable or directory, and the value to set.
    """
    check_launcher(variables)
    check_rendezvous(variables)
    check_words(variables)
    raise_descriptors()
    if run_dir is not None:
        check_writable(Path(run_dir))


def whole_number(name: str, variables: Mapping[str, str] = os.environ) -> int:
    """Parse an environment variable of the launcher as a non-negative integer.

    Raises:
        ValueError: The value is not an integer of at least 0.

    >>> whole_number("RANK", {"RANK": "two"})
    Traceback (most recent call last):
        ...
    ValueError: `RANK` (='two') must be an integer of at least 0. Launchers such as torchrun and srun set this \
environment variable, so start the job with one of them, or `unset RANK`.
    """
    value = variables[name]
    if not (value.isascii() and value.strip().isdigit()):
        raise ValueError(
            f"`{name}` (={value!r}) must be an integer of at least 0. Launchers such as torchrun "
            "and srun set this environment variable, so start the job with one of them, or "
            f"`unset {name}`."
        )
    return int(value)


def check_launcher(variables: Mapping[str, str]) -> None:
    """Raise if the environment variables of torchrun or SLURM are incomplete or contradict each other.

    Raises:
        ValueError: A variable of torchrun or SLURM is missing, or two contradict each other.

    >>> check_launcher({"TORCHELASTIC_RUN_ID": "1", "RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2",
    ...     "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    Traceback (most recent call last):
        ...
    ValueError: `RANK` (=2) must be below `WORLD_SIZE` (=2), because ranks count from 0. Start the job with \
torchrun, which sets both, or unset both.
    """
    if "TORCHELASTIC_RUN_ID" in variables:
        for name in _LAUNCHED:
            if name not in variables:
                raise ValueError(
                    f"`{name}` must be set if `TORCHELASTIC_RUN_ID` is set, because the ranks need "
                    "it to connect. Start the job with torchrun, which sets both, or `unset "
                    "TORCHELASTIC_RUN_ID`."
                )
    elif _slurm_starts(variables):
        for name in _OF_SLURM:
            if name not in variables:
                raise ValueError(
                    f"`{name}` must be set if `SLURM_NTASKS` is set, because each process reads its rank "
                    "from it. Start the job with srun, which sets both, or `unset SLURM_NTASKS`."
                )
    elif "LOCAL_RANK" in variables and not {"MASTER_ADDR", "MASTER_PORT"} <= variables.keys():
        raise ValueError(
            f"`LOCAL_RANK` (={variables['LOCAL_RANK']}) must be set together with MASTER_ADDR and "
            "MASTER_PORT, because a launcher sets all three. Start the job with torchrun, or "
            "`unset LOCAL_RANK`."
        )
    launch_values = {
        name: whole_number(name, variables) for name in (*_COUNTS, *_OF_SLURM) if name in variables
    }
    for rank, size in (
        ("RANK", "WORLD_SIZE"),
        ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("GROUP_RANK", "GROUP_WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
    ):
        if (
            rank in launch_values
            and size in launch_values
            and launch_values[rank] >= launch_values[size]
        ):
            raise ValueError(
                f"`{rank}` (={launch_values[rank]}) must be below `{size}` (={launch_values[size]}), "
                "because ranks count from 0. Start the job with "
                f"{'srun' if rank.startswith('SLURM') else 'torchrun'}, which sets both, or unset both."
            )
    parts = [
        launch_values.get(name) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE")
    ]
    if None not in parts and parts[0] * parts[1] != parts[2]:  # type: ignore[operator]
        raise ValueError(
            f"`WORLD_SIZE` (={parts[2]}) must equal `LOCAL_WORLD_SIZE * GROUP_WORLD_SIZE` "
            f"(={parts[0]} * {parts[1]}), because all nodes have the same number of ranks. Start "
            "the job with torchrun, which sets all three."
        )


def _slurm_starts(variables: Mapping[str, str]) -> bool:
    """Return whether SLURM starts the ranks, which is not the case in interactive shells."""
    return "SLURM_NTASKS" in variables and variables.get("SLURM_JOB_NAME") not in (
        "bash",
        "interactive",
    )


def check_place(*, local_rank: int, num_devices: int, node_rank: int, num_nodes: int) -> None:
    """Raise if the local rank or node rank is too large for the trainer's devices and nodes.

    A rank that is too large would wait forever.

    Raises:
        ValueError: `local_rank` is not below `num_devices`, or `node_rank` is not below `num_nodes`.

    >>> check_place(local_rank=0, num_devices=2, node_rank=1, num_nodes=1)
    Traceback (most recent call last):
        ...
    ValueError: `NODE_RANK` (=1) must be below `trainer.num_nodes` (=1), because ranks count from 0. Start the job \
with a launcher that sets it, `unset NODE_RANK`, or change trainer.num_nodes.
    """
    for name, rank, key, size in (
        ("LOCAL_RANK", local_rank, "trainer.devices", num_devices),
        ("NODE_RANK", node_rank, "trainer.num_nodes", num_nodes),
    ):
        if rank >= size:
            raise ValueError(
                f"`{name}` (={rank}) must be below `{key}` (={size}), because ranks count from 0. "
                f"Start the job with a launcher that sets it, `unset {name}`, or change {key}."
            )


def check_words(variables: Mapping[str, str]) -> None:
    """Raise if `WANDB_MODE` or `OMP_NUM_THREADS` has an invalid value.

    W&B would reject the value only later, and OpenMP would ignore it silently.

    Raises:
        ValueError: The message names the variable.

    >>> check_words({"WANDB_MODE": "ofline"})
    Traceback (most recent call last):
        ...
    ValueError: `WANDB_MODE` (='ofline') must be online, offline, disabled, dryrun, run or shared. Set \
WANDB_MODE=offline.
    """
    mode = variables.get("WANDB_MODE")
    if mode is not None and mode not in WANDB_MODES:
        near = (difflib.get_close_matches(mode, WANDB_MODES, n=1) or ["offline"])[0]
        modes = f"{', '.join(WANDB_MODES[:-1])} or {WANDB_MODES[-1]}"
        raise ValueError(f"`WANDB_MODE` (={mode!r}) must be {modes}. Set WANDB_MODE={near}.")
    threads = variables.get("OMP_NUM_THREADS", "1")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in threads.split(",")):
        raise ValueError(
            f"`OMP_NUM_THREADS` (={threads!r}) must be a positive integer, because OpenMP "
            "ignores any other value and uses all cores in each rank. Set OMP_NUM_THREADS=1."
        )


def raise_descriptors() -> None:
    """Raise the soft limit of open files to the hard limit, because each pair of ranks opens sockets.

    Child processes inherit the limit.

    Raises:
        ValueError: The hard limit is below the number that two ranks need.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and hard < MIN_DESCRIPTORS:
        raise ValueError(
            f"`ulimit -n` (={hard}) must be at least {MIN_DESCRIPTORS}, because each rank needs "
            "that many open files and sockets. Raise it in the shell or in the system's limits "
            "(limits.conf, LimitNOFILE of a service)."
        )
    if soft != unlimited and (hard == unlimited or soft < hard):
        with suppress(OSError, ValueError):  # the system may refuse; then the limit stays
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (MANY_DESCRIPTORS if hard == unlimited else hard, hard)
            )


def check_rendezvous(variables: Mapping[str, str]) -> None:
    """Raise if the rendezvous address, port or network interface cannot be used on this host.

    Raises:
        ValueError: The address is unreachable, the port is in use, or an interface does not exist.
    """
    address = variables.get("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" in variables:
        port = whole_number("MASTER_PORT", variables)
    else:
        port = None
    if port is not None and not 0 < port < 65536:
        raise ValueError(
            f"`MASTER_PORT` (={port}) must be a port from 1 to 65535. Set MASTER_PORT=29500, or `unset "
            "MASTER_PORT`."
        )
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address, port or 9, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)  # looks up a route and sends nothing
    except OSError as error:
        raise ValueError(
            f"`MASTER_ADDR` (={address}) cannot be reached from this host: "
            f"{error.strerror}. Set MASTER_ADDR to rank zero's host, or bring the interface up "
            "(`ip link set lo up` if all ranks are on this host)."
        ) from error
    if port is not None and _is_ours_to_open(variables):
        _check_free(port)
    there = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        names = variables.get(variable, "")
        if variable == "NCCL_SOCKET_IFNAME" and (names[:1] in ("^", "=") or not names):
            continue
        for name in filter(None, names.split(",")):
            if variable.startswith("NCCL"):
                is_there = any(entry.startswith(name) for entry in there)
            else:
                is_there = name in there
            if not is_there:
                raise ValueError(
                    f"`{variable}` (={names}) contains {name}, which is not a network interface of this "
                    f"host. Set {variable} to one of {', '.join(there)}, or `unset {variable}`."
                )


def _is_ours_to_open(variables: Mapping[str, str]) -> bool:
    """Return whether this process will listen on `MASTER_PORT`.

    Only rank zero listens there, unless torchrun's agent already does.
    """
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return False
    return all(
        variables.get(name, "0") == "0"
        for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
    )


def _check_free(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # as torch's store does: a socket in TIME_WAIT is not a listener
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise ValueError(
                f"`MASTER_PORT` (={port}) cannot be used, because this process cannot listen on it: "
                f"{error.strerror}. Set another port, or `unset MASTER_PORT` to let a run on one "
                "host choose a free port."
            ) from error


def check_writable(folder: Path) -> None:
    """Raise if a directory cannot be created or written to, for example because the disk is full.

    Raises:
        ValueError: The directory cannot be created, or a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(
            f"`hydra.run.dir` (={folder}) cannot be written to: {error.strerror}. Set "
            "hydra.run.dir=<directory> to a writable directory for logs and checkpoints."
        ) from error


def refuse_to_overwrite(run_dir: Path, *, resume: Any, overwrite: Any) -> None:
    """Raise if a new run would overwrite the checkpoints of another run in the same directory.

    Raises:
        ValueError: There are checkpoints, and neither `resume` nor `overwrite` is set.
    """
    checkpoints = sorted((run_dir / "checkpoints").glob("*.ckpt"))
    if checkpoints and resume is None and not overwrite:
        raise ValueError(
            f"`hydra.run.dir` (={run_dir}) already contains a run with "
            f"checkpoints/{checkpoints[0].name}, which this run would overwrite. Add resume=auto "
            "to continue it or overwrite=true to start again, or set another hydra.run.dir."
        )


def check_required(config: Mapping[str, Any]) -> None:
    """Raise if a required value of the configuration is missing. Hydra marks missing values with `???`.

    Raises:
        ValueError: The message names all such keys.

    >>> check_required({"root": "???", "packing": {"out": "???", "quality": 90}})
    Traceback (most recent call last):
        ...
    ValueError: `root` (=???) is required, but has no value. Missing keys: root, packing.out. Set them on the command \
line, for example root=<value>.
    """
    missing = list[str]()
    nodes: list[tuple[str, Any]] = [("", config)]
    for key, value in nodes:  # the list grows while it is traversed
        if isinstance(value, Mapping):
            nodes += [
                (f"{key}.{name}" if key else str(name), child) for name, child in value.items()
            ]
        elif value == "???":
            missing.append(key)
    if missing:
        raise ValueError(
            f"`{missing[0]}` (=???) is required, but has no value. Missing keys: {', '.join(missing)}. Set "
            f"them on the command line, for example {missing[0]}=<value>."
        )


def check_values(config: Mapping[str, Any]) -> None:
    """Raise if a configuration value is invalid, as far as this can be checked without torch.

    Importing torch takes seconds.

    Raises:
        ValueError: `precision` is the name of a dtype, a number of images or ranks is not above zero, the images do not
            divide evenly among the ranks, or a folder (`root`, `data.root`) or file (`resume`, Fashion-MNIST) is
            missing.

    >>> check_values({"precision": "fp16"})
    Traceback (most recent call last):
        ...
    ValueError: `precision` (='fp16') must be one of Lightning's names, such as 16-true (half-precision model with \
fp32 master weights), bf16-true, 32-true or 16-mixed. Set precision=16-true.
    """
    precision = str(config.get("precision"))
    data = config.get("data")
    trainer = config.get("trainer")
    if (name := DTYPE_NAMES.get(precision)) is not None:
        raise ValueError(
            f"`precision` (='{precision}') must be one of Lightning's names, such as 16-true "
            "(half-precision model with fp32 master weights), bf16-true, 32-true or 16-mixed. "
            f"Set precision={name}."
        )
    batch = config.get("global_batch_size")
    if isinstance(batch, int) and batch < 1:
        raise ValueError(
            f"`global_batch_size` (={batch}) must be above 0. Set global_batch_size to the number of "
            "images per optimizer step."
        )
    is_launched = any(
        name in os.environ for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS")
    )
    if isinstance(batch, int) and isinstance(trainer, Mapping) and not is_launched:
        devices = _without_launcher(trainer.get("devices"))
        _check_shares(batch, devices, _without_launcher(trainer.get("num_nodes")))
    check_resume(config.get("resume"))
    _check_folder("root", config.get("root"), "to pack")
    if not isinstance(data, Mapping):
        return
    root = data.get("root")
    if data.get("_target_") != fashion_mnist_files.DATA_MODULE:
        _check_folder("data.root", root, "that contains train/ and val/")
    elif _is_path(root):
        fashion_mnist_files.check_files(str(root), name="data.root")


def _without_launcher(value: Any) -> Any:
    """Return the default value of a `world_from_launcher` interpolation, and any other value unchanged.

    >>> _without_launcher("${world_from_launcher:devices,2}"), _without_launcher(3), _without_launcher("auto")
    (2, 3, 'auto')
    """
    match = re.fullmatch(r"\$\{world_from_launcher:\w+,(\d+)\}", str(value))
    if match is None:
        return value
    return int(match[1])


def check_resume(resume: Any) -> None:
    """Raise if `resume` is the path of a checkpoint that does not exist.

    Raises:
        ValueError: The file does not exist.
    """
    if not _is_path(resume) or resume == "auto" or Path(resume).is_file():
        return
    raise ValueError(
        f"`resume` (={resume}) is not an existing file. The current directory is "
        f"{Path.cwd()}. Set resume=<run directory>/checkpoints/last.ckpt, or set "
        "hydra.run.dir=<run directory> and resume=auto to use its newest checkpoint."
    )


def _is_path(root: Any) -> bool:
    # `$`: the value comes from the environment. `?`: the user must set the value, see `check_required`.
    return isinstance(root, str) and not root.startswith(("$", "?"))


def _check_folder(key: str, root: Any, content: str) -> None:
    if _is_path(root) and not Path(root).is_dir():
        raise ValueError(f"`{key}` (={root}) does not exist. Set {key} to the folder {content}.")


def _check_shares(batch: int, devices: Any, num_nodes: Any) -> None:
    """Raise if the global batch size is not a multiple of the number of ranks."""
    if (
        not isinstance(devices, int)
        or not isinstance(num_nodes, int)
        or devices < 1
        or num_nodes < 1
    ):
        return  # all devices of the machine, or a value that is rejected later
    num_ranks = devices * num_nodes
    if batch % num_ranks:
        below = batch // num_ranks * num_ranks
        if below:
            nearest = f"{below} or {below + num_ranks}"
        else:
            nearest = f"{num_ranks}"
        raise ValueError(
            f"`global_batch_size` (={batch}) must be a multiple of the number of ranks "
            f"(={num_ranks}), because every rank trains on the same number of images. Set "
            f"global_batch_size={nearest}."
        )


def check_secrets(config: Mapping[str, Any]) -> None:
    """Raise if the configuration contains a password or API key, which would be saved and logged.

    Args:
        config: Configuration of plain mappings and lists.

    Raises:
        ValueError: The message names the key, and does not contain the secret.

    >>> check_secrets({"logger": {"settings": {"api_key": "mine"}}})
    Traceback (most recent call last):
        ...
    ValueError: `logger.settings.api_key` must not be in the configuration, which is written to the run directory, to \
checkpoints and to the tracker, where others can read it. Set WANDB_API_KEY or run `wandb login` instead, and revoke a \
key that was already written.
    >>> check_secrets({"logger": {"settings": {"api_key": None}}})
    """
    nodes: list[tuple[str, Any]] = [("", config)]
    for key, value in nodes:  # the list grows while it is traversed
        if isinstance(value, Mapping):
            nodes += [
                (f"{key}.{name}" if key else str(name), child) for name, child in value.items()
            ]
        elif isinstance(value, list):
            nodes += [(f"{key}[{index}]", child) for index, child in enumerate(value)]
        elif value is not None and key.lower().endswith(SECRETS):
            raise ValueError(
                f"`{key}` must not be in the configuration, which is written to the run directory, to "
                "checkpoints and to the tracker, where others can read it. Set WANDB_API_KEY or run "
                "`wandb login` instead, and revoke a key that was already written."
            )
