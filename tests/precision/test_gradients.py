"""Gradients around a backward pass, tensor by tensor, without a Trainer and without ranks."""

import pytest
import torch
from torch import nn

from lightning_hybrid.precision.gradients import BackwardGradients, record_of
from lightning_hybrid.precision.half_window import HalfPrecisionWindow

F16 = torch.float16
SCALE = torch.tensor(4.0)


class Scene:
    """Two parameters, one of which stays fp32, and backward passes with chosen gradients."""

    def __init__(self, numel=4):
        self.half = nn.Parameter(torch.zeros(numel))
        module = nn.Module()
        module.weight = self.half
        module.norm = nn.LayerNorm(4, bias=False)
        self.kept = module.norm.weight
        self.window = HalfPrecisionWindow(module, F16)
        self.gradients = BackwardGradients(self.window)
        self.parameters = [self.half, self.kept]

    def backward(self, gradient, *, averages=True, scale=SCALE, fails=False, keeps=False):
        """Run a backward pass that adds `gradient`, unscaled, to both parameters.

        Return the gradients that autograd found before it.
        """
        factor = 1.0 if scale is None else float(scale)
        with self.window.opened():
            self.gradients.begin(self.parameters, scale, lambda _: averages)
            start = [None if p.grad is None else p.grad.clone() for p in self.parameters]
            for parameter in self.parameters:
                weights = torch.as_tensor(gradient, dtype=parameter.dtype)
                loss = (parameter * weights * factor).sum()
                loss.backward()
            if fails:
                self.gradients.abort(self.parameters)
            elif keeps:
                self.gradients.keep_scaled(self.parameters)
            else:
                self.gradients.finish([self.parameters], scale, lambda _: averages)
        return start

    def found_inf(self):
        return float(self.gradients.found_inf(self.parameters, device=torch.device("cpu")))


def test_gradients_are_fp32_and_unscaled_for_both_kinds_of_parameter():
    scene = Scene()
    scene.backward([1.0, 2.0, 3.0, 4.0])
    for parameter in scene.parameters:
        assert parameter.grad.dtype is torch.float32
        assert parameter.grad.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert scene.found_inf() == 0.0


def test_local_gradients_are_summed_in_fp32_and_go_into_the_last_backward_rounded_once():
    """Adding 512 times 2^-8 to 1 in fp16 would round in each addition and lose half of the sum."""
    scene = Scene()
    scene.backward([1.0] * 4, averages=False)
    for _ in range(511):
        assert scene.backward([2.0**-8 + 2.0**-18] * 4, averages=False) == [None, None]
    total = 1.0 + 511 * (2.0**-8 + 2.0**-18)
    assert scene.half.grad.tolist() == [total] * 4
    start = scene.backward([0.0] * 4)
    assert torch.equal(start[0], torch.full((4,), total * 4).half())
    assert torch.equal(scene.half.grad, (torch.full((4,), total * 4).half() / 4).float())


def test_an_average_is_not_averaged_again_and_keeps_its_digits():
    scene = Scene()
    scene.backward([1.0] * 4)
    scene.half.grad.add_(2.0**-20)
    assert scene.backward([1.0] * 4) == [None, None]
    assert scene.half.grad.tolist() == [2.0 + 2.0**-20] * 4


def test_a_gradient_that_the_user_assigned_is_averaged_with_that_of_the_backward():
    """It is unknown whether the assigned gradient is equal on all ranks. DDP averages it, too."""
    scene = Scene()
    scene.backward([1.0] * 4)
    scene.half.grad = torch.full((4,), 3.0)
    start = scene.backward([1.0] * 4)
    assert torch.equal(start[0], torch.full((4,), 12.0, dtype=F16))
    assert scene.half.grad.tolist() == [4.0] * 4


