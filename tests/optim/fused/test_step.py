"""The fused step: the same rule as lists and loop, in few passes over memory; and mixed precision in all of them."""

import copy
import itertools
from typing import get_args

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.optim import LAMB, LARS, WarmupPolynomialDecay
from lightning_hybrid.optim.lars import Denominator, MomentumForm
from tests.optim.test_lars import assert_same_bits, copies_of, normals, parameters, run, set_grads

PATHS = {"loop": {"foreach": False}, "lists": {"foreach": True}, "fused": {"fused": True}}
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
# Tiles of 128 and a rest; whole ones; less than one; no dimension; whole ones and one element; more than one block.
SHAPES = [(33, 17, 20), (64, 128), (5,), (), (513,), (3, 6000)]


def close(params, others, rtol):
    for param, other in zip(params, others, strict=True):
        param, other = param.detach().double(), other.detach().double()
        assert torch.linalg.vector_norm(param - other) <= rtol * torch.linalg.vector_norm(other)


def masters(*shapes, copy_dtype=torch.float16):
    """float32 parameters that take half-precision gradients, and their copies."""
    params = parameters(*shapes)
    for param in params:
        param.grad_dtype = None
    return params, {param: param.detach().to(copy_dtype) for param in params}


def set_scaled_grads(params, seed, scale, dtype=torch.float16):
    """Gradients in `dtype`, `scale` times too large."""
    set_grads(params, seed)
    for param in params:
        grad, param.grad = param.grad, None
        param.grad = (grad * scale).to(dtype)


def groups_of(params):
    """The second half is excluded."""
    return [{"params": params[::2]}, {"params": params[1::2], "trust_ratio": False, "weight_decay": 0.0}]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("maximize", [False, True], ids="maximize={}".format)
@pytest.mark.parametrize("momentum", [0.0, 0.9], ids="momentum={}".format)
@pytest.mark.parametrize("denominator", get_args(Denominator))
@pytest.mark.parametrize("momentum_form", get_args(MomentumForm))
def test_the_fused_step_is_the_rule_in_float32_and_float64(momentum_form, denominator, momentum, maximize):
    """Ten steps of a schedule. Other rounding only: each step rounds some five times, by 6e-8 or 1e-16 of a term."""
    dtypes = [torch.float32, torch.float64]
    for dtype, nesterov, clip in itertools.product(dtypes, (False, True), (None, 1.0)):
        if nesterov and (momentum == 0 or clip):
            continue
        ends = []
        for path in (PATHS["loop"], PATHS["fused"]):
            params = parameters(*SHAPES, dtype=dtype)
            optimizer = LARS(
                groups_of(params),
                lr=4.0 if clip is None else 0.01,
                weight_decay=0.01,
                momentum=momentum,
                nesterov=nesterov,
                momentum_form=momentum_form,
                denominator=denominator,
                trust_clip=clip,
                excluded_lr_mult=0.01,
                maximize=maximize,
                **path,
            )
            schedule = WarmupPolynomialDecay(optimizer, total_steps=10, warmup_steps=3)
            for step in range(9):
                run(optimizer, params, 1, first=step)
                schedule.step()
            ends.append(params)
        close(ends[1], ends[0], 2e-6 if dtype is torch.float32 else 1e-14)


