"""Half precision on the shards of FSDP2 (torch's `fully_shard`), which are the fp32 masters already."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hybrid.lightning_names import lightning_types, misconfiguration
from lightning_hybrid.precision.master_weights import NORMALISATION_TYPES, MasterWeights
from lightning_hybrid.precision.plugin import MasterWeightMixin


class ShardedHalfMixin(MasterWeightMixin):
    """A plugin for `fully_shard` under Lightning's `ModelParallelStrategy`: half weights, gathered from fp32 shards.

        gather, forward, backward    w16 = half(w), g16 = grad of s * L at w16          normalisation layers: fp32
        reduce                       g   = mean over ranks of g16, in `reduce_dtype`    fp32, a shard on each rank
        skip or step                 any(g / s is inf or nan) on any rank: skip;  else  w <- optimizer(w, g / s)

    The network is given to `shard_`. Arguments, and all else, are those of `MasterWeightPrecision`, but for the first
    scale, which falls by halves alone, and that each step has one all-reduce more, of the verdict.

    Source: Zhao et al. 2023 (arXiv:2304.11277), for `fully_shard`'s predecessor.
    """

    reduce_dtype = torch.float32
    """In which gradients are summed, over ranks and over the batches of a step; `torch.float16` sends half."""

    def shard_(self, network: nn.Module, blocks: Iterable[nn.Module], **options: Any) -> None:
        """Shard `network` in place: each block, which is gathered on its own, what is left, and what stays fp32.

        Collective, as `fully_shard`, which is given the `options`, such as `mesh`.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        kept = (*NORMALISATION_TYPES, *self.keep_fp32)
        fp32 = [one for one in network.modules() if isinstance(one, kept) and list(one.parameters(recurse=False))]
        if fp32:  # as one group: they are small, and stay gathered from forward to backward
            fully_shard(fp32, **options | {"reshard_after_forward": False})
        # Autocast casts what is computed in half precision: inputs keep their dtype.
        options["mp_policy"] = MixedPrecisionPolicy(self.dtype, self.reduce_dtype, cast_forward_inputs=False)
        for block in blocks:
            if block not in fp32 and list(block.parameters()):
                fully_shard(block, **options)
        fully_shard(network, **options)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Take the module, whose shards are masters already.

        Raises:
            MisconfigurationException: another strategy, or a module that `shard_` was not given.
        """
        from torch.distributed.fsdp import FSDPModule

        trainer: Any = getattr(module, "trainer", None)
        strategy = trainer and trainer.strategy
        if not isinstance(strategy, lightning_types("pytorch.strategies.ModelParallelStrategy")) or not any(
            isinstance(one, FSDPModule) for one in module.modules()
        ):
            raise misconfiguration(
                f"`strategy` (={type(strategy).__name__}) must be ModelParallelStrategy, and the module sharded by "
                f"{type(self).__name__}: it has no masters but the shards. Call `self.trainer.precision_plugin.shard_("
                "self.net, self.net.children(), mesh=...)` in `configure_model`, or take strategy='hybrid_allreduce'."
            )
        self.connect_strategy(is_last_backward_of_step=partial(bool, True))
        super().convert_module(module)
        self.follow_device(strategy.root_device)
        return module

    def _convert(self) -> None:
        self.masters = MasterWeights(nn.Module(), self.dtype)  # of no parameter
        for child in self._module.modules():
            if isinstance(child, NORMALISATION_TYPES) and not isinstance(child, _BatchNorm):
                self.masters.hooks.compute_in_fp32(child)
        self.masters.hooks.compute_as_in_a_step(self._module)
        self.masters.hooks.step_context = self.forward_context

    def _largest_gradient(self, *_: Any) -> Tensor | None:
        return None  # a rank has shards alone
