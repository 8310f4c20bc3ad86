"""Quick start: train with two processes, kill one of them, and resume the run bit for bit.

Run `python quickstart.py`.
"""

import os
import shutil
import signal

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# this import also registers the strategies
from lightning_hybrid.callbacks import (
    RunReport,
    TrainingMetrics,
)
from lightning_hybrid.optim import LARS, param_groups

images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, labels)  # your own data


class Classifier(pl.LightningModule):  # your own module
    def __init__(self, kill_at_step):
        super().__init__()
        self.kill_at_step = kill_at_step
        self.net = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)
        )

    def training_step(self, batch, batch_idx):
        if self.global_step == self.kill_at_step and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return LARS(param_groups(self, weight_decay=1e-4), lr=5.0, momentum=0.9)

    def on_train_start(self):
        self.print(
            f"Training on {self.trainer.world_size} ranks, starting at step {self.global_step}"
        )


def train(folder, kill_at_step=None):
    pl.seed_everything(0)
    module = Classifier(kill_at_step)
    callbacks = [
        pl.callbacks.ModelCheckpoint(folder, save_last=True),
        TrainingMetrics(),
        RunReport(folder),
    ]
    two = {"accelerator": "gpu" if torch.cuda.device_count() > 1 else "cpu", "devices": 2}
    trainer_options = {
        "max_epochs": 6,
        "callbacks": callbacks,
        "logger": False,
        "enable_model_summary": False,
    }
    # "_fork" because this script calls `fit` three times. Otherwise use "hybrid_allreduce".
    trainer = pl.Trainer(
        strategy="hybrid_allreduce_fork",
        precision="16-true",
        log_every_n_steps=5,
        **two,
        **trainer_options,
    )
    trainer.fit(
        module,
        DataLoader(data, 64, shuffle=True),
        ckpt_path="last" if os.path.isdir(folder) else None,
    )
    return module.state_dict()


if __name__ == "__main__":
    runs = "quickstart"  # folder of the runs; a second train() in it resumes
    shutil.rmtree(runs, ignore_errors=True)
    print("1/3 Two processes train without interruption.")
    undisturbed = train(f"{runs}/undisturbed")
    print("2/3 The same run starts again, but process 1 is killed at step 50.")
    try:
        train(f"{runs}/killed_and_resumed", kill_at_step=50)
    except Exception as error:
        print(error)
    print("3/3 The same call resumes from the last checkpoint.")
    resumed = train(f"{runs}/killed_and_resumed")
    print(
        "identical weights:", all(torch.equal(resumed[name], undisturbed[name]) for name in resumed)
    )
    print(f"report: {runs}/killed_and_resumed/run.html")
