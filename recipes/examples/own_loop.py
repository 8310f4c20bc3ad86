"""Example of a custom Fabric training loop on two CPU processes with LARS and fp32 master weights."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import lightning_hybrid  # registers the strategies
from lightning_hybrid.optim import LARS, param_groups

if __name__ == "__main__":
    fabric = L.Fabric(
        strategy="hybrid_allreduce", precision="16-true", accelerator="cpu", devices=2
    )
    fabric.launch()
    fabric.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.data).float() / 16
    labels = torch.tensor(digits.target)
    data = TensorDataset(images, labels)
    loader = DataLoader(data, batch_size=64, shuffle=True)
    loader = fabric.setup_dataloaders(loader)

    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    groups = param_groups(net, weight_decay=1e-4)
    optimizer = LARS(groups, lr=2.0, momentum=0.9)
    model, optimizer = fabric.setup(net, optimizer)
    for epoch in range(5):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            logits = model(images)
            loss = torch.nn.functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()  # skipped on all ranks if a gradient contains inf or nan
        mean_loss = fabric.all_reduce(loss.detach()).item()
        fabric.print(f"epoch {epoch}: loss {mean_loss:.3f}")

    # The file includes the fp32 master weights and the loss scale.
    fabric.save("own_loop.ckpt", {"model": model, "optimizer": optimizer})
