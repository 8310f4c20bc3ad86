"""The user's `training_step` around a stage: where the network's input comes from, and where its output goes.

    first stage     training_step(micro-batch) up to the call of the network        -> its input
    last stage      training_step(micro-batch) with the stage's output at that call -> the loss, nothing logged
    every rank      training_step(batch) with all outputs, once, without gradients  -> what is logged, the loss

The three draw the same random numbers for the same micro-batch outside the network, as mixing images and labels does.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_hybrid.batch_rows import count_rows, leaves, split_rows
from lightning_hybrid.precision.optimizer_protocol import temporary_attributes


class _InputFound(Exception):  # noqa: N818  not an error: it ends `training_step` at the call of the network
    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors


def input_of_net(net: nn.Module, run: Callable[[], Any]) -> tuple[Tensor, ...]:
    """Return what `run` gives to `net`, which is not computed.

    Raises:
        ValueError: something else than tensors is given to it, or it is never called.

    >>> net = nn.Linear(1, 1)
    >>> input_of_net(net, lambda: net(torch.ones(2, 1) / 2).sum())
    (tensor([[0.5000],
            [0.5000]]),)
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise _InputFound(only_tensors(args, kwargs))

    try:
        with temporary_attributes(net, forward=forward):
            run()
    except _InputFound as found:
        return found.tensors
    raise ValueError(
        "`training_step` must call the network that `of` names: it returned without. Set `of` to the network "
        "that it calls."
    )


def only_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return the tensors that a network was called with, one by one or in a tuple.

    Raises:
        ValueError: there is something else, or a name.
    """
    tensors = args[0] if len(args) == 1 and isinstance(args[0], tuple | list) else args
    if not tensors or kwargs or not all(isinstance(each, Tensor) for each in tensors):
        given = ", ".join([*(type(each).__name__ for each in tensors), *kwargs])
        raise ValueError(
            f"The network that `of` names must be called with tensors, without names (was called with: {given}): they "
            "are the arguments of its first block. Give it these, and what else it needs as attributes."
        )
    return tuple(tensors)


def loss_in(output: Any) -> Tensor:
    """Return the loss in what `training_step` returned.

    Raises:
        ValueError: there is none.

    >>> loss_in({"loss": torch.tensor(2.0)})
    tensor(2.)
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"`training_step` (returned {type(output).__name__}) must return a loss for every micro-batch in a "
            "pipeline: a batch cannot be left out by one stage alone. Leave it out of the loader."
        )
    return loss


# ---- micro-batches -------------------------------------------------------------------------------------------------


