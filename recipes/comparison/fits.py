"""Training runs of `recipes/train.py`, each in a child process that ends when its parent ends."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

Stage = Literal["validate", "test"]

CONF = Path(__file__).resolve().parents[2] / "conf"


@dataclass(frozen=True, kw_only=True)
class FitRequest:
    """Request for a training run and a measurement of its accuracy.

    Attributes:
        overrides: Overrides of `recipes/train.py`.
        run_dir: Folder of its checkpoints, from which an interrupted run continues.
        stage: Split on which the accuracy of the final weights is measured.
    """

    overrides: tuple[str, ...]
    run_dir: str
    stage: Stage


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """Result of one training run, with its accuracy and processor time.

    Attributes:
        accuracy: Accuracy of the final weights, from 0 to 1. If the run diverged, the accuracy of guessing.
        num_steps: Number of optimizer steps.
        core_s: Processor time in seconds, since the run was last resumed.
        divergence: Error with which the run diverged. Empty if it did not.
    """

    accuracy: float
    num_steps: int
    core_s: float
    divergence: str = ""


class FitError(RuntimeError):
    """Error raised if a training run fails for a reason other than divergence, such as an unknown key.

    Its message is the message of the original error.
    """


def check(requests: Sequence[FitRequest]) -> None:
    """Validate the configuration of each requested run, and build its data module to check the dataset.

    Raises:
        ValueError: A key is unknown, a value is invalid, or the images are missing.
    """
    from hydra.utils import instantiate

    from recipes.cli import config_check
    from recipes.training import keys

    for request in requests:
        cfg = _composed(request)
        config_check.check(cfg, keys.TRAIN_KEYS)
        instantiate(cfg.data)


def fit(request: FitRequest) -> FitResult:
    """Train a network as requested, and measure the accuracy of the final weights.

    Training resumes from the newest checkpoint in its folder if there is one.
    """
    from lightning_hybrid.callbacks import metrics as m
    from lightning_hybrid.callbacks.numerics import NonFiniteLossError
    from lightning_hybrid.precision.skipped_steps import EndlessOverflowError
    from recipes.training import resume
    from recipes.training.build import build

    # Lightning's messages about devices and loaders would hide the output of the study.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    cfg = _composed(request)
    ckpt_path = resume.checkpoint(cfg)
    trainer, module, data = build(cfg, ckpt_path)
    divergence = ""
    try:
        trainer.fit(module, data, ckpt_path=ckpt_path)
    except (NonFiniteLossError, EndlessOverflowError) as error:
        divergence = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if divergence:
        accuracy = 1 / cfg.model.num_classes
    elif request.stage == "validate":
        accuracy = float(trainer.validate(module, data, verbose=False)[0][m.VAL_ACC])
    else:
        accuracy = float(trainer.test(module, data, verbose=False)[0][m.TEST_ACC])
    return FitResult(
        accuracy=accuracy,
        num_steps=trainer.global_step,
        core_s=round(time.process_time(), 1),
        divergence=divergence,
    )


def _composed(request: FitRequest) -> Any:
    from hydra import compose, initialize_config_dir

    from recipes.cli import launch

    launch.register_resolvers()
    launch.ignore_lightning_warnings()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(
            "train", overrides=[*request.overrides, f"run_dir='{request.run_dir}'", "resume=auto"]
        )


class FitPool:
    """Pool that runs tasks in parallel, each in a new child process.

    All child processes end when this process ends. Every training run has a new process, so that side effects such as a
    seed in the environment do not reach the next run.

    Args:
        num_workers: Number of tasks that run in parallel.
    """

    def __init__(self, num_workers: int) -> None:
        self.executor = ThreadPoolExecutor(num_workers)
        self._processes: set[BaseProcess] = set()
        self._is_stopped = False

    def __enter__(self) -> FitPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_stopped = True
        for process in list(self._processes):
            # Ctrl-C is delivered to the child processes too
            if kind is not None and not issubclass(kind, KeyboardInterrupt):
                process.terminate()
        self.executor.shutdown(cancel_futures=True)

    def call(self, function: Callable[..., Any], argument: Any) -> Any:
        """Run a function in a new process, wait for it and return its result.

        Raises:
            FitError: The function raised an error, or its process died.
        """
        if self._is_stopped:
            raise FitError(
                "The pool has been stopped, because another task failed. See the error of that task."
            )
        # a forked process would inherit the state of threads
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(function, argument, sender))
        process.start()
        self._processes.add(process)
        sender.close()  # only the child holds this end, so `recv` raises EOFError when the child dies
        try:
            result, error = receiver.recv()
        except EOFError:
            process.join()
            result = None
            error = f"The process of a training run ended with exit code {process.exitcode}. Check its output."
        process.join()
        self._processes.discard(process)
        if error:
            # Set before this thread takes the next task, because the error ends the study.
            self._is_stopped = True
            raise FitError(error)
        return result


def _work(function: Callable[..., Any], argument: Any, sender: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        result = function(argument)
    except Exception as error:
        from recipes.cli.launch import message_of

        sender.send((None, message_of(error)))
    else:
        sender.send((result, ""))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
