"""The user's function that embeds a part of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.batch_rows import BatchPart


class Embedding:
    """The user's function that embeds a part of a batch, with checks of its embeddings.

    Args:
        function: a module, or a method of one.
        chunk: rows of a part, for errors.

    Raises:
        ValueError: it is neither.
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
        """Return the embeddings of a part of the batch.

        Raises:
            ValueError: they are no tensors with a row for each row of the part.
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
