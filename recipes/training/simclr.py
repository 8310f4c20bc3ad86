"""LightningModule for SimCLR, which evaluates the features with nearest-neighbor and linear probes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.checks import require_number, require_whole
from lightning_hybrid.contrastive import GlobalBatch, InfoNCE
from recipes.training.classifier import Batch, Classifier

KNN_TEMPERATURE = 0.07  # from Wu et al. 2018 (arXiv:1805.01978)


@dataclass(frozen=True, eq=False)
class LabeledFeatures:
    """Features of training images with their labels, from which the probes predict labels.

    Attributes:
        h: Features, `"images features"`.
        labels: Labels, `"images"`.
    """

    h: Tensor
    labels: Tensor


class SimCLR(Classifier):
    """LightningModule for SimCLR with negatives from all ranks (Chen et al. 2020, arXiv:2002.05709).

        h = the network without its last layer;   z = projector(h)
        loss = InfoNCE of both views of all images of a step

    Labels are used only by the probes, which use the features h of training images in the order of epoch 0. Validation
    logs the accuracy of the nearest-neighbor probe. The test logs the accuracy of a linear layer (`test/acc`) and of
    the nearest neighbors (`test/acc_knn`).

    Args:
        temperature: Temperature of the loss.
        features: Number of features of z.
        chunk: Number of images whose two views pass through the network at a time. It determines the BatchNorm
            statistics and the memory.
        least_area: Minimum area of a view, as a fraction of the image's area.
        jitter: Maximum relative change of gain and level of each channel. 0 disables it. There is no blur, which is our
            choice.
        flip: Flip half of the views horizontally.
        num_neighbors: Number of neighbors of the probe.
        max_probe_images: Maximum number of training images per rank for the probes.
        options: Arguments of `Classifier`.

    Attributes:
        bank: Training images for the probes. It is replaced when validation or the test begins.
        probe: Linear probe. It is trained when the test begins.

    Raises:
        ValueError: An argument is out of range.
    """

    bank: LabeledFeatures
    probe: nn.Module

    def __init__(
        self,
        *,
        temperature: float = 0.2,
        features: int = 128,
        chunk: int = 256,
        least_area: float = 0.08,
        jitter: float = 0.4,
        flip: bool = True,
        num_neighbors: int = 20,
        max_probe_images: int = 10_000,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_number(
            "least_area",
            least_area,
            "a view needs a part of the image. Set module.least_area=0.08",
            above=True,
        )
        require_number(
            "jitter",
            jitter,
            "it limits the relative change of gain and level. Set module.jitter=0.4",
        )
        counts = {"num_neighbors": num_neighbors, "max_probe_images": max_probe_images}
        for name, value in counts.items():
            require_whole(
                name, value, f"the probe needs at least one. Set module.{name}=20, for example"
            )

        width = _remove_last_linear(self.model)
        self.projector = nn.Sequential(
            nn.Linear(width, width, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, features),
        )
        loss = InfoNCE(temperature, both_views=True)
        self.global_batch = GlobalBatch(loss, chunk=chunk)
        self.view = partial(random_view, least_area=least_area, jitter=jitter, flip=flip)
        self.num_neighbors = num_neighbors
        self.max_probe_images = max_probe_images
        self.num_classes: int = options["num_classes"]
        self.test_acc_knn = MulticlassAccuracy(self.num_classes, average="micro")

    def embed(self, views: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Return the projected features z of both views of some images, computed as one batch."""
        h = self(torch.cat(views))
        z = self.projector(h)
        return z.chunk(2)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the contrastive loss over the images of all ranks."""
        images, _ = batch
        first_view = self.view(images)
        second_view = self.view(images)
        loss: Tensor = self.global_batch(self.embed, (first_view, second_view))
        return loss

    def on_validation_epoch_start(self) -> None:
        """Compute the features of training images, for the nearest-neighbor probe."""
        self.bank = self._features_of_training_images()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the accuracy of the nearest-neighbor probe."""
        images, labels = batch
        h = self(images)
        scores = self._neighbor_scores(h)
        self.val_acc(scores, labels)
        self.log(m.VAL_ACC, self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_test_epoch_start(self) -> None:
        """Compute the features of training images, and fit a linear layer to them."""
        self.bank = self._features_of_training_images()
        self.probe = linear_probe(self.bank.h, self.bank.labels, self.num_classes)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the accuracies of the linear probe and of the nearest-neighbor probe."""
        images, labels = batch
        h = self(images)
        logits = self.probe(h)
        self.test_acc(logits, labels)
        scores = self._neighbor_scores(h)
        self.test_acc_knn(scores, labels)
        self.log(m.TEST_ACC, self.test_acc, on_step=False, on_epoch=True)
        self.log("test/acc_knn", self.test_acc_knn, on_step=False, on_epoch=True)

    def _neighbor_scores(self, h: Tensor) -> Tensor:
        bank = self.bank
        return knn(h, bank.h, bank.labels, self.num_neighbors, self.num_classes)

    @torch.no_grad()
    def _features_of_training_images(self) -> LabeledFeatures:
        """Gather features and labels of training images from all ranks, with the same number from each rank.

        Collective: every rank must call it.
        """
        trainer: Any = self.trainer
        loader = trainer.datamodule.train_dataloader()
        num_images_per_rank = loader.order.num_images // trainer.world_size
        num_needed = min(self.max_probe_images, num_images_per_rank)
        num_computed = 0
        h_of_batches = []
        labels_of_batches = []
        for batch in loader.every_image():
            images, labels = trainer.strategy.batch_to_device(batch)
            with trainer.precision_plugin.forward_context():
                # Both are cloned because the loader may reuse its memory.
                h_of_batches.append(self(images).clone())
                labels_of_batches.append(labels.clone())
            num_computed += len(labels)
            if num_computed >= num_needed:
                break

        h = torch.cat(h_of_batches)[:num_needed]
        labels = torch.cat(labels_of_batches)[:num_needed]
        return LabeledFeatures(of_all_ranks(h), of_all_ranks(labels))


def _remove_last_linear(network: nn.Module) -> int:
    """Replace the last linear layer of a network by the identity, and return its number of input features."""
    linear_layers = []
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear):
            linear_layers.append((name, layer))
    last_name, last_layer = linear_layers[-1]
    network.set_submodule(last_name, nn.Identity())
    return last_layer.in_features


def of_all_ranks(rows: Tensor) -> Tensor:
    """Gather the tensors of all ranks, and concatenate them along the first dimension.

    The tensors of all ranks must have the same shape.

    Collective: every rank must call it.
    """
    if not dist.is_initialized():
        return rows
    rows_by_rank = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(rows_by_rank, rows)
    return torch.cat(rows_by_rank)


def random_view(images: Tensor, *, least_area: float, jitter: float, flip: bool) -> Tensor:
    """Return a random augmented view of each image, as in contrastive learning.

    A random square crop is enlarged to the size of the image, and gain and level of each channel are changed at random:

        area      = 1 - (1 - least_area) * draw         of the crop, as a fraction of the image's area
        side      = sqrt(area)                          of the crop, as a fraction of the image's side
        center    = (1 - side) * draw                   of the crop, in x and y, so that the crop is inside the image
        view      = crop * (1 + gain) + level           with gain = jitter * draw and level = jitter * draw

    The draws for the area are uniform in [0, 1), the others are uniform in [-1, 1). With `flip`, another draw
    mirrors x if it is negative.

    >>> images = torch.rand(2, 3, 8, 8)
    >>> torch.allclose(random_view(images, least_area=1.0, jitter=0.0, flip=False), images, atol=1e-6)
    True
    """
    num_images = len(images)
    device = images.device

    def uniform(*shape: int) -> Tensor:
        draws = torch.rand(num_images, *shape, device=device)
        return 2 * draws - 1  # from -1 to 1

    area = 1 - (1 - least_area) * (1 + uniform()) / 2
    side = area.sqrt()
    x_scale = side
    if flip:
        x_scale = torch.where(uniform() < 0, -side, side)
    max_shift = (1 - side)[:, None]
    affine = torch.zeros(num_images, 2, 3, device=device)
    affine[:, 0, 0] = x_scale
    affine[:, 1, 1] = side
    affine[:, :, 2] = max_shift * uniform(2)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    crops = F.grid_sample(images.float(), grid, align_corners=False)

    num_channels = images.shape[1]
    gain = jitter * uniform(num_channels, 1, 1)
    level = jitter * uniform(num_channels, 1, 1)
    views = crops * (1 + gain) + level
    return views.to(images.dtype)


def knn(h: Tensor, bank: Tensor, labels: Tensor, num_neighbors: int, num_classes: int) -> Tensor:
    """Return class scores of a weighted nearest-neighbor classifier (Wu et al. 2018).

    The score of a class is the sum of exp(cosine / 0.07) over the nearest neighbors with this label.

    Args:
        h: Features of the images to classify.
        bank: Features of the images among which neighbors are searched.
        labels: Labels of `bank`.
        num_neighbors: Number of neighbors of an image.
        num_classes: Number of classes.
    """
    cosines = F.normalize(h) @ F.normalize(bank).T
    num_nearest = min(num_neighbors, len(bank))
    nearest_cosines, nearest = cosines.topk(num_nearest)
    scaled_cosines = nearest_cosines.float() / KNN_TEMPERATURE
    votes = scaled_cosines.exp()
    scores = torch.zeros(len(h), num_classes, device=h.device)
    return scores.scatter_add_(1, labels[nearest], votes)


def linear_probe(
    bank: Tensor, labels: Tensor, num_classes: int, *, decay: float = 1e-4
) -> nn.Module:
    """Train a logistic regression on standardized features, and return it as a module.

    All ranks compute the same result.
    """
    with torch.inference_mode(False), torch.enable_grad():
        bank = bank.clone()
        labels = labels.clone()
        scale = nn.BatchNorm1d(bank.shape[1], affine=False, momentum=None).to(bank.device)
        x = scale(bank)
        layer = nn.Linear(bank.shape[1], num_classes, device=bank.device)
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
        optimizer = torch.optim.LBFGS(
            layer.parameters(), max_iter=200, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            cross_entropy = F.cross_entropy(layer(x), labels)
            penalty = decay * layer.weight.square().sum()
            loss = cross_entropy + penalty
            loss.backward()
            return loss

        optimizer.step(closure)
    return nn.Sequential(scale, layer).eval()
