"""Checkpoint files: which are there after a fit, what is in them, and what loading gives."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from tests.battery.case import Plain, Run, barrier, behaviour, loader


class Falls(Plain):
    """Logs a metric that goes up and down."""

    def on_train_epoch_end(self) -> None:
        self.log("score", torch.tensor(float((self.current_epoch * 2) % 3)), sync_dist=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "none": {"save_top_k": 0},
    "all": {"save_top_k": -1},
    "best_2": {"save_top_k": 2, "monitor": "score"},
    "best_2_max": {"save_top_k": 2, "monitor": "score", "mode": "max"},
    "last": {"save_last": True},
    "last_link": {"save_last": "link", "save_top_k": 2, "monitor": "score"},
    "last_alone": {"save_last": True, "save_top_k": 0},
    "weights_only": {"save_weights_only": True},
    "every_2_steps": {"every_n_train_steps": 2, "save_top_k": -1},
    "every_2_epochs": {"every_n_epochs": 2, "save_top_k": -1},
    "by_time": {"train_time_interval": timedelta(0), "save_top_k": -1},
    "filename": {"filename": "{epoch}-{score:.2f}", "monitor": "score", "save_top_k": -1},
    "filename_without_names": {
        "filename": "e{epoch}/s{score:.2f}",
        "monitor": "score",
        "save_top_k": -1,
        "auto_insert_metric_name": False,
    },
    "overwritten": {"filename": "same", "enable_version_counter": False, "save_top_k": 1},
    "versions": {"filename": "same", "save_top_k": -1},
    "at_train_epoch_end": {"save_on_train_epoch_end": True, "save_top_k": -1},
    "at_validation_end": {"save_on_train_epoch_end": False, "save_top_k": -1},
    "on_exception": {"save_on_exception": True},
}


def fit_with_files(run: Run, *loaders: Any, plugins: Any = None, **options: Any) -> Any:
    """A fit of three epochs with a ModelCheckpoint of these options: trainer, module, and the callback."""
    saves = ModelCheckpoint(dirpath=run.folder / "files", **options)
    settings = {"max_epochs": 3, "callbacks": [saves], "enable_checkpointing": True, "plugins": plugins}
    return *run.fit(Falls(), *loaders, **settings), saves


def kept(options: dict[str, Any], run: Run) -> Any:
    """What a ModelCheckpoint with these options leaves."""
    _, _, saves = fit_with_files(run, loader(), loader(), **options)
    files = run.files()
    links = [file for file in files if os.path.islink(run.folder / file)]
    content = content_of(run.folder / files[-1]) if files else None
    chosen = saves.best_model_path, saves.last_model_path, saves.best_model_score
    return files, links, saves.state_dict(), chosen, content


for _name, _options in OPTIONS.items():
    behaviour(functools.partial(kept, _options), name=f"kept_{_name}")


def content_of(path: Path) -> Any:
    """Keys and types in a file, and what is saved of weights and optimizers."""
    saved = torch.load(path, weights_only=True)
    return kinds_of({key: value for key, value in saved.items() if "Precision" not in key})


@behaviour
def precision_in_a_file(run: Run) -> Any:
    """Entries of the precision plugin."""
    _, _, path = run.saved()
    return [key for key in torch.load(path, weights_only=True) if "Precision" in key]


def kinds_of(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), {str(key): kinds_of(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [kinds_of(each) for each in value]
    return value if isinstance(value, torch.Tensor | int | str | None) else type(value)


@behaviour
def found_by_name(run: Run) -> Any:
    """`ckpt_path` of "best", "last" and a path, by each method that takes one."""
    trainer, module, saves = fit_with_files(run, loader(), loader(), monitor="score", save_last=True)
    seen: list[Any] = []
    for which in ("best", "last", saves.last_model_path):
        seen.append(trainer.validate(module, loader(), ckpt_path=which, verbose=False))
        seen.append(trainer.test(module, loader(), ckpt_path=which, verbose=False))
        seen.append((trainer.predict(module, loader(1), ckpt_path=which), trainer.ckpt_path))
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, loader(), loader(), ckpt_path="last")
    return seen, module.state_dict(), trainer.global_step, run.files()


@behaviour
def saved_by_hand(run: Run) -> Any:
    trainer, module = run.fit()
    whole, weights = run.folder / "deep/er/a.ckpt", run.folder / "weights.ckpt"
    trainer.save_checkpoint(whole)
    trainer.save_checkpoint(str(weights), weights_only=True)
    trainer.save_checkpoint(weights, weights_only=True)
    loaded = Plain.load_from_checkpoint(weights, tag="other")
    files = run.files()
    barrier()
    trainer.strategy.remove_checkpoint(weights)
    return files, run.files(), loaded.state_dict(), loaded.hparams, content_of(whole), module.hparams


def resumed_across(run: Run, first: str | None = None, second: str | None = None) -> Any:
    """A fit under one strategy goes on under the other; None: the one that is compared."""
    _, _, path = run.saved(strategy=first or run.strategy)
    trainer, module = run.fit(start={"ckpt_path": path}, strategy=second or run.strategy)
    return module.state_dict(), trainer.global_step


behaviour(functools.partial(resumed_across, first="ddp"), name="resumed_from_ddp")
behaviour(functools.partial(resumed_across, second="ddp"), name="resumed_by_ddp")


@dataclasses.dataclass
class Sizes:
    """Of a user."""

    width: int = 1


class Stateful(Plain):
    """Puts things of its own into checkpoints and takes them out."""

    def __init__(self, more: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen: list[Any] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.append(("save", list(checkpoint)))
        checkpoint["own"] = {"numbers": [1, 2.5], "nested": {3: ("a", None)}, "tensor": torch.ones(2)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.append(("load", list(checkpoint), kinds_of(checkpoint["own"]), checkpoint["hyper_parameters"]))


class StatefulCallback(pl.Callback):
    """The same of a callback."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"count": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.append(state)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["by callback"] = True

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.seen.append(list(checkpoint))


