"""Tensor-parallel layers, whose weights are sliced over the ranks of a node during training.

All ranks of a node compute together on the samples of the whole node:

    (first, last)   a pair: the samples of the node are gathered at the input of `first`. `first`, or the linear layers
                    in it, is sliced by output features or heads, `last` by input features. A reduce-scatter returns the
                    output of each sample to the rank that owns the sample.
    (layer,)        an embedding, sliced by tokens, or an output layer, sliced by classes (`vocabulary`)

Between the layers of a pair only operations on single features are allowed, or attention of complete heads. Layers and
parameters stay the same Python objects: the `data` of a parameter is its slice. State dicts hold full tensors, and
taking one is collective. The gradient of a slice is the average over its node. Averaged over nodes, it equals DDP's
average of the full gradient.

Shapes in this package: b samples on each rank, g ranks in the node, n input features, m output features.

Source: Krizhevsky 2014 (arXiv:1404.5997), scheme (a); Shoeybi et al. 2019 (arXiv:1909.08053) for pairs, attention by
heads, and embedding and cross-entropy over slices of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Description of this rank's slice of a tensor that is split along one dimension.

    All ranks hold slices of equal length: shorter ones are padded with zeros.

    Attributes:
        whole_shape: Shape of the full tensor.
        dim: Dimension that is split.
        index: Indices of `dim` that this rank holds, in the order of the slice.
        length: Length of `dim` in the slice, with padding.
        ranks: Ranks that hold the slices of the tensor.
    """

    whole_shape: torch.Size
    dim: int
    index: Tensor
    length: int
    ranks: NodeRanks

    @classmethod
    def of(cls, whole: Tensor, dim: int, ranks: NodeRanks, *, num_blocks: int = 1) -> Slice:
        """Create the description of this rank's slice of a tensor.

        Args:
            whole: Full tensor.
            dim: Dimension to split.
            ranks: Ranks that hold one slice each.
            num_blocks: Number of equal blocks along `dim` that are each split over the ranks, such as 3 for packed
                queries, keys and values.
        """
        blocks = torch.arange(whole.shape[dim]).view(num_blocks, -1)
        length = -(-blocks.shape[1] // ranks.size)
        begin = ranks.rank * length
        index = blocks[:, begin : begin + length].flatten()
        return cls(
            whole_shape=whole.shape, dim=dim, index=index, length=num_blocks * length, ranks=ranks
        )

    def cut_from(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of a full tensor, padded with zeros."""
        shape = list(self.whole_shape)
        shape[self.dim] = self.length
        part = whole.new_zeros(shape)
        values = whole.index_select(self.dim, self.index.to(whole.device))
        part.narrow(self.dim, 0, len(self.index)).copy_(values)
        return part

    def gather_whole(self, part: Tensor) -> Tensor:
        """Return the full tensor, assembled from the slices of all ranks.

        Collective: every rank of the node must call it, in the same order.
        """
        whole = part.new_zeros(self.whole_shape)
        values = part.narrow(self.dim, 0, len(self.index))
        whole.index_copy_(self.dim, self.index.to(part.device), values)
        # The sum is exact, because each element is nonzero on at most one rank.
        dist.all_reduce(whole, group=self.ranks.group)
        return whole


class SlicedLayer:
    """Base class of tensor-parallel layers, which replace the methods of layers in the user's network.

    The new methods are installed as attributes of the layer. This base class only handles the state of the slices,
    which is enough for a layer with a tied weight. Subclasses add a `forward`.

    Args:
        layer: Layer of the user's network.
        entrance: Input stage of the pair that the layer belongs to.

    Attributes:
        slices: Slices of the layer's parameters, by name of the parameter.
    """

    dims: ClassVar[dict[str, int]] = {}  # the dimension that is split, by name of the parameter
    num_blocks = 1

    def __init__(self, layer: Any, entrance: Entrance) -> None:
        self.layer = layer
        self.entrance = entrance
        self.ranks = entrance.ranks
        self.slices: dict[str, Slice] = {}

    def install(self) -> None:
        """Replace the layer's methods, so that it computes with slices but saves full tensors."""
        vars(self.layer).update(
            sliced=self, state_dict=self.state_dict, _load_from_state_dict=self.load
        )
        self.use_slices()

    def remove(self) -> None:
        """Restore the layer's own methods.

        Its parameters must be full tensors again.
        """
        self.use_slices()
        for name in ("sliced", "state_dict", "_load_from_state_dict", "forward"):
            vars(self.layer).pop(name, None)

    @torch.no_grad()
    def use_whole_tensors(self) -> None:
        """Gather the full tensors and let the layer compute with them until `use_slices` is called.

        Collective: every rank of the node must call it, in the same order. Afterwards the layer's
        `forward` is not collective.
        """
        vars(self.layer).pop("forward", None)
        for name, tensor_slice in self.slices.items():
            parameter = self.layer._parameters[name]
            whole_tensor = tensor_slice.gather_whole(parameter.detach())
            whole = nn.Parameter(whole_tensor, requires_grad=False)
            if self.ranks.window is not None:
                self.ranks.window.add_stand_in(whole, parameter)
            # Python finds an instance attribute before the parameter of this name, which stays the slice.
            vars(self.layer)[name] = whole

    def use_slices(self) -> None:
        """Make the layer compute with its slices again, and free the gathered full tensors."""
        for name in self.slices:
            whole = vars(self.layer).pop(name, None)
            if whole is not None and self.ranks.window is not None:
                self.ranks.window.remove_stand_in(whole)
        if hasattr(self, "forward"):
            vars(self.layer)["forward"] = self.forward

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's state dict with full tensors.

        Collective: every rank of the node must call it, in the same order, unless state dicts
        currently hold slices (`NodeRanks.is_own_state`).
        """
        # A state-dict hook would run too late, after the user's hooks, which may insert other values.
        state = type(self.layer).state_dict(self.layer, *args, **kwargs)
        if self.ranks.is_own_state:
            return state

        self.ranks.wait_for_ranks()
        prefix = kwargs.get("prefix", "")
        for name, tensor_slice in self.slices.items():
            key = prefix + name
            state[key] = tensor_slice.gather_whole(state[key].detach())
        return state

    def load(self, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Load this rank's slices from a state dict with full tensors."""
        state_of_rank = dict(state)
        for name, tensor_slice in self.slices.items():
            key = prefix + name
            if key in state:
                state_of_rank[key] = tensor_slice.cut_from(state[key])
        type(self.layer)._load_from_state_dict(self.layer, state_of_rank, prefix, *arguments)

    def averaged_parameter(self, name: str) -> Any:
        """Return a view of a parameter whose gradient is averaged over the ranks of the node.

        Backward adds the gradients of all ranks' losses, and a hook on the returned view divides them by the number of
        ranks. Gradients that other code adds to the parameter are not divided. Parameters that are not sliced are
        returned as they are.
        """
        parameter = self.layer._parameters[name]
        if name not in self.slices:
            return parameter
        # The hook is on a view and not on the parameter: `parameter.grad` also holds what this rank alone adds, such
        # as a penalty on its weights.
        view = parameter.view_as(parameter)
        if view.requires_grad:
            view.register_hook(lambda gradient: gradient / self.ranks.size)
        return view


class ColumnLinear(SlicedLayer):
    """Linear layer sliced by output features, from `[g b, n]` to `[g b, m / g]`."""

    dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def forward(self, images: Tensor) -> Tensor:
        """Return this rank's slice of the output features for the samples of the whole node."""
        weight = self.averaged_parameter("weight")
        return F.linear(images, weight, self.averaged_parameter("bias"))


class RowLinear(SlicedLayer):
    """Linear layer sliced by input features, from `[g b, m / g]` to this rank's samples `[b, n]`.

    Every rank holds the full bias.
    """

    dims: ClassVar[dict[str, int]] = {"weight": 1}

    def forward(self, features: Tensor) -> Tensor:
        """Return all output features of this rank's samples.

        The partial sums of all ranks are added in at least fp32 and rounded once.
        """
        self.entrance.leave()
        partial_sums = F.linear(features, self.averaged_parameter("weight"))
        output = self.ranks.reduce_scatter(partial_sums)
        if self.layer.bias is None:
            return output
        return output + self.layer.bias


class HeadsAttention(SlicedLayer):
    """Replacement for `nn.MultiheadAttention` that is sliced by attention heads.

    Its `out_proj` is the last layer of the pair.
    """

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
        """Return the attention output for this rank's samples. Each rank computes some of the heads.

        Raises:
            ValueError: Attention weights are requested, or a mask does not apply to all heads.
        """
        layer = self.layer
        is_mask_for_all_heads = attn_mask is None or attn_mask.dim() == 2
        if need_weights or query.dim() != 3 or not is_mask_for_all_heads:
            raise ValueError(
                f"A sliced attention layer supports only need_weights=False (got {need_weights}), "
                f"batched input (3 dimensions, got {query.dim()}) and a 2-D `attn_mask`, "
                "because each rank holds only some of the heads. "
                "Change the call, or leave the layer out of `node_slices`."
            )

        # A tensor passed as several arguments stays one object, because the entrance sends each object once.
        batch_dim = int(not layer.batch_first)
        batch_first = {}
        for tensor in (query, key, value):
            batch_first[id(tensor)] = tensor.transpose(0, batch_dim)
        inputs = [batch_first[id(tensor)] for tensor in (query, key, value)]
        padding = None
        if key_padding_mask is not None:
            padding = key_padding_mask[:, None, None]
        mask = None
        if attn_mask is not None:
            mask = attn_mask[None, None]
        *inputs, padding, mask = self.entrance.gather([*inputs, padding, mask])

        queries, keys, values = self._split_heads(inputs)
        score_bias = _score_bias((padding, mask), query)
        is_causal = is_causal and score_bias is None
        dropout = layer.dropout if layer.training else 0.0
        attended = F.scaled_dot_product_attention(
            queries, keys, values, score_bias, dropout_p=dropout, is_causal=is_causal
        )
        output = layer.out_proj(attended.transpose(1, 2).flatten(2))
        return output.transpose(0, batch_dim), None

    def _split_heads(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the projected queries, keys and values of this rank's heads.

        Each has the shape `[g b, heads / g, t, head_dim]`.
        """
        weights = self.averaged_parameter("in_proj_weight").chunk(3)
        packed_bias = self.averaged_parameter("in_proj_bias")
        biases: Sequence[Tensor | None] = (None, None, None)
        if packed_bias is not None:
            biases = packed_bias.chunk(3)

        shape = (self.layer.num_heads // self.ranks.size, -1)
        heads = []
        for tensor, weight, bias in zip(inputs, weights, biases, strict=True):
            features = F.linear(tensor, weight, bias)
            heads.append(features.unflatten(-1, shape).transpose(1, 2))
        return heads


def _score_bias(masks: Sequence[Tensor | None], query: Tensor) -> Tensor | None:
    """Return the sum of attention masks as a bias that is added to the attention scores.

    It is -inf where a boolean mask is True. Returns None if there is no mask.
    """
    zero = query.new_zeros(())
    biases = []
    for mask in masks:
        if mask is None:
            continue
        if mask.dtype is torch.bool:
            biases.append(zero.masked_fill(mask, -torch.inf))
        else:
            biases.append(mask.to(query))
    if not biases:
        return None
    return sum(biases, zero)


def _cannot_gather(tensor: Tensor, num_images: int) -> ValueError:
    return ValueError(
        f"An input (of shape {tuple(tensor.shape)}) of layers in `node_slices` cannot be gathered from all "
        f"ranks of a node, because its first dimension is neither 1 nor the number of images ({num_images}). "
        "Leave these layers out of `node_slices`."
    )


class Entrance:
    """Entry point of a layer pair, which gathers the node's samples and seeds the random number generator.

    Inside the pair each rank draws its own random numbers, because each rank has different features there. With one
    random state on all ranks, dropout would drop the same positions of each slice. After the pair the random state
    continues as it was before, so ranks that agree on it still agree.
    """

    def __init__(self, ranks: NodeRanks) -> None:
        self.ranks = ranks
        # These three are set only inside the pair.
        self._generator: torch.Generator | None = None
        self._outside_state: Tensor | None = None  # the generator's state to restore at the end
        self._seeded_state: Tensor | None = None  # its state at the beginning of the pair

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the arguments of a module from all ranks of the node. This method is a forward pre-hook."""
        if self.ranks.is_whole:
            return None
        return self.gather((args, kwargs))

    def gather(self, values: Any) -> Any:
        """Gather each tensor in `values` from all ranks of the node.

        The first tensor holds the samples. Each tensor is sent once.

        Collective: every rank of the node must call it, in the same order.

        Raises:
            ValueError: A tensor, or another rank, has another number of samples.
        """
        images, *arguments = tree_leaves(values)
        if images.dim() == 0:
            raise _cannot_gather(images, num_images=1)
        num_images = images.shape[0]
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.dim() == 0:
                raise _cannot_gather(argument, num_images)
        self.ranks.refuse_unequal_batches(images, *arguments)
        device = images.device
        gathered: dict[int, Tensor] = {}

        def gather_once(tensor: Tensor) -> Tensor:
            key = id(tensor)
            if key not in gathered:
                gathered[key] = self._gather_tensor(tensor, num_images)
            return gathered[key]

        values = tree_map_only(Tensor, gather_once, values)
        self.enter(device)
        return values

    def _gather_tensor(self, tensor: Tensor, num_images: int) -> Tensor:
        if tensor.shape[0] not in (1, num_images):
            raise _cannot_gather(tensor, num_images)
        # One entry for all samples becomes one entry for each sample of its rank.
        num_copies = 1
        if tensor.shape[0] < num_images:
            num_copies = num_images
        return self.ranks.gather(tensor).repeat_interleave(num_copies, 0)

    def enter(self, device: torch.device) -> None:
        """Seed this rank's random number generator for the code between the pair's layers."""
        generator = torch.default_generator
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index]
        seed = int(torch.randint(2**31, ()))
        self._generator = generator
        self._outside_state = generator.get_state()
        generator.manual_seed(seed + self.ranks.rank)
        self._seeded_state = generator.get_state()

    def has_drawn(self) -> bool:
        """Return whether code between the layers of the pair has drawn random numbers."""
        if self._generator is None or self._seeded_state is None:
            return False
        return not torch.equal(self._generator.get_state(), self._seeded_state)

    def leave(self) -> None:
        """Restore the state that the random number generator had before the layer pair."""
        generator = self._generator
        outside_state = self._outside_state
        self._generator = None
        self._outside_state = None
        self._seeded_state = None
        if generator is not None and outside_state is not None:
            generator.set_state(outside_state)