@every_path
@pytest.mark.parametrize("grad_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scaled_half_gradients_move_masters_and_copies_as_unscaled_ones_do(path, grad_dtype):
    """The same gradients, rounded to half precision, divided by hand beforehand."""
    copy_dtype = torch.bfloat16 if grad_dtype is torch.bfloat16 else torch.float16
    params, copies = masters(*SHAPES, copy_dtype=copy_dtype)
    plain = copies_of(params)
    ours = LARS(groups_of(params), lr=4.0, weight_decay=0.01, **path)
    theirs = LARS(groups_of(plain), lr=4.0, weight_decay=0.01)
    ours.copies = copies
    for step in range(5):
        set_scaled_grads(params, step, 1024.0, grad_dtype)
        ours.grad_scale, ours.found_inf = torch.tensor(1024.0), None
        ours.step()
        assert ours.last_found_inf.item() == 0
        for one, other in zip(params, plain, strict=True):
            other.grad = one.grad.float() / 1024
        theirs.step()
        for param in params:
            assert torch.equal(copies[param], param.to(copy_dtype))
    close(params, plain, 2e-6)


@pytest.mark.sampled(5)
@every_path
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", [0, 2, 5])
@pytest.mark.parametrize("given", [False, True], ids="given={}".format)
@pytest.mark.parametrize("denominator", get_args(Denominator))
def test_an_overflow_leaves_every_bit_and_the_next_step_is_as_if_nothing_had_been(path, bad, where, given, denominator):
    params, copies = masters(*SHAPES)
    optimizer = LARS(groups_of(params), lr=4.0, weight_decay=0.01, nesterov=True, denominator=denominator, **path)
    optimizer.copies = copies
    own_params = copies_of(params)
    untouched = LARS(groups_of(own_params), lr=4.0, weight_decay=0.01, nesterov=True, denominator=denominator, **path)
    for param in own_params:
        param.grad_dtype = None
    untouched.copies = {one: copies[other].clone() for one, other in zip(own_params, params, strict=True)}

    def step(opt, params, seed, spoil=False):
        set_scaled_grads(params, seed, 1024.0)
        if spoil:
            params[where].grad.view(-1)[-1] = bad
        opt.grad_scale = torch.tensor(1024.0)
        opt.found_inf = torch.tensor(1.0 if spoil else 0.0) if given else None
        opt.step()
        return opt.last_found_inf.item()

    for opt, own in ((optimizer, params), (untouched, own_params)):
        assert step(opt, own, 1) == 0
    with torch.no_grad():
        for tensor in (params[0], own_params[0], copies[params[0]], untouched.copies[own_params[0]]):
            tensor.view(-1)[0] = -0.0  # must not become +0.0
    before = [*copies_of(params), *(copies[param].clone() for param in params)]
    state = copy.deepcopy(optimizer.state_dict()["state"])
    assert step(optimizer, params, 2, spoil=True) == 1
    for old, new in zip(before, [*params, *(copies[param] for param in params)], strict=True):
        bits = torch.int32 if old.dtype is torch.float32 else torch.int16
        assert torch.equal(old.detach().view(bits), new.detach().view(bits))
    for key, entry in optimizer.state_dict()["state"].items():
        assert torch.equal(entry["momentum_buffer"], state[key]["momentum_buffer"])
    for opt, own in ((optimizer, params), (untouched, own_params)):
        assert step(opt, own, 3) == 0
    assert_same_bits(params, own_params)


@pytest.mark.long
@pytest.mark.parametrize("values", ["equal", "normal"])
def test_norms_are_right_to_a_millionth_at_37_million_elements(values):
    """Those of the pass over gradients and weights, and those that the update leaves for the next step."""
    weight = nn.Parameter(torch.full((9216, 4096), 0.1) if values == "equal" else torch.randn(9216, 4096))
    weight.grad_dtype = None
    weight.grad = torch.ones_like(weight).half() if values == "equal" else torch.randn(9216, 4096).half()
    optimizer = LARS([weight], lr=100.0, fused=True)  # a tenth of the weights: their norm moves by half a percent
    optimizer.copies = {weight: weight.detach().half()}
    for _ in range(2):
        exact = [torch.linalg.vector_norm(one.detach(), dtype=torch.float64).item() for one in (weight, weight.grad)]
        optimizer.step()
        sums = optimizer._fused._tensor_groups[0].engine.sums
        assert sums.sqrt().flatten().tolist() == pytest.approx(exact, rel=1e-6)


def test_an_edit_of_a_master_between_steps_is_seen():
    """The norm carried from the last update would be wrong: half of it is gone."""
    params, copies = masters((64, 512), (7,))
    plain = copies_of(params)
    ours, theirs = LARS(params, lr=4.0, fused=True), LARS(plain, lr=4.0)
    ours.copies = copies
    for step in range(4):
        set_grads(plain, step)
        for one, other in zip(params, plain, strict=True):
            one.grad = other.grad.half()
            other.grad = one.grad.float()
        for optimizer, own in ((ours, params), (theirs, plain)):
            optimizer.step()
            with torch.no_grad():
                own[step % 2].mul_(0.5)
    close(params, plain, 1e-6)


@pytest.mark.parametrize("has_copies", [False, True])
def test_state_goes_from_path_to_path(has_copies):
    """Fused, saved, lists, saved, fused: as three times as many steps of the loop."""
    params, copies = masters(*SHAPES)
    plain = copies_of(params)
    loop, state = LARS(groups_of(plain), lr=4.0, weight_decay=0.01), None
    for first, path in enumerate([PATHS["fused"], PATHS["lists"], PATHS["fused"]]):
        optimizer = LARS(groups_of(params), lr=4.0, weight_decay=0.01, **path)
        optimizer.copies = copies if has_copies else {}
        if state is not None:
            flags = [{**group, "fused": None, "foreach": None, **path} for group in state["param_groups"]]
            optimizer.load_state_dict({"state": state["state"], "param_groups": flags})
        for step in (2 * first, 2 * first + 1):
            set_scaled_grads(params, step, 1.0, torch.float16)
            for one, other in zip(params, plain, strict=True):
                other.grad = one.grad.float()
                one.grad = one.grad if has_copies else one.grad.float()
            optimizer.step()
            loop.step()
        state = copy.deepcopy(optimizer.state_dict())
    close(params, plain, 2e-6)


@every_path
def test_autograd_sees_that_the_step_wrote(path):
    """A backward pass that needs the weights of before must fail, as with any in-place change."""
    (weight,) = parameters((64, 128))
    out = (weight * weight).sum()
    weight.grad = torch.ones_like(weight)
    LARS([weight], lr=1.0, **path).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.long
def test_a_compiled_step_of_a_fused_optimizer_is_the_lists_in_one_graph():
    params, plain = parameters((9, 8), (4,)), parameters((9, 8), (4,))
    ours, theirs = LARS(params, lr=torch.tensor(2.0), fused=True), LARS(plain, lr=2.0)
    torch._dynamo.reset()  # what earlier tests have compiled counts against its limit
    torch._dynamo.utils.counters.clear()
    step = torch.compile(ours.step, backend="aot_eager")
    for seed in range(3):
        set_grads(params, seed)
        set_grads(plain, seed)
        step()
        theirs.step()
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]
    close(params, plain, 2e-6)


