"""Context managers for Hydra jobs, which give all ranks one run directory and shorten error messages.

The ranks of a job start in one of three ways:

    python recipes/train.py              Lightning starts ranks 1, 2, ... by repeating the command line. Without help
                                         Hydra would give each rank its own directory and, under --multirun, make each
                                         rank run the whole sweep.
    torchrun recipes/train.py            Every rank composes its own configuration and would use its own timestamp.
    srun python recipes/train.py         The same as with torchrun.

Therefore `job` rewrites the command line so that it repeats exactly this job in this directory. The directory of a job
that torchrun or SLURM started contains the launcher's job id.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException
from torch.distributed import DistError

from recipes.cli import key_note
from recipes.cli.command_line import bridge_hydra_versions
from recipes.cli.preflight import LAUNCH_VARIABLES
from recipes.cli.usage import UsageError, command
from recipes.cli.world import (
    accumulation,
    slurm_started_us,
    steps_between_questions,
    world_from_launcher,
)

# Importing Lightning takes seconds, and commands that do not train do not need it.
if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric import Fabric

KNOWN_ERRORS = (ValueError, TypeError, OSError, HydraException, OmegaConfBaseException)
"""Errors whose message is clear without the name of its type.

Lightning's `MisconfigurationException` is another one.
"""

RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Environment variables in which launchers store the rank, in Lightning's order."""

OWN_MESSAGE = re.compile(
    r"(\[Errno \d+\] )?`[^`]+`( and `[^`]+`)? (\(=|(must|cannot|is|are|was|has|contains|needs)\b)"
)

NOT_TOGETHER = (
    "`WORLD_SIZE` ranks must connect to MASTER_ADDR:MASTER_PORT, but one of them did not "
    "connect, or has exited. See the output of that rank, and check that no firewall blocks "
    "the connection. The error of PyTorch is"
)


# ---- resolvers -------------------------------------------------------------------------------------------------------


def launch_id(otherwise: str) -> str:
    """Return a job name that is the same on all ranks, or `otherwise` if no launcher has started the job."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return f"torchrun-{run_id}"
    if slurm_started_us():
        return f"slurm-{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_STEP_ID', 0)}"
    return otherwise


def count_classes(root: str) -> int:
    """Return the number of classes of the image dataset in the folder `root`."""
    # Imported here because most commands read no images.
    from recipes.datasets.images import (
        imagenet,
    )

    return imagenet.count_classes(root)


def register_resolvers() -> None:
    """Register the OmegaConf resolvers that the files of `conf` use.

    Call it before Hydra composes a configuration and before a command is declared.
    """
    bridge_hydra_versions()
    resolvers: dict[str, Callable[..., Any]] = {
        "launch_id": launch_id,
        "world_from_launcher": world_from_launcher,
        "product": lambda a, b: a * b,
        "accumulation": accumulation,
        "count_classes": count_classes,
        "steps_between_questions": steps_between_questions,
        "on_rank_zero": lambda value: value if is_rank_zero() else None,
        "log_handlers": lambda: ["console", "file"] if is_rank_zero() else ["console"],
        "command": command,
        "offline_by_default": lambda: "WANDB_MODE" not in os.environ,
    }
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def is_rank_zero() -> bool:
    """Return whether this process is rank zero. Without a launcher, it is."""
    # Lightning knows the rank once a trainer exists.
    lightning = sys.modules.get("lightning.fabric.utilities.rank_zero")
    rank = getattr(getattr(lightning, "rank_zero_only", None), "rank", None)
    return (
        int(next((os.environ[name] for name in RANKS if name in os.environ), 0))
        if rank is None
        else rank
    ) == 0


# ---- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def short_errors(cfg: DictConfig | None = None) -> Iterator[None]:
    """Context manager that reports an error as a short message without a traceback, and exits with code 2.

    Use it around start-up code, where every error is caused by the configuration. The traceback is shown if
    `HYDRA_FULL_ERROR=1` is set. With `cfg`, the message also lists the configuration keys of the arguments that it
    names.
    """
    try:
        yield
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        message = f"error: {message_of(error, cfg)}"
        print(message, file=sys.stderr, flush=True)
        if HydraConfig.initialized() and is_rank_zero():
            runtime = HydraConfig.get().runtime
            # a missing value means that Hydra has not created the directory yet
            if not OmegaConf.is_missing(runtime, "output_dir"):
                _remove_unused(Path(runtime.output_dir))
        raise UsageError(message) from None


def _remove_unused(folder: Path) -> None:
    """Remove the run directory of a job that failed to start, unless it contains more than the configuration."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {".hydra"}:
        shutil.rmtree(folder, ignore_errors=True)
        if re.fullmatch(r"\d{4}-\d\d-\d\d", folder.parent.name):
            with suppress(OSError):  # the folder contains another run
                folder.parent.rmdir()


