"""One rank that counts steps and follows the membership. It starts in tenths of a second because it omits torch.

`python worker.py HOST LOCAL RANKS MEET MIN_HOSTS MAX_HOSTS SILENT_S WAIT_S` prints one JSON object per line.
"""

import json
import os
import sys
import threading
import time
import types
from pathlib import Path

ROOT = Path(__file__).parents[3]


def without_torch():
    """Make the packages importable without the imports of their `__init__` files."""
    for name in ("lightning_hybrid", "lightning_hybrid.comm"):
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT / name.replace(".", "/"))]
        sys.modules[name] = package


def main(host, local, ranks_per_host, meet, min_hosts, max_hosts, silent_s, wait_s):
    from lightning_hybrid.elastic.membership.membership import Membership
    from lightning_hybrid.elastic.membership.view import IsolatedError

    def say(event, **more):
        line = json.dumps(
            {"t": time.time(), "host": host, "local": int(local), "event": event, **more}
        )
        os.write(1, f"{line}\n".encode())  # in a single write, because two threads write

    def change(number, why):
        say("change", why=why)
        has_ended.set()

    has_ended = threading.Event()
    membership = Membership(
        host=host,
        local=int(local),
        ranks_per_host=int(ranks_per_host),
        meet=meet.split(","),
        min_hosts=int(min_hosts),
        max_hosts=int(max_hosts),
        token="t",
        on_change=change,
        make_store=lambda: f"store-of-{host}:{time.monotonic_ns()}",
        silent_s=float(silent_s),
        wait_s=float(wait_s),
    )
    step = 0
    say("born")
    try:
        view = membership.enter(0, timeout_s=60)
        while True:
            say(
                "view",
                number=view.number,
                hosts=view.hosts,
                store=view.store,
                target=view.target,
                why=view.reasons,
            )
            step = view.target
            while not has_ended.wait(0.01):
                step += 1
            has_ended.clear()
            view = membership.next_view(step, timeout_s=60)
    except IsolatedError as error:
        say("isolated", why=str(error))


if __name__ == "__main__":
    without_torch()
    main(*sys.argv[1:])
