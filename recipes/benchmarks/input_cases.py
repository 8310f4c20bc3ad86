"""Rates of sources, decoders and other libraries in turns; and whether a step waits for its data."""

from __future__ import annotations

import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_hybrid.data.order import EpochOrder
from lightning_hybrid.data.prefetch import prefetch
from recipes.benchmarks.input_baselines import dali_batches, dataloader_batches
from recipes.benchmarks.photos import write_photos
from recipes.cli.markdown import markdown_table
from recipes.cli.ranges import Count, CountOrZero
from recipes.datasets.dali import DaliFiller, has_dali
from recipes.datasets.images import decode
from recipes.datasets.images.crops import TrainCrop
from recipes.datasets.images.datamodule import share_of_cores
from recipes.datasets.images.folder import ImageFolder
from recipes.datasets.images.imagenet import open_images
from recipes.datasets.images.loader import BatchFiller, DecodeThreads, ImageTrainLoader
from recipes.datasets.images.normalize import NormalizeOnDevice
from recipes.datasets.images.source import DecodedImages, RowSource
from recipes.datasets.packing import Packing
from recipes.datasets.synthetic import StoredRows

REFERENCE = "Pillow + DataLoader"
Batches = Callable[[], Iterator[Any]]


@dataclass(frozen=True, kw_only=True)
class InputRow:
    """Images per second of one arm: one sample per round. `bytes_per_image`: mean of the files it reads.

    `images_per_cpu_s`: by the processor time of this process, which other programs disturb less; empty for an arm that
    works in other processes.
    """

    arm: str
    source: str
    bytes_per_image: float
    num_threads: int
    images_per_s: tuple[float, ...]
    images_per_cpu_s: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """Median of the samples."""
        return statistics.median(self.images_per_s)


