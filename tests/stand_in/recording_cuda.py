"""Mock of CUDA streams and events that records their use, so that code for streams can be tested on a CPU.

Every operation is recorded on the current stream, with the memory that it reads and writes. Vector clocks determine the
order of operations:

    race    an operation reads what another stream writes, or writes what another uses, and no event orders them
    reuse   memory is returned to the stream that allocated it, while a stream that was not recorded may use it
    early   the host reads a value that it does not know to be complete

Streams have a simulated time. A collective takes `COLLECTIVE_S`, and a stream that waits for an event is at least as
late as the event.

With `installed`, tensors are on the CPU and computed at once. With `on_fake_tensors`, tensors have a device but no
values, and the host is a timeline as well: operations that it enqueues come after everything that it knows to be
complete. Copies with `non_blocking=True` tell the host nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
WRITTEN = {  # by collectives, whose schemas lack it: argument positions; all others are only read
    "c10d::_reduce_scatter_base_": (0,),
    "c10d::_allgather_base_": (0,),
}


class Stream:
    """Stream that records its operations, and the operations after which it is ordered: `clock`."""

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

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self) -> Event:
        event = Event(self.cuda)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.cuda.host_waits_for(f"stream {self.name}", self.clock)


class Event:
    """Position of a stream at the time of recording. It is complete once the device has reached it."""

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
        self.clock = dict(stream.clock)
        self.at_s = stream.now_s
        self.number = self.cuda.number

    def query(self) -> bool:
        self.cuda.num_queries += 1
        if self.number > self.cuda.num_through:
            return False
        _merge(self.cuda.host.clock, self.clock)
        return True  # CUDA also returns true for an event that was never recorded

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
    """Mock of torch's future of a device, which is set on one stream and waited for by another."""

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
        """Run the callback on a new stream, which waits for this one and is recorded on its value."""
        cuda = Cuda.instance()
        after = Future([])
        with cuda.on(cuda.stream(CUDA)):
            for tensor in _tensors_in(self.wait()):
                cuda.memory_of(tensor).recorded.add(cuda.current.name)
            try:
                after.set_result(callback(self))
            except Exception as error:
                after._error = error
        return after


@dataclass(frozen=True)
class _Use:
    """Bytes that an operation used, with its stream, the stream's count at that time, and whether it wrote."""

    begin: int
    end: int
    stream: str
    count: int
    is_write: bool

    def overlaps(self, other_use: _Use) -> bool:
        return max(self.begin, other_use.begin) < min(self.end, other_use.end)

    def covers(self, other_use: _Use) -> bool:
        return self.begin <= other_use.begin and other_use.end <= self.end


class _Memory:
    def __init__(self, storage: torch.UntypedStorage, owner: str) -> None:
        self.ref = StorageWeakRef(storage)
        self.owner = owner
        self.uses: list[_Use] = []
        self.last: dict[str, int] = {}  # count of the last use, by stream
        self.recorded: set[str] = set()


