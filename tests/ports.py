"""Ports for ranks and hosts that a test starts."""

import random
import socket
from contextlib import suppress

# The kernel gives ports from 32768 on to connections, also to those of the tests of the other process.
PORTS = range(20_000, 32_768)


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    # Tests seed the global generator, which would give the same port again.
    generator = random.SystemRandom()
    while True:
        port = generator.choice(PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def free_addresses(num: int) -> str:
    """Return different free addresses of this machine, separated by commas."""
    ports = set[int]()
    while len(ports) < num:
        ports.add(free_port())
    return ",".join(f"127.0.0.1:{port}" for port in ports)