def message_of(error: Exception, cfg: DictConfig | None = None) -> str:
    """Format an error as a short message with its cause, its configuration key and the overrides to check.

    Errors of this library name Python arguments. With `cfg`, a line with their configuration keys is added.
    """
    # Hydra 1.3 raises its own error with this line. Hydra 1.4 adds a note to the original error.
    said = [*str(error).splitlines(), *getattr(error, "__notes__", [])]
    where = next((line for line in said if line.strip().startswith("full_key:")), "")
    if error.__cause__ is not None and isinstance(error, HydraException):
        cause = error.__cause__
    else:
        cause = error
    notes = ("full_key:", "object_type=", "reference_type=")
    text = "\n".join(
        line for line in str(cause).splitlines() if not line.strip().startswith(notes)
    ).strip()
    text = text.removeprefix("ValueError raised while resolving interpolation: ")
    key = where.partition(":")[2].strip()
    if isinstance(cause, DistError):
        return f"{NOT_TOGETHER}: {text.partition(chr(10))[0]}"
    if OWN_MESSAGE.match(text) is None:  # raised by torch, Lightning or the system
        is_known = (
            isinstance(cause, KNOWN_ERRORS) or type(cause).__name__ == "MisconfigurationException"
        )
        if is_known and text:
            text = text
        else:
            text = f"{type(cause).__name__}: {text}"
        text = text.rstrip(".") + f". {_given(key)} Set HYDRA_FULL_ERROR=1 to see the traceback."
    elif cfg is not None:
        note = key_note.note_of(text, cfg, built_key=key)
        if note:
            return f"{text}\n{note}"
        return text
    return text + (f" [{key}]" if key else "")


def _given(key: str) -> str:
    """Return a sentence that names the overrides related to a key, or all overrides if there are none."""
    if HydraConfig.initialized():
        overrides = HydraConfig.get().overrides.task
    else:
        overrides = []
    names = {override: override.lstrip("+~").partition("=")[0] for override in overrides}
    within = [
        short_name
        for short_name, name in names.items()
        if f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.")
    ]
    if key and within:
        chosen_names = within
    else:
        chosen_names = list(names)
    if chosen_names:
        return f"Check these overrides: {' '.join(chosen_names)}."
    return "Check the files of conf/."


