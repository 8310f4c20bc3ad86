"""Callbacks that copy, save, average, prune, freeze and slice, and uses of the model outside of a step."""

import copy
import io

import torch
from lightning.pytorch import callbacks
from torch import nn, optim

from tests.battery.case import Row, row
from tests.toy import NUM_CLASSES, NUM_FEATURES

ONES = torch.ones(2, NUM_FEATURES)


def called(base=Row, *, attributes=None, **hooks):
    return row(
        base,
        configure_callbacks=lambda self: callbacks.LambdaCallback(**hooks),
        **(attributes or {}),
    )


def shipped(make, **special):
    return row(configure_callbacks=lambda self: make(), **special)


def digits(state):
    some = [t for t in state.values() if t.is_floating_point()]
    return {t.dtype for t in some}, any(not torch.equal(t.half().float(), t.float()) for t in some)


class _Saves(Row):
    def keep(self, saved):
        self.saved = saved
        self.facts["saved"] = digits(saved)

    def after_fit(self):
        state = self.state_dict()
        self.facts["saved is the module"] = all(
            torch.equal(self.saved[n], state[n]) for n in self.saved
        )


def through_a_file(trainer, module):
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    module.keep(torch.load(file))


def copy_module(trainer, module):
    module.copies = [copy.deepcopy(module.net)]
    module.keep({f"net.{n}": v for n, v in module.copies[0].state_dict().items()})
    module.facts["says"] = module.copies[0](ONES).dtype


def keep_first(trainer, module):
    module.first = copy.deepcopy(module.state_dict())


def reset_once(trainer, module):
    if trainer.current_epoch == 0:
        module.load_state_dict(module.first)


def freeze_late(trainer, module):
    if trainer.current_epoch == 1:
        module.net[0].requires_grad_(False)


def look_after_backward(trainer, module):
    """Read gradients, except under mixed precision, where they are scaled."""
    module.facts["there"] = all(
        p.grad is not None and p.grad.shape == p.shape for p in module.parameters()
    )


def write_as_vector(trainer, module):
    """Change all weights as one vector and write it back (SWAG, evolution). Each weight becomes a view of it."""
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, module.parameters())


def pruning(self):
    layers = [(self.net[0], "weight"), (self.net[2], "weight")]
    return callbacks.ModelPruning(
        "l1_unstructured", layers, amount=0.25, use_lottery_ticket_hypothesis=True
    )


ROWS = {
    # Weights that are read back from a file in a callback, a part in the module's own hook, a copy after each step.
    "SavesStateDict": called(_Saves, on_train_epoch_end=through_a_file),
    # `copy.deepcopy` in a callback, and a call of the copy: best weights, a model to serve, a momentum model.
    "CopiesModule": called(_Saves, on_train_epoch_end=copy_module),
    "LoadsInFit": called(
        on_fit_start=keep_first, on_train_epoch_end=reset_once, attributes={"falls_to": 0.8}
    ),
    "Ema": shipped(lambda: callbacks.EMAWeightAveraging(decay=0.8)),
    "Swa": shipped(
        lambda: callbacks.StochasticWeightAveraging(
            swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1
        ),
        epochs=4,
    ),
    "Averages": shipped(callbacks.WeightAveraging),
    # The weights return to their initial values after each pruning. On a CPU in fp32 they do so only once: from then
    # on, Lightning's copy of the initial values is the memory of the weights themselves.
    "PrunesLottery": row(configure_callbacks=pruning, epochs=4, falls_to=0.8),
    "FreezesLater": called(on_train_epoch_start=freeze_late, attributes={"find_unused": True}),
    "AccumulationChanges": shipped(
        lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 3: 4}), epochs=4
    ),
    "LooksAfterBackward": called(on_after_backward=look_after_backward),
    "WritesAsVector": called(on_train_epoch_end=write_as_vector),
}


class Freezes(Row):
    """Module with a backbone that is unfrozen later. It runs on one rank, as `ddp` would not average its gradients."""

    worlds = (1,)
    epochs = 4
    parts = {
        "backbone": lambda: nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.ReLU()),
        "net": lambda: nn.Linear(16, NUM_CLASSES),
    }

    def forward(self, x):
        return self.net(self.backbone(x))

    def configure_optimizers(self):
        return optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    def configure_callbacks(self):
        return callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=2)
