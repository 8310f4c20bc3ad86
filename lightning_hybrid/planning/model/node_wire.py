"""Data format of gradients sent between nodes, and the time that a codec takes.

With A bytes in that format and N nodes, a node sends 2 (N - 1) / N A, as without a codec:

    two nodes     one round     each sends its message to the other, and adds both
    more          two rounds    each shard goes to its owner, which adds; the encoded sum goes to all others

An element is therefore encoded 1 + 1 / N times (once with two nodes) and decoded twice
(`comm.engine.coded_sum`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_hybrid.checks import require_choice, require_number, require_positive
from lightning_hybrid.comm.codec.block_format import BLOCK, message_bytes

WireName = Literal["float16", "bfloat16", "int8", "int4"]
"""Wire format of gradients between nodes, as in the option `comm_dtype_across_nodes`."""

# Seconds from the launch of a small kernel to the launch of the next one. Our choice.
KERNEL_S = 5e-6


@dataclass(frozen=True, kw_only=True)
class NodeWire:
    """Data type or codec in which gradients are sent between nodes.

    Args:
        name: Name of the dtype or codec.
        itemsize: Bytes of an element in the buckets.

    Raises:
        ValueError: `name` is unknown.

    >>> [NodeWire(name=name, itemsize=2).num_bytes(512.0) for name in ("float16", "int8", "int4")]
    [512.0, 258.0, 130.0]
    """

    name: WireName
    itemsize: int

    def __post_init__(self) -> None:
        why = "gradients can be sent between nodes only in these formats. Set None for the dtype of the buckets"
        require_choice("comm_dtype_across_nodes", self.name, get_args(WireName), why)

    @property
    def bits(self) -> Literal[8, 4] | None:
        """Bits per element of a codec, or None for a dtype."""
        bits_of_codec: dict[str, Literal[8, 4]] = {"int8": 8, "int4": 4}
        return bits_of_codec.get(self.name)

    def num_bytes(self, num_bytes: float) -> float:
        """Return how many bytes are sent for `num_bytes` bytes of a gradient bucket.

        The gradients of the bucket must be whole codec blocks.
        """
        if self.bits is None:
            return min(2 / self.itemsize, 1.0) * num_bytes
        return num_bytes / self.itemsize * message_bytes(BLOCK, self.bits) / BLOCK

    def padded(self, numel: int) -> int:
        """Return the number of elements that are sent for a gradient, including padding.

        A codec pads the last block of the gradient.

        >>> NodeWire(name="int8", itemsize=2).padded(300), NodeWire(name="float16", itemsize=4).padded(300)
        (512, 300)
        """
        return numel if self.bits is None else -(-numel // BLOCK) * BLOCK


def bits_of(wire: NodeWire | None) -> Literal[8, 4] | None:
    """Return the bits per element of a wire format if it is a codec, otherwise None."""
    return None if wire is None else wire.bits


@dataclass(frozen=True, kw_only=True)
class CodecRates:
    """Codec throughput, as the float32 bytes per second that a rank encodes once and decodes twice.

    The defaults hold for one core of an EPYC with AVX-512, where encoding int8 alone runs at 4.7e9 bytes/s and decoding
    two messages at 2.0e10 bytes/s. `tune` measures the rates of your ranks.

    Args:
        int8_bytes_per_s, int4_bytes_per_s: Throughput of each codec.
        kernel_s: Fixed time of each kernel on an accelerator, in seconds. 0 on a CPU.
        is_measured: Whether the rates were measured on these ranks.

    Raises:
        ValueError: A rate is not positive.
    """

    int8_bytes_per_s: float = 3.8e9
    int4_bytes_per_s: float = 2.7e9
    kernel_s: float = 0.0
    is_measured: bool = False

    def __post_init__(self) -> None:
        for name in ("int8_bytes_per_s", "int4_bytes_per_s"):
            require_positive(
                f"codec.{name}",
                getattr(self, name),
                "codec times are computed from this rate. Set the bytes of float32 that a rank encodes per second",
            )
        require_number(
            "codec.kernel_s",
            self.kernel_s,
            "a time cannot be negative. Set 0 if no kernel is launched",
        )

    @classmethod
    def of_accelerator(cls, memory_bytes_per_s: float) -> CodecRates:
        """Calculate the codec rates for half-precision gradients from an accelerator's memory bandwidth.

            bytes of an element    (2 + 4) + (4 + b) + (2 b + 4) + (4 + 2) = 20 + 3 b        b = 258 / 256 or 130 / 256
                                   to float32, encode, decode two, back

        The arithmetic, about 50 integer operations per element, is assumed to overlap with memory
        traffic. The rates are calculated and not measured, because no GPU has run the kernels.

        >>> f"{CodecRates.of_accelerator(4.8e12).int8_bytes_per_s:.3g}"
        '8.34e+11'
        """
        require_positive(
            "memory_bytes_per_s",
            memory_bytes_per_s,
            "codec rates are computed from this memory bandwidth. Set the value from the device's data sheet",
        )
        rates = [
            4 * memory_bytes_per_s / (20 + 3 * message_bytes(BLOCK, bits) / BLOCK)
            for bits in (8, 4)
        ]
        return cls(int8_bytes_per_s=rates[0], int4_bytes_per_s=rates[1], kernel_s=KERNEL_S)

    def seconds(self, wire: NodeWire, numel: float, num_nodes: int) -> float:
        """Return the time that a rank needs to encode and decode `numel` elements, in seconds.

        The time is 0 for a dtype and for a single node.

        >>> rates = CodecRates(int8_bytes_per_s=4e9)
        >>> [rates.seconds(NodeWire(name="int8", itemsize=2), 1e6, num_nodes) for num_nodes in (2, 4)]
        [0.001, 0.00125]
        """
        if wire.bits is None or num_nodes == 1:
            return 0.0
        rate = self.int8_bytes_per_s if wire.bits == 8 else self.int4_bytes_per_s
        # Encoding takes most of the time, so the second encoding, of the sums, counts like a full pass.
        num_times = 1.0 if num_nodes == 2 else 1 + 1 / num_nodes
        # To float32 and back, encode, copy, decode. More nodes encode one shard per node, and decode each shard.
        num_kernels = 5 if num_nodes == 2 else 2 * num_nodes + 5
        return num_times * 4 * numel / rate + num_kernels * self.kernel_s
