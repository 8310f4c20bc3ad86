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
        loss = torch.nn.functional.cross_entropy(
            self.head(self.backbone(batch[0])).float(), batch[1]
        )
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=1e-2)


if __name__ == "__main__":
    pl.seed_everything(0)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    # Replace this by your backbone: load_state_dict(torch.load(..., weights_only=True)).
    backbone = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.ReLU()
    )
    backbone(data.tensors[0])  # updates the statistics once
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    module = FineTuned(backbone, num_classes=10)
    two = {"accelerator": "cpu", "devices": 2}
    trainer = pl.Trainer(
        strategy="hybrid_allreduce", precision="16-true", max_epochs=4, logger=False, **two
    )
    trainer.fit(module, DataLoader(data, batch_size=64, shuffle=True))
    after = module.backbone.state_dict()
    print("backbone unchanged:", all(torch.equal(before[name], after[name]) for name in before))
