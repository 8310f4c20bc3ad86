"""A fake of CUDA's streams and events that records their use, so that what runs on them can be tested on a CPU.

Every operation is recorded on the stream that is current, with the memory that it reads and writes, and vector clocks
say what is ordered after what:

    race    an operation reads what another stream writes, or writes what another uses, and no event orders them
    reuse   memory is given back to the stream that it was made on, while another that was not recorded may use it
    early   the host reads what it has not seen to be done

Streams have a time of their own: a collective takes `COLLECTIVE_S`; who waits for an event is at least as late.

`installed`: tensors are the CPU's and are computed at once. `on_fake_tensors`: tensors have a device and no values, and
the host is a timeline as well: what it enqueues comes after all that it knows; copies with `non_blocking=True` tell it
nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_hybrid.comm.engine import cuda_all_reduce, cuda_carrier, cuda_streams

CUDA = torch.device("cuda", 0)
COLLECTIVE_S = 1.0
HOST = "host"
NO_ACCESS = {
    "aten::empty",
    "aten::new_empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::record_stream",
}
BLOCKING = {torch.ops.aten.copy_, torch.ops.aten._to_copy}
WRITTEN = {  # by collectives, whose schemas do not say: arguments by place; all are read but these
    "c10d::_reduce_scatter_base_": (0,),
    "c10d::_allgather_base_": (0,),
}


class Stream:
    """A stream that records its operations, and what it is ordered after: `clock`."""

    device = CUDA

    def __init__(self, cuda: Cuda, name: str, priority: int = 0) -> None:
        self.cuda = cuda
        self.name = name
        self.priority = priority
        self.clock: dict[str, int] = {name: 0}
        self.now_s = 0.0

    def __repr__(self) -> str:
        return self.name

    def wait_event(self, event: Event) -> None:
        _merge(self.clock, event.clock)
        self.now_s = max(self.now_s, event.at_s)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        event = Event(self.cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.cuda.host_waits_for(f"stream {self.name}", self.clock)


class Event:
    """Position of a stream when it was recorded. Complete once the device has reached it."""

    def __init__(self, cuda: Cuda, enable_timing: bool = False) -> None:
        self.cuda = cuda
        self.has_time = enable_timing
        self.clock: dict[str, int] = {}
        self.at_s = 0.0
        self.number = -1

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.cuda.current
        self.cuda.is_told_by_host(stream)
        self.cuda.number += 1
        self.clock, self.at_s, self.number = dict(stream.clock), stream.now_s, self.cuda.number

    def query(self) -> bool:
        self.cuda.num_queries += 1
        if self.number > self.cuda.num_through:
            return False
        _merge(self.cuda.host.clock, self.clock)
        return True  # as CUDA says of an event that was never recorded, too

    def elapsed_time(self, end: Event) -> float:
        if not (self.has_time and end.has_time) or min(self.number, end.number) < 0:
            raise RuntimeError("Both events must be recorded and take times")
        if max(self.number, end.number) > self.cuda.num_through:
            raise RuntimeError("Both events must be completed before calculating elapsed time")
        return 1e3 * (end.at_s - self.at_s)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.cuda.current).wait_event(self)

    def synchronize(self) -> None:
        self.cuda.host_waits_for("event", self.clock)


class Future:
    """Mock of torch's future of a device: set on one stream, waited for by another."""

    def __init__(self, devices: list[torch.device]) -> None:
        self.event = Event(Cuda.instance())

    def set_result(self, value: object) -> None:
        self._value = value
        self._error = None
        self.event.record()

    def wait(self) -> object:
        Cuda.instance().current.wait_event(self.event)
        return self.value()

    def done(self) -> bool:
        return True

    def value(self) -> object:
        if self._error is not None:
            raise self._error
        return self._value

    def then(self, callback: Callable[[Future], object]) -> Future:
        """On a stream of its own, which waits for this one and is recorded of its value."""
        cuda = Cuda.instance()
        after = Future([])
        with cuda.on(cuda.stream(CUDA)):
            for each in filter(_is_tensor, tree_leaves(self.wait())):
                cuda.memory_of(each).recorded.add(cuda.current.name)
            try:
                after.set_result(callback(self))
            except Exception as error:
                after._error = error
        return after