@dataclass(frozen=True, kw_only=True)
class WaitRow:
    """Seconds that each step waited for its data, where a step lasts `step_s` and decoding alone `decode_s` a batch."""

    source: str
    load: float
    step_s: float
    decode_s: float
    waits_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class InputBench:
    """Benchmark of input pipelines.

    Args:
        root: An unpacked image set; None: photo-like images are made in `scratch`.
        scratch: Where images and shards of the benchmark go; they are used again.
        num_photos: Images to make.
        short_side: Pixels of the short side in the resized shards.
        image_size: Pixels of a side of a crop.
        batch_size: Images of a batch.
        num_batches: Batches of a sample.
        num_rounds: Samples of each arm, in turns.
        num_threads: Threads of the library, worker processes of the others; None: the number of cores.
        arms: Names to run; None: all that are installed.
        loads: Decoding time over step time, for the second part; empty leaves it out.
        num_steps: Steps of the second part.
    """

    root: str | None
    scratch: str
    num_photos: CountOrZero
    short_side: Count
    image_size: Count
    batch_size: Count
    num_batches: CountOrZero
    num_rounds: CountOrZero
    num_threads: CountOrZero | None
    arms: Sequence[str] | None
    loads: Sequence[float]
    num_steps: Count

    def prepare(self) -> dict[str, Path]:
        """Make what is missing; return the folder of each source by name."""
        root = Path(self.root or Path(self.scratch) / "photos")
        if self.root is None:
            write_photos(root, num_train=self.num_photos, num_val=10, num_classes=10)
        folders = {"folder": root / "train"}
        for name, short_side in (("shards", None), (f"shards, {self.short_side} px", self.short_side)):
            out = Path(self.scratch) / ("packed" if short_side is None else f"packed_{short_side}")
            settings = {"seed": 0, "quality": 90, "shard_bytes": 10**9, "max_corrupt_images": 16, "num_threads": None}
            Packing(
                root=str(root),
                out=str(out),
                splits=["train"],
                short_side=short_side,
                verify=False,
                **settings,  # type: ignore[arg-type]
            ).run()
            folders[name] = out / "train"
        return folders

    def every_arm(self, folders: dict[str, Path]) -> dict[str, tuple[str, Batches]]:
        """Return `{arm: (source, makes batches)}` without the libraries that are not installed."""
        arms: dict[str, tuple[str, Batches]] = {}
        paths, labels = _files_of(folders["folder"])
        settings = {"image_size": self.image_size, "batch_size": self.batch_size, "num_workers": self._num_threads}
        arms[REFERENCE] = ("folder", partial(dataloader_batches, paths, labels, **settings))
        if (dali := dali_batches(paths, labels, **settings)) is not None:
            arms["DALI, CPU"] = ("folder", dali)
        else:
            print("left out: DALI is not installed", flush=True)
        for source, folder in folders.items():
            for decoder in installed_decoders():
                arms[f"ours, {source}, {decoder}"] = (source, partial(self._ours, folder, decoder))
        arms["ours, noise"] = ("none", self._noise)
        wanted = set(arms) if self.arms is None else set(self.arms)
        if unknown := wanted - set(arms):
            raise ValueError(
                f"`arms` (={sorted(unknown)}) must be among those installed: {'; '.join(arms)}. Set bench.arms=null."
            )
        return {name: arm for name, arm in arms.items() if name in wanted}

    @property
    def _num_threads(self) -> int:
        return self.num_threads or share_of_cores(1)

    def _loader(self, rows: RowSource, filler: BatchFiller) -> ImageTrainLoader:
        order = EpochOrder(num_images=rows.num_images, global_batch_size=self.batch_size, seed=0)
        return ImageTrainLoader(rows, order, filler=filler, on_device=NormalizeOnDevice())

    def _decoding_loader(self, folder: Path, decoder: str) -> ImageTrainLoader:
        crop = TrainCrop(image_size=self.image_size, seed=0)
        is_dali = decoder == "dali"
        own = decode.default_decoder() if is_dali else decoder
        rows = DecodedImages(open_images(folder), crop, decoder=own, max_corrupt_images=16)
        filler: BatchFiller = (DaliFiller if is_dali else DecodeThreads)(num_threads=self._num_threads)
        return self._loader(rows, filler)

    def _ours(self, folder: Path, decoder: str) -> Iterator[Any]:
        return _endless(self._decoding_loader(folder, decoder))

    def _noise(self) -> Iterator[Any]:
        settings = {"num_images": 20_000, "num_stored": 256, "num_classes": 1000, "seed": 0}
        rows = StoredRows(image_size=self.image_size, **settings)
        return _endless(self._loader(rows, DecodeThreads(num_threads=self._num_threads)))

    def speeds(self) -> list[InputRow]:
        """Measure every arm `num_rounds` times, in turns."""
        folders = self.prepare()
        arms = self.every_arm(folders)
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        for number in range(self.num_rounds):
            # Forth and back: a machine that gets slower is not blamed on the last arm.
            names = list(arms) if number % 2 == 0 else list(reversed(arms))
            for name in names:
                samples[name].append(self._sample(arms[name][1]))
                rate = f"{samples[name][-1][0]:.0f} images/s"
                print(f"round {number + 1} of {self.num_rounds}: {name}: {rate}", flush=True)
        sizes = {source: _mean_bytes(folder) for source, folder in folders.items()} | {"none": 0.0}
        return [
            InputRow(
                arm=name,
                source=source,
                bytes_per_image=sizes[source],
                num_threads=self._num_threads,
                images_per_s=tuple(by_clock for by_clock, _ in samples[name]),
                images_per_cpu_s=() if name == REFERENCE else tuple(by_cpu for _, by_cpu in samples[name]),
            )
            for name, (source, _) in arms.items()
        ]

    def _sample(self, make: Batches) -> tuple[float, float]:
        """Measure images per second, and per second of this process's processor time.

        From one batch to another, in a pipeline that is full at both: start and end cost nothing.
        """
        gc.collect()
        with closing(make()) as batches:  # type: ignore[type-var]
            for _ in range(NUM_WARMUP_BATCHES):
                next(batches)
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(self.num_batches):
                next(batches)
            num_images = self.num_batches * self.batch_size
            took_s, took_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
            return num_images / took_s, num_images / took_cpu_s

    def waits(self, speeds: Sequence[InputRow]) -> list[WaitRow]:
        """Measure how long steps of different lengths wait for data; a step sleeps, as a host does next to a GPU."""
        rows = []
        folders = self.prepare()
        decoder = decode.default_decoder()
        for source in ("folder", f"shards, {self.short_side} px"):
            measured = [row for row in speeds if row.arm == f"ours, {source}, {decoder}"]
            for load in self.loads if measured else ():
                decode_s = self.batch_size / measured[0].median
                loader = self._decoding_loader(folders[source], decoder)
                ahead = prefetch(loader, torch.device("cpu"))
                waits_s = list(_waits(ahead, step_s=decode_s / load, num_steps=self.num_steps))
                rows.append(
                    WaitRow(source=source, load=load, step_s=decode_s / load, decode_s=decode_s, waits_s=tuple(waits_s))
                )
        return rows


