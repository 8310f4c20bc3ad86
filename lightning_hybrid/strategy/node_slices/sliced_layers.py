"""Layers of which each rank of a node has a slice, for the time of a fit; all ranks compute for all images of the node.

    (first, last)   a pair: images of the node are gathered where `first` begins; `first`, or what is in it, is cut by
                    output features or heads, `last` by input features; its sums go to whose images they are
    (one,)          an embedding, cut by tokens; or a head, cut by classes (`vocabulary`)

Between the layers of a pair stand operations on single features, or attention of whole heads. Layers stay the objects
that they are, and parameters too, whose `data` is the slice; state dicts hold whole tensors, and to take one is
collective. A slice's gradient is the average over its node; averaged over nodes it is what DDP makes of whole ones.

Source: Krizhevsky 2014 (arXiv:1404.5997), whose scheme (a) this is; Shoeybi et al. 2019 (arXiv:1909.08053) for pairs,
attention by heads, and embedding and cross-entropy over slices of a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_hybrid.strategy.node_slices.slice_exchange import NodeRanks


@dataclass(frozen=True, kw_only=True, eq=False)
class Slice:
    """Which part of a tensor this rank has: indices of one dimension, and zeros up to the length of other ranks'."""

    shape: torch.Size  # of the whole
    dim: int
    index: Tensor
    length: int
    ranks: NodeRanks

    @classmethod
    def of(cls, whole: Tensor, dim: int, ranks: NodeRanks, *, num_blocks: int = 1) -> Slice:
        """Cut `dim`, or each of its equal blocks, into one part for each rank."""
        blocks = torch.arange(whole.shape[dim]).view(num_blocks, -1)
        length = -(-blocks.shape[1] // ranks.size)
        index = blocks[:, ranks.rank * length : (ranks.rank + 1) * length].flatten()
        return cls(shape=whole.shape, dim=dim, index=index, length=num_blocks * length, ranks=ranks)

    def own_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of the whole's shape."""
        own = whole.new_zeros([*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :]])
        own.narrow(self.dim, 0, len(self.index)).copy_(
            whole.index_select(self.dim, self.index.to(whole.device))
        )
        return own

    def whole_of(self, own: Tensor) -> Tensor:
        """Return the whole on every rank. Collective."""
        whole = own.new_zeros(self.shape)
        whole.index_copy_(
            self.dim, self.index.to(own.device), own.narrow(self.dim, 0, len(self.index))
        )
        dist.all_reduce(
            whole, group=self.ranks.group
        )  # exact: of each element all ranks but one have zero
        return whole


class SlicedLayer:
    """What a layer with slices does, put on it by attributes. This one only holds some, as of tied weights."""

    dims: ClassVar[dict[str, int]] = {}  # the cut dimension of each sliced parameter
    num_blocks = 1

    def __init__(self, layer: Any, entrance: Entrance) -> None:
        self.layer = layer
        self.entrance = entrance
        self.ranks = entrance.ranks
        self.slices: dict[str, Slice] = {}

    def begin(self) -> None:
        """Compute and save with slices from now on."""
        vars(self.layer).update(
            sliced=self, state_dict=self.state_dict, _load_from_state_dict=self.load
        )
        self.drop()

    def end(self) -> None:
        """Give the layer back; its parameters are whole again."""
        self.drop()
        for name in ("sliced", "state_dict", "_load_from_state_dict", "forward"):
            vars(self.layer).pop(name, None)

    @torch.no_grad()
    def gather(self) -> None:
        """Compute with whole tensors, each rank by itself, until `drop`. Collective; `forward` then is not."""
        vars(self.layer).pop("forward", None)
        for name, one in self.slices.items():
            parameter = self.layer._parameters[name]
            whole = nn.Parameter(one.whole_of(parameter.detach()), requires_grad=False)
            if self.ranks.window is not None:
                self.ranks.window.add_stand_in(whole, parameter)
            # An attribute goes before the parameter of this name, which stays the slice.
            vars(self.layer)[name] = whole

    def drop(self) -> None:
        """Compute with slices again; forget the whole tensors."""
        for name in self.slices:
            whole = vars(self.layer).pop(name, None)
            if whole is not None and self.ranks.window is not None:
                self.ranks.window.remove_stand_in(whole)
        if hasattr(self, "forward"):
            vars(self.layer)["forward"] = self.forward

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state with whole tensors. Collective."""
        # Not by a hook: those of the state dict, which may put other values in, come before.
        state = type(self.layer).state_dict(self.layer, *args, **kwargs)
        prefix = kwargs.get("prefix", "")
        if not self.ranks.is_own_state:
            self.ranks.meet()
            state |= {
                prefix + k: one.whole_of(state[prefix + k].detach())
                for k, one in self.slices.items()
            }
        return state

    def load(self, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Load this rank's slices of whole tensors."""
        own = {
            prefix + k: one.own_of(state[prefix + k])
            for k, one in self.slices.items()
            if prefix + k in state
        }
        type(self.layer)._load_from_state_dict(self.layer, {**state, **own}, prefix, *arguments)

    def averaged(self, name: str) -> Any:
        """Return a parameter whose gradient from here is the average over the ranks' images, and not their sum."""
        parameter = self.layer._parameters[name]
        if name not in self.slices:
            return parameter
        # Of a view and not of `parameter.grad`, which also has what this rank alone adds: a penalty on its weights.
        view = parameter.view_as(parameter)
        if view.requires_grad:
            view.register_hook(lambda gradient: gradient / self.ranks.size)
        return view


