"""Description of the machine on which the checks run, with library versions, GPUs and git commit."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.callbacks.run_report.environment import code_state

PACKAGES = (
    "torch lightning triton numpy torchmetrics pytest simplejpeg nvidia-nccl-cu12 nvidia-nccl-cu13 nvidia-cudnn-cu13"
).split()


# Runs in a separate process: querying the properties of a GPU creates a CUDA context. A GPU in exclusive mode allows
# only one such context, and if NVML cannot count the devices (MIG), even counting them prevents forking.
_ASK_FOR_GPUS = """
import json, torch
found = {"gpus": [], "capability": None, "cudnn": None, "nccl": None}
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        each = torch.cuda.get_device_properties(index)
        found["gpus"].append(f"{each.name}, {each.total_memory / 2**30:.0f} GiB")
    found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    found["cudnn"] = torch.backends.cudnn.version()
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
print(json.dumps(found))
"""


def gpu_environment(root: Path) -> dict[str, Any]:
    """Return library versions, GPUs, driver and git commit as a dictionary, with None for unknown values.

    >>> gpu_environment(Path("/"))["torch"] == torch.__version__, gpu_environment(Path("/"))["commit"]
    (True, None)
    """
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    environment |= {package: _version(package) for package in PACKAGES} | {
        "torch": torch.__version__
    }
    code = code_state(root) or {}
    environment |= {
        "cuda": torch.version.cuda,
        "commit": code.get("commit"),
        "has_changes": code.get("is_dirty"),
    }
    environment["nccl_made_by"] = nccl_made_by()
    if torch.cuda.is_available():
        environment |= _gpus()
        environment["driver"] = driver()
        environment["topology"] = _output("nvidia-smi", "topo", "-m")
    return environment


def _gpus() -> dict[str, Any]:
    answer = _output(sys.executable, "-c", _ASK_FOR_GPUS, limit_s=120)
    if answer is None:
        return {}
    gpus: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return gpus


def driver() -> str | None:
    """Return the version of the NVIDIA driver, or None if `nvidia-smi` does not report it."""
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def why_no_gpu() -> str:
    """Return a sentence for error messages that states torch's CUDA version and the driver version.

    >>> why_no_gpu().startswith(f"torch {torch.__version__} was built for CUDA {torch.version.cuda}")
    True
    """
    version = driver()
    has_driver = "nvidia-smi finds no driver"
    if version is not None:
        has_driver = f"the driver is {version.splitlines()[0]}"
    return f"torch {torch.__version__} was built for CUDA {torch.version.cuda}, and {has_driver}"


def clocks() -> str | None:
    """Return clock rates, temperature, power and throttle reasons of each GPU as CSV, or None if unknown."""
    asked = "clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw,clocks_throttle_reasons.active"
    return _output("nvidia-smi", f"--query-gpu=index,{asked}", "--format=csv")


def nccl_made_by() -> str | None:
    """Return the name of the class or function that this version of torch uses to create NCCL groups.

    >>> nccl_made_by() in (None, "ProcessGroupNCCL", "_create_nccl_process_group", "_create_nccl2_process_group")
    True
    """
    if not dist.is_nccl_available():
        return None
    # Since torch 2.14 the backend is registered on first use, according to TORCH_DIST_USE_NCCL2 at that time.
    if hasattr(dist.Backend, "_ensure_backend_registered"):
        dist.Backend._ensure_backend_registered("nccl")
    plugin = dist.Backend._plugins.get("NCCL")
    if plugin is None:
        return "ProcessGroupNCCL"
    return plugin.creator_fn.__name__


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str, limit_s: float = 10) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return done.stdout.strip()
    return None
