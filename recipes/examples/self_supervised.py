"""Example that trains SimCLR with LARS on handwritten digits, and evaluates it by nearest neighbours.

Each image is compared with the images of all processes, but a process only needs activation memory for `chunk` images.
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import lightning_hybrid  # registers the strategies
from lightning_hybrid.contrastive import GlobalBatch, InfoNCE
from lightning_hybrid.optim import LARS, param_groups


def view(images):
    """Augment images with a random shift of up to one pixel and Gaussian noise."""
    moved = torch.nn.functional.pad(images.view(-1, 8, 8), (1, 1, 1, 1))
    row, column = torch.randint(0, 3, (2,)).tolist()
    moved = moved[:, row : row + 8, column : column + 8].flatten(1)
    return moved + 0.1 * torch.randn_like(moved)


class SimCLR(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.ReLU()
        )
        self.projector = torch.nn.Linear(256, 64)
        self.global_batch = GlobalBatch(InfoNCE(temperature=0.2, both_views=True), chunk=125)

    def embed(self, images):  # of one chunk of the batch
        return self.projector(self.encoder(torch.cat([view(images), view(images)]))).chunk(2)

    def training_step(self, batch, batch_idx):
        loss = self.global_batch(self.embed, batch[0])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        # Biases and BatchNorm parameters get no weight decay and no trust ratio, as in the paper.
        return LARS(param_groups(self, weight_decay=1e-6), lr=1.0, momentum=0.9)


def neighbours(encoder, images, labels):
    """Return the accuracy of a nearest-neighbour classifier on the features of an encoder.

    The last 297 images are classified by their nearest neighbour among the first 1,500.
    """
    with torch.no_grad():
        z = torch.nn.functional.normalize(encoder.eval()(images))
    return (labels[(z[1500:] @ z[:1500].T).argmax(1)] == labels[1500:]).float().mean().item()


if __name__ == "__main__":
    pl.seed_everything(0)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    loader = DataLoader(TensorDataset(images[:1500]), batch_size=250, shuffle=True, drop_last=True)
    two = {"accelerator": "cpu", "devices": 2}
    trainer = pl.Trainer(
        strategy="hybrid_allreduce", precision="16-true", max_epochs=20, logger=False, **two
    )
    module = SimCLR()
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        print(
            "nearest neighbour has the same label:",
            f"{neighbours(module.encoder, images, labels):.3f}",
        )