class StatefulData(pl.LightningDataModule):
    """The same of a datamodule."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen: list[Any] = []

    def train_dataloader(self) -> Any:
        return loader()

    def state_dict(self) -> dict[str, Any]:
        return {"position": 5}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.append(state)


@behaviour
def state_of_everyone(run: Run) -> Any:
    trainer = run.trainer(max_epochs=1, callbacks=[StatefulCallback()])
    trainer.fit(Stateful(more={"a": [1]}), datamodule=StatefulData())
    trainer.save_checkpoint(run.folder / "a.ckpt")
    other = run.trainer(callbacks=[callback := StatefulCallback()])
    other.fit(module := Stateful(more={"a": [1]}), datamodule=(data := StatefulData()), ckpt_path=run.folder / "a.ckpt")
    again = Stateful.load_from_checkpoint(run.folder / "a.ckpt")
    dated = StatefulData.load_from_checkpoint(run.folder / "a.ckpt")
    return [
        *(module.seen if run.precision == "32-true" else []),
        callback.seen if run.precision == "32-true" else callback.seen[1:],
        data.seen,
        again.hparams,
        dated.hparams,
        content_of(run.folder / "a.ckpt"),
    ]


@behaviour
def types_of_hyper_parameters(run: Run) -> Any:
    """Of types that torch builds with `weights_only=False` only; the test of the plugin has more."""
    values = {"path": Path("a/b"), "names": Namespace(a=1), "sizes": Sizes(2), "dtype": torch.float16}
    warnings.filterwarnings("ignore", "The checkpoint .* holds objects")  # `objects_in_a_checkpoint`
    _, module, path = run.saved(Stateful(more=values))
    found = Stateful.load_from_checkpoint(path, weights_only=False).hparams["more"]
    trainer, _ = run.fit(module, start={"ckpt_path": path, "weights_only": False})
    return found == values, {name: type(value) for name, value in found.items()}, trainer.global_step


@behaviour
def objects_in_a_checkpoint(run: Run) -> Any:
    """What is said of objects when they are saved, and when they are refused."""
    _, module, path = run.saved(Stateful(more=Sizes(2)))
    try:
        run.fit(module, start={"ckpt_path": path})
    except Exception as error:
        return type(error)


@behaviour
def damaged_file(run: Run) -> Any:
    """A bit of a weight that has flipped on the disk."""
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


class Counting(TorchCheckpointIO):
    """A plugin of the user's."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.calls.append(("save", Path(path).name, storage_options))
        super().save_checkpoint(checkpoint, path)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(("load", Path(path).name, args, sorted(kwargs)))
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(("remove", Path(path).name))
        super().remove_checkpoint(path)

    def teardown(self) -> None:
        self.calls.append(("teardown",))


@behaviour
def plugin_of_the_user(run: Run) -> Any:
    plugin = Counting()
    trainer, _, _ = fit_with_files(run, monitor="score", save_last=True, plugins=[plugin])
    trainer.save_checkpoint(run.folder / "a.ckpt", storage_options={"a": 1})
    trainer.test(Falls(), loader(), ckpt_path=run.folder / "a.ckpt", verbose=False)
    return plugin.calls, run.files()


@behaviour
def asynchronous_plugin(run: Run) -> Any:
    _, module, _ = fit_with_files(run, monitor="score", save_last=True, plugins=[AsyncCheckpointIO()])
    loaded = Falls.load_from_checkpoint(run.folder / "files/last.ckpt")
    return run.files(), loaded.state_dict(), module.state_dict()


@behaviour
def folders_of_loggers(run: Run) -> Any:
    for _ in range(2):
        trainer, _ = run.fit(logger=CSVLogger(run.folder, name="logs"), enable_checkpointing=True)
        barrier()
    return run.files(), trainer.log_dir, trainer.checkpoint_callback.best_model_path


@behaviour
def two_fits_into_one_folder(run: Run) -> Any:
    seen = []
    for _ in range(2):
        saves = ModelCheckpoint(dirpath=run.folder / "files", filename="same", save_last=True)
        run.fit(max_epochs=1, callbacks=[saves], enable_checkpointing=True)
        seen.append((run.files(), saves.best_model_path, saves.last_model_path))
        barrier()
    return seen


@behaviour
def plugin_by_itself(run: Run) -> Any:
    """save, load, remove and teardown of the plugin, outside of a fit."""
    plugin, seen = run.trainer().strategy.checkpoint_io, []
    folder = run.folder / f"rank{run.trainer().global_rank}"
    plugin.save_checkpoint({"a": torch.ones(2), "b": {"c": (1, None)}}, folder / "a.ckpt")
    plugin.save_checkpoint({"a": 2}, str(folder / "a.ckpt"))
    seen.append((plugin.load_checkpoint(folder / "a.ckpt"), plugin.load_checkpoint(str(folder / "a.ckpt"), None)))
    seen.append(sorted(os.listdir(folder)))
    plugin.remove_checkpoint(folder / "a.ckpt")
    plugin.remove_checkpoint(folder / "a.ckpt")
    (folder / "sub/b").mkdir(parents=True)
    plugin.remove_checkpoint(folder / "sub")
    seen.append((sorted(os.listdir(folder)), plugin.teardown()))
    for call in (plugin.load_checkpoint, lambda path: plugin.save_checkpoint({}, path, storage_options={})):
        try:
            call(folder / "a.ckpt")
        except Exception as error:
            seen.append((type(error), str(error)))
    return seen
