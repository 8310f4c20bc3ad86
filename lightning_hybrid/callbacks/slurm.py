"""Requeueing of a SLURM job that is about to reach its time limit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment

REQUEUE_LIMIT_S = 30.0
"""How long `scontrol` may take. Our choice: SLURM's own `MessageTimeout` is 10 s."""


def requeue_signal_of(trainer: pl.Trainer) -> signal.Signals | None:
    """Return the signal at which the job is to be queued again, Lightning's `requeue_signal`; None: at no signal."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def job_id_of(variables: Mapping[str, str]) -> str:
    """Return the job's name for `scontrol`; a task of an array has its own.

    >>> job_id_of({"SLURM_JOB_ID": "17"})
    '17'
    >>> job_id_of({"SLURM_JOB_ID": "18", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "1"})
    '17_1'
    """
    if (array := variables.get("SLURM_ARRAY_JOB_ID")) is not None:
        return f"{array}_{variables['SLURM_ARRAY_TASK_ID']}"
    return variables["SLURM_JOB_ID"]


def queue_again() -> str:
    """Ask SLURM to end this job and to queue it again; return the result in one line. Call it on one rank only."""
    job_id = job_id_of(os.environ)
    command = ["scontrol", "requeue", job_id]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=REQUEUE_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        if done.returncode == 0:
            return f"SLURM job {job_id} is queued again"
        reason = done.stderr.strip() or f"exit code {done.returncode}"
    return f"SLURM job {job_id} could not be queued again by `{' '.join(command)}` ({reason}): submit it again yourself"
