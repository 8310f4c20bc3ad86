"""Data module and loaders for masked language modeling, which read packed shards of tokens.

    [CLS] L - 2 tokens of the text [SEP]        sequence i has tokens i (L - 2), ..., (i + 1) (L - 2) - 1 of its split
    15 % of these L - 2 tokens are predicted: 80 % of them become [MASK], 10 % another token, 10 % stay
    (Devlin et al. 2018, arXiv:1810.04805)

The masked positions depend only on (seed, epoch, sequence). They change from epoch to epoch, need no state in a
checkpoint, and do not depend on the number of ranks. Every sequence has the same number of masked tokens, so that the
mean over ranks equals the mean over all masked tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_hybrid.checks import require_whole
from lightning_hybrid.data.batch_counters import share_of
from lightning_hybrid.data.order import EpochOrder, Indices, ResumableLoader, eval_shares
from recipes.datasets.seed_check import require_seed
from recipes.datasets.text_packing import (
    CLS,
    MASK,
    SEP,
    SPECIAL_TOKENS,
    PackedText,
    TextPacking,
    shard_path,
)

MASKED_SHARE = 0.15
MASK_SHARE = 0.8
RANDOM_SHARE = 0.1
VALIDATION_SEED = 0  # seed of the masks in validation: the same in every run and epoch

TextBatch = tuple[tuple[Tensor, Tensor], Tensor]


class Sequences:
    """Token sequences of one split, read from memory-mapped shards on demand.

    Args:
        folder: Folder that `TextPacking` wrote.
        split: `train`, `val` or `test`.
        sequence_length: Tokens per sequence, including [CLS] and [SEP].
    """

    def __init__(self, folder: Path, split: str, sequence_length: int) -> None:
        packed = PackedText.load(folder)
        paths = [shard_path(folder, split, shard) for shard in range(len(packed.crc32s[split]))]
        self._shards = [np.memmap(path, dtype=np.uint16, mode="r") for path in paths]
        self._ends = np.cumsum([len(shard) for shard in self._shards])
        self.vocab_size = packed.vocab_size
        self._num_own = sequence_length - 2
        self._length = num_sequences(packed, split, sequence_length)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.uint16]:
        """Return the tokens of one sequence, without [CLS] and [SEP]."""
        begin = index * self._num_own
        shard = int(np.searchsorted(self._ends, begin, side="right"))
        begin -= int(self._ends[shard]) - len(self._shards[shard])
        parts = [self._shards[shard][begin : begin + self._num_own]]
        while (missing := self._num_own - sum(map(len, parts))) > 0:
            shard += 1
            parts.append(self._shards[shard][:missing])
        return np.concatenate(parts)

    def batch(self, indices: Indices, seed: int, epoch: int) -> TextBatch:
        """Return the masked sequences with these indices as a batch `((tokens, positions), targets)`.

        `TextLoader` describes the batch.
        """
        length = self._num_own + 2
        tokens = np.full((len(indices), length), SEP, dtype=np.int64)
        tokens[:, 0] = CLS
        positions = []
        targets = []
        for row, index in enumerate(indices):
            row_tokens = self[int(index)].astype(np.int64)
            masked, shown = mask_tokens(
                row_tokens, np.random.default_rng([seed, epoch, 1, int(index)]), self.vocab_size
            )
            targets.append(row_tokens[masked])
            row_tokens[masked] = shown
            tokens[row, 1:-1] = row_tokens
            positions.append(1 + masked)
        all_positions, all_targets = (
            torch.from_numpy(np.stack(column)) for column in (positions, targets)
        )
        return (torch.from_numpy(tokens), all_positions), all_targets


def num_sequences(packed: PackedText, split: str, sequence_length: int) -> int:
    """Return the number of complete sequences of `sequence_length` tokens in a split."""
    return packed.num_tokens[split] // (sequence_length - 2)


def mask_tokens(
    tokens: NDArray[np.int64], generator: np.random.Generator, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose tokens to be predicted, and return their positions and the tokens that replace them.

    >>> masked, shown = mask_tokens(np.arange(5, 25), np.random.default_rng(2), vocab_size=100)
    >>> masked, shown
    (array([ 6,  7, 18]), array([4, 4, 4]))
    """
    number = max(1, round(MASKED_SHARE * len(tokens)))
    masked = np.sort(generator.permutation(len(tokens))[:number])
    chance = generator.random(number)
    random_tokens = generator.integers(len(SPECIAL_TOKENS), vocab_size, number)
    shown = np.where(
        chance < MASK_SHARE,
        MASK,
        np.where(chance < MASK_SHARE + RANDOM_SHARE, random_tokens, tokens[masked]),
    )
    return masked, shown


class TextLoader(ResumableLoader):
    """Training loader of one rank for masked sequences, which shuffles each epoch and can resume after any batch.

    Yields:
        `((tokens, positions), targets)`: tokens int64 `"batch length"`, some of them masked; positions int64 `"batch
            masked"`, the masked positions in each sequence; targets int64 `"batch masked"`, the original tokens.
    """

    reads_ahead = True  # and returns new memory for each batch, see `DevicePrefetcher`

    def __init__(
        self, sequences: Sequences, order: EpochOrder, *, trainer: pl.Trainer | None = None
    ) -> None:
        super().__init__(order, trainer=trainer)
        self.sequences = sequences

    def _batches(self, epoch: int, shares: Iterator[Indices]) -> Iterator[TextBatch]:
        for share in shares:
            yield self.sequences.batch(share, self.order.seed, epoch)


