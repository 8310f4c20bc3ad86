"""Note of an error about the checkpoint to resume from, which is the newest one that can be resumed."""

import time

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_hybrid import DurableCheckpointIO, HybridAllReduceStrategy
from lightning_hybrid.checkpoint import io
from tests import toy
from tests.scenes import at

pytestmark = pytest.mark.filterwarnings("ignore")
NOTHING = "no checkpoint was written"


class GetsWorse(toy.Toy):
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", float(self.trainer.current_epoch), batch_size=8)


def fail_at_step_9(trainer, module):
    if trainer.global_step == 9:
        raise OSError("gone")


def note_of(callback, **options):
    """Return the note of an error in the third epoch, of four steps each."""
    strategy = HybridAllReduceStrategy(checkpoint_io=DurableCheckpointIO(**options))
    callbacks = [at(on_after_backward=fail_at_step_9), callback]
    trainer = toy.trainer(
        strategy=strategy,
        callbacks=callbacks,
        max_epochs=3,
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    with pytest.raises(OSError, match="gone") as caught:
        trainer.fit(GetsWorse(), toy.loader(32), toy.loader(32))
    (note,) = [note for note in caught.value.__notes__ if note.startswith("The run stopped")]
    return note


def test_the_newest_of_the_best_checkpoints_is_named_and_not_the_best_one(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{step}", monitor="val/loss", save_top_k=2)
    assert "step=8.ckpt" in note_of(callback)


def test_a_checkpoint_that_was_written_on_the_error_is_named(tmp_path):
    assert "on_exception.ckpt" in note_of(OnExceptionCheckpoint(tmp_path))


def test_a_file_of_weights_is_not_named(tmp_path):
    assert NOTHING in note_of(ModelCheckpoint(tmp_path, save_weights_only=True))


def test_a_checkpoint_that_a_thread_is_writing_is_named(tmp_path, monkeypatch):
    write = io.write_checkpoint

    def write_slowly(*args, **kwargs):
        time.sleep(0.2)
        write(*args, **kwargs)

    monkeypatch.setattr(io, "write_checkpoint", write_slowly)
    callback = ModelCheckpoint(tmp_path, "{step}", save_on_exception=True)
    assert "step=9.ckpt" in note_of(callback, in_background=True)
