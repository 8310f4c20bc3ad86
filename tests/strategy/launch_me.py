"""A user's script, started by `test_launch.py` in every way there is: `python launch_me.py STRATEGY FOLDER`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lightning.pytorch as pl
import torch

from tests import toy


class Saves(pl.Callback):
    """Writes what each rank ends with; under spawn and fork nothing else comes back from ranks above 0."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_end(self, trainer, module):
        strategy = trainer.strategy
        result = {
            "weights": strategy.lightning_module_state_dict(),
            "losses": module.losses,
            "world_size": trainer.world_size,
            "strategy": type(strategy).__name__,
            "precision": type(trainer.precision_plugin).__name__,
            "half": module.net[5].weight.dtype,
        }
        torch.save(result, f"{self.folder}/rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    strategy, folder = sys.argv[1:]
    torch.set_num_threads(1)
    module = toy.Toy()
    trainer = toy.trainer(devices=2, strategy=strategy, precision="16-true", callbacks=[Saves(folder)])
    trainer.fit(module, toy.loader())
    torch.save(module.state_dict(), f"{folder}/after_fit_{trainer.global_rank}.pt")
