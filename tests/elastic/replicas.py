"""Hosts of an elastic run as processes, with losses at chosen steps, and one plain process for comparison.

The plain process has no elastic code. It is an ordinary torch loop over all shards of a step. Gradients are sums of
small integers, which are exact in every precision and in every order of additions. After each step, all hosts must
therefore hold the bits of the plain process, regardless of which hosts were present. The gradients depend on the
weights, the images and random numbers.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import pickle
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hybrid import HybridElasticStrategy
from lightning_hybrid.data.random_streams import seed_streams
from lightning_hybrid.elastic import elastic_fit, host_changes
from lightning_hybrid.elastic.membership.connections import Connection
from lightning_hybrid.elastic.membership.host import Host
from lightning_hybrid.elastic.membership.membership import Membership
from lightning_hybrid.elastic.membership.view import IsolatedError, RefusedError, View
from tests.ports import free_addresses, free_port
from tests.rank_pool import warm_context

NUM_SHARDS = 4
BATCH_SIZE = 2
STEPS_PER_EPOCH = 5
NUM_FEATURES = 6
SEED = 7
# small enough for sums of these integers in fp16, and large enough to expose code that omits it
LOSS_SCALE = 16.0
WAIT_LIMIT_S = 120.0


@dataclass(frozen=True)
class Loss:
    """Death of a host at a step: SIGKILL to all its ranks.

    Attributes:
        when: "before" the step: Lightning has read the batch of the host that dies, and the other hosts know of the
        death
            before they begin the step; "within" the step: before the backward pass of a shard; "after" the all-reduce:
            `ahead` has made the step, and `late`, which also has the result, has not; "soon": `delay_s` after the step
            began, and before the next step begins.
        shard: Index of the shard among the shards of the host.
    """

    host: str
    step: int
    when: Literal["before", "within", "after", "soon"]
    shard: int = 0
    delay_s: float = 0.0
    ahead: str = ""
    late: str = ""


@dataclass(frozen=True)
class Join:
    """Start of a host before a step. The other hosts begin that step once they share a view with the new host."""

    host: str
    step: int


@dataclass(frozen=True)
class Cut:
    """Cut of all links of a host before a step: it cannot reach any other host and cannot be reached."""

    host: str
    step: int


@dataclass(frozen=True)
class Scene:
    """Hosts of a run in the order in which they start, and the events during the run."""

    hosts: str
    events: Sequence[Loss | Join | Cut] = ()
    num_steps: int = 8
    precision: str = "32-true"
    ranks: int = 1  # per host
    max_hosts: int = NUM_SHARDS
    silent_s: float = 2.0
    # Widths of networks that differ from the network of the other hosts, by host.
    widths: Mapping[str, int] = field(default_factory=dict)
    # False: a joining host is rejected, and has exited before the others begin the step.
    join_ends_view: bool = True

    @property
    def first_hosts(self) -> list[str]:
        """Return the hosts that are present from the beginning."""
        later = {event.host for event in self.events if isinstance(event, Join)}
        return [host for host in self.hosts if host not in later]


class ExactNet(nn.Module):
    """Network whose gradients are small integers, and whose running statistics follow the weights."""

    def __init__(self, width: int = NUM_FEATURES) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(width) / 8)
        self.shift = nn.Parameter(torch.zeros(3))
        self.norm = nn.BatchNorm1d(width, affine=False)

    def forward(self, images: Tensor) -> Tensor:
        return integer_loss(self.weight, self.shift, self.norm, images)


def integer_loss(weight: Tensor, shift: Tensor, norm: nn.Module, images: Tensor) -> Tensor:
    """Return a loss with integer gradients of at most 51 that depend on weights, images and random numbers."""
    width = weight.numel()
    features = images[:, :width].float()
    norm(features + weight.detach().float())
    turn = torch.floor(4 * weight.detach().float().sum()) % 3
    noise = torch.randint(0, 4, (width,))
    slopes = (features.sum(0) + noise) * (1 + turn)
    return (slopes.to(weight.dtype) * weight).sum().float() + (
        slopes[:3].to(shift.dtype) * shift
    ).sum().float()


def images_of_run() -> TensorDataset:
    """Return the data set, in which all images differ."""
    generator = torch.Generator().manual_seed(1)
    num_images = NUM_SHARDS * BATCH_SIZE * STEPS_PER_EPOCH
    return TensorDataset(torch.randint(0, 8, (num_images, NUM_FEATURES), generator=generator))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=2**-6, momentum=0.9)


def record_of(
    net: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, draw: Tensor
) -> dict[str, Tensor]:
    """Return all values that must be equal after a step."""
    record = {name: value.detach().clone() for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        record[f"momentum of {name}"] = optimizer.state[parameter]["momentum_buffer"].clone()
    return record | {"mean loss": loss.detach().clone(), "draw after the step": draw}


# ---- one plain process -----------------------------------------------------------------------------------------------


def plain_run(num_steps: int, precision: str = "32-true") -> list[dict[str, Tensor]]:
    """Train on all shards of each step in this process, and return the record of each step."""
    net = ExactNet()
    optimizer = optimizer_of(net.parameters())
    records: list[dict[str, Tensor]] = []
    for step, batches in zip(range(num_steps), all_shards(), strict=False):
        gradients = [torch.zeros_like(parameter) for parameter in net.parameters()]
        losses: list[Tensor] = []
        buffers_of_first_shard: dict[str, Tensor] = {}
        for shard, images in enumerate(batches):
            seed_streams(SEED, step, shard)
            copies = [
                parameter.detach().to(dtype_of(precision)).requires_grad_()
                for parameter in net.parameters()
            ]
            weight, shift = copies
            loss = integer_loss(weight, shift, net.norm, images)
            loss.backward()
            losses.append(loss.detach())
            for gradient, copy in zip(gradients, copies, strict=True):
                assert copy.grad is not None
                gradient += copy.grad.float()
            if shard == 0:
                buffers_of_first_shard = {
                    name: buffer.clone() for name, buffer in net.named_buffers()
                }
        for name, buffer in net.named_buffers():
            buffer.copy_(buffers_of_first_shard[name])
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = gradient / NUM_SHARDS
        optimizer.step()
        seed_streams(SEED, step, NUM_SHARDS)
        mean_loss = torch.stack(losses).double().sum().div(NUM_SHARDS).float()
        records.append(record_of(net, optimizer, mean_loss, torch.rand(3)))
    return records


def dtype_of(precision: str) -> torch.dtype:
    if precision == "16-true":
        return torch.float16
    return torch.float32


def all_shards() -> Iterator[list[Tensor]]:
    """Yield the batches of all shards step by step, as this number of ranks reads them under `ddp`."""
    data = images_of_run()
    epoch = 0
    while True:
        loaders = []
        for shard in range(NUM_SHARDS):
            sampler: DistributedSampler[Any] = DistributedSampler(
                data, NUM_SHARDS, shard, shuffle=True, seed=SEED
            )
            sampler.set_epoch(epoch)
            loaders.append(DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler))
        for batches in zip(*loaders, strict=True):
            yield [images for (images,) in batches]
        epoch += 1


# ---- a rank of an elastic run ----------------------------------------------------------------------------------------


class Injector:
    """Injector that triggers the events of a scene on one rank."""

    def __init__(self, scene: Scene, host: str, folder: Path) -> None:
        self.scene = scene
        self.host = host
        self.folder = folder
        self.strategy: Any = None
        self._step_of_sum = -1  # the step whose all-reduced gradients this rank already received
        self._num_shards_begun = 0
        self._view_before = -1  # number of the view in which the previous step began

    def events_at(self, step: int) -> list[Loss | Join | Cut]:
        return [event for event in self.scene.events if event.step == step]

    def before_step(self, step: int) -> None:
        """Trigger the events between two steps. The other hosts wait until they know of them."""
        self._num_shards_begun = 0
        self._end_step_of_a_loss_soon(step - 1)
        self._view_before = self.strategy._fit._views.groups.number
        for event in self.events_at(step):
            if isinstance(event, Loss) and event.when != "before":
                if event.when == "soon" and event.host == self.host:
                    threading.Timer(event.delay_s, die).start()
                continue
            if event.host != self.host:
                (self.folder / f"at_{step}").touch()
                if isinstance(event, Join) and not self.scene.join_ends_view:
                    wait_for(lambda event=event: (self.folder / f"end_{event.host}_0").exists())
                elif not isinstance(event, Cut):  # hosts notice a cut in an all-reduce
                    self.wait_for_end_of_view()
            elif isinstance(event, Loss):
                die()
            elif isinstance(event, Cut):
                setattr(Connection, "data_received", lambda connection, data: None)  # noqa: B010
                setattr(Connection, "send", lambda connection, **message: None)  # noqa: B010
                self.wait_for_end_of_view()

    def _end_step_of_a_loss_soon(self, step: int) -> None:
        """Wait for a death that began in a step, so that events of later steps happen after it."""
        for event in self.events_at(step):
            if not isinstance(event, Loss) or event.when != "soon":
                continue
            if event.host == self.host:
                time.sleep(WAIT_LIMIT_S)  # until the process dies
            of_run = self.strategy._fit._views
            if of_run.groups.number == self._view_before:
                self.wait_for_end_of_view()

    def before_shard(self, step: int) -> None:
        for event in self.events_at(step):
            if not isinstance(event, Loss) or event.when != "within":
                continue
            if event.host == self.host and event.shard == self._num_shards_begun:
                die()
        self._num_shards_begun += 1

    def after_sum(self, step: int) -> None:
        """Trigger the events between the all-reduce and the step, in the first attempt of the step."""
        if step == self._step_of_sum:
            return
        self._step_of_sum = step
        for event in self.events_at(step):
            if not isinstance(event, Loss) or event.when != "after":
                continue
            if event.host == self.host:
                wait_for(lambda event=event: (self.folder / f"made_{event.ahead}_{step}").exists())
                die()
            elif event.late == self.host:
                self.wait_for_end_of_view()

    def wait_for_end_of_view(self) -> None:
        of_run = self.strategy._fit._views
        wait_for(lambda: bool(of_run.ended))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(condition: Any, limit_s: float = WAIT_LIMIT_S) -> None:
    ends_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > ends_s:
            raise TimeoutError(f"the event did not come in {limit_s:g} s")
        time.sleep(0.002)


class MembershipThatBegins(Membership):
    """Membership of a run that begins with all `min_hosts` hosts and continues with any number of hosts.

    Attributes:
        founds_after_s: Seconds for which a host waits for others before it founds a run. A joining host must wait long
            enough for the run to contact it, because the `meet` addresses may no longer belong to any host of the run.
            Otherwise it founds a second run.
    """

    founds_after_s = 0.3

    def __init__(self, **options: Any) -> None:
        super().__init__(wait_s=self.founds_after_s, **options)

    def enter(self, *args: Any, **options: Any) -> View:
        view = self.next_view(*args, **options)
        if isinstance(self._part, Host):
            self._part.machine._min_hosts = 1
        return view


class ExactModule(pl.LightningModule):
    """Module of a rank that trains an `ExactNet` and writes a record after each step."""

    def __init__(self, injector: Injector, rows: Path, width: int) -> None:
        super().__init__()
        self.net = ExactNet(width)
        self._injector = [injector]  # wrapped in a list to hide it from Lightning
        self._rows = rows

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._injector[0].before_step(self.trainer.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._injector[0].before_shard(self.trainer.global_step)
        loss = self.net(batch[0])
        self.log("loss", loss, on_step=True, on_epoch=False, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = self.trainer.global_step - 1
        optimizer = self.trainer.optimizers[0]
        record = record_of(
            self.net, optimizer, self.trainer.callback_metrics["loss"].float(), torch.rand(3)
        )
        with self._rows.open("ab") as file:
            file.write(pickle.dumps((step, record)))
        injector = self._injector[0]
        (injector.folder / f"made_{injector.host}_{step}").touch()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.net.parameters())

    def train_dataloader(self) -> Any:
        return DataLoader(images_of_run(), batch_size=BATCH_SIZE, shuffle=True)


def rank_main(scene: Scene, host: str, local: int, meet: str, port: int, folder: Path) -> None:
    """Train on one rank, as a launcher on its host would start it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the fork server
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(
            os.open(folder / f"{name}_{host}_{local}", os.O_CREAT | os.O_WRONLY | os.O_APPEND),
            number,
        )
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of a run that hangs
    os.environ |= {
        "RANK": str(local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(scene.ranks),
        "GROUP_RANK": "0",
    }
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(scene.ranks),
        "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "1",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    try:
        train(scene, host, local, meet, folder)
        end = "ended"
    except (IsolatedError, RefusedError) as error:
        end = f"{type(error).__name__}: {error}"
    except BaseException:
        end = traceback.format_exc()
    # Write the file atomically, because the process may be killed at any time.
    unfinished = folder / f"unfinished_{host}_{local}_{os.getpid()}"
    unfinished.write_text(end)
    unfinished.rename(folder / f"end_{host}_{local}")


def train(scene: Scene, host: str, local: int, meet: str, folder: Path) -> None:
    pl.seed_everything(SEED, verbose=False)
    injector = Injector(scene, host, folder)
    is_whole = elastic_fit.ElasticFit._is_whole

    def is_whole_after_events(fit: Any, of_run: Any) -> bool:
        if not of_run.ended:
            injector.after_sum(of_run.committed)
        return is_whole(fit, of_run)

    setattr(elastic_fit.ElasticFit, "_is_whole", is_whole_after_events)  # noqa: B010
    host_changes.Membership = MembershipThatBegins  # type: ignore[misc]
    min_hosts = len(scene.first_hosts)
    if host not in scene.first_hosts:
        min_hosts = 1
        MembershipThatBegins.founds_after_s = WAIT_LIMIT_S
    strategy = HybridElasticStrategy(
        max_hosts=scene.max_hosts,
        meet=meet,
        min_hosts=min_hosts,
        silent_s=scene.silent_s,
        loss_scale=LOSS_SCALE if scene.precision == "16-true" else None,
    )
    injector.strategy = strategy
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=scene.ranks,
        strategy=strategy,
        precision=scene.precision,  # type: ignore[arg-type]
        max_steps=scene.num_steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    width = scene.widths.get(host, NUM_FEATURES)
    trainer.fit(ExactModule(injector, folder / f"rows_{host}_{local}", width))


# ---- a run -----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Records and ends of a run.

    Attributes:
        records: Record of each step that a rank made or received, in order, by host and local rank.
        ends: How each rank ended, by host and local rank. Killed ranks have no entry.
    """

    records: dict[tuple[str, int], list[tuple[int, dict[str, Tensor]]]] = field(
        default_factory=dict
    )
    ends: dict[tuple[str, int], str] = field(default_factory=dict)

    def steps_of(self, host: str, local: int = 0) -> list[int]:
        return [step for step, _ in self.records.get((host, local), [])]


def run(scene: Scene, folder: Path, *, limit_s: float = WAIT_LIMIT_S) -> Outcome:
    """Run a scene until every host has ended or died."""
    context = warm_context()
    folder.mkdir(parents=True, exist_ok=True)
    meet = free_addresses(2)
    processes: dict[str, list[Any]] = {}

    def start(host: str) -> None:
        port = free_port()
        processes[host] = [
            context.Process(target=rank_main, args=(scene, host, local, meet, port, folder))
            for local in range(scene.ranks)
        ]
        for process in processes[host]:
            process.start()

    joins = [event for event in scene.events if isinstance(event, Join)]
    ends_s = time.monotonic() + limit_s
    try:
        for host in scene.first_hosts:
            start(host)
        while joins or any(process.is_alive() for ranks in processes.values() for process in ranks):
            for event in list(joins):
                if (folder / f"at_{event.step}").exists():
                    start(event.host)
                    joins.remove(event)
            if time.monotonic() > ends_s:
                ask_for_stacks(processes)
                raise TimeoutError(f"the run did not end in {limit_s:g} s; {state_of(folder)}")
            if not joins or any(
                process.is_alive() for ranks in processes.values() for process in ranks
            ):
                time.sleep(0.01)
            else:
                raise AssertionError(f"all hosts ended before {joins}; {state_of(folder)}")
    finally:
        for ranks in processes.values():
            for process in ranks:
                process.kill()
                process.join()
    return outcome_of(scene, folder)


def ask_for_stacks(processes: Mapping[str, Sequence[Any]]) -> None:
    """Make each rank that is still running write the stacks of its threads."""
    for ranks in processes.values():
        for process in ranks:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)


def outcome_of(scene: Scene, folder: Path) -> Outcome:
    outcome = Outcome()
    for host in scene.hosts:
        for local in range(scene.ranks):
            rows = folder / f"rows_{host}_{local}"
            outcome.records[host, local] = read_rows(rows) if rows.exists() else []
            end = folder / f"end_{host}_{local}"
            if end.exists():
                outcome.ends[host, local] = end.read_text()
    return outcome


def read_rows(path: Path) -> list[tuple[int, dict[str, Tensor]]]:
    """Read the records of a rank, and ignore one that was incomplete when the rank was killed."""
    records = []
    with path.open("rb") as file:
        while True:
            try:
                records.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):
                return records


def state_of(folder: Path) -> str:
    """Return the last output of all ranks, for an error message."""
    words = [f"{path.name}: {path.read_text()[-4000:]}" for path in sorted(folder.glob("err_*"))]
    words += [f"{path.name}: {path.read_text()[-4000:]}" for path in sorted(folder.glob("end_*"))]
    return "\n".join(
        [", ".join(sorted(path.name for path in folder.glob("made_*")))[-300:], *words]
    )


def differences(outcome: Outcome, wanted: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """Return a line for each value of each step in which a rank differs from the plain process."""
    words = []
    for (host, local), records in outcome.records.items():
        steps = [step for step, _ in records]
        if steps != list(range(steps[0], steps[0] + len(steps)) if steps else []):
            words.append(
                f"host {host}, rank {local}: steps {steps} have one twice or none of a step"
            )
        for step, record in records:
            if record.keys() != wanted[step].keys():
                words.append(f"host {host}, rank {local}, step {step}: values {sorted(record)}")
            for name, value in record.items():
                if name not in wanted[step] or not is_same(name, value, wanted[step][name]):
                    words.append(
                        f"host {host}, rank {local}, step {step}: {name} {value} != {wanted[step].get(name)}"
                    )
    return words


def is_same(name: str, value: Tensor, wanted: Tensor) -> bool:
    """Return whether two values are equal. Only the mean of losses, which is not an integer, may differ by rounding."""
    if name == "mean loss":
        # Two roundings of fp32 on a rank, and a margin.
        return torch.allclose(value, wanted, rtol=4 * 2**-24, atol=0.0)
    return torch.equal(value, wanted)
