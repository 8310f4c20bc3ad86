"""Example that trains a new head on a backbone with frozen weights and BatchNorm statistics.

Freeze parameters before `fit`. Unfreezing parameters later raises an error, because they would not be averaged.
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import lightning_hybrid  # registers the strategies


class FineTuned(pl.LightningModule):
    def __init__(self, backbone, num_classes):
        super().__init__()
        # Lightning keeps the mode, so the statistics stay fixed.
        self.backbone = backbone.requires_grad_(False).eval()
        self.head = torch.nn.Linear(128, num_classes)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        features = self.backbone(images)
        logits = self.head(features)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=1e-2)


if __name__ == "__main__":
    pl.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.data).float() / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    # Replace this with your backbone: load_state_dict(torch.load(..., weights_only=True)).
    backbone = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.ReLU()
    )
    backbone(images)  # updates the statistics once
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    module = FineTuned(backbone, num_classes=10)
    trainer = pl.Trainer(
        strategy="hybrid_allreduce",
        precision="16-true",
        accelerator="cpu",
        devices=2,
        max_epochs=4,
        logger=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=64, shuffle=True))
    after = module.backbone.state_dict()
    is_unchanged = all(torch.equal(before[name], after[name]) for name in before)
    print("backbone unchanged:", is_unchanged)
