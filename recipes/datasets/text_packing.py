"""Packing of text into shards of tokens, with a tokenizer that is trained on this text.

`recipes/pack.py packing=text` uses this module.
"""

from __future__ import annotations

import itertools
import json
import sysconfig
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_hybrid.atomic_file import atomic_path
from lightning_hybrid.checks import require_whole

INDEX_NAME = "text.json"
TOKENIZER_NAME = "tokenizer.json"
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(len(SPECIAL_TOKENS))
# our choice: a longer file is split at line ends, so that one file can be a whole dataset
PIECE_CHARS = 1 << 14
NUM_LETTERS = 1000  # number of the most frequent characters that become tokens, as is usual
NUM_TOGETHER = 64  # number of pieces that are tokenized at a time
SPLITS = ("train", "val", "test")


@dataclass(frozen=True, kw_only=True)
class PackedText:
    """Index of packed text with sizes and checksums, stored as `text.json`.

    Args:
        about: Options with which the text was packed.
        vocab_size: Number of tokens of the trained vocabulary.
        num_tokens: Number of tokens of each split.
        crc32s: CRC-32 of the shards of each split, in order.
        num_left_out: Number of files that are not UTF-8 text.
    """

    about: dict[str, Any]
    vocab_size: int
    num_tokens: dict[str, int]
    crc32s: dict[str, list[int]]
    num_left_out: int

    @classmethod
    def load(cls, folder: Path) -> PackedText:
        """Read the index of a folder of packed text.

        Raises:
            ValueError: There is no index, because nothing was packed there or packing was not finished.
        """
        path = folder / INDEX_NAME
        if not path.is_file():
            raise ValueError(
                f"`data.root` (={folder}) does not contain completely packed text, because it has no "
                f"{INDEX_NAME}. Pack text first: python recipes/pack.py packing=text root=<folder of "
                "text> out=<this folder>."
            )
        return cls(**json.loads(path.read_text()))

    def __str__(self) -> str:
        if self.num_left_out:
            left_out = f", {self.num_left_out:,} files left out because they are not UTF-8"
        else:
            left_out = ""
        sizes = ", ".join(f"{name} {number:,}" for name, number in self.num_tokens.items())
        return f"tokens: {sizes}; vocabulary {self.vocab_size:,}{left_out}"


@dataclass(frozen=True, kw_only=True)
class TextPacking:
    """Job that packs text into shards of tokens according to the given options.

    Every 20th piece of text is used for validation, and the piece after it for the test. Packing cannot be resumed, so
    a run that was killed starts again.

    Args:
        root: Folder of text, of which all UTF-8 files are read. None: Python's own documentation, license and sources,
            which are the same for one version of Python.
        out: Folder for shards, tokenizer and index.
        vocab_size: Maximum size of the WordPiece vocabulary that is trained (Devlin et al. 2018, arXiv:1810.04805).
            BERT's vocabulary has 30,522 tokens of lower-case text, which is also used here.
        shard_tokens: Tokens per shard.
        max_chars: Approximate number of characters to pack. None: all.
        max_training_chars: Approximate number of characters for training the tokenizer.

    Raises:
        ValueError: An option is out of range.
    """

    root: str | None
    out: str
    vocab_size: int = 30522
    shard_tokens: int = 1 << 27
    max_chars: int | None = None
    max_training_chars: int = 1 << 30

    def __post_init__(self) -> None:
        require_whole(
            "vocab_size",
            self.vocab_size,
            "fewer tokens cannot cover the alphabet of ordinary text. Set packing.vocab_size=30522",
            least=300,
        )
        if self.vocab_size > 65535:
            raise ValueError(
                f"`vocab_size` (={self.vocab_size}) must be at most 65535, because a token is stored "
                "in two bytes. Set packing.vocab_size=30522."
            )
        for name in ("shard_tokens", "max_chars", "max_training_chars"):
            if (value := getattr(self, name)) is not None:
                require_whole(
                    name, value, f"nothing would be packed otherwise. Set packing.{name}=1000000"
                )
        if self.root is not None and Path(self.root).resolve() == Path(self.out).resolve():
            raise ValueError(
                f"`out` (={self.out}) must not be the same folder as `root`, because shards would "
                "be read as text otherwise. Set out=<folder>."
            )

    def run(self) -> list[str]:
        """Pack the text, unless `out` already contains the result, and return a summary as lines of text.

        Raises:
            ValueError: `out` contains another packing, or there is too little text.
        """
        out = Path(self.out)
        start_s = time.perf_counter()
        about = {name: value for name, value in asdict(self).items() if name != "out"}
        if (out / INDEX_NAME).is_file():
            if (existing := PackedText.load(out)).about != about:
                raise ValueError(
                    f"`out` (={out}) must be empty or contain text packed with the same options, but it was "
                    f"packed with {existing.about}. Choose another folder with out=<folder>."
                )
            return [f"{existing}; already packed"]
        out.mkdir(parents=True, exist_ok=True)
        left_out: list[str] = []
        tokenizer = trained(self._pieces([], self.max_training_chars), self.vocab_size)
        shards = {name: _Shards(out, name, self.shard_tokens) for name in SPLITS}
        pieces = self._pieces(left_out, self.max_chars)
        for piece_index, tokens in enumerate(tokens_of(pieces, tokenizer)):
            shards[{0: "val", 1: "test"}.get(piece_index % 20, "train")].add(tokens)
        for shard in shards.values():
            shard.close()
        with atomic_path(out / TOKENIZER_NAME, has_rivals=True) as part:
            part.write_text(tokenizer.to_str())
        packed = PackedText(
            about=about,
            vocab_size=tokenizer.get_vocab_size(),
            num_tokens={name: shard.num_tokens for name, shard in shards.items()},
            crc32s={name: shard.crc32s for name, shard in shards.items()},
            num_left_out=len(left_out),
        )
        if not all(packed.num_tokens.values()):
            raise ValueError(
                f"`root` (={self.root}) must contain enough text for {', '.join(SPLITS)}, but it "
                f"has only {packed.num_tokens} tokens. Use a folder with more text."
            )
        with atomic_path(out / INDEX_NAME, has_rivals=True) as part:
            part.write_text(json.dumps(asdict(packed), indent=1))
        return [f"{packed}; {time.perf_counter() - start_s:.1f} s"]

    def check(self) -> None:
        """Read all packed shards, and raise if a checksum is wrong.

        Raises:
            ValueError: A shard is missing or damaged.
        """
        packed = PackedText.load(Path(self.out))
        for name, crc32s in packed.crc32s.items():
            for shard, crc32 in enumerate(crc32s):
                path = shard_path(Path(self.out), name, shard)
                if not path.is_file() or zlib.crc32(path.read_bytes()) != crc32:
                    raise ValueError(
                        f"`out` (={self.out}) is damaged: {path.name} is missing or has changed. Pack the "
                        "text again."
                    )

    def _pieces(self, left_out: list[str], max_chars: int | None) -> Iterator[str]:
        num_chars = 0
        for path in files_of(self.root):
            try:
                for piece in pieces_of(path):
                    yield piece
                    num_chars += len(piece)
                    if max_chars is not None and num_chars >= max_chars:
                        return
            except UnicodeDecodeError:
                left_out.append(str(path))


