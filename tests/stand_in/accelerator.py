"""Mock device on which Lightning fits under `FullyShardedStrategy`, to check locations and sizes of tensors.

Tensors are fake: they have a device but no values. Torch rejects operations that mix devices. The device cannot be
removed from a process, so this is a separate program. It receives cases in JSON, fits each of them, and answers in
JSON.
"""

import json
import sys
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.io import CheckpointIO
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from lightning_hybrid.optim import LAMB, LARS
from recipes.training.fully_sharded import FullyShardedStrategy

NUM_RANKS = 2
NUM_BLOCKS = 6
WIDTH = 512
OPTIMIZERS = {
    "lars": lambda params: LARS(params, lr=1.0),
    "lamb": lambda params: LAMB(params, lr=0.1),
}


class Stream:
    """Stream of the device, which is also an event."""

    stream_id = device_index = device_type = 0
    wait_event = wait_stream = wait = synchronize = lambda self, *_: None
    record_event = record = lambda self, *_: self


def _make(value):
    return lambda *_, **__: value


_BACKEND = {  # the counterpart of `torch.cuda`
    **dict.fromkeys(("Stream", "Event", "current_stream"), _make(Stream())),
    **dict.fromkeys(("is_initialized", "is_available"), _make(True)),
    "stream": lambda _: nullcontext(),
    "current_device": _make(0),
    "device_count": _make(1),
    "set_device": _make(None),
    "manual_seed_all": _make(None),
    "_is_in_bad_fork": _make(False),
    "get_amp_supported_dtype": _make([torch.float16, torch.bfloat16]),
}
if __name__ == "__main__":  # not if pytest collects examples
    _setup_privateuseone_for_python_backend("standin", backend_module=SimpleNamespace(**_BACKEND))
    _AUTOCAST = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    _AUTOCAST.fallback(torch.library.fallthrough_kernel)
    DEVICE = torch.device("standin", 0)


class StandIn(CPUAccelerator):
    def setup_device(self, device): ...

    @staticmethod
    def get_parallel_devices(devices):
        return [DEVICE]


class Memories(TorchDispatchMode):
    """Mode that counts the device's bytes and rejects operations that mix tensors of host and device.

    If the host reads a value, it gets 0.
    """

    def __init__(self):
        super().__init__()
        self.live = {}
        self.now = 0
        self.peak = 0
        self.after = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = _fakes((args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default and inputs:
            return 0
        is_copy = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy)
        kinds = set()
        for tensor in inputs:
            if tensor.dim() > 0 or tensor.device == DEVICE:
                kinds.add(tensor.device.type)
        assert is_copy or len(kinds) < 2, f"two memories in {func}"
        result = func(*args, **(kwargs or {}))
        for tensor in _fakes(result):
            if tensor.device == DEVICE:
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = weakref.ref(storage)
        self.live = {key: storage for key, storage in self.live.items() if storage() is not None}
        self.now = sum(storage().nbytes() for storage in self.live.values())
        self.peak = max(self.peak, self.now)
        return result


def _fakes(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, FakeTensor)]


class Numbers(TorchFunctionMode):
    """Mode in which `torch.tensor` discards its values, because the device cannot store them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.tensor:
            return func(*args, **kwargs)
        device = kwargs.pop("device", None)
        like = func(*args, **kwargs)
        return torch.empty(like.shape, dtype=like.dtype, device=device)


class InMemory(CheckpointIO):
    def __init__(self):
        self.file = {}

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.file = checkpoint

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        return self.file

    def remove_checkpoint(self, path): ...


class Sharded(FullyShardedStrategy):
    def setup_environment(self):
        with unset_fake_temporarily():  # a mesh reads its ranks
            super().setup_environment()


class Steps(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(2))


class Cast(nn.Linear):
    def forward(self, x):
        # As autocast would do, which does not know the device.
        return super().forward(x.to(self.weight.dtype))


class Blocks(pl.LightningModule):
    def __init__(self, memories, optimizer, policy=None):
        super().__init__()
        self.memories = memories
        self.optimizer_name = optimizer
        self.policy = policy
        self.net = nn.Sequential()
        with DEVICE:
            for _ in range(NUM_BLOCKS):
                self.net.append(nn.Sequential(nn.BatchNorm1d(WIDTH), Cast(WIDTH, WIDTH)))

    def configure_model(self):
        if self.policy is None:
            self.trainer.strategy.shard_(self.net)
        else:  # as user code does
            mesh = self.device_mesh["data_parallel"]
            self.trainer.precision_plugin.shard_(
                self.net, self.net, mesh=mesh, offload_policy=self.policy
            )

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer_name](self.parameters())

    def train_dataloader(self):
        return Steps()

    def on_train_start(self):
        self.memories.peak = 0  # of steps: the whole network was created on the device before

    def training_step(self, batch, batch_idx):
        return self.net(torch.ones(2, WIDTH, device=self.device)).float().sum()

    def on_train_end(self):
        self.trainer.optimizers[0].zero_grad()
        torch.ones(1)  # triggers another count
        self.memories.after = self.memories.now


def fit(
    *,
    optimizer="lars",
    precision="16-true",
    offload=True,
    policy=None,
    is_resumed=False,
    **settings,
):
    """Return the devices after the fit, and the device's bytes per parameter at the peak of a step and after it."""
    checkpoint_io = InMemory()
    paths = [None, "a file"] if is_resumed else [None]
    for path in paths:
        with FakeTensorMode(allow_non_fake_inputs=True), Memories() as memories, Numbers():
            strategy = Sharded(offload=offload, checkpoint_io=checkpoint_io)
            trainer = pl.Trainer(
                accelerator=StandIn(),
                strategy=strategy,
                devices=1,
                num_nodes=NUM_RANKS,
                precision=precision,
                max_epochs=1 if path is None else 2,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                **settings,
            )
            module = Blocks(memories, optimizer, policy)
            try:
                trainer.fit(module, ckpt_path=path)
            except pl.utilities.exceptions.MisconfigurationException as error:
                return {"error": str(error)}
            trainer.save_checkpoint("a file")
            devices = devices_after_fit(trainer, module, checkpoint_io)
    num_parameters = sum(map(torch.numel, module.parameters()))
    return devices | {
        "peak": memories.peak / num_parameters,
        "after": memories.after / num_parameters,
        "module": module.device.type,
        "backend": strategy.process_group_backend,
    }


def devices_after_fit(trainer, module, checkpoint_io):
    """Return the device types of weights, optimizer state, loss scale, buffers and checkpoint."""
    state = []
    for values in trainer.optimizers[0].state.values():
        state += [value for value in values.values() if value.dim() > 0]
    loss_scale = getattr(trainer.precision_plugin, "loss_scale", None)
    tensors = {
        "masters": module.parameters(),
        "state": state,
        "scale": [] if loss_scale is None else [loss_scale.scale],
        "buffers": module.buffers(),
        "file": checkpoint_io.file["state_dict"].values(),
    }
    devices = {}
    for name, tensors_of_kind in tensors.items():
        devices[name] = sorted({tensor.device.type for tensor in tensors_of_kind})
    return devices


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    cases = json.loads(sys.argv[1])
    for case in cases.values():
        if case.pop("has_policy", False):
            case["policy"] = CPUOffloadPolicy(pin_memory=False)
    print(json.dumps({name: fit(**case) for name, case in cases.items()}))
