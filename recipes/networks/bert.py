"""BERT for masked language modeling (Devlin et al. 2018, arXiv:1810.04805), built with `transformers`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybrid.models.activation_checkpointing import second_pass


class Bert(nn.Module):
    """BERT from `transformers` for masked language modeling, with random weights and without a download.

    Embedding and head share their weight. The head is computed only for masked positions.

    Args:
        num_classes: Size of the vocabulary from which masked tokens are predicted.
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, max_position_embeddings: As in
            `transformers.BertConfig`, whose defaults are BERT-base.
        dropout: Dropout probability of hidden states and attention.
        checkpoint_activations: Recompute each layer's activations in backward, as implemented in `transformers`.

    Raises:
        ValueError: The package `transformers` is missing.
    """

    def __init__(
        self,
        *,
        num_classes: int = 30522,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        intermediate_size: int = 3072,
        max_position_embeddings: int = 512,
        dropout: float = 0.1,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        try:
            from transformers import BertConfig, BertForMaskedLM
        except ImportError as error:
            raise ValueError(
                "`transformers` must be installed, because this network is built with it. Run pip "
                "install 'lightning-hybrid[text]'."
            ) from error
        config = BertConfig(
            vocab_size=num_classes,
            hidden_size=hidden_size,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            intermediate_size=intermediate_size,
            max_position_embeddings=max_position_embeddings,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        self.network: Any = BertForMaskedLM(config)
        bert = self.network.bert
        beside = [_Beside(layer) for layer in (bert.embeddings, *bert.encoder.layer)]
        # kept in a list, so that parameter names are those of `transformers`
        self._blocks = [
            *beside,
            _Head(self.network.cls),
        ]
        self.checkpoint_activations = checkpoint_activations

    @property
    def checkpoint_activations(self) -> bool:
        """True if activation checkpointing is enabled."""
        return bool(self.network.is_activation_checkpointing)

    @checkpoint_activations.setter
    def checkpoint_activations(self, is_on: bool) -> None:
        if is_on:
            self.network.activation_checkpointing_enable(
                {"use_reentrant": False, "context_fn": _contexts}
            )
        elif self.checkpoint_activations:
            self.network.activation_checkpointing_disable()

    def forward(self, text: tuple[Tensor, Tensor]) -> Tensor:
        """Return the logits of the masked tokens, `"masked num_classes"`.

        `text` is the pair `(tokens, positions)` of a batch of `TextLoader`.
        """
        x: Any = text
        for block in self._blocks:
            x = block(*x)
        logits: Tensor = x
        return logits

    def pipeline_blocks(self) -> list[nn.Module]:
        """Return the embeddings, each layer and the head as blocks for pipeline parallelism."""
        return self._blocks

    def example(
        self, num_sequences: int, *shape: int, device: torch.device | str
    ) -> tuple[Tensor, Tensor]:
        """Return a batch of zeros as an example input for the planner.

        The shape `(length,)` gives the sequence length. For the shape of an image, the length is the network's maximum.
        """
        if len(shape) == 1:
            length = shape[0]
        else:
            length = self.network.config.max_position_embeddings
        num_masked = max(1, round(0.15 * (length - 2)))
        tokens = torch.zeros(num_sequences, length, dtype=torch.int64, device=device)
        return tokens, torch.zeros(num_sequences, num_masked, dtype=torch.int64, device=device)


class _Beside(nn.Module):
    """Wrapper of a layer that also passes the positions of the masked tokens on to the next layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(states), positions


class _Head(nn.Module):
    """Wrapper of the prediction head that computes the logits of masked tokens only."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, states: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.head(states.take_along_dim(positions[..., None], 1).flatten(0, 1))
        return logits


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    # Recomputes with the modes of forward, such as emulated fp16.
    return nullcontext(), second_pass(nn.Identity())
