"""Free ports for the ranks and hosts that a test starts."""

import random
import socket
from contextlib import suppress

# The kernel assigns ports from 32768 upwards to outgoing connections, including those of other test processes.
PORTS = range(20_000, 32_768)


def free_port() -> int:
    """Return a port of this machine that has no listener."""
    # Tests seed the global generator, which would return the same port again.
    generator = random.SystemRandom()
    while True:
        port = generator.choice(PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def free_addresses(num: int) -> str:
    """Return `num` distinct free addresses of this machine as a comma-separated string."""
    ports = set[int]()
    while len(ports) < num:
        ports.add(free_port())
    return ",".join(f"127.0.0.1:{port}" for port in ports)
