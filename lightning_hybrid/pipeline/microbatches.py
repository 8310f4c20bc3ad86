"""Splitting of batches into micro-batches, and calls of the user's `training_step` on them.

    first stage     training_step(micro-batch) up to the call of the network        -> the network's input
    last stage      training_step(micro-batch) with the stage's output at that call -> the loss, nothing logged
    every rank      training_step(batch) with all outputs, once, without gradients  -> logged values, the loss

All three draw the same random numbers for the same micro-batch outside of the network, for example
to mix images and labels.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_hybrid.batch_rows import count_rows, leaves, split_rows
from lightning_hybrid.precision.optimizer_protocol import temporary_attributes


class _InputFound(Exception):  # noqa: N818  not an error: ends `training_step` at the call of the network
    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors


def input_of_net(net: nn.Module, run: Callable[[], Any]) -> tuple[Tensor, ...]:
    """Return the tensors that `run` passes to `net`, without running `net`.

    Raises:
        ValueError: `run` calls the network with something other than tensors, or never.

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
    except _InputFound as call:
        return call.tensors
    raise ValueError(
        "`training_step` must call the network that `of` names, but did not call it. Set `of` to the name of the "
        "network that `training_step` calls."
    )


def only_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return the positional tensors passed to a network, and raise for other arguments.

    Raises:
        ValueError: An argument is not a tensor, there are keyword arguments, or there are no
            arguments.
    """
    tensors: Any = args
    if len(args) == 1 and isinstance(args[0], tuple | list):
        tensors = args[0]
    if not tensors or kwargs or not all(isinstance(tensor, Tensor) for tensor in tensors):
        arguments = [type(value).__name__ for value in tensors]
        arguments += kwargs
        raise ValueError(
            "The network that `of` names must be called with positional tensors only, because they are passed to its "
            f"first block, but was called with these arguments: {', '.join(arguments)}. Pass tensors by position, and "
            "store other values as attributes of the network."
        )
    return tuple(tensors)


def loss_in(output: Any) -> Tensor:
    """Extract the loss from the output of `training_step`.

    Raises:
        ValueError: The output contains no loss.

    >>> loss_in({"loss": torch.tensor(2.0)})
    tensor(2.)
    """
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"`training_step` returned {type(output).__name__}, but must return a loss for every micro-batch in a "
            "pipeline, because a single stage cannot skip a batch. Filter such batches in the loader."
        )
    return loss


# ---- micro-batches -----------------------------------------------------------------------------


def microbatches(batch: Any, num: int) -> list[Any]:
    """Split a batch into `num` micro-batches with equal numbers of rows.

    `lightning_hybrid.batch_rows` defines the rows of a batch.

    Raises:
        ValueError: The batch does not divide, or its rows are unknown.

    >>> [(part["x"].tolist(), part["names"]) for part in microbatches({"x": torch.arange(2), "names": ["a", "b"]}, 2)]
    [([0], ['a']), ([1], ['b'])]
    """
    size = count_rows(batch)
    if size % num:
        raise ValueError(
            f"`batch_size` (={size}) must be a multiple of `num_microbatches` (={num}) on each data-parallel rank, "
            "because micro-batches have equal sizes. Change one of the two values. If only the last batch is smaller, "
            "set `drop_last=True` in the loader."
        )
    if size == 0:
        return [batch] * num
    return [part.batch for part in split_rows(batch, size // num)]


def rows_if_known(batch: Any) -> int | None:
    """Return the number of rows of a batch, or None if the rows cannot be counted."""
    try:
        return count_rows(batch)
    except ValueError:
        return None


def digest_of(batch: Any, *, with_values: bool) -> int:
    """Return a 63-bit digest of a batch's number of rows, shapes and dtypes, and optionally of its labels.

    With `with_values`, only integer values count, which are labels. Images may differ because each
    rank augments its own. If a batch has no integers, all its tensors count. If it has no tensors,
    all its arrays, texts and numbers count.

    >>> threes_and_fours = (torch.rand(2), torch.tensor([3, 4]))
    >>> threes_and_fives = (torch.rand(2), torch.tensor([3, 5]))
    >>> digest_of(threes_and_fours, with_values=True) == digest_of(threes_and_fives, with_values=True)
    False
    """
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
    shapes: list[Any] = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    # A batch of texts or arrays may have no tensors, but its last batch may also have fewer rows.
    shapes += [leaf.shape for leaf in leaves(batch) if isinstance(leaf, np.ndarray)]
    text = repr((rows_if_known(batch), shapes))
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    if with_values:
        labels = [tensor for tensor in tensors if _may_be_labels(tensor)]
        for tensor in labels or tensors:
            digest.update(_bytes_of(tensor))
        if not tensors:
            digest.update(_text_of(batch).encode())
    return int.from_bytes(digest.digest(), "little") >> 1


def _may_be_labels(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.dtype is not torch.uint8


def _bytes_of(tensor: Tensor) -> bytes:
    row = tensor.detach().cpu().contiguous().view(-1)
    return row.view(torch.uint8).numpy().tobytes()


def _text_of(batch: Any) -> str:
    entries = []
    for leaf in leaves(batch):
        if isinstance(leaf, np.ndarray):
            leaf = leaf.tolist()
        entries.append(leaf)
    return repr(entries)


# ---- random numbers ----------------------------------------------------------------------------


@contextmanager
def random_state(
    numbers: int | tuple[int, ...], device: torch.device
) -> Iterator[Callable[[], bool]]:
    """Seed the random number generators of torch, Python and NumPy, and restore them on exit.

    Random numbers drawn within the context depend on `numbers` only.

    The context yields a function that returns whether any numbers were drawn inside.

    >>> with random_state((1, 2), torch.device("cpu")) as has_drawn:
    ...     has_drawn(), len([random.random()]), has_drawn()
    (False, 1, True)
    """
    # Hash the numbers, because the CPU generators of torch and numpy use only 32 bits of a seed. A
    # simple combination could lose the epoch or the data rank.
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little")
    # `torch.manual_seed` and `fork_rng` would take a hundred times as long.
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])

    torch_states = [generator.get_state() for generator in generators]
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        for generator in generators:
            generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield lambda: not _are_fresh(generators, seed)
    finally:
        for generator, state in zip(generators, torch_states, strict=True):
            generator.set_state(state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _are_fresh(generators: list[torch.Generator], seed: int) -> bool:
    """Return whether the torch, Python and NumPy generators are still unused after seeding."""
    for generator in generators:
        fresh_state = torch.Generator(generator.device).manual_seed(seed).get_state()
        if not torch.equal(generator.get_state(), fresh_state):
            return False
    if random.getstate() != random.Random(seed).getstate():
        return False
    fresh_numpy_state = np.random.RandomState(seed).get_state()
    for value, fresh_value in zip(np.random.get_state(), fresh_numpy_state, strict=True):
        if not np.array_equal(value, fresh_value):
            return False
    return True


# ---- logging and metrics -----------------------------------------------------------------------


class Muting:
    """Switch that suppresses logging and metric updates while `training_step` runs on a micro-batch.

    Each batch is then logged once, as without a pipeline. Copies replace the metrics of the module during these calls,
    so that code that uses metric values works.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # The parent of each metric, its name there, the metric and the copy.
        self._metrics: list[tuple[nn.Module, str, Any, Any]] = []
        for parent, name, metric in metrics_in(module):
            self._metrics.append((parent, name, metric, _scratch_copy(metric)))

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Temporarily suppress `log`, `log_dict` and metric updates.

        `all_gather` raises an error, because only one stage would call it.
        """
        with temporary_attributes(
            self._module, log=_log_nothing, log_dict=_log_nothing, all_gather=_refuse_gather
        ):
            try:
                for parent, name, _, scratch in self._metrics:
                    parent._modules[name] = scratch
                yield
            finally:
                for parent, name, metric, _ in self._metrics:
                    parent._modules[name] = metric
                for _, _, _, scratch in self._metrics:
                    scratch.reset()


def metrics_in(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Return the `Metric` and `MetricCollection` children of a module, each with its parent and name.

    Metrics inside of another metric are left out.
    """
    metrics: list[tuple[nn.Module, str, Any]] = []
    for name, child in module.named_children():
        if isinstance(child, Metric | MetricCollection):
            metrics.append((module, name, child))
        else:
            metrics += metrics_in(child)
    return metrics


def single_metrics(module: nn.Module) -> list[Metric]:
    """Return every torchmetrics `Metric` of a module, including those in metric collections."""
    return [child for child in module.modules() if isinstance(child, Metric)]


def _scratch_copy(metric: Any) -> Any:
    """Copy a metric for updates on one rank only, with synchronization between ranks disabled."""
    scratch = copy.deepcopy(metric)
    for single_metric in single_metrics(scratch):
        single_metric.dist_sync_on_step = False
        single_metric.sync_on_compute = False
    return scratch


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _refuse_gather(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "`all_gather` cannot be called in `training_step` in a pipeline, because only the ranks of the last stage "
        "compute the loss, so other ranks would not participate. Call it in a hook such as `on_train_epoch_end`."
    )
