"""Reader of W&B's offline runs, which are protocol buffers in the log format of LevelDB.

A file has a header of 7 bytes, and then blocks of 32 KiB with chunks: checksum (4 bytes), length (2), kind (1), data. A
record is one chunk, or a first chunk, middle chunks and a last chunk. If the end of a block cannot hold a header, it is
filled with zeros.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 32 * 1024
HEADER_BYTES = 7
FULL = 1
FIRST = 2
MIDDLE = 3
LAST = 4


def frames(content: bytes) -> Iterator[bytes]:
    """Yield the bytes of each record, without an incomplete last one."""
    assert content[:4] == b":W&B", "not a file of W&B's"
    begin = HEADER_BYTES
    begun = b""
    while begin + HEADER_BYTES <= len(content):
        left = BLOCK_BYTES - begin % BLOCK_BYTES
        if left < HEADER_BYTES:
            begin += left
            continue
        _, length, kind = struct.unpack("<IHB", content[begin : begin + HEADER_BYTES])
        data = content[begin + HEADER_BYTES : begin + HEADER_BYTES + length]
        if len(data) < length or kind not in (FULL, FIRST, MIDDLE, LAST):
            return
        begin += HEADER_BYTES + length
        if kind in (FULL, FIRST):
            begun = data
        else:
            begun = begun + data
        if kind in (FULL, LAST):
            yield begun


class OfflineRun:
    """Content of one offline directory of `<run_dir>/wandb`."""

    def __init__(self, folder: Path) -> None:
        from wandb.proto.wandb_internal_pb2 import Record

        (path,) = folder.glob("run-*.wandb")
        self.config: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        for record in map(Record.FromString, frames(path.read_bytes())):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run: Any = record.run
                self._update(self.config, record.run.config.update)
            elif kind == "history":
                self.history.append({})
                self._update(self.history[-1], record.history.item)
            elif kind in ("config", "summary"):
                self._update(getattr(self, kind), getattr(record, kind).update)
            elif kind == "exit":
                self.exit_code: int = record.exit.exit_code

    @staticmethod
    def _update(target: dict[str, Any], items: Any) -> None:
        for item in items:
            *above, last = list(item.nested_key) or [item.key]
            inner = target
            for key in above:
                inner = inner.setdefault(key, {})
            inner[last] = json.loads(item.value_json)

    def column(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of one metric in the order of logging."""
        return [(row["trainer/global_step"], row[name]) for row in self.history if name in row]


def runs_in(run_dir: Path) -> list[OfflineRun]:
    """Return all offline runs of a run directory in the order in which they were started."""
    return [OfflineRun(folder) for folder in sorted((run_dir / "wandb").glob("offline-run-*"))]
