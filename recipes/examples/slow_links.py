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
        images, labels = batch
        logits = self.net(images)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_end(self):
        communication = self.trainer.strategy.comm_trace.total()
        num_bytes = communication.bytes_across / self.global_step
        self.print(f"bytes over the link of a node, per step: {num_bytes:,.0f}")


if __name__ == "__main__":
    digits = load_digits()
    images = torch.tensor(digits.data).float() / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(images, labels)
    for between_nodes in (Mean(), Mean(dtype="int8", error_feedback=True)):
        pl.seed_everything(0)
        # "fork", because the script calls `fit` twice
        strategy = HybridAllReduceStrategy(between_nodes, ranks_per_node=1, start_method="fork")
        trainer = pl.Trainer(
            strategy=strategy,
            precision="16-true",
            accelerator="cpu",
            devices=2,
            max_epochs=3,
            logger=False,
        )
        trainer.fit(Classifier(), DataLoader(data, batch_size=64, shuffle=True))
