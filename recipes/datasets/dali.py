"""Decoding by NVIDIA's DALI, a batch at a time: on the GPU (nvJPEG) where there is one, else on the CPU.

DALI gets our bytes in our order with our crops, so that an epoch, its resume and the replacement of broken images are
those of `decode_threads`. Pixels differ by up to one grey level, as both round after resizing; more in the outermost
ring of a crop that was made smaller, where the filter reaches over the edge: DALI repeats the edge's pixels, Pillow and
torch leave them out. On a GPU nvJPEG's arithmetic is not libjpeg's, either.

    our threads        read -> size from the header -> frame (see `crops`)
    DALI's             decode the box alone -> resize -> square -> flip

A file that is no plain JPEG, whole and of 8-bit grey or RGB, is decoded here, and DALI gets its pixels; so are batches
with damage that only decoding finds, at which DALI's whole pipeline fails.
"""

from __future__ import annotations

import importlib.util
import io
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lightning_hybrid.data.order import Batch, Indices
from recipes.datasets.images.crops import Frame
from recipes.datasets.images.decode import JPEG_MAGIC, decode_rgb
from recipes.datasets.images.host_buffers import HostBuffers
from recipes.datasets.images.source import DecodedImages, RowSource

log = logging.getLogger(__name__)

JPEG_END = b"\xff\xd9"


class Encoded(NamedTuple):
    """An image file that DALI decodes as we do, and the size of its image."""

    data: bytes
    height: int
    width: int


class Prepared(NamedTuple):
    """A row of a batch before it is decoded: index of the image, bytes of the file (uint8), crop, label."""

    image: int
    data: NDArray[np.uint8]
    frame: Frame
    label: int


def decodable(data: bytes, *, decoder: str) -> Encoded:
    r"""Return the file itself if it is a plain JPEG, else its pixels behind the shortest header that DALI reads (PPM).

    Files cut short end without JPEG's last marker, and go through `decoder`, which refuses them.

    Raises:
        CorruptImageError: The file is no image, or cut short.

    >>> buffer = io.BytesIO()
    >>> Image.new("RGB", (3, 2)).save(buffer, format="PNG")
    >>> decodable(buffer.getvalue(), decoder="pillow")[0][:11]
    b'P6\n3 2\n255\n'
    """
    # Files cut short end without JPEG's last marker, and go through `decoder`, which refuses them.
    if data.startswith(JPEG_MAGIC) and data.endswith(JPEG_END):
        try:
            with Image.open(io.BytesIO(data)) as image:  # reads the header alone
                if image.format == "JPEG" and image.mode in ("RGB", "L"):
                    return Encoded(data, image.height, image.width)
        except Exception:  # as in `decode_rgb`, which says what is wrong
            pass
    pixels = decode_rgb(data, decoder=decoder)
    height, width, _ = pixels.shape
    return Encoded(b"P6\n%d %d\n255\n" % (width, height) + pixels.tobytes(), height, width)


def prepared(index: int, *, rows: DecodedImages, epoch: int) -> Prepared:
    """Read an image, or the one that replaces it, and prepare it for DALI."""
    (data, height, width), label = rows.find(index, partial(decodable, decoder=rows.decoder))
    frame = rows.crop.frame(height, width, image=index, epoch=epoch)
    return Prepared(index, np.frombuffer(data, dtype=np.uint8), frame, label)


def has_dali() -> bool:
    """Whether DALI is installed; it is not imported."""
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # nothing of NVIDIA's is
        return False


def dali_filler(**options: Any) -> DaliFiller:
    """Make a `DaliFiller`.

    Raises:
        ValueError: DALI is not installed.
    """
    if not has_dali():
        raise ValueError(
            "`decoder` (='dali') must be installed: pip install 'lightning-hybrid[dali]' (Linux, CUDA 13; "
            "nvidia-dali-cuda120 for CUDA 12), or set data.decoder=null."
        )
    return DaliFiller(**options)