NUM_WARMUP_BATCHES = 6  # our choice: more than any arm has under way when its first batch is out


def _waits(ahead: Any, *, step_s: float, num_steps: int) -> Iterator[float]:
    """Return the waits of each step after the first few, which start with nothing ready."""
    with closing(_endless(ahead)) as batches:  # type: ignore[type-var]
        for step in range(num_steps + NUM_WARMUP_BATCHES):
            next(batches)
            waited_s = ahead.take_wait_s()
            if step >= NUM_WARMUP_BATCHES:
                yield waited_s
            time.sleep(step_s)


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _files_of(folder: Path) -> tuple[list[str], list[int]]:
    images = ImageFolder(folder)
    return [images.name(index) for index in range(len(images))], images.labels.tolist()


def _mean_bytes(folder: Path) -> float:
    images = open_images(folder)
    indices = range(0, len(images), max(1, len(images) // 256))
    return statistics.mean(len(images.read(index)) for index in indices)


def installed_decoders() -> list[str]:
    """List the values of `data.decoder` that are installed."""
    found = [name for name in decode.DECODERS if name != "simplejpeg" or decode.simplejpeg is not None]
    return found + ["dali"] * has_dali()


def dali_version() -> str:
    """Return the version of DALI, if it is installed."""
    return str(importlib.import_module("nvidia.dali").__version__) if has_dali() else "not installed"


def as_dict(row: InputRow) -> dict[str, Any]:
    """Return a row as JSON can hold it."""
    return asdict(row) | {"median_images_per_s": row.median}


def speed_table(rows: Sequence[InputRow]) -> str:
    """Format a table. `x reference`: median over that of the first arm; spread: least and most of the samples."""
    lines = [("arm", "KB/image", "images/s", "[least, most]", "images/s/core", "x reference", "images/CPU-s")]
    for row in rows:
        lines.append(
            (
                row.arm,
                f"{row.bytes_per_image / 1e3:.0f}",
                f"{row.median:.0f}",
                f"[{min(row.images_per_s):.0f}, {max(row.images_per_s):.0f}]",
                f"{row.median / row.num_threads:.0f}",
                f"{row.median / rows[0].median:.2f}",
                f"{statistics.median(row.images_per_cpu_s):.0f}" if row.images_per_cpu_s else "",
            )
        )
    return markdown_table(lines[0], lines[1:])


def wait_table(rows: Sequence[WaitRow]) -> str:
    """Format a table. Load: decoding time over step time; above 1 decoding is slower; a wait is `load - 1` steps."""
    lines = [("source", "load", "step ms", "wait ms, median", "wait ms, most", "wait / step, mean")]
    for row in rows:
        lines.append(
            (
                row.source,
                f"{row.load:.2f}",
                f"{1e3 * row.step_s:.1f}",
                f"{1e3 * statistics.median(row.waits_s):.2f}",
                f"{1e3 * max(row.waits_s):.2f}",
                f"{statistics.mean(row.waits_s) / row.step_s:.3f}",
            )
        )
    return markdown_table(lines[0], lines[1:])
