"""Text data: tokenized once, with masks that depend only on seed, epoch and sequence."""

import json
import os
import sys

import numpy as np
import pytest
import torch

from lightning_hybrid.data.order import EpochOrder
from recipes.datasets.text import Sequences, TextDataModule, TextLoader, mask_tokens
from recipes.datasets.text_packing import (
    CLS,
    MASK,
    SEP,
    SPECIAL_TOKENS,
    TextPacking,
    files_of,
    shard_path,
)
from tests.scenes import same

tokenizers = pytest.importorskip("tokenizers")

WORDS = "the quick brown fox jumps over a lazy dog and Runs away".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Create a folder of text with many files, one of them long, and one file that is not text."""
    folder = tmp_path_factory.mktemp("text")
    generator = np.random.default_rng(0)
    for number in range(30):
        words = generator.choice(WORDS, 5000 if number == 7 else 300)
        lines = [" ".join(words[at : at + 10]) for at in range(0, len(words), 10)]
        (folder / f"{number:02d}.txt").write_text("\n".join(lines))
    (folder / "picture.png").write_bytes(bytes(range(128, 256)))
    return folder


def packing(root, out, **options):
    settings = {"vocab_size": 300, "shard_tokens": 1000, **options}
    return TextPacking(root=str(root), out=str(out), **settings)


@pytest.fixture(scope="module")
def packed(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed")
    packing(text, out).run()
    return out


def test_shards_hold_the_text_and_other_packings_are_refused(text, packed):
    [line] = packing(text, packed).run()
    assert "1 files left out" in line
    tokenizer = tokenizers.Tokenizer.from_file(str(packed / "tokenizer.json"))
    index = json.loads((packed / "text.json").read_text())
    shards = []
    for shard in range(len(index["crc32s"]["train"])):
        shards.append(np.fromfile(shard_path(packed, "train", shard), np.uint16))
    assert [len(shard) for shard in shards[:-1]] == [1000] * (len(shards) - 1)
    tokens = np.concatenate(shards)
    words = tokenizer.decode(tokens[tokens != SEP].tolist()).split()
    # Whole words in lower case, all of them known.
    assert set(words) == {word.lower() for word in WORDS}
    with pytest.raises(
        ValueError, match=r"`out` .* must be empty or contain text packed with the same options"
    ):
        packing(text, packed, vocab_size=400).run()


def test_a_tokenizer_is_the_same_in_each_process(text, packed, tmp_path):
    """The trainer of the tokenizer uses hash tables, whose order differs between processes and even within one."""
    expected = (packed / "tokenizer.json").read_text()
    for number in range(3):
        out = tmp_path / str(number)
        packing(text, out).run()
        assert (out / "tokenizer.json").read_text() == expected


def test_a_damaged_shard_is_found(text, tmp_path):
    shards = packing(text, tmp_path)
    shards.run()
    shards.check()
    path = shard_path(tmp_path, "val", 0)
    path.write_bytes(path.read_bytes()[:-2] + b"\0\1")
    with pytest.raises(ValueError, match=r"val-00000\.bin is missing or has changed"):
        shards.check()


def test_sequences_of_any_length_are_the_text_in_its_order(packed):
    """Two sequence lengths use the same shards, whose ends fall within sequences."""
    whole = [np.concatenate(list(Sequences(packed, "train", length))) for length in (9, 130)]
    shortest = min(map(len, whole))
    assert shortest > 2000
    assert np.array_equal(whole[0][:shortest], whole[1][:shortest])


def test_15_percent_are_masked_of_which_80_are_masks_and_10_other_tokens():
    tokens = np.arange(5, 205)
    seen = [mask_tokens(tokens, np.random.default_rng([seed]), 100_000) for seed in range(400)]
    assert {len(set(masked)) for masked, _ in seen} == {30}
    masked = np.concatenate([positions for positions, _ in seen])
    shown = np.concatenate([tokens_shown for _, tokens_shown in seen])
    number = len(masked)  # 12,000; the standard deviations are 44 and 33
    assert abs((shown == MASK).sum() - 0.8 * number) < 200
    assert abs((shown == tokens[masked]).sum() - 0.1 * number) < 150
    assert shown[shown != MASK].min() >= len(SPECIAL_TOKENS)
    assert np.bincount(masked, minlength=200).min() > 20  # any position may be masked


def batches(packed, *, world_size=1, accumulate=1, epoch=0, first=0):
    """Return tokens and targets of each global batch over all ranks, in sorted order."""
    rows_by_step = {}
    for rank in range(world_size):
        order = EpochOrder(
            num_images=64,
            global_batch_size=16,
            seed=3,
            world_size=world_size,
            rank=rank,
            accumulate_grad_batches=accumulate,
        )
        loader = TextLoader(Sequences(packed, "train", 20), order)
        loader.epoch = epoch
        loader.batches_done = first
        for batch_index, ((tokens, positions), targets) in enumerate(loader, first):
            whole = tokens.scatter(1, positions, targets)
            assert positions.shape == targets.shape == (len(tokens), 3)
            assert (tokens[:, 0] == CLS).all()
            assert (tokens[:, -1] == SEP).all()
            rows = torch.cat([tokens, whole], 1).tolist()
            rows_by_step.setdefault(batch_index // accumulate, []).extend(map(tuple, rows))
    return {step: sorted(rows) for step, rows in rows_by_step.items()}


def test_what_is_masked_does_not_depend_on_ranks_accumulation_or_a_resume(packed):
    whole = batches(packed)
    assert len(whole) == 4
    assert batches(packed, world_size=2, accumulate=2) == whole
    assert batches(packed, world_size=4) == whole
    assert batches(packed, first=2) == {step: whole[step] for step in (2, 3)}
    rows = {row for rows in whole.values() for row in rows}
    rows_of_next_epoch = {row for rows in batches(packed, epoch=1).values() for row in rows}
    assert {row[20:] for row in rows} == {row[20:] for row in rows_of_next_epoch}  # the same text
    assert not rows & rows_of_next_epoch


def test_validation_hides_the_same_tokens_each_time_and_reads_each_sequence_once(packed):
    data = TextDataModule(
        root=str(packed), sequence_length=20, vocab_size=300, global_batch_size=4, seed=0
    )
    data.setup("fit")
    loader = data.val_dataloader()
    assert same(list(loader), list(loader))
    assert sum(len(tokens) for (tokens, _), _ in loader) == len(data.splits["val"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"seed": -1}, r"`seed` \(=-1\) .* random number generators accept no other seeds"),
        ({"sequence_length": 2}, r"`sequence_length` \(=2\) .* at least one token"),
        ({"max_sequences": 0}, r"`max_sequences` \(=0\) .* at least one sequence"),
        ({"max_sequences": -5}, r"`max_sequences` \(=-5\) .* at least one sequence"),
    ],
    ids=str,
)
def test_an_option_that_is_out_of_range_is_refused_with_its_own_reason(option, message, tmp_path):
    valid = {"sequence_length": 16, "vocab_size": 300, "global_batch_size": 8, "seed": 0}
    with pytest.raises(ValueError, match=message):
        TextDataModule(root=None, packing=packing(tmp_path, tmp_path / "out"), **valid | option)


def test_a_vocabulary_that_the_network_does_not_know_is_refused(packed):
    with pytest.raises(
        ValueError, match=r"`model.num_classes` \(=60\) must be at least the vocabulary size of"
    ):
        TextDataModule(
            root=str(packed), sequence_length=20, vocab_size=60, global_batch_size=4, seed=0
        )
    with pytest.raises(ValueError, match=r"does not contain completely packed text"):
        TextDataModule(
            root=os.path.dirname(sys.executable),
            sequence_length=20,
            vocab_size=60,
            global_batch_size=4,
            seed=0,
        )


def test_the_text_of_python_is_found():
    files = [path.name for path in files_of(None)]
    assert files[0] == "topics.py"
    assert "argparse.py" in files
