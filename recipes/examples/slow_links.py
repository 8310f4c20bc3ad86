"""Example of 8-bit gradient compression with error feedback for a slow link between nodes.

Each process represents a node in this example (`ranks_per_node=1`). On machines with several GPUs, omit this argument.
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridAllReduceStrategy, Mean


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
        )

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_end(self):
        sent = self.trainer.strategy.comm_trace.total()
        self.print(
            f"bytes over the link of a node, a step: {sent.bytes_across / self.global_step:,.0f}"
        )


if __name__ == "__main__":
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(labels))
    for between_nodes in (Mean(), Mean(dtype="int8", error_feedback=True)):
        pl.seed_everything(0)
        # "fork", because the script calls `fit` twice
        strategy = HybridAllReduceStrategy(between_nodes, ranks_per_node=1, start_method="fork")
        two = {"accelerator": "cpu", "devices": 2}
        trainer = pl.Trainer(
            strategy=strategy, precision="16-true", max_epochs=3, logger=False, **two
        )
        trainer.fit(Classifier(), DataLoader(data, batch_size=64, shuffle=True))
