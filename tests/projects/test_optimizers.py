"""lightly's LARS compared with ours, and timm's networks and optimizers in a user's own loop."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric

from lightning_hybrid.optim import LARS

pytest.importorskip("torchvision")
# Warning about depthwise kernels.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:Grad strides do not match"),
]


@pytest.mark.parametrize("nesterov", [False, True], ids="nesterov={}".format)
def test_lightlys_lars_and_ours_by_its_arguments_end_at_the_same_weights(nesterov):
    """LARS of bolts and of lightly-train are equal. A decay of zero excludes the second group."""
    theirs = pytest.importorskip("lightly.utils.lars").LARS
    generator = torch.Generator().manual_seed(0)
    ends = []
    common = {
        "lr": 0.3,
        "momentum": 0.9,
        "trust_coefficient": 0.02,
        "eps": 1e-8,
        "nesterov": nesterov,
    }
    gradients = []
    for _ in range(50):
        matrix = torch.randn((40, 30), generator=generator)
        bias = torch.randn((30,), generator=generator)
        gradients.append([matrix, bias])
    for kind in (theirs, LARS):
        weights = []
        for gradient in gradients[0]:
            start = torch.linspace(-1, 1, gradient.numel()).view_as(gradient)
            weights.append(torch.nn.Parameter(start))
        adapted = {"params": weights[:1], "weight_decay": 1e-3}
        excluded = {"params": weights[1:], "weight_decay": 0.0}
        options = {}
        if kind is LARS:
            excluded["trust_ratio"] = False
            options["momentum_form"] = "lr_outside"
        optimizer = kind([adapted, excluded], **common, **options)
        # The form of momentum only matters where the learning rate changes.
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        for step in gradients:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient.clone()
            optimizer.step()
            schedule.step()
        ends.append(weights)
    for first, second in zip(*ends, strict=True):
        assert (first - second).norm() <= 1e-6 * first.norm()


def losses_under_fabric(strategy, precision, network, optimizer, options):
    """Make six steps on noise images that differ on each rank, and return the losses and the final weights."""
    timm = pytest.importorskip("timm")
    optim = pytest.importorskip("timm.optim")
    fabric = Fabric(
        strategy=strategy, precision=precision, accelerator="cpu", devices=dist.get_world_size()
    )
    fabric.launch()
    torch.manual_seed(0)
    net = timm.create_model(network, num_classes=4, pretrained=False)
    raw_optimizer = optim.create_optimizer_v2(net, opt=optimizer, **options)
    net, wrapped_optimizer = fabric.setup(net, raw_optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(8, 3, 96, 96, generator=generator)
    labels = torch.arange(8) % 4
    losses = []
    for _ in range(6):
        loss = F.cross_entropy(net(images).float(), labels)
        fabric.backward(loss)
        wrapped_optimizer.step()
        wrapped_optimizer.zero_grad()
        losses.append(loss.item())
    weights = torch.cat([parameter.detach().float().flatten() for parameter in net.parameters()])
    fabric.strategy.teardown()
    return losses, weights


@pytest.mark.parametrize(
    ("network", "optimizer", "options"),
    [
        ("test_resnet", "lars", {"lr": 0.3, "momentum": 0.9, "weight_decay": 1e-4}),
        ("test_vit", "lamb", {"lr": 3e-3, "weight_decay": 0.01}),
        ("test_convnext", "adamw", {"lr": 1e-3, "weight_decay": 0.05}),
    ],
)
def test_timms_networks_and_optimizers_train_under_fabric(two_ranks, network, optimizer, options):
    """In fp32, bits equal those of `ddp`. In fp16, losses agree within 2^-5.

    The bound allows six steps, each with about five roundings of 2^-11.
    """
    runs = {}
    for strategy, precision in (
        ("ddp", "32-true"),
        ("hybrid_allreduce", "32-true"),
        ("hybrid_allreduce", "16-true"),
    ):
        args = (strategy, precision, network, optimizer, options)
        rank_0, rank_1 = two_ranks.run(losses_under_fabric, *args, timeout_s=300.0)
        assert torch.equal(rank_0[1], rank_1[1])
        runs[strategy, precision] = rank_0
    plain, ours, half = runs.values()
    assert plain[0] == ours[0]
    assert torch.equal(plain[1], ours[1])
    assert half[0] == pytest.approx(plain[0], abs=2**-5 * max(plain[0]))
    assert half[0][-1] < half[0][0]
