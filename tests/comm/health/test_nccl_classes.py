"""torch's own classes of NCCL, with a driver and an NCCL that do nothing, are found and aborted by whatever name."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

CLASSES = [name for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy") if hasattr(dist, name)]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (torch.version.cuda or "").startswith("13"), reason="needs a torch built for CUDA 13"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="its stand-in takes the place of a driver"),
]

CHILD = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from lightning_hybrid.comm.health import abort
from lightning_hybrid.comm.health.watchdog import comes_from_others, is_of_a_collective

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
options = dist.ProcessGroupNCCL.Options()
options._timeout = timedelta(seconds=1)
backend = getattr(dist, sys.argv[1])(dist.HashStore(), 0, 1, options)
world = dist.group.WORLD
world._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.CUSTOM, backend)
told = []
abort.on_abort(world, lambda: told.append(1))
if "HANG" in os.environ:
    backend.allreduce([torch.empty(8, device="cuda")])
    end_s = time.monotonic() + 30
    while not told and time.monotonic() < end_s:
        time.sleep(0.1)
print("TOLD", len(told), file=sys.stderr)
assert abort.abort_all(limit_s=20) == []
try:
    if sys.argv[1] != "ProcessGroupNCCL":  # which makes its communicator with its first collective
        backend.allreduce([torch.empty(8, device="cuda")])
except RuntimeError as error:
    assert comes_from_others(error) and is_of_a_collective(error), error
    print("REFUSED", file=sys.stderr)
backend.shutdown()
print("ENDED", file=sys.stderr)
sys.stderr.flush()
os._exit(0)
"""

BUCKET = """
import os, sys
from types import SimpleNamespace
import torch, torch.distributed as dist
from lightning_hybrid.comm.engine.cuda_all_reduce import Issued, all_reduce

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
backend = getattr(dist, sys.argv[1])(dist.HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())
dist.group.WORLD._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.CUSTOM, backend)
flat, sums = torch.empty(8, device="cuda"), []
for finish in (lambda summed: sums.append(summed) or summed[:3], lambda summed: summed.no_such_name):
    bucket = SimpleNamespace(flat=flat, finish=finish, chunks=[0], plan=SimpleNamespace(num_bytes=16))
    try:
        future = all_reduce(Issued(bucket), dist.group.WORLD, flat.device)
    except RuntimeError as error:
        print("RAISED" if "no_such_name" in str(error) else error, file=sys.stderr)
assert future.done()
assert sums[0].data_ptr() == future.wait().data_ptr() == flat.data_ptr()
assert future.value().numel() == 3
sys.stderr.flush()
os._exit(0)
"""


@pytest.fixture(scope="module")
def no_gpu(tmp_path_factory):
    """The library, and a folder in which it is the driver."""
    folder = tmp_path_factory.mktemp("no_gpu")
    source = Path(__file__).with_name("no_gpu.c")
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", folder / "no_gpu.so", source], check=True)
    shutil.copy(folder / "no_gpu.so", folder / "libcuda.so.1")
    return folder


def said(no_gpu, name, code=CHILD, **variables):
    environment = os.environ | {"LD_PRELOAD": str(no_gpu / "no_gpu.so"), "LD_LIBRARY_PATH": str(no_gpu), **variables}
    environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"  # as the strategy sets it
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_of_nccl_is_found_aborted_once_and_ends(no_gpu, name):
    text = said(no_gpu, name)
    assert "ENDED" in text
    assert "TOLD 0" in text
    if name != "ProcessGroupNCCL":
        assert text.count("NCCL aborts") == 1
        assert "REFUSED" in text


@pytest.mark.skipif("ProcessGroupNCCL2" not in CLASSES, reason="this torch has one class of NCCL")
def test_what_torch_aborts_after_its_time_limit_is_told_and_the_process_lives(no_gpu):
    text = said(no_gpu, "ProcessGroupNCCL2", HANG="1")
    assert "TOLD 1" in text
    assert "ENDED" in text
    assert "REFUSED" in text
    assert text.count("NCCL aborts") == 1


@pytest.mark.parametrize("name", CLASSES)
def test_a_bucket_is_finished_by_the_future_of_each_class_at_once_and_what_fails_there_is_raised(no_gpu, name):
    assert "RAISED" in said(no_gpu, name, code=BUCKET)