class _Shards:
    """Writer that collects the tokens of one split and writes them in shards of equal size."""

    def __init__(self, folder: Path, name: str, shard_tokens: int) -> None:
        self.folder = folder
        self.name = name
        self.shard_tokens = shard_tokens
        self.num_tokens = 0
        self.crc32s = list[int]()
        self._held: list[NDArray[np.uint16]] = []
        self._num_held = 0

    def add(self, tokens: NDArray[np.uint16]) -> None:
        self._held.append(tokens)
        self._num_held += len(tokens)
        while self._num_held >= self.shard_tokens:
            self._write(self.shard_tokens)

    def close(self) -> None:
        if self._num_held:
            self._write(self._num_held)

    def _write(self, number: int) -> None:
        held = np.concatenate(self._held)
        data = held[:number].tobytes()
        with atomic_path(
            shard_path(self.folder, self.name, len(self.crc32s)), has_rivals=True
        ) as part:
            part.write_bytes(data)
        self._held = [held[number:]]
        self._num_held = len(held) - number
        self.num_tokens += number
        self.crc32s.append(zlib.crc32(data))


def shard_path(folder: Path, split: str, shard: int) -> Path:
    """Return the path of a shard of tokens.

    Tokens are stored as uint16, because the vocabulary has fewer than 65,536 tokens.
    """
    return folder / f"{split}-{shard:05d}.bin"


def files_of(root: str | None) -> list[Path]:
    """Return the sorted files of a folder, or the text files of the Python installation if `root` is None.

    Raises:
        ValueError: The folder does not exist, or it is empty.
    """
    if root is None:
        library = Path(sysconfig.get_path("stdlib"))
        first = [library / "pydoc_data/topics.py", library / "LICENSE.txt"]
        return [path for path in [*first, *sorted(library.glob("*.py"))] if path.is_file()]
    files = sorted(path for path in Path(root).rglob("*") if path.is_file())
    if not files:
        raise ValueError(
            f"`root` (={root}) does not exist or contains no files. Set root=<folder>."
        )
    return files


def pieces_of(path: Path) -> Iterator[str]:
    """Read a text file, and yield it in pieces of about `PIECE_CHARS` characters, split at line ends."""
    with path.open(encoding="utf-8") as file:
        while lines := file.readlines(PIECE_CHARS):
            yield "".join(lines)


def trained(pieces: Iterable[str], vocab_size: int) -> Any:
    """Train a WordPiece tokenizer deterministically on the given text.

    Raises:
        ValueError: The package `tokenizers` is missing.
    """
    try:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    except ImportError as error:
        raise ValueError(
            "`tokenizers` must be installed, because it trains and applies the vocabulary. Run pip "
            "install 'lightning-hybrid[text]'."
        ) from error

    def make(vocabulary: dict[str, int]) -> Any:
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return tokenizer

    # The trainer breaks ties by token ids, which it assigns in hash-table order. Listing the one-character parts first
    # makes the order deterministic.
    held = list(pieces)
    tokenizer = make({})
    counts = sum((Counter(tokenizer.normalizer.normalize_str(text)) for text in held), Counter())
    letters = [
        letter
        for letter in sorted(counts, key=lambda one: (-counts[one], one))
        if not letter.isspace()
    ]
    letters = letters[: min(NUM_LETTERS, vocab_size // 4)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *(f"##{letter}" for letter in letters)],
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    tokenizer.train_from_iterator(held, trainer)
    words = sorted(tokenizer.get_vocab().keys() - set(SPECIAL_TOKENS))
    return make({word: number for number, word in enumerate([*SPECIAL_TOKENS, *words])})


def tokens_of(pieces: Iterable[str], tokenizer: Any) -> Iterator[NDArray[np.uint16]]:
    """Tokenize pieces of text, and yield the token ids of each piece with a final [SEP]."""
    source = iter(pieces)
    while some := list(itertools.islice(source, NUM_TOGETHER)):
        for encoding in tokenizer.encode_batch(some, add_special_tokens=False):
            yield np.array([*encoding.ids, SEP], dtype=np.uint16)
