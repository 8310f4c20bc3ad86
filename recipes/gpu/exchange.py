"""Checks of the code that swaps fp32 parameters for half-precision copies and back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hybrid.precision.gradients import BackwardGradients
from lightning_hybrid.precision.half_window import HalfPrecisionWindow
from recipes.gpu.runner import CheckRequest, Details, NotHere

WIDTH = 64
NUM_STEPS = 4


class Trained:
    """Small network for a manual SGD loop with bf16 copies of its fp32 parameters.

    `HalfPrecisionWindow` swaps the parameters.

    Args:
        device: Device of the network.
    """

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.net = nn.Sequential(*layers).to(device)
        self.window = HalfPrecisionWindow(self.net, torch.bfloat16)
        self.gradients = BackwardGradients(self.window)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.forward: Any = self.net
        self.images = torch.randn(32, WIDTH, device=device)

    def step(self) -> None:
        """Run one training step with bf16 forward and backward passes and an fp32 update."""
        parameters = list(self.net.parameters())
        with self.window.opened():
            with torch.autocast(self.images.device.type, dtype=torch.bfloat16):
                loss = self.forward(self.images).float().square().mean()
            self.gradients.begin(parameters, None, lambda _: True)
            loss.backward()
            self.gradients.finish([parameters], None, lambda _: True)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        """Return fp32 copies of the weights on the CPU."""
        return [parameter.detach().float().cpu().clone() for parameter in self.net.parameters()]


def _check_close(found: list[Tensor], expected: list[Tensor], what: str) -> float:
    largest = 0.0
    for value, reference in zip(found, expected, strict=True):
        distance = (value - reference).norm() / reference.norm().clamp(min=1e-6)
        largest = max(largest, float(distance))
    assert largest < 2e-2, (
        f"The weights after steps with {what} differ by {largest:.2g} from those after plain steps, more than 2e-2."
    )
    return largest


def _plain_weights(request: CheckRequest) -> list[Tensor]:
    plain = Trained(request.device)
    for _ in range(NUM_STEPS):
        plain.step()
    return plain.weights()


def values(request: CheckRequest) -> Details:
    """Check that swapping bf16 copies in and out changes only those fp32 values that were written.

    The check runs on the device and on the CPU. After one training step, the weights on both must agree.
    """
    results: list[list[Tensor]] = []
    for device in (request.device, "cpu"):
        trained = Trained(device)
        weight: Any = trained.net[0].weight
        with torch.no_grad():
            weight.mul_(1 + 2**-12)
        exact = weight.detach().clone()
        with trained.window.opened():
            assert torch.equal(weight.detach(), exact.to(torch.bfloat16)), (
                "The half-precision parameters are not the rounded fp32 values."
            )
            weight.data[0, 0] = 0.5
        assert weight[0, 0].item() == 0.5, "A value written in half precision was lost at the end."
        assert torch.equal(weight.detach()[1:], exact[1:]), (
            "An fp32 value changed although it was not written."
        )
        trained.step()
        results.append(trained.weights())
    return {
        "message": "Maximum difference from the CPU: "
        f"{_check_close(results[0], results[1], 'this device'):.1e}."
    }


def reducer(request: CheckRequest) -> Details:
    """Check that DDP trains correctly if bf16 copies of parameters are swapped in while it is constructed."""
    if request.on_cuda:
        backend = "nccl"
    else:
        backend = "gloo"
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        trained = Trained(request.device)
        with trained.window.opened():
            trained.forward = DistributedDataParallel(trained.net, gradient_as_bucket_view=True)
        for _ in range(NUM_STEPS):
            trained.step()
        weights = trained.weights()
    finally:
        dist.destroy_process_group()
    return {
        "message": f"Maximum difference of DDP over {backend} from plain steps: "
        f"{_check_close(weights, _plain_weights(request), 'DDP'):.1e}."
    }


def stream(request: CheckRequest) -> Details:
    """Check that training steps on a side CUDA stream give the same weights as on the default stream."""
    if not request.on_cuda:
        raise NotHere("A CPU has no streams.")
    trained = Trained(request.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(NUM_STEPS):
            trained.step()
    torch.cuda.current_stream().wait_stream(side)
    return {
        "message": "Maximum difference of steps on a side stream from plain steps: "
        f"{_check_close(trained.weights(), _plain_weights(request), 'a stream'):.1e}."
    }


def compiled(request: CheckRequest) -> Details:
    """Check that a compiled network uses the current half-precision parameters in every step."""
    trained = Trained(request.device)
    trained.forward = torch.compile(
        trained.net, backend="inductor" if request.on_cuda else "aot_eager"
    )
    for _ in range(NUM_STEPS):
        trained.step()
    return {
        "message": "Maximum difference of compiled steps from plain steps: "
        f"{_check_close(trained.weights(), _plain_weights(request), 'compilation'):.1e}."
    }


def graph(request: CheckRequest) -> Details:
    """Check that a replayed CUDA graph uses the current half-precision parameters, not the captured values."""
    if not request.on_cuda:
        raise NotHere("A CPU has no CUDA graphs.")
    trained = Trained(request.device)
    with (
        trained.window.opened(),
        torch.no_grad(),
        torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False),
    ):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            trained.net(trained.images)  # warm-up, which capture requires
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            output = trained.net(trained.images)
    with torch.no_grad():
        last: Any = trained.net[2]
        last.weight.zero_()
        last.bias.fill_(2.0)
    with trained.window.opened():
        captured.replay()
    torch.cuda.synchronize()
    assert bool((output == 2.0).all()), (
        "A replayed CUDA graph used outdated half-precision parameters."
    )
    return {"message": "A replayed graph uses the current half-precision parameters."}
