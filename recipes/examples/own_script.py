"""Example of a typical Lightning script for two CPU processes, in which three lines use this package.

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
        images, labels = batch
        logits = self.net(images)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        num_steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


if __name__ == "__main__":
    pl.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.data).float() / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(images, labels)
    train, val = random_split(data, [0.9, 0.1], torch.Generator().manual_seed(0))
    folder = "own_script"
    best = ModelCheckpoint(
        f"{folder}/checkpoints", monitor="val/accuracy", mode="max", save_last=True
    )
    trainer = pl.Trainer(
        strategy="hybrid_allreduce",  # 2: was "ddp"
        precision="16-true",  # 3: fp16 with fp32 master weights; was "32-true"
        accelerator="cpu",
        devices=2,
        max_epochs=6,
        logger=CSVLogger(folder),
        callbacks=[best, LearningRateMonitor(), StopOnSignal(f"{folder}/checkpoints")],
    )
    ckpt_path = f"{folder}/checkpoints/stopped.ckpt"
    if not os.path.exists(ckpt_path):
        ckpt_path = None
    train_loader = DataLoader(train, batch_size=32, shuffle=True)
    val_loader = DataLoader(val, batch_size=64)
    trainer.fit(Classifier(), train_loader, val_loader, ckpt_path=ckpt_path)
    accuracy = trainer.callback_metrics["val/accuracy"].item()
    print(f"accuracy: {accuracy:.3f}")
