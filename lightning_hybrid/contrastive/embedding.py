"""Wrapper that checks the results of the user's embedding function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.batch_rows import BatchPart


class Embedding:
    """Wrapper of the user's function for embedding a chunk of a batch, with checks of its results.

    Args:
        function: Module, or method of a module.
        chunk: Number of rows in a chunk, for error messages.

    Raises:
        ValueError: `function` is neither a module nor a method of a module.
    """

    def __init__(self, function: Callable[[Any], Any], chunk: int) -> None:
        module = (
            function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        )
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"`embed` (={function!r}) must be a module or a method of a module, because gradients are computed "
                "for the parameters of that module. Make the function a method of your module."
            )
        self.module = module
        self.name = getattr(function, "__qualname__", type(module).__name__)
        self._function = function
        self._chunk = chunk

    def of(self, part: BatchPart) -> tuple[Tensor, ...]:
        """Compute the embeddings of a chunk of the batch.

        Raises:
            ValueError: The results are not tensors with one row for each row of the chunk.
        """
        try:
            result = self._function(part.batch)
        except Exception as error:
            error.add_note(
                f"`{self.name}` was called with {part.num_rows} rows, because `GlobalBatch` splits batches into "
                f"chunks of `chunk` (={self._chunk}) rows. If these are too few rows, set a `chunk` that divides the "
                "batch size."
            )
            raise
        embeddings = tuple(result) if isinstance(result, tuple | list) else (result,)
        if not embeddings or not all(isinstance(embedding, Tensor) for embedding in embeddings):
            raise ValueError(
                f"`embed` (={self.name}) returned a {type(result).__name__}, but must return a tensor or a tuple of "
                "tensors, because the results are the arguments of the loss. Return the tensors in a tuple."
            )
        for embedding in embeddings:
            if embedding.dim() == 0 or len(embedding) != part.num_rows:
                raise ValueError(
                    f"`embed` (={self.name}) must return one row for each row of its chunk of the batch, but returned "
                    f"a tensor of shape {tuple(embedding.shape)} for {part.num_rows} rows. `GlobalBatch` splits "
                    "tensors, arrays and lists with one entry per row. Return samples as one of these, and return "
                    "other values from another method."
                )
        return embeddings
