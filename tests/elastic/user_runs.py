"""Elastic runs as users write them: each host is a separate process with a plain `DataLoader(shuffle=True)`.

    run = UserHosts(tmp_path, UserScene(max_steps=24))
    run.start("a")
    run.wait("the end", run.has_ended("a"))
    run.images_of_steps()       # of all hosts, by step

A scene is pickled to reach the hosts, so its classes and functions must be defined at module level.
"""

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.netlab import recovery
from tests.rank_pool import warm_context


class Numbered(Dataset):
    """Data set whose images are their own indices plus noise from the global random stream, as in a random crop."""

    def __init__(self, num_images: int) -> None:
        self.num_images = num_images

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.rand(2)


class Net(pl.LightningModule):
    """Small regression module that records the images that it reads in each step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)
        self.images_read: list[list[int]] = []  # in all attempts of a step
        self.shards_then: list[list[int]] = []  # shards of this rank in each step

    def loss(self, batch: Any) -> Tensor:
        images, noise = batch
        inputs = torch.cat([images[:, None] / 64, noise], dim=1)
        return (self.net(inputs) - images[:, None] / 16).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.images_read.append(batch[0].tolist())
        self.shards_then.append(
            list(self.trainer.strategy._fit._shards) if self.is_elastic else [0]
        )
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    @property
    def is_elastic(self) -> bool:
        return getattr(self.trainer.strategy, "_fit", None) is not None

    def images_of_shards(self) -> dict[int, list[int]]:
        """Return the images of the last attempt of a step, by shard."""
        shards = self.shards_then[-1]
        return dict(zip(shards, self.images_read[-len(shards) :], strict=False))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def shuffled(scene: "UserScene") -> DataLoader[Any]:
    """Return a loader as most users write it."""
    return DataLoader(Numbered(scene.num_images), scene.batch_size, shuffle=True)


@dataclass(frozen=True, kw_only=True)
class UserScene:
    """Settings of a user for an elastic run."""

    module: Callable[[], pl.LightningModule] = Net
    loader: Callable[["UserScene"], Any] = shuffled
    callbacks: Callable[[Path], list[Any]] | None = None
    loggers: Callable[[Path], list[Any]] | None = None
    with_validation: bool = False
    num_images: int = 64
    batch_size: int = 2
    max_hosts: int = 2
    devices: int = 1
    max_steps: int = -1
    max_epochs: int | None = None
    pause_s: float = 0.0
    # Steps after which a host waits while other hosts are missing.
    hold_after: tuple[int, ...] = ()
    wait_s: float = 0.5  # time that the first meeting waits for more hosts than `min_hosts`
    ckpt_path: str | None = None
    save_to: str | None = None
    seed: int | None = None
    elastic: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    fits: int = 1  # consecutive fits on one trainer


class _Notes(pl.Callback):
    def __init__(self, note: Callable[..., None], scene: UserScene, folder: Path) -> None:
        self.note = note
        self.scene = scene
        self.folder = folder
        self.steps_made = 0

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        module.images_read.clear()
        module.shards_then.clear()

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        # Before any all-reduce: a host that is killed after it has no row of the step.
        self.note(event="read", step=trainer.global_step, read=module.images_read[-1])

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        values = [parameter.detach().numpy().tobytes() for parameter in module.parameters()]
        digest = hashlib.blake2b(b"".join(values), digest_size=8).hexdigest()
        views = trainer.strategy._fit._views
        self.note(
            event="step",
            step=trainer.global_step - 1,
            digest=digest,
            hosts=views.topology.num_nodes,
            view=views.groups.number,
            images=module.images_of_shards(),
            epoch=trainer.current_epoch,
            is_writer=trainer.is_global_zero,
        )
        time.sleep(self.scene.pause_s)
        is_held = trainer.global_step - 1 in self.scene.hold_after
        while is_held and views.topology.num_nodes < self.scene.max_hosts and not views.ended:
            time.sleep(0.01)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.note(event="validation", step=trainer.global_step)


def user_main(
    host: str, local: int, port: int, options: dict[str, Any], folder: str, part: dict[str, Any]
) -> None:
    """Train on one rank."""
    scene: UserScene = part["scenes"].get(host, part["scene"])
    for descriptor, name in ((1, "out"), (2, "err")):
        path = f"{folder}/{name}_{host}_{local}"
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    os.environ |= {
        "RANK": str(local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(scene.devices),
        "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": str(scene.devices),
        "TORCHELASTIC_RUN_ID": "x",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    log = open(f"{folder}/log_{host}_{local}_{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115

    def note(**values: Any) -> None:
        row = {"t": time.monotonic(), "host": host, "local": local, **values}
        log.write(json.dumps(row) + "\n")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _train(scene, options, Path(folder), note)
        except BaseException as error:
            note(event="error", error=f"{type(error).__name__}: {error}"[:4000])
            raise
        finally:
            note(event="warnings", texts=[str(warning.message) for warning in caught])
    note(event="over")


def _train(
    scene: UserScene, options: dict[str, Any], folder: Path, note: Callable[..., None]
) -> None:
    from lightning_hybrid import HybridElasticStrategy
    from lightning_hybrid.elastic import host_changes
    from lightning_hybrid.elastic.membership.view import IsolatedError

    host_changes.Membership = partial(host_changes.Membership, wait_s=scene.wait_s)  # type: ignore[assignment, misc]
    if scene.seed is not None:
        pl.seed_everything(scene.seed)
    elastic = {"max_hosts": scene.max_hosts, "meet": options["meet"], **scene.elastic}
    strategy = HybridElasticStrategy(**{"timeout": 60, **elastic, **scene.strategy})
    callbacks = []
    if scene.callbacks is not None:
        callbacks = scene.callbacks(folder)
    settings = {
        "enable_checkpointing": False,
        "logger": False if scene.loggers is None else scene.loggers(folder),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        **scene.trainer,
    }
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=scene.devices,
        strategy=strategy,
        max_steps=scene.max_steps,
        max_epochs=scene.max_epochs,
        callbacks=[*callbacks, _Notes(note, scene, folder)],
        **settings,
    )
    module = scene.module()
    val = None
    if scene.with_validation:
        val = DataLoader(Numbered(12), 4)
    for number in range(scene.fits):
        if number:
            trainer.fit_loop.max_epochs *= 2
        try:
            trainer.fit(
                module, scene.loader(scene), val, ckpt_path=scene.ckpt_path, weights_only=False
            )
        except IsolatedError:
            sys.exit(75)  # it has not joined yet, and its launcher restarts it
    if scene.save_to is not None:
        trainer.save_checkpoint(scene.save_to)
    weights = {name: value.flatten().tolist() for name, value in module.state_dict().items()}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    note(
        event="end",
        step=trainer.global_step,
        epoch=trainer.current_epoch,
        weights=weights,
        metrics=metrics,
    )


class UserHosts(recovery.Hosts):
    """Hosts of one run.

    Args:
        folder: Folder for their files.
        scene: Scene of all hosts.
        scenes: Scenes of individual hosts by name, which replace `scene`.
    """

    main: Any = staticmethod(user_main)

    def __init__(
        self, folder: Path, scene: UserScene, scenes: dict[str, UserScene] | None = None
    ) -> None:
        warm_context()
        self.scene = scene
        options = {"hosts": scene.max_hosts, "ranks": scene.devices}
        super().__init__(options, folder, {"scene": scene, "scenes": scenes or {}})

    def events(self, event: str, host: str | None = None) -> list[dict[str, Any]]:
        """Return the rows of an event so far, of all hosts or of one."""
        self.look()
        return [row for row in self.rows if row["event"] == event and host in (None, row["host"])]

    def wait(self, goal: str, is_reached: Any, **limits: Any) -> None:
        """Wait until a condition holds. Fail if a host raises an error."""

        def is_reached_or_failed() -> bool:
            if is_reached():
                return True
            errors = [
                f"host {row['host']}: {row['error']}"
                for row in self.rows
                if row["event"] == "error"
            ]
            if errors:
                raise RuntimeError(f"{goal}: {'; '.join(errors)}")
            return False

        super().wait(goal, is_reached_or_failed, **limits)

    def has_ended(self, *hosts: str) -> Callable[[], bool]:
        """Return a condition that holds once all of these hosts have ended."""
        return lambda: all(self.events("over", host) for host in hosts)

    def has_made(self, step: int, *hosts: str, num_hosts: int | None = None) -> Callable[[], bool]:
        """Return a condition that holds once all of these hosts have made a step, in a view of `num_hosts` hosts."""

        def is_made() -> bool:
            for host in hosts:
                rows = [
                    row for row in self.events("step", host) if num_hosts in (None, row["hosts"])
                ]
                if not any(row["step"] >= step for row in rows):
                    return False
            return True

        return is_made

    def resume(self, scene: UserScene) -> None:
        """Use another scene for all hosts that are started from now on."""
        self._part["scene"] = scene

    def kill(self, host: str) -> None:
        """Kill a host."""
        self.signal(host, 9)
        self.end(host)

    def finish(self, *hosts: str, limit_s: float = 120.0) -> None:
        """Wait until these hosts have ended their fits, then end all hosts."""
        self.wait("the end", self.has_ended(*hosts), limit_s=limit_s)
        self.close()

    def close(self) -> None:
        """End all hosts."""
        for host in list(self.running):
            self.end(host)
        self.look()

    def images_of_steps(self) -> dict[int, list[int]]:
        """Return the images of each step over all shards.

        Raises:
            AssertionError: Two hosts read different images for the same shard.
        """
        of_shards: dict[int, dict[str, list[int]]] = {}
        for row in self.events("step"):
            images_of_shards = of_shards.setdefault(row["step"], {})
            for shard, images in row["images"].items():
                assert images_of_shards.setdefault(shard, images) == images, row
        images_of_steps = {}
        for step, shards in sorted(of_shards.items()):
            images_of_steps[step] = sorted(image for images in shards.values() for image in images)
        return images_of_steps

    def num_writers_of_steps(self) -> dict[int, int]:
        """Return the number of ranks that would write a checkpoint, for each step that two hosts made."""
        num_writers: dict[int, int] = {}
        for row in self.events("step"):
            if row["hosts"] == 2:
                num_writers[row["step"]] = num_writers.get(row["step"], 0) + row["is_writer"]
        return num_writers

    def batches_of_step(self, step: int) -> list[list[int]]:
        """Return the batches that ranks read for a step, including hosts that were killed within it."""
        return [sorted(row["read"]) for row in self.events("read") if row["step"] == step]

    def digests(self) -> dict[int, set[str]]:
        """Return the digests of the weights after each step."""
        digests: dict[int, set[str]] = {}
        for row in self.events("step"):
            digests.setdefault(row["step"], set()).add(row["digest"])
        return dict(sorted(digests.items()))

    def warnings_of(self, host: str) -> list[str]:
        """Return the warnings of a host's ranks."""
        return [text for row in self.events("warnings", host) for text in row["texts"]]


def wanted_images(scene: UserScene, num_steps: int) -> dict[int, list[int]]:
    """Return the images of each step as `ddp` on `max_hosts` x `devices` ranks reads them."""
    num_shards = scene.max_hosts * scene.devices
    dataset = Numbered(scene.num_images)
    samplers = [
        DistributedSampler(dataset, num_shards, shard, shuffle=True, seed=scene.seed or 0)
        for shard in range(num_shards)
    ]
    batches_per_epoch = -(-len(samplers[0]) // scene.batch_size)
    images: dict[int, list[int]] = {}
    for step in range(num_steps):
        epoch, batch = divmod(step, batches_per_epoch)
        images[step] = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            order = list(sampler)
            images[step].extend(order[batch * scene.batch_size : (batch + 1) * scene.batch_size])
        images[step].sort()
    return images


def undisturbed(folder: Path, scene: UserScene) -> UserHosts:
    """Run a scene without disturbance in one process that has all shards."""
    run = UserHosts(
        folder, replace(scene, hold_after=(), elastic={**scene.elastic, "min_hosts": 1})
    )
    run.start("a")
    run.finish("a")
    return run
