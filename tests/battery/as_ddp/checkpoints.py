"""Checkpoint files: which files exist after a fit, their content, and the result of loading them."""

import dataclasses
import functools
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from tests.battery.case import Plain, Run, barrier, behavior, loader


class Falls(Plain):
    def on_train_epoch_end(self) -> None:
        self.log("score", torch.tensor(float((self.current_epoch * 2) % 3)), sync_dist=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "best_2": {"save_top_k": 2, "monitor": "score"},
    "last_link": {"save_last": "link", "save_top_k": 2, "monitor": "score"},
    "weights_only": {"save_weights_only": True},
    "every_2_steps": {"every_n_train_steps": 2, "save_top_k": -1},
    "by_time": {"train_time_interval": timedelta(0), "save_top_k": -1},
    "filename": {"filename": "{epoch}-{score:.2f}", "monitor": "score", "save_top_k": -1},
    "overwritten": {"filename": "same", "enable_version_counter": False, "save_top_k": 1},
    "on_exception": {"save_on_exception": True},
}


def fit_with_files(run: Run, *loaders: Any, plugins: Any = None, **options: Any) -> Any:
    saves = ModelCheckpoint(dirpath=run.folder / "files", **options)
    settings = {
        "max_epochs": 3,
        "callbacks": [saves],
        "enable_checkpointing": True,
        "plugins": plugins,
    }
    return *run.fit(Falls(), *loaders, **settings), saves


def kept(options: dict[str, Any], run: Run) -> Any:
    _, _, saves = fit_with_files(run, loader(), loader(), **options)
    files = run.files()
    links = [file for file in files if os.path.islink(run.folder / file)]
    content = content_of(run.folder / files[-1]) if files else None
    chosen = saves.best_model_path, saves.last_model_path, saves.best_model_score
    return files, links, saves.state_dict(), chosen, content


for _name, _options in OPTIONS.items():
    behavior(functools.partial(kept, _options), name=f"kept_{_name}")


def content_of(path: Path) -> Any:
    saved = torch.load(path, weights_only=True)
    for key in list(saved):
        if "Precision" in key or key == "exact_resume":
            del saved[key]
    return kinds_of(saved)


@behavior
def precision_in_a_file(run: Run) -> Any:
    _, _, path = run.saved()
    return [key for key in torch.load(path, weights_only=True) if "Precision" in key]


def kinds_of(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), {str(key): kinds_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [kinds_of(item) for item in value]
    if isinstance(value, torch.Tensor | int | str | None):
        return value
    return type(value)


@behavior
def found_by_name(run: Run) -> Any:
    """Use `ckpt_path` with "best", "last" and a path, in each method that accepts it."""
    options = {"monitor": "score", "save_last": True}
    trainer, module, saves = fit_with_files(run, loader(), loader(), **options)
    seen: list[Any] = []
    for which in ("best", "last", saves.last_model_path):
        seen.append(trainer.validate(module, loader(), ckpt_path=which, verbose=False))
        seen.append(trainer.test(module, loader(), ckpt_path=which, verbose=False))
        seen.append((trainer.predict(module, loader(1), ckpt_path=which), trainer.ckpt_path))
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, loader(), loader(), ckpt_path="last")
    return seen, module.state_dict(), trainer.global_step, run.files()


@behavior
def saved_by_hand(run: Run) -> Any:
    trainer, module = run.fit()
    whole = run.folder / "deep/er/a.ckpt"
    weights = run.folder / "weights.ckpt"
    trainer.save_checkpoint(whole)
    trainer.save_checkpoint(str(weights), weights_only=True)
    trainer.save_checkpoint(weights, weights_only=True)
    loaded = Plain.load_from_checkpoint(weights, tag="other")
    files = run.files()
    barrier()
    trainer.strategy.remove_checkpoint(weights)
    return (
        files,
        run.files(),
        loaded.state_dict(),
        loaded.hparams,
        content_of(whole),
        module.hparams,
    )


@dataclasses.dataclass
class Sizes:
    width: int = 1


class Stateful(Plain):
    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen: list[Any] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.append(("save", keys_of(checkpoint)))
        checkpoint["own"] = {
            "numbers": [1, 2.5],
            "nested": {3: ("a", None)},
            "tensor": torch.ones(2),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kinds = kinds_of(checkpoint["own"])
        self.seen.append(("load", keys_of(checkpoint), kinds, checkpoint["hyper_parameters"]))


def keys_of(checkpoint: dict[str, Any]) -> list[str]:
    """Return the keys of a checkpoint, without the additional one that the page lists for random numbers."""
    return [key for key in checkpoint if key != "exact_resume"]


@behavior
def state_of_the_user(run: Run) -> Any:
    _, _, path = run.saved(Stateful(extra={"a": [1]}))
    _, module = run.fit(Stateful(extra={"a": [1]}), start={"ckpt_path": path})
    again = Stateful.load_from_checkpoint(path)
    seen = [again.hparams, content_of(path)]
    if run.precision == "32-true":
        seen += module.seen
    return seen


@behavior
def objects_in_a_checkpoint(run: Run) -> Any:
    _, module, path = run.saved(Stateful(extra=Sizes(2)))
    try:
        run.fit(module, start={"ckpt_path": path})
    except Exception as error:
        return type(error)


@behavior
def damaged_file(run: Run) -> Any:
    trainer, module, path = run.saved()
    barrier()
    if trainer.is_global_zero:
        content = bytearray(path.read_bytes())
        content[content.index(module.body.weight.detach().numpy().tobytes()[:8])] ^= 1
        path.write_bytes(content)
    barrier()
    try:
        run.fit(start={"ckpt_path": path})
    except Exception as error:
        return type(error)


@behavior
def asynchronous_plugin(run: Run) -> Any:
    _, module, _ = fit_with_files(
        run, monitor="score", save_last=True, plugins=[AsyncCheckpointIO()]
    )
    loaded = Falls.load_from_checkpoint(run.folder / "files/last.ckpt")
    return run.files(), loaded.state_dict(), module.state_dict()