@dataclass(frozen=True, kw_only=True)
class DaliFiller:
    """A `BatchFiller` that decodes by DALI.

    A pipeline is built for each epoch and evaluation (0.1 s on a CPU), and ends with its generator.

    Args:
        num_threads: Threads of DALI; as many of our threads read files.
        num_batches_ahead: Batches that are decoded while the consumer works; so many more are read.
        device_id: The GPU that decodes, and where images then are; None: the CPU.
    """

    num_threads: int
    num_batches_ahead: int = 2
    device_id: int | None = None

    @property
    def pin_memory(self) -> bool:
        """False: images that go to a GPU are made there."""
        return False

    def fill(self, shares: Iterator[Indices], rows: RowSource, buffers: HostBuffers, *, epoch: int) -> Iterator[Batch]:
        """Yield batches of the images in `shares`.

        Raises:
            CorruptImageError: As `DecodedImages`, when its batch is due.
            RuntimeError: DALI fails twice in a row, on batches without a broken image.
        """
        if not isinstance(rows, DecodedImages):
            raise TypeError(f"`rows` (={type(rows).__name__}) must be image files to decode: DecodedImages.")
        readers = ThreadPoolExecutor(self.num_threads, thread_name_prefix="read")
        # A stream of its own, so that the host waits for copies of images and not for the training step.
        stream = None if self.device_id is None else torch.cuda.Stream(self.device_id)
        feed = _Feed(_ahead(readers, shares, partial(prepared, rows=rows, epoch=epoch), self.num_batches_ahead))
        try:
            pipeline, may_fail = None, True
            while True:
                pipeline = pipeline or self._pipeline(feed, max_images=buffers.max_images, image_size=rows.image_size)
                try:
                    decoded = _next_of(pipeline)
                except RuntimeError as error:
                    if not may_fail:
                        raise
                    # DALI does not say at which image it failed: to decode its batches here finds and counts the broken
                    # one. Only if one was found may the next pipeline fail as well, else DALI itself is at fault.
                    log.warning("%s\nThe batches in progress are decoded without it.", error)
                    pipeline, num_corrupt = None, len(rows.corrupt)
                    load = partial(rows.load, epoch=epoch)
                    for indices in feed.take_all():
                        yield _decoded_here(indices, load, readers, buffers, stream)
                    may_fail = len(rows.corrupt) > num_corrupt
                    continue
                if decoded is None:
                    break
                may_fail, (_, labels) = True, feed.given.popleft()
                yield _received(decoded, buffers, len(labels), stream), labels.pin_memory() if stream else labels
            if feed.error is not None:
                raise feed.error
        finally:
            readers.shutdown(cancel_futures=True)

    def _pipeline(self, feed: _Feed, *, max_images: int, image_size: int) -> Any:
        from nvidia.dali import Pipeline, fn, types  # the extra `dali`; half a second

        pipeline = Pipeline(
            batch_size=max_images,
            num_threads=self.num_threads,
            device_id=self.device_id,
            prefetch_queue_depth=self.num_batches_ahead,
        )
        with pipeline:
            files, starts, shapes, sizes, corners, flips = fn.external_source(source=feed, num_outputs=6, batch=True)
            images = fn.decoders.image_slice(
                files,
                start=starts,
                shape=shapes,
                axes=[0, 1],
                device="cpu" if self.device_id is None else "mixed",
                adjust_orientation=False,  # as Pillow and simplejpeg, and all that ImageNet was ever trained with
                jpeg_fancy_upsampling=True,  # of chroma, as libjpeg: nvJPEG's own way is another
            )
            images = fn.resize(images, size=sizes, interp_type=types.INTERP_LINEAR, antialias=True)
            images = fn.slice(images, start=corners, shape=[image_size, image_size], axes=[0, 1])
            pipeline.set_outputs(fn.flip(images, horizontal=flips))
        pipeline.build()
        return pipeline


class _Feed(Iterator[tuple[list[NDArray[Any]], ...]]):
    """The source that DALI takes batches from. `given` holds indices and labels of those it has not returned yet."""

    def __init__(self, batches: Iterator[list[Prepared]]) -> None:
        self.batches = batches
        self.given: deque[tuple[list[int], Tensor]] = deque()
        self.error: Exception | None = None

    def __next__(self) -> tuple[list[NDArray[Any]], ...]:
        try:
            batch = next(self.batches)
        except StopIteration:
            raise
        except Exception as error:
            # To DALI this is the end of the epoch, so that the batches before the error still come.
            self.error = error
            raise StopIteration from None
        labels = torch.tensor([row.label for row in batch], dtype=torch.int64)
        self.given.append(([row.image for row in batch], labels))
        frames = [row.frame for row in batch]
        starts = [np.array([frame.box.top, frame.box.left], dtype=np.int32) for frame in frames]
        shapes = [np.array([frame.box.height, frame.box.width], dtype=np.int32) for frame in frames]
        sizes = [np.array([frame.height, frame.width], dtype=np.float32) for frame in frames]  # DALI resizes to these
        corners = [np.array([frame.top, frame.left], dtype=np.int32) for frame in frames]
        flips = [np.array(frame.flip, dtype=np.int32) for frame in frames]
        return [row.data for row in batch], starts, shapes, sizes, corners, flips

    def take_all(self) -> list[list[int]]:
        taken = [indices for indices, _ in self.given]
        self.given.clear()
        return taken


def _ahead(
    readers: ThreadPoolExecutor, shares: Iterator[Indices], prepare: Callable[[int], Prepared], num_batches: int
) -> Iterator[list[Prepared]]:
    pending: deque[list[Future[Prepared]]] = deque()
    for share in shares:
        pending.append([readers.submit(prepare, int(index)) for index in share])
        # So many batches are read ahead, and no more: files of a whole epoch would fill the memory.
        if len(pending) > num_batches:
            yield [row.result() for row in pending.popleft()]
    while pending:
        yield [row.result() for row in pending.popleft()]


def _received(decoded: Any, buffers: HostBuffers, num_images: int, stream: torch.cuda.Stream | None) -> Tensor:
    # A copy, as DALI uses its own memory again for the next batch.
    from nvidia.dali.plugin.pytorch import feed_ndarray

    if stream is None:
        images = buffers.take(num_images)
        feed_ndarray(decoded.as_tensor(), images.permute(0, 2, 3, 1))
        return images
    with torch.cuda.stream(stream):
        shape = (num_images, buffers.image_size, buffers.image_size, 3)
        images = torch.empty(shape, dtype=torch.uint8, device=stream.device)
        feed_ndarray(decoded.as_tensor(), images, cuda_stream=stream)
    # Before DALI may write there, and before another stream reads the copy.
    stream.synchronize()
    return images.permute(0, 3, 1, 2)


def _decoded_here(
    indices: list[int],
    load: Callable[[int, Tensor], int],
    readers: ThreadPoolExecutor,
    buffers: HostBuffers,
    stream: torch.cuda.Stream | None,
) -> Batch:
    images = buffers.take(len(indices))
    labels = torch.tensor(list(readers.map(load, indices, images)))
    return (images, labels) if stream is None else (images.to(stream.device), labels.pin_memory())


def _next_of(pipeline: Any) -> Any | None:
    try:
        (images,) = pipeline.run()
    except StopIteration:
        return None
    except RuntimeError as error:
        raise RuntimeError(
            f"DALI cannot decode an image, or has failed otherwise: {error}\nWith data.decoder=null images are decoded "
            "without it."
        ) from error
    return images
