"""Selection of a checkpoint to resume from, with checks that it fits the configuration and is the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from omegaconf import DictConfig, OmegaConf

from lightning_hybrid.checkpoint.file import (
    DamagedCheckpointError,
    RefusedCheckpointError,
    check_whole,
    load_unchecked,
    mark_of,
)
from recipes.cli.preflight import check_resume

NO_INFLUENCE = {"model.checkpoint_activations", "model.slice_fc"}
"""Saved keys that do not influence results, except by the order of additions."""


# ---- selection of the checkpoint -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckpointCandidate:
    """Checkpoint file with a complete training state, from which a run can resume."""

    path: Path
    global_step: int

    @property
    def age(self) -> tuple[int, int]:
        """Sort key that increases with the step of the checkpoint, then with its modification time."""
        return self.global_step, self.path.stat().st_mtime_ns


def checkpoint(cfg: DictConfig) -> str | None:
    """Return the path of the checkpoint from which the run resumes, or None to start from scratch.

    Raises:
        ValueError: The file does not exist, all checkpoints are damaged, or the checkpoint has another configuration or
            more epochs or steps than the run.
    """
    path = _asked_for(cfg.resume, Path(cfg.run_dir))
    if path is None:
        return None
    now = saved_configuration(cfg)
    if now is not None:
        refuse_other_configuration(path, now)
    _refuse_shorter_run(path, cfg.trainer)
    return str(path)


def _asked_for(resume: str | None, run_dir: Path) -> Path | None:
    if resume is None:
        return None
    if resume == "auto":
        return newest_whole(run_dir / "checkpoints")
    check_resume(resume)
    path = Path(resume)
    check_whole(path)
    return path


def newest_whole(folder: Path) -> Path | None:
    """Return the newest undamaged checkpoint in a folder, or None if there is no checkpoint.

    The newest checkpoint is the one with the most steps. Checkpoints that are damaged, or contain more than plain data,
    are skipped with a warning.

    Raises:
        ValueError: All checkpoints are damaged. A new run would silently overwrite them.
    """
    paths = {path.resolve() for path in folder.glob("*.ckpt") if path.is_file()}
    refused: list[str] = []
    candidates = [
        candidate for path in sorted(paths) if (candidate := _look_at(path, refused)) is not None
    ]
    # A checksum reads the whole file: start with the newest file, and stop at the first one that is undamaged.
    for candidate in sorted(candidates, key=lambda each: each.age, reverse=True):
        try:
            check_whole(candidate.path)
        except DamagedCheckpointError as error:
            refused.append(str(error))
            continue
        for words in refused:
            rank_zero_warn(
                f"{words} The run skips this checkpoint, and resumes from {candidate.path}."
            )
        return candidate.path
    if refused:
        raise ValueError(
            f"`resume` (=auto) found no undamaged checkpoint in {folder}: {' '.join(refused)} Set "
            "resume=null overwrite=true to start again, or set resume=<path> to another checkpoint."
        )
    return None


def _look_at(path: Path, refused: list[str]) -> CheckpointCandidate | None:
    """Read the step of a checkpoint, or return None if it is unreadable or contains only weights."""
    try:
        content = load_unchecked(path, map_location="cpu", mmap=True)
    except (DamagedCheckpointError, RefusedCheckpointError) as error:
        refused.append(str(error))
        return None
    if not isinstance(content, dict) or "optimizer_states" not in content:
        return None
    return CheckpointCandidate(path=path, global_step=int(content["global_step"]))


# ---- comparison of the configuration ---------------------------------------------------------------------------------


class Configuration(Callback):
    """Callback that saves the configuration in checkpoints, so that a resumed run can detect changes.

    Args:
        kept: Sections of the configuration to save, as plain data.
    """

    def __init__(self, kept: dict[str, Any]) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        """Return the sections of the configuration to save in the checkpoint."""
        return {"kept": self.kept}


def saved_configuration(cfg: DictConfig) -> dict[str, Any] | None:
    """Return the part of the configuration that is saved in checkpoints, or None if saving is disabled."""
    node = (cfg.callbacks or {}).get("configuration")
    if node is None:
        return None
    return cast(dict[str, Any], OmegaConf.to_container(node.kept, resolve=True))


def refuse_other_configuration(path: Path, now: dict[str, Any]) -> None:
    """Raise if the configuration of the run differs from the configuration saved in a checkpoint.

    A checkpoint without a configuration is accepted. Keys that do not influence results are ignored.

    Raises:
        ValueError: The message names all keys that differ.
    """
    content = load_unchecked(path, map_location="cpu", mmap=True)
    before = content.get("callbacks", {}).get(Configuration.__name__, {}).get("kept")
    if before is None:
        return
    differing = [key for key in differences(before, now) if key not in NO_INFLUENCE]
    if differing:
        (key, *further_keys) = differing
        old = dict(_leaves(before))
        new = dict(_leaves(now))
        if further_keys:
            also = (
                " Other keys that differ are "
                f"{', '.join(f'{further_key} (={old.get(further_key)})' for further_key in further_keys)}."
            )
        else:
            also = ""
        raise ValueError(
            f"`{key}` (={new.get(key)}) differs from the value in the checkpoint {path} "
            f"(={old.get(key)}).{also} Set "
            f"{key}={old.get(key)}, or start a new run in another hydra.run.dir without `resume`."
        )


def _refuse_shorter_run(path: Path, trainer: DictConfig) -> None:
    """Raise if a checkpoint has more epochs or steps than the trainer allows.

    Lightning would raise its own error after all ranks have started, or end without training.
    """
    content = load_unchecked(path, map_location="cpu", mmap=True)
    for name, unit, num_done in (
        ("max_epochs", "epochs", _num_epochs(content)),
        ("max_steps", "steps", content.get("global_step", 0)),
    ):
        limit = trainer.get(name)
        # -1: no limit. Another type is rejected later, by name.
        if isinstance(limit, int | float) and 0 <= limit < num_done:
            raise ValueError(
                f"`trainer.{name}` (={limit}) must be at least {num_done}, because the checkpoint {path} "
                f"was saved after that many {unit}. Set trainer.{name} to {num_done} or more, "
                "or set resume=<path> to an earlier checkpoint."
            )


def _num_epochs(content: dict[str, Any]) -> int:
    """Return the number of epochs that were finished when a checkpoint was saved."""
    num_epochs = int(content.get("epoch", 0))
    try:
        # During the last callbacks of an epoch, `epoch` does not count it yet.
        progress = content["loops"]["fit_loop"]["epoch_progress"]["current"]
        return max(num_epochs, int(progress["processed"]))
    except (KeyError, TypeError):
        return num_epochs


def differences(before: Any, now: Any) -> list[str]:
    """Return the dotted keys at which two configurations differ.

    >>> differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 0}, "e": 4})
    ['a.c', 'd', 'e']
    """
    old = dict(_leaves(before))
    new = dict(_leaves(now))
    return [
        key
        for key in {**old, **new}
        if (key in old) != (key in new) or old.get(key) != new.get(key)
    ]


def _leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{place}.{key}" if place else str(key))
    else:
        yield place, value


# ---- comparison between ranks ----------------------------------------------------------------------------------------


class SameCheckpoint(Callback):
    """Callback that raises an error if two ranks would resume from different checkpoints.

    Each rank searches the run directory by itself. If ranks see different directories, or a file system that is updated
    with a delay, they would resume from different steps or wait for each other forever.

    Args:
        ckpt_path: Checkpoint that this rank resumes from.

    Raises:
        ValueError: Raised in `setup` on every rank if the checkpoints differ. The message says which checkpoint each
            rank found.
    """

    def __init__(self, ckpt_path: str | None) -> None:
        self.ckpt_path = ckpt_path

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise if the ranks selected different checkpoints.

        Collective: every rank must call it.
        """
        # The test after training calls `setup` again, with the same file.
        if stage != "fit" or trainer.world_size < 2 or not dist.is_initialized():
            return
        paths: list[str | None] = [None] * trainer.world_size
        dist.all_gather_object(
            paths, None if self.ckpt_path is None else mark_of(Path(self.ckpt_path))
        )
        if len(set(paths)) > 1:
            marks = "; ".join(
                f"rank {rank}: {mark or 'no checkpoint'}" for rank, mark in enumerate(paths[:8])
            )
            raise ValueError(
                f"`resume` (={self.ckpt_path}) selects different checkpoints on different ranks ({marks}). "
                "Set hydra.run.dir to a directory that all nodes share, or set resume=<path> to "
                "the same file on every rank."
            )
