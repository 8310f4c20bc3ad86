"""Example of two-stage pipeline parallelism for a module that also runs unchanged on one device."""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridPipelineStrategy


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(64, 256)]
        for _ in range(6):
            layers.append(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()))
        layers.append(torch.nn.Linear(256, 10))
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.net(images)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    pl.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.data).float() / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(images, labels)
    # With the 1F1B schedule, each rank waits for (2 - 1) / (4 + 2 - 1) of the time.
    strategy = HybridPipelineStrategy(num_stages=2, num_microbatches=4)
    trainer = pl.Trainer(
        strategy=strategy,
        precision="16-true",
        accelerator="cpu",
        devices=2,
        max_epochs=4,
        logger=False,
    )
    module = Classifier()
    trainer.fit(module, DataLoader(data, batch_size=64, shuffle=True, drop_last=True))
    if trainer.is_global_zero:
        loss = trainer.callback_metrics["loss"].item()
        print(f"loss: {loss:.3f}")