def test_channels_last_expanded_and_missing_gradients_and_moved_memory():
    weights = [nn.Parameter(normals(40, 30, 5, 5, dtype=torch.float32).to(memory_format=torch.channels_last))]
    weights += parameters((40, 30, 5, 5), (9000,), (9,))
    plain = copies_of(weights)
    ours, theirs = LARS(weights, lr=2.0, weight_decay=0.1, fused=True), LARS(plain, lr=2.0, weight_decay=0.1)
    for step in range(5):
        set_grads(plain, step)
        plain[2].grad = torch.full((), 0.5).expand(9000)
        plain[3].grad = None if step == 2 else plain[3].grad
        for one, other in zip(weights, plain, strict=True):
            one.grad = other.grad
        if step == 3:
            weights[1].data = weights[1].data.clone()
        ours.step()
        theirs.step()
    close(weights, plain, 1e-6)


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "unique"):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@every_path
@pytest.mark.parametrize("given", [False, True], ids="given={}".format)
def test_a_step_reads_nothing_on_the_host(path, given):
    params, copies = masters(*SHAPES)
    optimizer = LARS(groups_of(params), lr=4.0, weight_decay=0.01, **path)
    optimizer.copies = copies
    set_scaled_grads(params, 1, 1024.0)
    scale, found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * step
        optimizer.grad_scale, optimizer.found_inf = scale, found_inf if given else None
        with Reads() as reads:
            optimizer.step()
        assert reads.names == []


def test_the_counter_of_reads_counts():
    with Reads() as reads:
        torch.ones(1).item()
        bool(torch.ones(1) > 0)
    assert reads.names


@every_path
@pytest.mark.parametrize("rule", [LARS, LAMB])
def test_works_under_the_stock_grad_scaler(rule, path):
    """Overflow: skipped, scale halved; else the very step of float32."""
    params, plain = parameters((30, 20), (4,)), parameters((30, 20), (4,))
    ours, theirs = rule(params, lr=0.1, **path), rule(plain, lr=0.1)
    assert getattr(ours, "_step_supports_amp_scaling", False) is ("fused" in path)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    scaler.scale(torch.ones(()))
    for step in range(4):
        set_grads(plain, step)
        for one, other in zip(params, plain, strict=True):
            one.grad = other.grad * scaler.get_scale()
        if step == 2:
            params[0].grad[3, 3] = torch.inf
            before = copies_of(params)
        scaler.step(ours)
        scaler.update()
        if step == 2:
            assert_same_bits(params, before)
        else:
            theirs.step()
    assert scaler.get_scale() == 2.0**9
    close(params, plain, 2e-6)


