"""Packing of an image dataset into shards, split by split, for `recipes/pack.py`.

Every shard is written atomically and has its own index. The index of the whole split is written last. A run that was
killed therefore continues after its last complete shard, and a reader never finds an incomplete split.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lightning_hybrid.atomic_file import atomic_path, sync
from recipes.cli.ranges import CountOrZero, Seed
from recipes.datasets.images.crops import resized, short_side_resized
from recipes.datasets.images.datamodule import share_of_cores
from recipes.datasets.images.decode import (
    CorruptImageError,
    decode_rgb,
    default_decoder,
    encode_jpeg,
)
from recipes.datasets.images.folder import ImageFolder, check_root
from recipes.datasets.images.shards import (
    INDEX_NAME,
    ShardedImages,
    ShardIndex,
    crc32_of,
    damaged_shards,
    shard_name,
)

PLAN_NAME = "packing.json"
CORRUPT_NAME = "corrupt.txt"
NUM_SAMPLES = 64  # our choice: number of images whose mean size determines the images per shard
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Summary of a packed split of an image dataset.

    >>> print(Packed(split="train", num_images=40, num_shards=1, num_bytes=312_000, num_corrupt=0, seconds=0.4))
    train: 40 images, 1 shard, 312 kB, 0.4 s
    """

    split: str
    num_images: int
    num_shards: int
    num_bytes: int
    num_corrupt: int
    seconds: float

    def __str__(self) -> str:
        units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
        unit, name = next(
            (unit_row for unit_row in units if self.num_bytes >= unit_row[0]), units[-1]
        )
        counts = [f"{self.num_images:,} image{'s' * (self.num_images != 1)}"]
        counts += [f"{self.num_shards:,} shard{'s' * (self.num_shards != 1)}"]
        if self.num_corrupt:
            left_out = [f"{self.num_corrupt:,} left out as corrupt"]
        else:
            left_out = []
        took = [
            f"{self.num_bytes / unit:.3g} {name}",
            *left_out,
            f"{self.seconds:.{1 if self.seconds < 10 else 0}f} s",
        ]
        return f"{self.split}: {', '.join([*counts, *took])}"


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Job that packs an image dataset into shards according to the given options.

    Args:
        root: Folder of the unpacked dataset.
        out: Folder for `<split>/shard-*.bin` and `<split>/index.npz`.
        splits: Names of the folders in `root` to pack.
        seed: Seed of the order in which images are stored.
        short_side: Length in pixels to which longer short sides are resized (bilinear, antialiased) before the image is
            encoded as JPEG again. None: store every file unchanged.
        quality: Quality of the JPEGs that are encoded again.
        shard_bytes: Approximate size of a shard in bytes.
        max_corrupt_images: Maximum number of images per split that cannot be decoded. They are left out and listed in
            `<split>/corrupt.txt`. More of them end the run.
        num_threads: Number of threads. None: one per core.
        verify: Decode every image, including those that are not resized, to find corrupt images before training.
    """

    root: str
    out: str
    splits: Sequence[str]
    seed: Seed
    short_side: int | None
    quality: int
    shard_bytes: int
    max_corrupt_images: CountOrZero
    num_threads: CountOrZero | None
    verify: bool

    def __post_init__(self) -> None:
        if Path(self.root).resolve() == Path(self.out).resolve():
            raise ValueError(
                f"`out` (={self.out}) must not be the same folder as `root`, because shards and class folders cannot "
                "be in the same folder. Set out=<folder>."
            )
        self._check_out()
        for name, least, most in (("shard_bytes", 1, 2**40), ("quality", 1, 100)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(
                    f"`{name}` (={getattr(self, name)}) must be from {least} to {most}. Set "
                    f"{name} to a number in this range."
                )
        if self.short_side is not None and self.short_side < 1:
            raise ValueError(
                f"`short_side` (={self.short_side}) must be a number of pixels above zero, or null. "
                "Set null to keep the size of all images."
            )

    def _check_out(self) -> None:
        """Raise if the shards would be written into a folder of the unpacked dataset."""
        out = Path(self.out).resolve()
        for split in self.splits:
            folder = (Path(self.root) / split).resolve()
            if out.is_relative_to(folder):
                raise ValueError(
                    f"`out` (={self.out}) must not be {folder} or a folder inside it, because shards would "
                    "become a class of the unpacked images. Set out=<folder> to a folder outside of "
                    f"`root` (={self.root})."
                )

    def run(self) -> list[Packed]:
        """Pack every split, and return one summary per split.

        Raises:
            ValueError: `root` is incomplete, `out` contains another packing, or too many images are corrupt.
        """
        check_root(Path(self.root), self.splits, key="root")
        sources = {split: ImageFolder(Path(self.root) / split) for split in self.splits}
        return [
            _Split(self, source, Path(self.out) / split).run() for split, source in sources.items()
        ]

    def check(self) -> None:
        """Read all packed shards, and raise if a checksum is wrong.

        Raises:
            ValueError: Packing was not finished, or a shard is damaged.
        """
        out = Path(self.out)
        for split in self.splits:
            if not (out / split / INDEX_NAME).is_file():
                raise ValueError(
                    f"`out` (={out}) must be packed completely before it can be checked, but there is no "
                    f"{split}/{INDEX_NAME}. Run the command without check=true to continue the packing."
                )
            if damaged := damaged_shards(out / split):
                raise ValueError(
                    f"`out` (={out}) contains damaged shards. {split}/{damaged[0]} is the first of "
                    f"{len(damaged)} in {split}/. Copy them again, or remove {split}/ and pack again."
                )

    def prepared(self, data: bytes) -> bytes:
        """Return the bytes to store for an image file, after shrinking large images and re-encoding them as JPEG.

        Raises:
            CorruptImageError: The file cannot be decoded.
        """
        if self.short_side is None and not self.verify:
            return data
        pixels = decode_rgb(data, decoder=default_decoder())
        height, width, _ = pixels.shape
        if self.short_side is None or min(height, width) <= self.short_side:
            return data
        height, width = short_side_resized(height, width, short_side=self.short_side)
        small = resized(pixels, height=height, width=width)[0].permute(1, 2, 0).contiguous().numpy()
        return encode_jpeg(small, quality=self.quality)


@dataclass
class _Split:
    """Job that packs one split into shards, and records the corrupt images that it finds."""

    packing: Packing
    source: ImageFolder
    out: Path
    corrupt: list[tuple[str, str]] = field(default_factory=list)  # (name, reason)

    def run(self) -> Packed:
        start_s = time.perf_counter()
        self.out.mkdir(parents=True, exist_ok=True)
        num_per_shard = self._agree_on_plan()
        if not (self.out / INDEX_NAME).is_file():
            order = np.random.default_rng([self.packing.seed, 0]).permutation(len(self.source))
            bar = tqdm(total=len(self.source), desc=self.out.name, unit=" images", smoothing=0.05)
            parts = []
            for shard, start in enumerate(range(0, len(order), num_per_shard)):
                images = order[start : start + num_per_shard]
                parts.append(self._part(shard) or self._write(shard, images, bar))
                self._note_corrupt(parts[-1])
                bar.update(start + len(images) - bar.n)
            bar.close()
            about = json.dumps({name: getattr(self.packing, name) for name in _DECIDES})
            replace(ShardIndex.joined(parts), about=about).save(self.out / INDEX_NAME)
        for path in self.out.glob("*.part"):
            path.unlink()
        index = ShardedImages(self.out).index
        return Packed(
            split=self.out.name,
            num_images=len(index.labels),
            num_shards=len(index.shard_num_bytes),
            num_bytes=int(index.shard_num_bytes.sum()),
            num_corrupt=len(self.source) - len(index.labels),
            seconds=time.perf_counter() - start_s,
        )

    def _agree_on_plan(self) -> int:
        """Return the number of images per shard, and save it for runs that resume the packing.

        Raises:
            ValueError: The first run used other options.
        """
        packing = {name: value for name, value in asdict(self.packing).items() if name in _DECIDES}
        names = crc32_of(self._name(image) for image in range(len(self.source)))
        plan = packing | {"num_images": len(self.source), "names_crc32": names}
        path = self.out / PLAN_NAME
        if path.is_file():
            before = json.loads(path.read_text())
            num_per_shard: int = before.pop("num_per_shard")
            if different := [name for name in plan if plan[name] != before.get(name)]:
                name = different[0]
                raise ValueError(
                    f"`{name}` (={plan[name]}) differs from the value of the packing in {self.out} "
                    f"(={before.get(name)}), which this command would continue. Use the same value, or "
                    "choose another folder with out=<folder>."
                )
            return num_per_shard
        # The images per shard determine which image is in which shard. The number is computed from a seeded sample and
        # then written to a file, so that a run after a kill uses the same plan.
        samples = np.random.default_rng([self.packing.seed, 1]).choice(
            len(self.source), size=min(NUM_SAMPLES, len(self.source)), replace=False
        )
        sizes = [len(data) for data in map(self._prepared, samples) if isinstance(data, bytes)]
        num_per_shard = max(
            1, round(self.packing.shard_bytes / max(1.0, float(np.mean(sizes or [1]))))
        )
        with atomic_path(path) as unfinished:
            unfinished.write_text(
                json.dumps(plan | {"num_per_shard": num_per_shard}, indent=1) + "\n"
            )
        return num_per_shard

    def _name(self, image: int) -> bytes:
        """Return the path of an image relative to the folder of its split, as bytes."""
        return os.fsencode(self.source.name(image)[len(str(self.source.folder)) + 1 :])

    def _prepared(self, image: int) -> bytes | str:
        """Return the bytes to store for an image, or an error message if the image is corrupt."""
        try:
            return self.packing.prepared(self.source.read(int(image)))
        except (CorruptImageError, OSError) as error:
            return str(error)

    def _part(self, shard: int) -> ShardIndex | None:
        """Return the index of a shard that an earlier run completed, or None if there is none."""
        path = self.out / shard_name(shard)
        index = self._part_path(shard)
        if not index.is_file() or not path.is_file():
            return None
        part = ShardIndex.load(index)
        if path.stat().st_size == part.shard_num_bytes[0]:
            return part
        return None

    def _part_path(self, shard: int) -> Path:
        return self.out / shard_name(shard).replace(".bin", ".part")

    def _write(self, shard: int, images: NDArray[np.int64], bar: tqdm) -> ShardIndex:
        path = self.out / shard_name(shard)
        stored = []
        sizes = []
        crc32s = []
        corrupt = []
        shard_crc32 = 0
        with atomic_path(path) as unfinished, unfinished.open("wb") as file:
            num_threads = self.packing.num_threads or share_of_cores(1)
            for image, data in zip(
                images, mapped_ahead(self._prepared, images, num_threads), strict=True
            ):
                bar.update()
                if isinstance(data, str):
                    corrupt.append((self.source.name(int(image)), data))
                    self._refuse_too_many(corrupt)
                    continue
                file.write(data)
                stored.append(int(image))
                sizes.append(len(data))
                crc32s.append(zlib.crc32(data))
                shard_crc32 = zlib.crc32(data, shard_crc32)
            sync(file)
        # The index is written after its shard, so that an index always describes a complete shard.
        part = ShardIndex(
            shards=np.full(len(stored), shard, dtype=np.int32),
            offsets=np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])[: len(stored)].astype(
                np.int64
            ),
            num_bytes=np.array(sizes, dtype=np.int32),
            crc32s=np.array(crc32s, dtype=np.uint32),
            labels=self.source.labels[stored],
            names=np.array([self._name(image) for image in stored], dtype=np.bytes_),
            shard_num_bytes=np.array([sum(sizes)], dtype=np.int64),
            shard_crc32s=np.array([shard_crc32], dtype=np.uint32),
            classes=self.source.classes,
            about=json.dumps({"corrupt": corrupt}),
        )
        part.save(self._part_path(shard))
        return part

    def _note_corrupt(self, part: ShardIndex) -> None:
        self.corrupt += [(name, why) for name, why in json.loads(part.about)["corrupt"]]
        self._refuse_too_many([])
        if self.corrupt:
            lines = "".join(f"{name}\t{why}\n" for name, why in self.corrupt)
            with atomic_path(self.out / CORRUPT_NAME) as unfinished:
                unfinished.write_bytes(lines.encode(errors="replace"))

    def _refuse_too_many(self, more: Sequence[tuple[str, str]]) -> None:
        corrupt = [*self.corrupt, *more]
        if len(corrupt) > self.packing.max_corrupt_images:
            name, why = corrupt[-1]
            raise ValueError(
                f"`max_corrupt_images` (={self.packing.max_corrupt_images}) is exceeded. So far, "
                f"{len(corrupt)} images cannot be decoded, the last of which is {name} ({why}). Repair "
                f"them, or set max_corrupt_images={len(corrupt)} or more to leave them out."
            )


_DECIDES = ("seed", "short_side", "quality", "shard_bytes")  # options that change the stored bytes


def mapped_ahead(function: Callable[[T], R], values: Iterable[T], num_threads: int) -> Iterator[R]:
    """Map a function over values in several threads, yielding the results in order.

    Only a few results are computed in advance, because they are large.

    >>> list(mapped_ahead(lambda value: value * value, range(5), num_threads=2))
    [0, 1, 4, 9, 16]
    """
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque[Future[R]] = deque()
        for value in values:
            waiting.append(pool.submit(function, value))
            # Four per thread: enough that one slow image does not stall the threads, and few enough to fit into memory.
            if len(waiting) > 4 * num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