class TextEvalLoader:
    """Evaluation loader of one rank for masked sequences, with the same masks in every run.

    `shares` are the sequence indices of each batch of this rank.
    """

    reads_ahead = True

    def __init__(self, sequences: Sequences, shares: Iterable[Indices]) -> None:
        self.sequences = sequences
        self.shares = list(shares)

    def __len__(self) -> int:
        return len(self.shares)

    def __iter__(self) -> Iterator[TextBatch]:
        for share in self.shares:
            yield self.sequences.batch(share, VALIDATION_SEED, 0)


class TextDataModule(pl.LightningDataModule):
    """Data module for masked language modeling, for any number of ranks.

    Args:
        root: Folder that `recipes/pack.py packing=text` wrote. None: pack with `packing` when the run begins.
        packing: Packing of the text, used if `root` is None.
        sequence_length: Tokens per sequence, including [CLS] and [SEP]. Any length works with the same shards.
        vocab_size: Number of tokens that the network knows.
        max_sequences: Number of training sequences to use, from the start. None: all.
        global_batch_size: Sequences per optimizer step, over all ranks and accumulation steps.
        seed: Seed of the order and of the masks. It must be the same on every rank.
        eval_batch_size_per_rank: Sequences per batch and rank in validation and test. It does not influence results.

    Raises:
        ValueError: An argument is out of range, or the text has more tokens than `vocab_size`.
    """

    def __init__(
        self,
        *,
        root: str | None,
        packing: TextPacking | None = None,
        sequence_length: int,
        vocab_size: int,
        max_sequences: int | None = None,
        global_batch_size: int,
        seed: int,
        eval_batch_size_per_rank: int = 32,
    ) -> None:
        super().__init__()
        for name, value, least, why in (
            (
                "sequence_length",
                sequence_length,
                3,
                "a sequence has [CLS], [SEP] and at least one token. Set data.sequence_length=128",
            ),
            (
                "vocab_size",
                vocab_size,
                1,
                "every token needs an embedding. Set model.num_classes to the size of the vocabulary",
            ),
            (
                "global_batch_size",
                global_batch_size,
                1,
                "each step needs at least one sequence. Set global_batch_size=128",
            ),
            (
                "eval_batch_size_per_rank",
                eval_batch_size_per_rank,
                1,
                "each batch needs at least one sequence. Set data.eval_batch_size_per_rank=32",
            ),
        ):
            require_whole(name, value, why, least=least)
        if max_sequences is not None:
            require_whole(
                "max_sequences",
                max_sequences,
                "training needs at least one sequence. Set data.max_sequences=null to use all",
            )
        require_seed(seed)
        if root is None and packing is None:
            raise ValueError(
                "`data.root` (=null) must be a folder of packed text, because `data.packing` is "
                "not set. Set data.root=<folder>."
            )
        self.root = root
        self.packing = packing
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.max_sequences = max_sequences
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.eval_batch_size_per_rank = eval_batch_size_per_rank
        if root is not None:
            self._check(PackedText.load(Path(root)))

    @property
    def folder(self) -> Path:
        """Folder that contains the packed shards."""
        return Path(self.packing.out if self.root is None else self.root)  # type: ignore[union-attr]

    def _check(self, packed: PackedText) -> None:
        if packed.vocab_size > self.vocab_size:
            raise ValueError(
                f"`model.num_classes` (={self.vocab_size}) must be at least the vocabulary size of "
                f"the text in {self.folder} (={packed.vocab_size}), because every token needs an "
                f"embedding. Set model.num_classes={packed.vocab_size}."
            )

    def prepare_data(self) -> None:
        """Pack the text on one rank per node, if `root` is None."""
        if self.root is None:
            for line in self.packing.run():  # type: ignore[union-attr]
                print(line, flush=True)

    def setup(self, stage: str) -> None:
        """Open the shards of the training, validation and test text on every rank."""
        self._check(PackedText.load(self.folder))
        self.splits = {
            name: Sequences(self.folder, name, self.sequence_length)
            for name in ("train", "val", "test")
        }

    def train_dataloader(self) -> TextLoader:
        """Create this rank's training loader. Lightning sets the loader's epoch."""
        sequences = self.splits["train"]
        trainer = self.trainer
        order = EpochOrder(
            num_images=min(len(sequences), self.max_sequences or len(sequences)),
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            accumulate_grad_batches=trainer.accumulate_grad_batches if trainer else 1,
            **share_of(trainer),
        )
        return TextLoader(sequences, order, trainer=trainer)

    def _eval_loader(self, name: str) -> TextEvalLoader:
        size = self.eval_batch_size_per_rank
        sequences = self.splits[name]
        shares = eval_shares(
            num_images=len(sequences), batch_size_per_rank=size, **share_of(self.trainer)
        )
        return TextEvalLoader(sequences, shares)

    def val_dataloader(self) -> TextEvalLoader:
        """Create this rank's loader of the validation text."""
        return self._eval_loader("val")

    def test_dataloader(self) -> TextEvalLoader:
        """Create this rank's data loader for the test text."""
        return self._eval_loader("test")
