"""One job, one directory: what Hydra, Lightning's launcher and torchrun must agree on, and clear words when they fail.

Three ways to start the ranks of a job, and who knows what:

    python recipes/train.py              Lightning starts ranks 1, 2, ... by repeating the command line; Hydra would let
                                         each choose a directory and, under --multirun, each run the whole sweep
    torchrun recipes/train.py            every rank composes its own configuration and would take its own time stamp
    srun python recipes/train.py         the same

so `job` rewrites the command line to repeat exactly this job in this directory, and the directory of a job that was
started from outside carries the launcher's own id.
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

# a command that does not train starts without Lightning, which takes seconds to import
if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric import Fabric

KNOWN_ERRORS = (ValueError, TypeError, OSError, HydraException, OmegaConfBaseException)
"""Errors whose message says what is wrong without their name; Lightning's `MisconfigurationException` is one more."""

RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Where launchers say a rank, in Lightning's order."""

OWN_MESSAGE = re.compile(
    r"(\[Errno \d+\] )?`[^`]+`( and `[^`]+`)? (\(=|must|is not known|was not written)"
)

NOT_TOGETHER = (
    "`WORLD_SIZE` ranks must find one another at MASTER_ADDR:MASTER_PORT and stay; one did not come, or is gone: see "
    "what it said, and whether a firewall is between"
)


# ---- resolvers -------------------------------------------------------------------------------------------------------


def launch_id(otherwise: str) -> str:
    """Return a name that is the same on every rank of a job started by torchrun or SLURM, else `otherwise`."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return f"torchrun-{run_id}"
    if slurm_started_us():
        return f"slurm-{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_STEP_ID', 0)}"
    return otherwise


def count_classes(root: str) -> int:
    """Count the classes of the image set in `root`, see `imagenet.count_classes`."""
    # here: most commands read no images, and start without it
    from recipes.datasets.images import (
        imagenet,
    )

    return imagenet.count_classes(root)


def register_resolvers() -> None:
    """Register the functions that `conf` uses. Before Hydra composes, and before a command is declared."""
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
    """Return whether this process is rank zero according to its launcher, and True without a launcher."""
    # knows more once a trainer is there
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
    """End with one message, not a traceback, for what a configuration can cause (HYDRA_FULL_ERROR=1 shows it all).

    To be put around what is done before work starts: whatever goes wrong there comes from what was given. With `cfg`
    the message has the keys of the arguments that it names.
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
            # else Hydra has made no directory yet
            if not OmegaConf.is_missing(runtime, "output_dir"):
                _remove_unused(Path(runtime.output_dir))
        raise UsageError(message) from None


def _remove_unused(folder: Path) -> None:
    """Remove a run directory that holds nothing but the configuration of a start that was refused."""
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {".hydra"}:
        shutil.rmtree(folder, ignore_errors=True)
        if re.fullmatch(r"\d{4}-\d\d-\d\d", folder.parent.name):
            with suppress(OSError):  # holds another run
                folder.parent.rmdir()


def message_of(error: Exception, cfg: DictConfig | None = None) -> str:
    """Format an error: what is wrong, the key of the part that could not be built, and what was given.

    With `cfg`, an error of the library, which names arguments of Python, gets a line with their keys.
    """
    # Hydra 1.3 raises an error of its own with this line; 1.4 adds a note to the error itself.
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
    if OWN_MESSAGE.match(text) is None:  # an error of torch, Lightning or the system
        is_known = (
            isinstance(cause, KNOWN_ERRORS) or type(cause).__name__ == "MisconfigurationException"
        )
        if is_known and text:
            text = text
        else:
            text = f"{type(cause).__name__}: {text}"
        text = text.rstrip(".") + f". {_given(key)} HYDRA_FULL_ERROR=1 shows where."
    elif cfg is not None:
        note = key_note.note_of(text, cfg, built_key=key)
        if note:
            return f"{text}\n{note}"
        return text
    return text + (f" [{key}]" if key else "")


def _given(key: str) -> str:
    """Return what of a part was given on the command line, which the message alone would not show."""
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
        return f"Given was {' '.join(chosen_names)}: correct that."
    return "Correct the files of conf/."


