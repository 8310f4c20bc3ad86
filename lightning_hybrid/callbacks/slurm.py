"""A SLURM job that is about to reach its time limit: which signal says so, and how the job is queued again."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import SLURMEnvironment

REQUEUE_LIMIT_S = 30.0
"""How long `scontrol` may take; ours: SLURM's own `MessageTimeout` is 10 s."""


def requeue_signal_of(trainer: pl.Trainer) -> signal.Signals | None:
    """The signal at which the trainer's job is to be queued again, Lightning's `requeue_signal`; None: at no signal."""
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        return environment.requeue_signal
    return None


def job_id_of(variables: Mapping[str, str]) -> str:
    """What `scontrol` calls the job; a task of an array is one by itself.

    >>> job_id_of({"SLURM_JOB_ID": "17"})
    '17'
    >>> job_id_of({"SLURM_JOB_ID": "18", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "1"})
    '17_1'
    """
    if (array := variables.get("SLURM_ARRAY_JOB_ID")) is not None:
        return f"{array}_{variables['SLURM_ARRAY_TASK_ID']}"
    return variables["SLURM_JOB_ID"]


def queue_again() -> str:
    """Ask SLURM to end this job and to queue it again; says in one line what came of it. On one rank only."""
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
