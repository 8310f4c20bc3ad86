"""Example that trains SimCLR with LARS on handwritten digits, and evaluates it by nearest neighbors.

Each image is compared with the images of all processes, but a process only needs activation memory for `chunk` images.
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_hybrid  # registers the strategies
from lightning_hybrid.contrastive import GlobalBatch, InfoNCE
from lightning_hybrid.optim import LARS, param_groups


def view(images):
    """Augment images with a random shift of up to one pixel and Gaussian noise."""
    squares = images.view(-1, 8, 8)
    padded = F.pad(squares, (1, 1, 1, 1))
    row = torch.randint(3, ()).item()
    column = torch.randint(3, ()).item()
    shifted = padded[:, row : row + 8, column : column + 8]
    noise = torch.randn_like(shifted)
    return (shifted + 0.1 * noise).flatten(1)


class SimCLR(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU())
        self.projector = nn.Linear(256, 64)
        self.global_batch = GlobalBatch(InfoNCE(temperature=0.2, both_views=True), chunk=125)

    def embed(self, images):
        """Return the embeddings of two views of each image in a chunk of the batch."""
        views = torch.cat([view(images), view(images)])
        features = self.encoder(views)
        return self.projector(features).chunk(2)

    def training_step(self, batch, batch_idx):
        (images,) = batch
        loss = self.global_batch(self.embed, images)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        # Biases and BatchNorm parameters get no weight decay and no trust ratio, as in the paper.
        groups = param_groups(self, weight_decay=1e-6)
        return LARS(groups, lr=1.0, momentum=0.9)


def neighbor_accuracy(encoder, images, labels):
    """Return the accuracy of a nearest-neighbor classifier on the features of an encoder.

    The last 297 images are classified by their nearest neighbor among the first 1,500.
    """
    encoder.eval()
    with torch.no_grad():
        features = F.normalize(encoder(images))
    known = features[:1500]
    similarities = features[1500:] @ known.T
    nearest = similarities.argmax(dim=1)
    is_correct = labels[nearest] == labels[1500:]
    accuracy = is_correct.float().mean()
    return accuracy.item()


if __name__ == "__main__":
    pl.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.data).float() / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(images[:1500])
    loader = DataLoader(data, batch_size=250, shuffle=True, drop_last=True)
    trainer = pl.Trainer(
        strategy="hybrid_allreduce",
        precision="16-true",
        accelerator="cpu",
        devices=2,
        max_epochs=20,
        logger=False,
    )
    module = SimCLR()
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        accuracy = neighbor_accuracy(module.encoder, images, labels)
        print(f"nearest neighbor has the same label: {accuracy:.3f}")