class ColumnLinear(SlicedLayer):
    """A linear layer cut by output features: `[g b, n]` -> `[g b, m / g]`."""

    dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def forward(self, images: Tensor) -> Tensor:
        """Compute this rank's features of all images of the node."""
        return F.linear(images, self.averaged("weight"), self.averaged("bias"))


class RowLinear(SlicedLayer):
    """A linear layer cut by input features: `[g b, m / g]` -> `[b, n]`, the rank's own images. The bias is whole."""

    dims: ClassVar[dict[str, int]] = {"weight": 1}

    def forward(self, features: Tensor) -> Tensor:
        """Compute all features of this rank's images; what ranks add is added in fp32 at least and rounded once."""
        self.entrance.leave()
        own = self.ranks.sum_to_own(F.linear(features, self.averaged("weight")))
        return own if self.layer.bias is None else own + self.layer.bias


class HeadsAttention(SlicedLayer):
    """`nn.MultiheadAttention` cut by heads; its `out_proj` is the last layer of the pair."""

    dims: ClassVar[dict[str, int]] = {"in_proj_weight": 0, "in_proj_bias": 0}
    num_blocks = 3

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend with this rank's heads to all images of the node.

        Raises:
            ValueError: weights of the attention are asked for, or a mask is not one for all heads.
        """
        layer = self.layer
        if need_weights or query.dim() != 3 or (attn_mask is not None and attn_mask.dim() != 2):
            raise ValueError(
                f"`need_weights` (={need_weights}) must be False in an attention that `node_slices` cuts, the input "
                f"(of {query.dim()} dimensions) a batch of sequences, and `attn_mask` of 2 dimensions: no rank has the "
                "attention of all heads. Call it so, or leave the layer out."
            )
        dims = (0, int(not layer.batch_first))
        one_each = {
            id(one): one.transpose(*dims) for one in (query, key, value)
        }  # what is given twice is sent once
        padding = None if key_padding_mask is None else key_padding_mask[:, None, None]
        mask = None if attn_mask is None else attn_mask[None, None]
        given = [one_each[id(one)] for one in (query, key, value)]
        *given, padding, mask = self.entrance.gather([*given, padding, mask])
        weights = self.averaged("in_proj_weight").chunk(3)
        bias = self.averaged("in_proj_bias")
        biases = (None, None, None) if bias is None else bias.chunk(3)
        features = (F.linear(*each) for each in zip(given, weights, biases, strict=True))
        shape = (layer.num_heads // self.ranks.size, -1)
        queries, keys, values = (one.unflatten(-1, shape).transpose(1, 2) for one in features)
        zero = query.new_zeros(())
        masks = [one for one in (padding, mask) if one is not None]
        added = [
            zero.masked_fill(one, -torch.inf) if one.dtype is torch.bool else one.to(query)
            for one in masks
        ]
        mask = sum(added, zero) if added else None
        dropout = layer.dropout if layer.training else 0.0
        attended = F.scaled_dot_product_attention(
            queries, keys, values, mask, dropout_p=dropout, is_causal=is_causal and mask is None
        )
        own = layer.out_proj(attended.transpose(1, 2).flatten(2))
        return own.transpose(*dims), None


class Entrance:
    """Where a pair begins: images of the node are gathered, and random numbers are the rank's own up to its end.

    There each rank has other features: with one stream on all ranks, dropout would take the same places out of each
    slice. The stream outside goes on behind the pair as it was, so that ranks which agree on it still do.
    """

    def __init__(self, ranks: NodeRanks) -> None:
        self.ranks = ranks
        # The generator, and its state outside and at the beginning of the pair. Inside of the pair only.
        self._outside: tuple[torch.Generator, Tensor] | None = None
        self._seeded_state: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the arguments of `module`, before its `forward`."""
        return None if self.ranks.is_whole else self.gather((args, kwargs))

    def gather(self, values: Any) -> Any:
        """Return `values`, of which images are the first, for all images of the node; each tensor is sent once.

        Raises:
            ValueError: a tensor, or another rank, has another number of images.
        """
        images, *others = tree_leaves(values)
        self.ranks.refuse_unequal_batches(images, *others)
        found = dict[int, Tensor]()
        num = images.shape[0]
        device = images.device

        def of_node(own: Tensor) -> Tensor:
            if own.dim() == 0 or own.shape[0] not in (1, num):
                raise ValueError(
                    f"an input (of shape {tuple(own.shape)}) of layers that `node_slices` cuts must have one part for "
                    f"each of the {num} images, or one for all: those of the node are gathered. Leave these layers out."
                )
            if id(own) not in found:
                found[id(own)] = self.ranks.gather(own).repeat_interleave(
                    num if own.shape[0] < num else 1, 0
                )
            return found[id(own)]

        values = tree_map_only(Tensor, of_node, values)
        self.enter(device)
        return values

    def enter(self, device: torch.device) -> None:
        """Seed the random numbers of this rank inside of the pair."""
        on_cuda = device.type == "cuda"
        generator = (
            torch.cuda.default_generators[device.index] if on_cuda else torch.default_generator
        )
        seed = int(torch.randint(2**31, ()))
        self._outside = generator, generator.get_state()
        generator.manual_seed(seed + self.ranks.rank)
        self._seeded_state = generator.get_state()

    def has_drawn(self) -> bool:
        """Return whether code inside of the pair has drawn random numbers."""
        if self._outside is None or self._seeded_state is None:
            return False
        generator, _ = self._outside
        return not torch.equal(generator.get_state(), self._seeded_state)

    def leave(self) -> None:
        """Go on with the random numbers from before."""
        outside = self._outside
        self._outside = None
        self._seeded_state = None
        if outside is not None:
            generator, state = outside
            generator.set_state(state)
