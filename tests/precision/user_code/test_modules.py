"""Networks of users: shared parameters, parts called outside of steps, scripts, pruning, single-dtype operations."""

import threading
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import DataLoader, IterableDataset

from tests.precision.user_code.support import (
    Frozen,
    Manual,
    UserCode,
    Validated,
    code_of_users,
    in_half_precision,
    is_on_last_rank,
    this_rank,
)
from tests.toy import NUM_CLASSES, NUM_FEATURES

# ---- parameters that several modules share ---------------------------------------------------------------------------


class TiedHead(UserCode):
    """Module whose head shares the weight of an embedding. One of the two has to stay fp32."""

    def __init__(self, kept_type, head_comes_first):
        self.head_comes_first = head_comes_first
        super().__init__()
        self.keep_fp32 = (kept_type,)

    def build(self):
        torch.manual_seed(0)
        if self.head_comes_first:
            self.head = nn.Linear(8, NUM_CLASSES, bias=False)
            self.embedding = nn.Embedding(NUM_CLASSES, 8)
        else:
            self.embedding = nn.Embedding(NUM_CLASSES, 8)
            self.head = nn.Linear(8, NUM_CLASSES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.5)
        self.head.weight = self.embedding.weight
        self.body = nn.Linear(NUM_FEATURES, 8)

    def loss(self, batch):
        images, targets = batch
        self.outcome.facts["dtype of the shared weight"] = self.embedding.weight.dtype
        hidden = torch.tanh(self.body(images) + self.embedding((targets + 1) % NUM_CLASSES))
        return F.cross_entropy(self.head(hidden), targets)


