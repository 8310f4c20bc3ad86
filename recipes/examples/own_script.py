"""Example of a typical Lightning script on two CPU processes, with three lines that use this package.

On Ctrl-C or SIGTERM the script stops after the current step and saves a checkpoint. The same command then resumes.
"""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_hybrid.callbacks import StopOnSignal  # 1: this import also registers the strategies


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
        )
        self.accuracy = MulticlassAccuracy(10)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [
            {
                "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
                "interval": "step",
            }
        ]


if __name__ == "__main__":
    pl.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    train, val = random_split(data, [0.9, 0.1], torch.Generator().manual_seed(0))
    folder = "own_script"
    trainer = pl.Trainer(
        strategy="hybrid_allreduce",  # 2: was "ddp"
        precision="16-true",  # 3: fp16 with fp32 master weights; was "32-true"
        accelerator="cpu",
        devices=2,
        max_epochs=6,
        logger=CSVLogger(folder),
        callbacks=[
            ModelCheckpoint(
                f"{folder}/checkpoints", monitor="val/accuracy", mode="max", save_last=True
            ),
            LearningRateMonitor(),
            StopOnSignal(f"{folder}/checkpoints"),
        ],
    )
    stopped = f"{folder}/checkpoints/stopped.ckpt"
    trainer.fit(
        Classifier(),
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(val, batch_size=64),
        ckpt_path=stopped if os.path.exists(stopped) else None,
    )
    print("accuracy:", f"{trainer.callback_metrics['val/accuracy'].item():.3f}")