def device_of(name: str | None) -> torch.device:
    """Return the device of that name. None: CUDA's where there is one, else the CPU.

    Raises:
        ValueError: There is no such device.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"`device` (={name!r}) must be a device of this machine: {reason}. Set device=cpu."
        ) from error
    return device


# ---- processes -------------------------------------------------------------------------------------------------------


def ignore_lightning_warnings() -> None:
    """Ignore a warning of torch 2.13 at every loader of Lightning 2.6: no user can change it."""
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")


@contextmanager
def job(cfg: DictConfig | None = None) -> Iterator[list[pl.Trainer | Fabric]]:
    """Run one job of Hydra's, in its own directory on all ranks, and leave the process fit for the next one.

    Yields a list; put the trainer, or Fabric, into it, so that the ranks it started are waited for. What Lightning, or
    we, find wrong with the configuration only while it runs ends in one message, as in `short_errors`.
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
    # Lightning starts the other ranks by this command line: without it each would run the whole sweep.
    sys.argv = [argv[0], *command_of_this_job()]
    # Lightning gives this, and not the directory of a sweep, to the ranks it starts.
    with read_write(cast(DictConfig, hydra)):
        hydra.run.dir = hydra.runtime.output_dir
    try:
        yield trainers
        if torch.distributed.is_initialized():
            _end_process_group()
        # The ranks that Lightning started end a little later; the next job of a sweep must find their ports free.
        for process in (
            p for trainer in trainers for p in getattr(trainer.strategy.launcher, "procs", [])
        ):
            process.wait()
        exit_code = 0
    except (SIGTERMException, KeyboardInterrupt):
        if is_rank_zero():
            print(
                f"to go on: the same command with hydra.run.dir={hydra.runtime.output_dir} resume=auto",
                flush=True,
            )
        raise
    # Errors of a run that end it in one message; a ValueError if it is about what was given.
    except (
        MisconfigurationException,
        ValueError,
        RendezvousError,
        CheckpointWriteError,
        DistError,
    ) as error:
        is_clear = not isinstance(error, ValueError) or str(error).startswith("`")
        # not about what was given: where matters
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or not is_clear:
            raise
        raise SystemExit(f"error: {message_of(error, cfg)}") from None
    finally:
        sys.argv = argv
        # the last is set by Lightning's logger, offline
        for name in {*LAUNCH_VARIABLES, "WANDB_MODE"} - set(before):
            os.environ.pop(name, None)
        finish(exit_code)


def _end_process_group() -> None:
    """Destroy the process group, and let Gloo's threads free what they hold."""
    has_gloo = "gloo" in torch.distributed.get_backend()
    torch.distributed.destroy_process_group()
    if has_gloo:
        # A thread of Gloo's frees a collective's tensors a moment after it is done, and needs Python's lock for that.
        # FSDP2's caches, and cycles of the stages, keep a group alive, so nothing waits for its threads; one that is
        # late, in a process that is at its end, aborts it (pytorch/pytorch#190489).
        gc.collect()
        time.sleep(0.1)


def finish(exit_code: int) -> None:
    """End W&B's run, where there is one. Warn where its disk is full, which hides no other error."""
    wandb: Any = sys.modules.get("wandb")
    if wandb is None:
        return
    folder = getattr(getattr(wandb, "run", None), "dir", None)
    try:
        wandb.finish(exit_code=exit_code)
        if folder is not None and os.path.isdir(folder):
            with tempfile.TemporaryFile(
                dir=folder
            ) as probe:  # from 0.31 on W&B itself says nothing of a full disk
                probe.write(bytes(2**16))
    except OSError as error:
        from lightning.pytorch.utilities import rank_zero_warn

        rank_zero_warn(
            f"W&B's files of this run are not whole ({error.strerror}): `wandb sync` will send what is there. "
            "curves.json of the run directory, or the report of a resumed run, has what was logged."
        )


def command_of_this_job() -> list[str]:
    """Return the command line, without the script, that makes Hydra compose exactly this job and run it alone."""
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
    # As they were given: read one by one, OmegaConf would put a value in the place of ${...}.
    of_hydra, of_task = (
        cast(list[str], OmegaConf.to_container(overrides))
        for overrides in (hydra.overrides.hydra, hydra.overrides.task)
    )
    command += [override for override in of_hydra if not override.lstrip("+").startswith(ours)]
    return [*command, *of_task, "hydra.mode=RUN"]