def microbatches(batch: Any, num: int) -> list[Any]:
    """Cut a batch into `num` equal parts, by the rows of `lightning_hybrid.batch_rows`.

    Raises:
        ValueError: it does not divide, or it is unknown where samples begin in it.

    >>> [(part["x"].tolist(), part["names"]) for part in microbatches({"x": torch.arange(2), "names": ["a", "b"]}, 2)]
    [([0], ['a']), ([1], ['b'])]
    """
    size = count_rows(batch)
    if size % num:
        raise ValueError(
            f"`batch_size` (={size}) must be a multiple of `num_microbatches` (={num}) on each data rank: they are of "
            "equal size. Change one of them; for a smaller last batch set `drop_last=True` in the loader."
        )
    if size == 0:
        return [batch] * num
    return [part.batch for part in split_rows(batch, size // num)]


def digest_of(batch: Any, *, with_values: bool) -> int:
    """Return 63 bits that differ where two ranks of a pipeline have batches of different shapes, dtypes or labels.

    Of the values, integers count, which are labels: images may differ, as each rank augments its own. If a batch has no
    integers, all its tensors count, and if it has no tensors, all its arrays, texts and numbers.

    >>> one, other = (digest_of((torch.rand(2), torch.tensor([3, label])), with_values=True) for label in (4, 5))
    >>> one == other
    False
    """
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
    digest = hashlib.blake2b(
        repr([(tuple(leaf.shape), leaf.dtype) for leaf in tensors]).encode(), digest_size=8
    )
    if with_values:
        labels = [
            leaf
            for leaf in tensors
            if not leaf.is_floating_point() and leaf.dtype is not torch.uint8
        ]
        for leaf in labels or tensors:
            digest.update(
                leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        if not tensors:
            digest.update(_text_of(batch).encode())
    return int.from_bytes(digest.digest(), "little") >> 1


def _text_of(batch: Any) -> str:
    entries = [leaf.tolist() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves(batch)]
    return repr(entries)


@contextmanager
def random_state(
    numbers: int | tuple[int, ...], device: torch.device
) -> Iterator[Callable[[], bool]]:
    """Draw the random numbers of `numbers` inside: torch's, Python's and numpy's; those outside go on undisturbed.

    It gives a function that says whether any were drawn since.

    >>> with random_state((1, 2), torch.device("cpu")) as has_drawn:
    ...     has_drawn(), len([random.random()]), has_drawn()
    (False, 1, True)
    """
    # Mixed: torch's generator on a CPU and numpy's take 32 bits, in which an epoch or a data rank would have no part.
    seed = int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest(), "little")
    generators = [
        torch.default_generator
    ]  # by hand: `torch.manual_seed` and `fork_rng` take a hundred times as long
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    before = [generator.get_state() for generator in generators]
    of_python = random.getstate()
    of_numpy = np.random.get_state()

    def has_drawn() -> bool:
        fresh = [
            torch.Generator(generator.device).manual_seed(seed).get_state()
            for generator in generators
        ]
        same = all(
            torch.equal(each.get_state(), state)
            for each, state in zip(generators, fresh, strict=True)
        )
        of_seed = np.random.RandomState(seed).get_state()
        return not (
            same
            and random.getstate() == random.Random(seed).getstate()
            and all(
                np.array_equal(one, other)
                for one, other in zip(np.random.get_state(), of_seed, strict=True)
            )
        )

    try:
        for generator in generators:
            generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield has_drawn
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


# ---- logging and metrics -------------------------------------------------------------------------------------------


class Muting:
    """What keeps a micro-batch out of log and metrics: each batch counts once, as without a pipeline.

    Metrics of the module are replaced by copies meanwhile, so that what the user computes with them works.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._copies = [
            (parent, name, metric, _copy_of(metric)) for parent, name, metric in metrics_in(module)
        ]

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Mute `log`, `log_dict` and the metrics inside; refuse `all_gather`, which only one stage would call."""
        muted = temporary_attributes(
            self._module, log=_nothing, log_dict=_nothing, all_gather=_refuse_gather
        )
        with muted, ExitStack() as stack:
            for parent, name, metric, scratch in self._copies:
                parent._modules[name] = scratch
                stack.callback(parent._modules.__setitem__, name, metric)
                stack.callback(scratch.reset)
            yield


def metrics_in(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return torchmetrics and their collections in a module, with parent and name; not those inside another."""
    found: list[tuple[nn.Module, str, Any]] = []
    for name, child in module.named_children():
        if isinstance(child, Metric | MetricCollection):
            found.append((module, name, child))
        else:
            found += metrics_in(child)
    return found


def single_metrics(module: nn.Module) -> list[Metric]:
    """Return every torchmetric of a module, those of collections too."""
    return [child for child in module.modules() if isinstance(child, Metric)]


def _copy_of(metric: Any) -> Any:
    scratch = copy.deepcopy(metric)
    for each in single_metrics(scratch):
        each.dist_sync_on_step = each.sync_on_compute = False  # one rank alone updates it
    return scratch


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _refuse_gather(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "`all_gather` cannot be called in `training_step` in a pipeline: the loss is computed on the ranks of the last "
        "stage, and the others would not come. Gather in a hook such as `on_train_epoch_end`."
    )