class Cuda(TorchDispatchMode):
    """Mock of the device. `num_through` is the number of completed operations, which is all of them unless it hangs."""

    current_instance: Cuda | None = None

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.num_through = sys.maxsize
        self.streams: list[Stream] = []
        self.compute = self.current = self.stream(CUDA)
        self.compute.name = "compute"
        self.compute.clock = {"compute": 0}
        self.nccl = Stream(self, "nccl")
        self.host = Stream(self, HOST)
        self.is_fake = False
        self.memory: dict[int, _Memory] = {}
        self._was_entered = False
        self._violations: list[str] = []
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
    def violations(self) -> list[str]:
        """Return all races, reuses and early reads so far."""
        assert self._was_entered, (
            "operations are recorded within `with Cuda().installed(patch):` alone"
        )
        return self._violations

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
        """Set the current device. In a new thread, it is the first GPU until this context is entered."""
        self.device = device
        yield
        self.device = None

    def synchronize(self, device: object = None) -> None:
        for stream in self.streams:
            stream.synchronize()

    def installed(self, patch: pytest.MonkeyPatch) -> Cuda:
        Cuda.current_instance = self
        patch.setattr(torch.cuda, "Stream", self.stream)
        patch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(self, enable_timing))
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "device", self.on_device)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "default_stream", lambda device=None: self.compute)
        patch.setattr(torch.cuda, "synchronize", self.synchronize)
        patch.setattr(cuda_streams, "Future", Future)
        patch.setattr(cuda_all_reduce, "Future", Future)
        # Gloo groups stand for NCCL groups.
        patch.setattr(cuda_carrier, "is_on_hosts", lambda group: False)
        patch.setattr(dist, "all_reduce", partial(self.all_reduce, dist.all_reduce))
        patch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.record_stream(tensor, stream)
        )
        return self

    @contextlib.contextmanager
    def on_fake_tensors(self) -> Iterator[Cuda]:
        """Install on fake tensors. Operations complete only when they are waited for."""
        with (
            pytest.MonkeyPatch.context() as patch,
            FakeTensorMode(allow_non_fake_inputs=True),
            self.installed(patch),
        ):
            self.is_fake = True
            self.hang()
            yield self
            self._find_reuse()

    def host_waits_for(self, reason: str, clock: dict[str, int]) -> None:
        self.host_waits.append(reason)
        assert self.is_fake or self.num_through == sys.maxsize, "the host would wait"
        _merge(self.host.clock, clock)

    def is_told_by_host(self, stream: Stream) -> None:
        if self.is_fake:
            _merge(stream.clock, self.host.clock)

    def host_reads(self, tensor: torch.Tensor) -> None:
        """Record a read other than by torch operations, such as a write to a file."""
        self._use("a read", tensor, self.host, is_write=False)

    def all_reduce(
        self, real: Callable, tensor: torch.Tensor, *args, async_op: bool = False, **kwargs
    ):
        """Mock NCCL's all-reduce, whose asynchronous form runs on the backend's stream and keeps its tensors."""
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
        """Let no further operation complete until `go_on`."""
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
        inputs = _inputs_of(args, kwargs)
        if name == "aten::_local_scalar_dense":
            _, tensor = inputs[0]
            self._host_reads(tensor)
            return result
        input_tensors = [tensor for _, tensor in inputs]
        new_tensors = [tensor for tensor in _tensors_in(result) if _key(tensor) not in self.memory]
        self._own_new_memory(new_tensors, input_tensors)
        if name in NO_ACCESS:
            return result
        devices = {tensor.device.type for tensor in (*new_tensors, *input_tensors)}
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
        for argument_key, tensor in inputs:
            self._use(name, tensor, stream, is_write=_is_written(func, name, argument_key))
        for tensor in new_tensors:
            self._use(name, tensor, stream, is_write=True)
        is_copy_across = len(devices) > 1 and func.overloadpacket in BLOCKING
        if is_copy_across and not _is_non_blocking(func, args, kwargs):
            _merge(self.host.clock, stream.clock)
        return result

    def _own_new_memory(
        self, new_tensors: list[torch.Tensor], input_tensors: list[torch.Tensor]
    ) -> None:
        input_keys = {_key(tensor) for tensor in input_tensors}
        for tensor in new_tensors:
            if _key(tensor) in input_keys:
                continue
            owner = self.current.name
            if self.is_fake and tensor.device.type == "cpu":
                owner = HOST
            self.memory[_key(tensor)] = _Memory(tensor.untyped_storage(), owner)

    def memory_of(self, tensor: torch.Tensor) -> _Memory:
        # not allocated by an operation, but by the host, such as NumPy's
        if _key(tensor) not in self.memory:
            self.memory[_key(tensor)] = _Memory(tensor.untyped_storage(), HOST)
        return self.memory[_key(tensor)]

    def _use(self, name: str, tensor: torch.Tensor, stream: Stream, *, is_write: bool) -> None:
        memory = self.memory_of(tensor)
        if memory.owner == HOST and not self.is_fake:
            return
        begin = tensor.storage_offset() * tensor.element_size()
        end = begin + tensor.numel() * tensor.element_size()
        count = stream.clock[stream.name]
        new_use = _Use(begin, end, stream.name, count, is_write)
        uses = []
        for use in memory.uses:
            if new_use.overlaps(use) and (is_write or use.is_write):
                if stream.clock.get(use.stream, 0) < use.count:
                    self.violations.append(
                        f"race: {name} on {stream} is not ordered after a use on {use.stream}"
                    )
                elif is_write and new_use.covers(use):
                    continue  # operations ordered after this write are ordered after that use
            uses.append(use)
        memory.uses = [*uses, new_use]
        memory.last[stream.name] = count

    def _host_reads(self, tensor: torch.Tensor) -> None:
        for use in self.memory_of(tensor).uses:
            if use.is_write and self.host.clock.get(use.stream, 0) < use.count:
                self.violations.append("early: the host reads what was not seen to be done")

    def _find_reuse(self) -> None:
        for key, memory in list(self.memory.items()):
            if not memory.ref.expired():
                continue
            del self.memory[key]
            if memory.owner == HOST:
                continue
            streams_that_wait = {memory.owner, *memory.recorded}
            clocks = [stream.clock for stream in self.streams if stream.name in streams_that_wait]
            for user, count in memory.last.items():
                if not any(clock.get(user, 0) >= count for clock in clocks):
                    self.violations.append(
                        f"reuse: {memory.owner} may write what {user} still uses"
                    )


def _is_non_blocking(func, args, kwargs) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("non_blocking", False))


def _merge(clock: dict[str, int], later: dict[str, int]) -> None:
    for name, count in later.items():
        clock[name] = max(clock.get(name, 0), count)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors_in(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _inputs_of(args: tuple, kwargs: dict) -> list[tuple[int | str, torch.Tensor]]:
    """Return the tensors among the arguments, each with the index of its argument, or "out" for a keyword."""
    inputs: list[tuple[int | str, torch.Tensor]] = []
    for index, arg in enumerate(args):
        inputs += [(index, tensor) for tensor in _tensors_in(arg)]
    for arg in kwargs.values():
        inputs += [("out", tensor) for tensor in _tensors_in(arg)]
    return inputs


def _is_written(func, name: str, argument_key: int | str) -> bool:
    if name.startswith("c10d::"):
        return argument_key in WRITTEN.get(name, (argument_key,))
    if argument_key == "out":
        return True
    argument = func._schema.arguments[argument_key]
    return argument.alias_info is not None and argument.alias_info.is_write
