"""Launch command on the page about elastic runs: `torchrun --nnodes=1 --max-restarts=...`."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_hybrid.strategy.rendezvous import store_of_attempt

SCRIPT = """
import os, time
import lightning.pytorch as pl
from lightning_hybrid import HybridAllReduceStrategy
from tests import toy

attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
if attempt == "1" and rank == 1:
    time.sleep(8)  # the other rank is first, and reads what the attempt before has left

class Dies(pl.Callback):
    def on_train_batch_end(self, *_):
        if attempt == "0" and rank == 1:
            os._exit(1)

trainer = toy.trainer(strategy=HybridAllReduceStrategy(timeout=60), devices=2, max_epochs=1, callbacks=[Dies()])
trainer.fit(toy.Toy(), toy.loader())
print(f"rank {rank} ended in attempt {attempt}", flush=True)
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_worker_that_is_killed_comes_back_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        "--nproc-per-node=2",
        "--max-restarts=1",
    ]
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert f"rank {rank} ended in attempt 1" in done.stdout


def test_an_attempt_does_not_read_what_the_one_before_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=20)
    stores = []
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        stores.append(store_of_attempt("127.0.0.1", agents.port, limit))
    stores[0].set("address", "of a process that is gone")
    assert stores[0].check(["address"])
    assert not stores[1].check(["address"])