class _Memory:
    def __init__(self, storage: torch.UntypedStorage, owner: str) -> None:
        self.ref = StorageWeakRef(storage)
        self.owner = owner
        self.uses: list[
            tuple[int, int, str, int, bool]
        ] = []  # bytes from and to, stream, its count, whether written
        self.last: dict[str, int] = {}  # use, by stream
        self.recorded: set[str] = set()


class Cuda(TorchDispatchMode):
    """The device. `num_through`: how many operations and records are done. All, unless `hang` is called."""

    current_instance: Cuda | None = None

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.num_through = sys.maxsize
        self.streams: list[Stream] = []
        self.compute = self.current = self.stream(CUDA)
        self.compute.name = "compute"
        self.compute.clock = {"compute": 0}
        self.nccl, self.host = Stream(self, "nccl"), Stream(self, HOST)
        self.is_fake = False
        self.memory: dict[int, _Memory] = {}
        self._was_entered = False
        self._found: list[str] = []
        self.host_waits: list[str] = []
        self.operations: list[tuple[str, str]] = []
        self.num_queries = 0
        self.device: torch.device | None = None

    @classmethod
    def instance(cls) -> Cuda:
        assert cls.current_instance is not None
        return cls.current_instance

    def __enter__(self) -> Cuda:
        self._was_entered = True
        return super().__enter__()

    @property
    def found(self) -> list[str]:
        """Races, reuses and early reads so far."""
        assert self._was_entered, (
            "operations are recorded within `with Cuda().installed(patch):` alone"
        )
        return self._found

    # ---- torch.cuda --------------------------------------------------------------------------------------------------

    def stream(self, device: object, priority: int = 0) -> Stream:
        stream = Stream(self, f"side {len(self.streams)}", priority)
        self.streams.append(stream)
        return stream

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self.current = stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        """In a thread of ours the current device is the first GPU, until this is entered."""
        self.device = device
        yield
        self.device = None

    def installed(self, patch: pytest.MonkeyPatch) -> Cuda:
        Cuda.current_instance = self
        patch.setattr(torch.cuda, "Stream", self.stream)
        patch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(self, enable_timing))
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "device", self.on_device)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "default_stream", lambda device=None: self.compute)
        patch.setattr(
            torch.cuda,
            "synchronize",
            lambda device=None: [one.synchronize() for one in self.streams],
        )
        patch.setattr(cuda_streams, "Future", Future)
        patch.setattr(cuda_all_reduce, "Future", Future)
        # what is run over Gloo plays NCCL
        patch.setattr(cuda_carrier, "is_on_hosts", lambda group: False)
        patch.setattr(dist, "all_reduce", partial(self.all_reduce, dist.all_reduce))
        patch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.record_stream(tensor, stream)
        )
        return self

    @contextlib.contextmanager
    def on_fake_tensors(self) -> Iterator[Cuda]:
        """Nothing is done before somebody waits for it."""
        with (
            pytest.MonkeyPatch.context() as patch,
            FakeTensorMode(allow_non_fake_inputs=True),
            self.installed(patch),
        ):
            self.is_fake = True
            self.hang()
            yield self
            self._find_reuse()

    def host_waits_for(self, what: str, clock: dict[str, int]) -> None:
        self.host_waits.append(what)
        assert self.is_fake or self.num_through == sys.maxsize, "the host would wait"
        _merge(self.host.clock, clock)

    def is_told_by_host(self, stream: Stream) -> None:
        if self.is_fake:
            _merge(stream.clock, self.host.clock)

    def host_reads(self, tensor: torch.Tensor) -> None:
        """By other means than torch's operations, such as a file that is written."""
        self._use("a read", tensor, self.host, is_write=False)

    def all_reduce(
        self, real: Callable, tensor: torch.Tensor, *args, async_op: bool = False, **kwargs
    ):
        """Mock of NCCL's all-reduce, whose asynchronous form runs on the backend's stream and keeps its tensors."""
        if not async_op:
            return real(tensor, *args, **kwargs)
        ready = Event(self)
        ready.record()
        self.nccl.wait_event(ready)
        with self.on(self.nccl):
            real(tensor, *args, **kwargs)
            future = Future([])
            future.set_result([tensor])
        self.memory_of(tensor).recorded.add(self.nccl.name)
        return SimpleNamespace(get_future=lambda: future)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.memory_of(tensor).recorded.add(stream.name)

    def hang(self) -> None:
        """From here on nothing gets done, until `go_on`."""
        self.num_through = self.number

    def go_on(self) -> None:
        self.num_through = sys.maxsize

    # ---- operations --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._find_reuse()
        result = func(*args, **kwargs)
        name = func._schema.name
        if func.is_view or name == "aten::detach":
            return result
        given = [
            (index, each)
            for index, arg in enumerate(args)
            for each in tree_leaves(arg)
            if _is_tensor(each)
        ]
        given += [
            ("out", each)
            for key, arg in kwargs.items()
            for each in tree_leaves(arg)
            if _is_tensor(each)
        ]
        if name == "aten::_local_scalar_dense":
            self._host_reads(given[0][1])
            return result
        made = [
            each
            for each in tree_leaves(result)
            if _is_tensor(each) and _key(each) not in self.memory
        ]
        for each in made:
            if not any(_key(each) == _key(other) for _, other in given):
                if self.is_fake and each.device.type == "cpu":
                    owner = HOST
                else:
                    owner = self.current.name
                self.memory[_key(each)] = _Memory(each.untyped_storage(), owner)
        if name in NO_ACCESS:
            return result
        devices = {each.device.type for each in (*made, *(each for _, each in given))}
        if self.is_fake and "cuda" not in devices:
            stream = self.host
        else:
            stream = self.current
        self.is_told_by_host(stream)
        self.number += 1
        self.operations.append((name, stream.name))
        stream.clock[stream.name] += 1
        if name.startswith("c10d::"):
            stream.now_s += COLLECTIVE_S
        for place, each in given:
            self._use(name, each, stream, is_write=_is_written(func, name, place))
        for each in made:
            self._use(name, each, stream, is_write=True)
        if (
            len(devices) > 1
            and func.overloadpacket in BLOCKING
            and not _is_non_blocking(func, args, kwargs)
        ):
            _merge(self.host.clock, stream.clock)
        return result

    def memory_of(self, tensor: torch.Tensor) -> _Memory:
        if _key(tensor) not in self.memory:  # not made by an operation: the host's, as numpy's
            self.memory[_key(tensor)] = _Memory(tensor.untyped_storage(), HOST)
        return self.memory[_key(tensor)]

    def _use(self, name: str, tensor: torch.Tensor, stream: Stream, *, is_write: bool) -> None:
        memory = self.memory_of(tensor)
        if memory.owner == HOST and not self.is_fake:
            return
        begin = tensor.storage_offset() * tensor.element_size()
        end = begin + tensor.numel() * tensor.element_size()
        kept = []
        for use in memory.uses:
            other_begin, other_end, other, count, was_write = use
            if max(begin, other_begin) < min(end, other_end) and (is_write or was_write):
                if stream.clock.get(other, 0) < count:
                    self.found.append(
                        f"race: {name} on {stream} is not ordered after a use on {other}"
                    )
                elif is_write and begin <= other_begin and other_end <= end:
                    continue  # what is ordered after this write is ordered after that use
            kept.append(use)
        memory.uses = [*kept, (begin, end, stream.name, stream.clock[stream.name], is_write)]
        memory.last[stream.name] = stream.clock[stream.name]

    def _host_reads(self, tensor: torch.Tensor) -> None:
        for _, _, stream, count, was_write in self.memory_of(tensor).uses:
            if was_write and self.host.clock.get(stream, 0) < count:
                self.found.append("early: the host reads what was not seen to be done")

    def _find_reuse(self) -> None:
        for key, memory in list(self.memory.items()):
            if not memory.ref.expired():
                continue
            del self.memory[key]
            if memory.owner == HOST:
                continue
            waited = [
                stream.clock
                for stream in self.streams
                if stream.name in {memory.owner, *memory.recorded}
            ]
            for other, count in memory.last.items():
                if not any(clock.get(other, 0) >= count for clock in waited):
                    self.found.append(f"reuse: {memory.owner} may write what {other} still uses")


def _is_non_blocking(func, args, kwargs) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("non_blocking", False))


def _merge(clock: dict[str, int], other: dict[str, int]) -> None:
    for name, count in other.items():
        clock[name] = max(clock.get(name, 0), count)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_written(func, name: str, place: int | str) -> bool:
    if name.startswith("c10d::"):
        return place in WRITTEN.get(name, (place,))
    if place == "out":
        return True
    argument = func._schema.arguments[place]
    return argument.alias_info is not None and argument.alias_info.is_write