def device_of(name: str | None) -> torch.device:
    """Convert a device name to a torch device. None selects CUDA if available, and otherwise the CPU.

    Raises:
        ValueError: The device does not exist.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"`device` (={name!r}) cannot be used on this machine: {reason}. Set device=cpu."
        ) from error
    return device


# ---- processes -------------------------------------------------------------------------------------------------------


def ignore_lightning_warnings() -> None:
    """Silence a deprecation warning that torch 2.13 gives for every data loader of Lightning 2.6.

    Users cannot change the code that causes it.
    """
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")


@contextmanager
def job(cfg: DictConfig | None = None) -> Iterator[list[pl.Trainer | Fabric]]:
    """Context manager that runs a Hydra job in one directory for all ranks, and cleans up at the end.

    It yields a list. Append the trainer or Fabric to it, so that `job` waits for the ranks that it started. If
    Lightning or this package finds an error in the configuration during the run, it is reported as a short message, as
    by `short_errors`.
    """
    from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

    from lightning_hybrid.checkpoint.file import CheckpointWriteError
    from lightning_hybrid.strategy.rendezvous import RendezvousError

    ignore_lightning_warnings()
    hydra = HydraConfig.get()
    before = dict(os.environ)
    argv = sys.argv
    trainers = list[Any]()
    exit_code = 1
    # Lightning starts the other ranks with this command line. With the original one each would run the whole sweep.
    sys.argv = [argv[0], *command_of_this_job()]
    # Lightning passes this directory, and not that of the sweep, to the ranks that it starts.
    with read_write(cast(DictConfig, hydra)):
        hydra.run.dir = hydra.runtime.output_dir
    try:
        yield trainers
        if torch.distributed.is_initialized():
            _end_process_group()
        # The ranks that Lightning started exit a little later. The next job of a sweep needs their ports.
        for process in (
            p for trainer in trainers for p in getattr(trainer.strategy.launcher, "procs", [])
        ):
            process.wait()
        exit_code = 0
    except (SIGTERMException, KeyboardInterrupt):
        if is_rank_zero():
            print(
                f"To continue, run the same command with hydra.run.dir={hydra.runtime.output_dir} "
                "resume=auto",
                flush=True,
            )
        raise
    # These errors end a run with one short message. A ValueError does so only if it is about the configuration.
    except (
        MisconfigurationException,
        ValueError,
        RendezvousError,
        CheckpointWriteError,
        DistError,
    ) as error:
        is_clear = not isinstance(error, ValueError) or str(error).startswith("`")
        # The error is not about the configuration, so the traceback is needed.
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or not is_clear:
            raise
        raise SystemExit(f"error: {message_of(error, cfg)}") from None
    finally:
        sys.argv = argv
        # Lightning's logger sets WANDB_MODE when it is offline
        for name in {*LAUNCH_VARIABLES, "WANDB_MODE"} - set(before):
            os.environ.pop(name, None)
        finish(exit_code)


def _end_process_group() -> None:
    """Destroy the process group, and give Gloo's threads time to release their tensors."""
    has_gloo = "gloo" in torch.distributed.get_backend()
    torch.distributed.destroy_process_group()
    if has_gloo:
        # A Gloo thread frees the tensors of a collective shortly after it completes, and needs the GIL for that.
        # FSDP2's caches and reference cycles of the pipeline stages keep a group alive, so nothing joins its threads.
        # A thread that is late while the process exits aborts the process (pytorch/pytorch#190489).
        gc.collect()
        time.sleep(0.1)


def finish(exit_code: int) -> None:
    """Finish the current W&B run, if any, and warn if a full disk has left its files incomplete.

    A full disk causes only a warning, so it does not hide another error.
    """
    wandb: Any = sys.modules.get("wandb")
    if wandb is None:
        return
    folder = getattr(getattr(wandb, "run", None), "dir", None)
    try:
        wandb.finish(exit_code=exit_code)
        if folder is not None and os.path.isdir(folder):
            # Since version 0.31 W&B does not report a full disk.
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(bytes(2**16))
    except OSError as error:
        from lightning.pytorch.utilities import rank_zero_warn

        rank_zero_warn(
            f"The W&B files of this run are incomplete ({error.strerror}), so `wandb sync` can "
            "only upload part of the metrics. All logged metrics are in curves.json of the run "
            "directory, or in the report of a resumed run."
        )


def command_of_this_job() -> list[str]:
    """Return the command-line arguments with which Hydra repeats this job, without the script's path."""
    hydra = HydraConfig.get()
    command = [f"--config-name={hydra.job.config_name}"]
    command += [
        f"--config-dir={s.path}"
        for s in hydra.runtime.config_sources
        if s.provider == "command-line"
    ]
    ours = (
        "hydra.mode=",
        "hydra.run.",
        "hydra.sweep.",
        "hydra/sweeper",
        "hydra.sweeper",
        "hydra/launcher",
    )
    # Read as a whole: item access would replace interpolations `${...}` by their values.
    of_hydra, of_task = (
        cast(list[str], OmegaConf.to_container(overrides))
        for overrides in (hydra.overrides.hydra, hydra.overrides.task)
    )
    command += [override for override in of_hydra if not override.lstrip("+").startswith(ours)]
    return [*command, *of_task, "hydra.mode=RUN"]
