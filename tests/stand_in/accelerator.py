"""A device that is none, on which Lightning fits under `FullyShardedStrategy`: what lies where, and which bytes.

Tensors are fake: they have a device and no values. torch refuses operations that mix devices. A process has the device
for good, so this is a program of its own: it fits each of the cases that it is given in JSON, and answers in JSON.
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
    """Also an event."""

    stream_id = device_index = device_type = 0
    wait_event = wait_stream = wait = synchronize = lambda self, *_: None
    record_event = record = lambda self, *_: self


def _make(value):
    return lambda *_, **__: value


_BACKEND = {  # what `torch.cuda` is to CUDA
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
if __name__ == "__main__":  # not where pytest looks for examples
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
    """Counts the device's bytes, refuses its numbers beside the host's tensors, and answers 0 where the host reads."""

    def __init__(self):
        super().__init__()
        self.live = {}
        self.now = 0
        self.peak = 0
        self.after = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = _fakes((args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default and given:
            return 0
        is_copy = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy)
        kinds = {each.device.type for each in given if each.dim() > 0 or each.device == DEVICE}
        assert is_copy or len(kinds) < 2, f"two memories in {func}"
        made = func(*args, **(kwargs or {}))
        for storage in (each.untyped_storage() for each in _fakes(made) if each.device == DEVICE):
            self.live[storage._cdata] = weakref.ref(storage)
        self.live = {key: storage for key, storage in self.live.items() if storage() is not None}
        self.now = sum(storage().nbytes() for storage in self.live.values())
        self.peak = max(self.peak, self.now)
        return made


def _fakes(tree):
    return [tree_leave for tree_leave in tree_leaves(tree) if isinstance(tree_leave, FakeTensor)]


class Numbers(TorchFunctionMode):
    """Makes `torch.tensor` forget its values, which the device could not take."""

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
        # as autocast, which does not know the device
        return super().forward(x.to(self.weight.dtype))


class Blocks(pl.LightningModule):
    def __init__(self, memories, optimizer, policy=None):
        super().__init__()
        self.memories = memories
        self.optimizer_name = optimizer
        self.policy = policy
        with DEVICE:
            self.net = nn.Sequential(
                *(
                    nn.Sequential(nn.BatchNorm1d(WIDTH), Cast(WIDTH, WIDTH))
                    for _ in range(NUM_BLOCKS)
                )
            )

    def configure_model(self):
        if self.policy is None:
            self.trainer.strategy.shard_(self.net)
        else:  # as a user does
            mesh = self.device_mesh["data_parallel"]
            self.trainer.precision_plugin.shard_(
                self.net, self.net, mesh=mesh, offload_policy=self.policy
            )

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer_name](self.parameters())

    def train_dataloader(self):
        return Steps()

    def on_train_start(self):
        self.memories.peak = 0  # of steps: here the network is made on the device, and whole

    def training_step(self, batch, batch_idx):
        return self.net(torch.ones(2, WIDTH, device=self.device)).float().sum()

    def on_train_end(self):
        self.trainer.optimizers[0].zero_grad()
        torch.ones(1)  # counts once more
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
    """Return the devices after the fit, and the device's bytes per parameter: the peak of a step, and after it."""
    saved = InMemory()
    for path in (None, "a file")[: 1 + is_resumed]:
        with FakeTensorMode(allow_non_fake_inputs=True), Memories() as memories, Numbers():
            strategy = Sharded(offload=offload, checkpoint_io=saved)
            trainer = pl.Trainer(
                accelerator=StandIn(), strategy=strategy, devices=1, num_nodes=NUM_RANKS, precision=precision,
                max_epochs=1 if path is None else 2, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **settings
            )  # fmt: skip
            module = Blocks(memories, optimizer, policy)
            try:
                trainer.fit(module, ckpt_path=path)
            except pl.utilities.exceptions.MisconfigurationException as error:
                return {"error": str(error)}
            trainer.save_checkpoint("a file")
            scale = getattr(trainer.precision_plugin, "loss_scale", None)
            state = trainer.optimizers[0].state
            parts = {
                "masters": module.parameters(),
                "state": [
                    value
                    for of_one in state.values()
                    for value in of_one.values()
                    if value.dim() > 0
                ],
                "scale": [] if scale is None else [scale.scale],
                "buffers": module.buffers(),
                "file": saved.file["state_dict"].values(),
            }
    num_bytes = {name: getattr(memories, name) for name in ("peak", "after")}
    found = {name: sorted({each.device.type for each in some}) for name, some in parts.items()}
    found |= {
        name: each / sum(map(torch.numel, module.parameters())) for name, each in num_bytes.items()
    }
    return found | {"module": module.device.type, "backend": strategy.process_group_backend}


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    cases = json.loads(sys.argv[1])
    for case in cases.values():
        if case.pop("has_policy", False):
            case["policy"] = CPUOffloadPolicy(pin_memory=False)
    print(json.dumps({name: fit(**case) for name, case in cases.items()}))