@pytest.mark.parametrize("drop", ["none", "zero_"])
def test_zero_grad_ends_the_sum(drop):
    scene = Scene()
    scene.backward([float("inf")] * 4, averages=False)
    assert scene.found_inf() == 1.0
    optimizer = torch.optim.SGD(scene.parameters, lr=1.0)
    optimizer.zero_grad(set_to_none=drop == "none")
    scene.backward([1.0] * 4)
    assert scene.half.grad.tolist() == [1.0] * 4
    assert scene.found_inf() == 0.0


def test_an_inf_of_an_earlier_backward_in_the_sum_is_found():
    scene = Scene()
    scene.backward([1.0, float("inf"), 1.0, 1.0])
    scene.backward([1.0] * 4)
    assert record_of(scene.half.grad).found_inf is None
    assert scene.found_inf() == 1.0


def test_a_gradient_that_somebody_keeps_is_not_written_again():
    """The memory of a gradient is reused only when nothing refers to it, including views and arrays."""
    scene = Scene(numel=1 << 12)
    gradient = torch.ones(1 << 12)
    scene.parameters = [scene.half]
    scene.backward(gradient)
    for keep in (lambda g: g, lambda g: g[3:5], lambda g: g.numpy(), lambda g: g.detach()):
        kept = keep(scene.half.grad)
        scene.half.grad = None
        scene.backward(gradient * 2)
        assert float(kept[0]) == 1.0
        del kept
        scene.half.grad = None
        scene.backward(gradient)
    scene.half.grad = None
    scene.backward(gradient)
    first = scene.half.grad.data_ptr()
    scene.half.grad = None
    scene.backward(gradient)
    assert scene.half.grad.data_ptr() == first, "memory that nobody holds is used again"


def test_the_memory_of_ddps_buckets_is_never_the_users():
    scene = Scene()
    bucket = torch.zeros(4)
    scene.window.open()
    scene.gradients.begin([scene.kept], None, lambda _: True)
    scene.kept.grad = bucket.view(4)
    scene.gradients.finish([[scene.kept]], None, lambda _: True)
    scene.window.close()
    bucket.fill_(9.0)
    assert scene.kept.grad.tolist() == [0.0] * 4


def test_a_backward_that_fails_leaves_what_was_there_before():
    scene = Scene()
    scene.backward([1.0] * 4, averages=False)
    scene.backward([5.0] * 4, averages=False, fails=True)
    assert scene.half.grad.tolist() == [1.0] * 4
    scene.half.grad = None
    scene.backward([5.0] * 4, fails=True)
    assert scene.half.grad is None


def test_scaled_gradients_are_out_of_sight_until_the_step_that_takes_them():
    scene = Scene()
    scene.backward([1.0] * 4, keeps=True)
    assert scene.half.grad is None
    assert scene.kept.grad is None
    with scene.gradients.given_scaled(scene.parameters):
        assert scene.half.dtype is torch.float32
        assert scene.half.grad.dtype is F16
        assert scene.half.grad.tolist() == [4.0] * 4
    assert scene.half.grad is None
    with pytest.raises(RuntimeError, match="grad_dtype"):
        scene.half.grad = torch.zeros(4, dtype=F16)


def test_a_term_of_the_fp32_parameters_reaches_the_half_precision_parameters_once():
    scene = Scene()
    calls = []
    scene.half.register_hook(lambda gradient: calls.append(gradient.tolist()))
    penalty = scene.half.square().sum() + 3.0 * scene.half.sum()
    with scene.window.opened():
        loss = (scene.half * torch.ones(4, dtype=F16)).sum().float() + penalty
        scene.gradients.begin(scene.parameters, None, lambda _: True)
        total = scene.gradients.with_outside_terms(loss)
        assert torch.equal(total, loss)
        total.backward()
        scene.gradients.finish([scene.parameters], None, lambda _: True)
    assert scene.half.grad.tolist() == [4.0] * 4
    assert scene.kept.grad is None
    assert calls == [[4.0] * 4]