@pytest.mark.sampled(2)
@every_path
@pytest.mark.parametrize("more", [{}, {"bias_correction": False}, {"max_grad_norm": 0.5}, {"trust_clip": 0.1}], ids=str)
def test_lamb_unscales_skips_and_writes_copies(path, more):
    """Beside it the same gradients, unscaled by hand; the third step overflows, and its count does not advance."""
    params, copies = masters(*SHAPES, (600_000,))
    plain = copies_of(params)
    ours = LAMB(groups_of(params), lr=0.1, weight_decay=0.01, **more, **path)
    theirs = LAMB(groups_of(plain), lr=0.1, weight_decay=0.01, **more)
    ours.copies = copies
    for step in range(6):
        set_scaled_grads(params, step, 1024.0)
        for one, other in zip(params, plain, strict=True):
            other.grad = one.grad.float() / 1024
        if skipped := step in (0, 3):
            params[2].grad[1] = torch.nan
            before, state = copies_of(params), copy.deepcopy(ours.state_dict()["state"])
        ours.grad_scale = torch.tensor(1024.0)
        ours.step()
        assert ours.last_found_inf.item() == skipped
        if skipped:
            assert_same_bits(params, before)
            for key, entry in state.items():
                assert all(torch.equal(value, ours.state_dict()["state"][key][name]) for name, value in entry.items())
        else:
            theirs.step()
        for param in params:
            assert torch.equal(copies[param], param.half())
    close(params, plain, 5e-6)
    assert ours.state[params[0]]["step"].item() == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lamb_without_eps_divides_no_zero_by_zero_in_the_rest_of_a_tile(dtype):
    ends = []
    for path in (PATHS["loop"], PATHS["fused"]):
        params = parameters(*SHAPES, dtype=dtype)
        run(LAMB(groups_of(params), lr=0.1, weight_decay=0.01, eps=0.0, **path), params, 3)
        ends.append(params)
    close(ends[1], ends[0], 5e-6)


@pytest.mark.parametrize("rule", [LARS, LAMB])
def test_fused_is_refused_where_it_cannot_be(rule):
    with pytest.raises(ValueError, match=r"`fused` \(=True\) excludes `foreach` \(=True\)"):
        rule(parameters((2,)), lr=0.1, fused=True, foreach=True)
    with pytest.raises(ValueError, match=rf"`fused` \(=True\) must be the optimizer's \(=None\).* to {rule.__name__}"):
        rule([{"params": parameters((2,)), "fused": True}], lr=0.1)
    with pytest.raises(ValueError, match=r"`fused` \(=1\) must be one of"):
        rule(parameters((2,)), lr=0.1, fused=1)


def test_fused_survives_pickling_compiling_hooks_closures_and_tensor_rates():
    params, plain = parameters(*SHAPES), parameters(*SHAPES)
    ours, theirs = LARS(params, lr=torch.tensor(2.0), fused=True), LARS(plain, lr=2.0)
    calls = []
    ours.register_step_post_hook(lambda *_: calls.append("after"))
    for optimizer, own in ((ours, params), (theirs, plain)):
        set_grads(own, 1)
        optimizer.step(lambda: calls.append("closure") or torch.zeros(()))
    assert calls == ["closure", "after", "closure"]
    ours = copy.deepcopy(ours)
    params = ours.param_groups[0]["params"]
    late, same = parameters((3, 5)), parameters((3, 5))
    for optimizer, own, new in ((ours, params, late), (theirs, plain, same)):
        optimizer.add_param_group({"params": new})
        run(optimizer, [*own, *new], 2, first=1)
    torch._dynamo.reset()  # takes nothing from us
    for optimizer, own, new in ((ours, params, late), (theirs, plain, same)):
        run(optimizer, [*own, *new], 1, first=3)
    close([*params, *late], [*plain, *same], 1e-6)
