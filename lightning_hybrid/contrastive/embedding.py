"""Wrapper of the user's embedding function, which checks its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.batch_rows import BatchPart


class Embedding:
    """Wrapper of the user's function that embeds a chunk of a batch, with checks of its results.

    Args:
        function: Module, or method of a module.
        chunk: Number of rows of a chunk, for error messages.

    Raises:
        ValueError: `function` is neither a module nor a method of a module.
    """

    def __init__(self, function: Callable[[Any], Any], chunk: int) -> None:
        module = (
            function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        )
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"`embed` (={function!r}) must be a module or a method of a module, because the gradients go "
                "to its parameters. Move the function into your module."
            )
        self.module = module
        self.name = getattr(function, "__qualname__", type(module).__name__)
        self._function = function
        self._chunk = chunk

    def of(self, part: BatchPart) -> tuple[Tensor, ...]:
        """Return the embeddings of a chunk of the batch.

        Raises:
            ValueError: The results are not tensors with one row for each row of the chunk.
        """
        try:
            result = self._function(part.batch)
        except Exception as error:
            error.add_note(
                f"`{self.name}` was called by `GlobalBatch` with {part.num_rows} rows: it splits batches into parts of "
                f"`chunk` (={self._chunk}) rows. If there are too few here, choose a `chunk` that divides the batch."
            )
            raise
        embeddings = tuple(result) if isinstance(result, tuple | list) else (result,)
        if not embeddings or not all(isinstance(embedding, Tensor) for embedding in embeddings):
            raise ValueError(
                f"`embed` (={self.name}) must return a tensor or several tensors (returned a "
                f"{type(result).__name__}), because the loss is called with them. Return the tensors in a "
                "tuple."
            )
        for embedding in embeddings:
            if embedding.dim() == 0 or len(embedding) != part.num_rows:
                raise ValueError(
                    f"`embed` (={self.name}) must return a row for each row of its part of the batch (returned a "
                    f"tensor of shape {tuple(embedding.shape)} for {part.num_rows} rows). `GlobalBatch` splits "
                    "tensors, arrays and lists with an entry for each row. Put samples into these, and return "
                    "other values from another method."
                )
        return embeddings
