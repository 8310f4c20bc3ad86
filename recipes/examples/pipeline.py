"""Example of two-stage pipeline parallelism for a module that also runs unchanged on one device."""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridPipelineStrategy


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(6)]
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), *layers, torch.nn.Linear(256, 10))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    pl.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    # 1F1B schedule; the bubble is (2 - 1) / (4 + 2 - 1) of the time
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
        print("loss:", f"{trainer.callback_metrics['loss'].item():.3f}")