class SharedNormalization(UserCode):
    """Module in which a user's submodule shares the weight of a normalization layer."""

    class Penalty(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.scale = weight

        def forward(self):
            return (self.scale - 0.5).square().sum()

    def build(self):
        super().build()
        self.norm = nn.LayerNorm(NUM_FEATURES)
        self.penalty = self.Penalty(self.norm.weight)

    def loss(self, batch):
        images, targets = batch
        self.outcome.facts["dtype of the shared weight"] = self.norm.weight.dtype
        return F.cross_entropy(self.net(self.norm(images)), targets) + 0.1 * self.penalty()


class SharedParametrization(UserCode):
    """Module in which a user's submodule shares a parameter from which a weight is computed."""

    def build(self):
        super().build()
        self.net[0] = parametrizations.weight_norm(self.net[0])
        magnitude = self.net[0].parametrizations.weight.original0
        self.penalty = SharedNormalization.Penalty(magnitude)

    def loss(self, batch):
        self.outcome.facts["dtype of the shared weight"] = self.penalty.scale.dtype
        return super().loss(batch) + 0.1 * self.penalty()


class TiedLate(UserCode):
    """Module that adds a layer with the weight of another one when training starts."""

    def on_train_start(self):
        self.late = nn.Linear(NUM_FEATURES, 16, bias=False)
        self.late.weight = self.net[0].weight

    def loss(self, batch):
        return super().loss(batch) + 0.1 * self.late(batch[0]).square().mean()

    def on_train_end(self):
        del self.late


@in_half_precision()
@code_of_users(
    partial(TiedHead, nn.Embedding, True),
    partial(TiedHead, nn.Embedding, False),
    partial(TiedHead, nn.Linear, True),
    partial(TiedHead, nn.Linear, False),
    SharedNormalization,
    SharedParametrization,
    TiedLate,
)
def test_a_shared_parameter_is_in_fp32_where_one_of_its_places_is(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


# ---- parts of the network that are called outside of a step ----------------------------------------------------------


class AutoEncoder(nn.Module):
    """Network as from a library, with additional methods."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Tanh())
        self.decoder = nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, NUM_FEATURES)
        )

    def forward(self, images):
        return self.decode(self.encoder(images))

    def decode(self, codes):
        return self.decoder(codes)

    def act(self, observation):
        return self.encoder(observation).argmax(dim=-1)


class CallsParts(UserCode):
    """Module that calls its network, nested parts and their methods in all hooks outside of a step."""

    is_exact = True

    def build(self):
        torch.manual_seed(0)
        self.model = AutoEncoder()
        self.codes = torch.linspace(-1, 1, 16).reshape(2, 8)
        self.images = torch.linspace(-1, 1, 2 * NUM_FEATURES).reshape(2, NUM_FEATURES)

    def forward(self, images):
        return self.model(images)

    def loss(self, batch):
        return (self(batch[0]) - batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def call_parts(self, moment):
        with torch.no_grad():
            outputs = {
                "the module": self(self.images),
                "a child": self.model(self.images),
                "a method of a child": self.model.decode(self.codes),
                "a grandchild": self.model.decoder(self.codes),
                "a layer": self.model.decoder[0](self.codes),
                "a normalization layer": self.model.decoder[1](self.codes.repeat(1, 2)),
                "a policy": self.model.act(self.images),
                "a product with a weight": self.codes @ self.model.decoder[0].weight.t(),
            }
        for name, output in outputs.items():
            self.outcome.facts[f"{name}, {moment}"] = output

    def on_train_start(self):
        self.call_parts("when training starts")

    def on_train_batch_start(self, *args):
        self.call_parts("before a batch")

    def on_after_backward(self):
        self.call_parts("after backward")

    def on_train_batch_end(self, *args):
        self.call_parts("after a batch")

    def on_train_epoch_end(self):
        self.call_parts("after an epoch")


class SamplesImages(pl.Callback):
    def on_train_epoch_end(self, trainer, module):
        module.model.decoder.eval()
        module.outcome.facts["samples of a callback"] = module.model.decode(module.codes).detach()
        module.model.decoder.train()


class CallsPartsInACallback(CallsParts):
    def configure_callbacks(self):
        return [SamplesImages()]

    def call_parts(self, moment):
        pass


class Episodes(IterableDataset):
    """Samples that the policy chooses. It runs in the loader, between steps."""

    def __init__(self, module):
        self.module = module

    def __iter__(self):
        for number in range(6):
            generator = torch.Generator().manual_seed(10 * number + this_rank())
            observation = torch.randn(8, NUM_FEATURES, generator=generator)
            with torch.no_grad():
                value = self.module.model.encoder(observation).sum()
            self.module.outcome.facts[f"value of observation {number}"] = value
            yield observation, self.module.model.act(observation)


class PlaysInTheLoader(CallsParts):
    """Reinforcement learning as users of Lightning write it, with the policy in the loader."""

    epochs = 1

    def call_parts(self, moment):
        pass

    def train_dataloader(self):
        return DataLoader(Episodes(self), batch_size=None)


@in_half_precision()
@code_of_users(CallsParts, CallsPartsInACallback, PlaysInTheLoader)
def test_parts_called_outside_of_a_step_compute_in_fp32(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


class CallsInAThread(CallsParts):
    """Module with a user's thread that calls a part while a training step runs."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def call_parts(self, moment):
        pass

    def play(self):
        try:
            with torch.no_grad():
                self.played = self.model.get_submodule(self.part)(
                    self.codes if self.part else self.images
                )
        except RuntimeError as error:
            self.refusal = str(error)

    def training_step(self, batch, batch_idx):
        self.played = None
        self.refusal = ""
        thread = threading.Thread(target=self.play, name="player")
        thread.start()
        thread.join()
        self.outcome.facts["played"] = self.played
        self.outcome.facts["refusal"] = self.refusal
        return super().training_step(batch, batch_idx)


@in_half_precision(world_sizes=(1,))
@code_of_users(partial(CallsInAThread, ""), partial(CallsInAThread, "decoder"))
def test_a_thread_that_calls_a_part_in_a_step_computes_in_fp32_or_is_refused(
    comparison, user_code, world_size, precision
):
    """The error of the module and its children names the thread. Deeper layers raise torch's error about dtypes."""
    (reference,) = comparison.reference(user_code, world_size)
    (outcome,) = comparison.run(user_code, "hybrid_allreduce", world_size, precision)
    assert not outcome.error
    if outcome.facts["played"] is None:
        assert outcome.facts["refusal"]
        if not user_code.args[0]:
            assert "player" in outcome.facts["refusal"]
            assert "copy.deepcopy" in outcome.facts["refusal"]
    else:
        assert torch.equal(outcome.facts["played"], reference.facts["played"])


# ---- TorchScript and other exports -----------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, NUM_FEATURES)

    def forward(self, images):
        return torch.tanh(self.layer(images))


class TrainsAScript(UserCode):
    """Module with a scripted part that is created in the constructor."""

    def build(self):
        super().build()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.encoder = torch.jit.script(Encoder())

    def forward(self, images):
        return self.net(self.encoder(images))


class ExportsScripts(Frozen):
    """Module that scripts, traces and exports the network in hooks, and runs the results."""

    ignored_warnings = (".*torch.jit", "`LightningModule.to_torchscript` has been deprecated")

    def example(self):
        return torch.linspace(-1, 1, 2 * NUM_FEATURES).reshape(2, NUM_FEATURES)

    def on_train_epoch_end(self):
        exports = {
            "script of the network": torch.jit.script(self.net),
            "script of the module": self.to_torchscript(method="script"),
            "trace of the network": torch.jit.trace(self.net, self.example()),
            "export of the network": torch.export.export(self.net, (self.example(),)).module(),
        }
        for name, exported in exports.items():
            self.outcome.facts[name] = exported(self.example()).detach()


@in_half_precision(precisions=("16-true",))
@code_of_users(TrainsAScript)
def test_a_scripted_part_trains(comparison, user_code, world_size, precision):
    """Only one precision is tested, because a process keeps the autocast dtype of a script's first run."""
    comparison.assert_as_under_ddp(user_code, world_size, precision)


@in_half_precision()
@code_of_users(ExportsScripts)
def test_scripts_and_exports_are_made_in_hooks(comparison, user_code, world_size, precision):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


# ---- pruning ---------------------------------------------------------------------------------------------------------


class CutsWeights(Validated):
    """Module with Lightning's pruning after each epoch."""

    epochs = 3

    def __init__(self, lr):
        super().__init__()
        self.lr = lr

    def configure_callbacks(self):
        parts = [(self.net[0], "weight"), (self.net[2], "weight")]
        return [
            ModelPruning(
                "l1_unstructured",
                parameters_to_prune=parts,
                amount=0.3,
                make_pruning_permanent=False,
            )
        ]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def on_train_end(self):
        cut = {name: buffer == 0 for name, buffer in self.named_buffers() if name.endswith("_mask")}
        self.cut = cut
        self.outcome.facts["numbers of elements that were cut"] = [
            int(mask.sum()) for mask in cut.values()
        ]
        if self.lr == 0.0:
            self.outcome.facts["elements that were cut"] = cut
        for layer in (self.net[0], self.net[2]):
            prune.remove(layer, "weight")


class PrunesFromTheStart(UserCode):
    """Module that prunes a layer in the constructor, and logs the computed weight after each epoch."""

    def build(self):
        super().build()
        prune.l1_unstructured(self.net[0], "weight", 0.5)

    def on_train_epoch_end(self):
        weight = self.net[0].weight.detach()
        self.outcome.facts[f"sparsity after epoch {self.current_epoch}"] = float(
            (weight == 0).float().mean()
        )
        self.outcome.facts["dtype of the computed weight"] = weight.dtype
        self.outcome.readings["computed weights"].append(weight.clone())


class PrunesInTheFit(PrunesFromTheStart):
    """Module that prunes a layer when training starts, after DDP was built with its weight."""

    def build(self):
        UserCode.build(self)

    def on_train_start(self):
        prune.l1_unstructured(self.net[0], "weight", 0.5)

    def on_train_end(self):
        prune.remove(self.net[0], "weight")


class NormalizesWeights(UserCode):
    """Module with weights of the old `weight_norm` and `spectral_norm`, which are read between steps."""

    ignored_warnings = (".*weight_norm",)

    def build(self):
        super().build()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            nn.utils.weight_norm(self.net[0])
            nn.utils.spectral_norm(self.net[2])

    def on_train_batch_end(self, *args):
        self.outcome.facts["dtypes of computed weights"] = [
            self.net[0].weight.dtype,
            self.net[2].weight.dtype,
        ]
        self.outcome.readings["computed weights"].append(self.net[0].weight.detach().clone())


@in_half_precision()
@code_of_users(partial(CutsWeights, 0.0), PrunesFromTheStart, PrunesInTheFit, NormalizesWeights)
def test_computed_weights_are_those_of_ddp(comparison, user_code, world_size, precision):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


@in_half_precision()
def test_pruning_cuts_the_elements_that_it_cuts_under_ddp(comparison, world_size, precision):
    """Rounding may exchange a few of the elements near the threshold."""
    user_code = partial(CutsWeights, 0.1)
    reference = comparison.reference(user_code, world_size)
    outcomes = comparison.run(user_code, "hybrid_allreduce", world_size, precision)
    for expected, outcome in zip(reference, outcomes, strict=True):
        assert not outcome.error
        assert outcome.facts == expected.facts
        num_different = 0
        num_elements = 0
        for name in ("net.0.weight", "net.2.weight"):
            is_different = (outcome.weights[name] == 0) != (expected.weights[name] == 0)
            num_different += int(is_different.sum())
            num_elements += expected.weights[name].numel()
        assert num_different <= 0.02 * num_elements


# ---- torch functions on the module within a step ---------------------------------------------------------------------


class CallsFunctionally(UserCode):
    """Module that calls the network with a dictionary of its parameters, and with one from a state dict."""

    def forward(self, images):
        parameters = dict(self.net.named_parameters())
        return torch.func.functional_call(self.net, parameters, (images,))


class PenalisesWeights(UserCode):
    """Module that penalizes all squared weights, with parameters listed in the step or before it."""

    def __init__(self, moment):
        super().__init__()
        self.moment = moment
        self.kept_list = list(self.net.parameters())
        self.term = torch.zeros(())

    def penalty(self, parameters):
        return 0.02 * sum(parameter.square().sum() for parameter in parameters)

    def on_train_batch_start(self, batch, batch_idx):
        if self.moment == "before the step":
            self.term = self.penalty(self.parameters())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.moment == "in the step":
            self.term = self.penalty(self.parameters())
        if self.moment == "from a list":
            self.term = self.penalty(self.kept_list)
        return loss + self.term


class PenalisesWeightsOnOneRank(PenalisesWeights):
    """Module that adds a penalty from before the step on one rank only."""

    def __init__(self):
        super().__init__("before the step")

    def on_train_batch_start(self, batch, batch_idx):
        if is_on_last_rank():
            super().on_train_batch_start(batch, batch_idx)


class PenalisesWeightsByHand(Manual):
    """Module with a penalty from before the step, in manual optimization with two backward passes."""

    def on_train_batch_start(self, batch, batch_idx):
        self.term = 0.02 * sum(parameter.square().sum() for parameter in self.parameters())

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(0.5 * self.noted_loss(batch))
        self.manual_backward(0.5 * self.loss(batch) + self.term)
        optimizer.step()


class ParameterOfThePenaltyAlone(PenalisesWeights):
    """Module with a trained parameter that occurs only in a term computed before the step."""

    def __init__(self, find_unused_parameters):
        super().__init__("before the step")
        self.ddp_options = {"find_unused_parameters": find_unused_parameters}

    def build(self):
        super().build()
        self.center = nn.Parameter(torch.ones(3))

    def penalty(self, parameters):
        return super().penalty(parameters) + 0.1 * (self.center - self.global_rank).square().sum()


class ParameterOfThePenaltyAloneByHand(PenalisesWeightsByHand):
    """The same parameter in manual optimization, where the second of two backward passes uses it."""

    ddp_options = {"find_unused_parameters": True}

    def build(self):
        super().build()
        self.center = nn.Parameter(torch.ones(3))

    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        self.term = self.term + 0.1 * (self.center - self.global_rank).square().sum()


class CallsTheNetBeforeTheStep(UserCode):
    """Module that keeps the graph of a forward pass before the step for a consistency term."""

    def on_train_batch_start(self, batch, batch_idx):
        self.earlier = self(batch[0])

    def training_step(self, batch, batch_idx):
        consistency = (self(batch[0] + 0.1) - self.earlier).square().mean()
        return super().training_step(batch, batch_idx) + consistency


class CountsCallsOfHooks(UserCode):
    """Module that counts calls of hooks on graph tensors, which must run once in each backward pass."""

    def __init__(self):
        super().__init__()
        self.num_calls = {"loss": 0, "hidden": 0, "module": 0}
        self.net[2].register_full_backward_hook(self.count_module)

    def count_module(self, module, grad_input, grad_output):
        self.num_calls["module"] += 1

    def count(self, name, gradient):
        self.num_calls[name] += 1

    def forward(self, images):
        hidden = self.net[:2](images)
        if hidden.requires_grad:
            hidden.register_hook(partial(self.count, "hidden"))
        return self.net[2](hidden)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(partial(self.count, "loss"))
        return loss

    def on_train_end(self):
        self.outcome.facts["calls"] = self.num_calls


@pytest.mark.sampled(4)
@in_half_precision(usual_world_size=2)
@code_of_users(
    CallsFunctionally,
    partial(PenalisesWeights, "in the step"),
    partial(PenalisesWeights, "from a list"),
    partial(PenalisesWeights, "before the step"),
    PenalisesWeightsOnOneRank,
    PenalisesWeightsByHand,
    partial(ParameterOfThePenaltyAlone, False),
    partial(ParameterOfThePenaltyAlone, True),
    ParameterOfThePenaltyAloneByHand,
    CallsTheNetBeforeTheStep,
    CountsCallsOfHooks,
)
def test_gradients_reach_parameters_from_wherever_they_were_used(
    comparison, user_code, world_size, precision
):
    comparison.assert_as_under_ddp(user_code, world_size, precision)


# ---- operations that require a single dtype --------------------------------------------------------------------------


def index_add(module, images):
    nodes = module.node.weight[torch.arange(8) % 4] * module.edge
    return torch.zeros(30, 8).index_add(0, torch.arange(8), nodes)


def scatter_add(module, images):
    nodes = module.node.weight[torch.arange(8) % 4] * module.edge
    index = torch.arange(8)[:, None].expand(8, 8)
    return torch.zeros(30, 8).scatter_add(0, index, nodes)


def scatter_reduce(module, images):
    nodes = module.node.weight[torch.arange(8) % 4] * module.edge
    index = torch.arange(8)[:, None].expand(8, 8)
    return torch.zeros(30, 8).scatter_reduce(0, index, nodes, reduce="mean")


def mask_by_a_token(module, images):
    index = torch.zeros(len(images), 1, dtype=torch.long)
    return torch.scatter(images, 1, index, module.token.expand(len(images), 1))


def complex_exponential(module, images):
    return torch.exp((-module.log_re.exp() + 1j * module.im) * 0.1).real


def complex_parts(module, images):
    return torch.complex(-module.log_re.exp(), module.im).abs()


def interpolate(module, images):
    return torch.lerp(images[:, :4], module.im, 0.5)


class UsesOneDtype(UserCode):
    """Module with a trained parameter in an operation whose operands must have the same dtype."""

    ignored_warnings = ("ComplexHalf support is experimental",)

    def __init__(self, operation):
        self.operation = operation
        super().__init__()

    def build(self):
        super().build()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.node = nn.Embedding(4, 8)
            self.edge = nn.Parameter(torch.rand(8, 8))
            self.token = nn.Parameter(torch.rand(1))
            self.log_re = nn.Parameter(torch.rand(4))
            self.im = nn.Parameter(torch.rand(4))

    def loss(self, batch):
        used = self.operation(self, batch[0])
        all_parameters = sum(parameter.float().sum() for parameter in self.parameters())
        return super().loss(batch) + used.float().square().mean() + 0.0 * all_parameters


class UsesOneDtypeInFp32(UsesOneDtype):
    """Module that applies the remedy: the class that holds these parameters stays fp32."""

    def __init__(self, operation):
        super().__init__(operation)
        self.keep_fp32 = (UsesOneDtype, nn.Embedding)


OPERATIONS = [
    index_add,
    scatter_add,
    scatter_reduce,
    mask_by_a_token,
    complex_exponential,
    complex_parts,
    interpolate,
]


@in_half_precision(world_sizes=(1,))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_of_one_dtype_trains_or_ends_with_the_cure(
    comparison, operation, world_size, precision
):
    comparison.reference(partial(UsesOneDtype, operation), world_size)
    (outcome,) = comparison.run(
        partial(UsesOneDtype, operation), "hybrid_allreduce", world_size, precision
    )
    if outcome.error:
        assert "keep_fp32" in outcome.error
    else:
        comparison.assert_as_under_ddp(partial(UsesOneDtype, operation), world_size, precision)
    comparison.assert_as_under_ddp(partial(UsesOneDtypeInFp32, operation), world_size, precision)
