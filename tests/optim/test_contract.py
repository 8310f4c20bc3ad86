"""What every optimizer of torch's keeps to, over all combinations of flags and paths of LARS and LAMB."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hybrid.optim import LAMB, LARS
from tests.optim.fused.test_step import close
from tests.optim.test_lars import assert_same_bits, copies_of, parameters, run, set_grads

PATHS = {"default": {}, "loop": {"foreach": False}, "lists": {"foreach": True}, "fused": {"fused": True}}
SHAPES = [(6, 5), (), (0, 3), (3, 700)]


def lars(params, **flags):
    return LARS(params, **{"lr": 2.0, "weight_decay": 0.01, **flags})


def lamb(params, **flags):
    return LAMB(params, **{"lr": 0.1, "weight_decay": 0.01, **flags})


RULES = {"lars": lars, "lamb": lamb}


def flags_of(name):
    """All combinations of the switches of a rule, on all of its paths."""
    more = {"lars": {"nesterov": (False, True)}, "lamb": {"bias_correction": (True, False)}}[name]
    switches = {"maximize": (False, True), "capturable": (False, True), **more}
    for path, values in itertools.product(PATHS, itertools.product(*switches.values())):
        yield PATHS[path] | dict(zip(switches, values, strict=True))


CASES = [
    pytest.param(RULES[name], flags, id="-".join([name, *(key for key, value in flags.items() if value)]) or name)
    for name in RULES
    for flags in flags_of(name)
]


def every_case(test):
    """Each third of them by default: 3 divides no number of switches or paths, so that all of these come."""
    return pytest.mark.sampled(3)(pytest.mark.parametrize(("rule", "flags"), CASES)(test))


every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def groups_of(params):
    return [{"params": params[:2]}, {"params": params[2:], "trust_ratio": False, "lr": 0.25}]


def pair(rule, flags, dtype=torch.float32):
    """The same optimizer twice, with parameters of its own each."""
    params = parameters(*SHAPES, dtype=dtype)
    others = copies_of(params)
    return (rule(groups_of(params), **flags), params), (rule(groups_of(others), **flags), others)


def assert_same_end(one, other, num_steps=2, first=3):
    for optimizer, params in (one, other):
        run(optimizer, params, num_steps, first=first)
    assert_same_bits(one[1], other[1])


@every_case
def test_it_moves_what_has_a_gradient_and_nothing_else(rule, flags):
    (optimizer, params), _ = pair(rule, flags)
    before = copies_of(params)
    optimizer.step()  # no gradient at all
    assert_same_bits(params, before)
    set_grads(params, 1)
    params[1].grad = None
    optimizer.step()
    assert torch.equal(params[1], before[1])
    assert params[1] not in optimizer.state
    assert not torch.equal(params[0], before[0])
    assert not torch.equal(params[3], before[3])
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)


@every_case
@pytest.mark.parametrize("medium", ["state_dict", "file", "pickle", "deepcopy"])
def test_what_was_saved_goes_on_bit_for_bit(rule, flags, medium):
    (optimizer, params), (second, others) = pair(rule, flags)
    for one, own in ((optimizer, params), (second, others)):
        run(one, own, 3)
    if medium in ("state_dict", "file"):
        saved = optimizer.state_dict()
        if medium == "file":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        own = copies_of(params)
        resumed = rule(groups_of(own), **flags)
        resumed.load_state_dict(saved)
    else:
        resumed = copy.deepcopy(optimizer) if medium == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        own = [param for group in resumed.param_groups for param in group["params"]]
    assert resumed.param_groups[1]["lr"] == 0.25
    assert_same_end((second, others), (resumed, own))


@every_rule
@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(PATHS, 2)])
def test_state_goes_from_path_to_path(rule, source, target):
    """Bit for bit among lists and loop; to or from the fused step within five roundings of a step."""
    (optimizer, params), (whole, others) = pair(rule, PATHS[source])
    for one, own in ((optimizer, params), (whole, others)):
        run(one, own, 3)
    own = copies_of(params)
    moved = rule(groups_of(own), **PATHS[target])
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group.update({key: PATHS[target].get(key) for key in ("foreach", "fused") if key in group})
    moved.load_state_dict(saved)
    run(moved, own, 2, first=3)
    run(whole, others, 2, first=3)
    close(own, others, 2e-6 if "fused" in (source, target) else 0.0)


@every_rule
@pytest.mark.parametrize("path", ["loop", "lists", "fused"])
@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, torch.float64), (torch.float64, torch.float32), (torch.float16, torch.float32)],
    ids=str,
)
def test_state_goes_from_dtype_to_dtype(rule, path, source, target):
    """State takes the new parameters' arithmetic: float32 for half precision, else their dtype."""
    params = parameters(*SHAPES, dtype=source)
    optimizer = rule(groups_of(params), **PATHS[path])
    run(optimizer, params, 2)
    own = [nn.Parameter(param.detach().to(target)) for param in params]
    moved = rule(groups_of(own), **PATHS[path])
    moved.load_state_dict(optimizer.state_dict())
    for old, new in zip(params, own, strict=True):
        for key, value in optimizer.state[old].items():
            loaded = moved.state[new][key]
            assert loaded.dtype == (torch.float32 if key == "step" else target)
            assert torch.equal(loaded, value.to(loaded.dtype))
    run(moved, own, 1, first=2)
    assert all(param.isfinite().all() for param in own)


@every_case
def test_a_group_added_later_is_one_given_at_once(rule, flags):
    (at_once, params), _ = pair(rule, flags)
    own = copies_of(params)
    first, second = groups_of(own)
    later = rule([first], **flags)
    later.add_param_group(second)
    assert_same_end((at_once, params), (later, own))


@every_case
def test_hooks_run_around_a_step_and_a_closure_within_with_autograd(rule, flags):
    (optimizer, params), (plain, others) = pair(rule, flags)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure_of(optimizer, params):
        def closure():
            calls.append("closure")
            optimizer.zero_grad()
            loss = sum(param.square().sum() for param in params)
            loss.backward()
            return loss

        return closure

    expected = sum(param.detach().square().sum() for param in params)
    assert torch.equal(optimizer.step(closure_of(optimizer, params)), expected)
    assert calls == ["before", "closure", "after"]
    closure_of(plain, others)()
    assert plain.step() is None
    assert_same_bits(params, others)


@every_case
def test_accumulated_gradients_are_one_gradient(rule, flags):
    """Two backward passes before a step, of numbers that add exactly."""
    (optimizer, params), (second, others) = pair(rule, flags)
    for own, parts in ((params, (0.25, 0.5)), (others, (0.75,))):
        for part in parts:
            (part * sum(param.sum() for param in own)).backward()
    for one in (optimizer, second):
        one.step()
    assert_same_bits(params, others)


@every_case
def test_a_rate_may_be_a_tensor_and_change_in_place(rule, flags):
    (number, params), (tensor, others) = pair(rule, flags)
    for group in tensor.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    for step in range(3):
        for optimizer, own in ((number, params), (tensor, others)):
            run(optimizer, own, 1, first=step)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
    close(params, others, 1e-6)
    assert isinstance(tensor.param_groups[0]["lr"], torch.Tensor)


@every_case
def test_a_sparse_gradient_is_refused_by_name_before_anything_moves(rule, flags):
    embedding, dense = nn.Embedding(5, 3, sparse=True), nn.Parameter(torch.ones(3))
    optimizer = rule([("dense", dense), ("embedding.weight", embedding.weight)], **flags)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"`embedding.weight.grad.layout` \(=torch.sparse_coo\) must be torch.strided"):
        optimizer.step()


@every_case
def test_the_stock_grad_scaler_unscales_skips_and_steps(rule, flags):
    """The protocol of fused optimizers is declared where the step is fused, and nowhere else."""
    (ours, params), (theirs, others) = pair(rule, flags)
    assert getattr(ours, "_step_supports_amp_scaling", False) is bool(flags.get("fused"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    scaler.scale(torch.ones(()))
    for step in range(3):
        set_grads(others, step)
        for one, other in zip(params, others, strict=True):
            one.grad = other.grad * scaler.get_scale()
        before = copies_of(params)
        if step == 1:
            params[0].grad[3, 3] = torch.inf
        scaler.step(ours)
        scaler.update()
        if step == 1:
            assert_same_bits(params, before)
        else:
            theirs.step()
    assert scaler.get_scale() == 2.0**9
    close(params, others, 2e-6)


@every_case
def test_scaled_gradients_are_unscaled_and_overflow_skips_every_path(rule, flags):
    """Our own protocol, next to gradients divided by hand: `grad_scale` alone, the step looks for inf itself."""
    (ours, params), (theirs, others) = pair(rule, flags)
    for step in range(3):
        set_grads(others, step)
        for one, other in zip(params, others, strict=True):
            one.grad = other.grad * 1024
        before = copies_of(params)
        if step == 1:
            params[3].grad[1, 3] = torch.nan
        ours.grad_scale = torch.tensor(1024.0)
        ours.step()
        assert ours.last_found_inf.item() == (step == 1)
        if step == 1:
            assert_same_bits(params, before)
        else:
            theirs.step()
    close(params, others, 2e-6)


class HostReads(TorchDispatchMode):
    """Counts what gives the host a number of a tensor."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "unique"):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@every_case
def test_capturable_reads_nothing_on_the_host_with_rates_as_tensors(rule, flags):
    """What a CUDA graph needs. Without the flag rates and counts on a CPU are read, where that costs nothing."""
    (optimizer, params), _ = pair(rule, flags)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    run(optimizer, params, 1)
    with HostReads() as reads:
        run(optimizer, params, 2, first=1)
    if flags["capturable"]:
        assert reads.names == []
    elif "fused" not in flags:
        assert reads.names


@every_rule
@pytest.mark.parametrize("path", ["loop", "lists"])
def test_capturable_changes_no_number(rule, path):
    """Beside the step that reads: a count as a tensor enters in float64, so only the order of products may differ."""
    ends = []
    for capturable in (False, True):
        params = parameters(*SHAPES)
        run(rule(groups_of(params), capturable=capturable, **PATHS[path]), params, 10)
        ends.append(params)
    close(ends[1], ends[0], 2e-6)


@every_rule
@pytest.mark.parametrize("is_group", [False, True], ids="group={}".format)
def test_differentiable_is_refused_with_the_cure(rule, is_group):
    """A bare TypeError would not say that no step here can be differentiated."""
    params = parameters((2,))
    with pytest.raises(ValueError, match=r"`differentiable` \(=True\) must be one of False: .* use torch.optim.SGD"):
        rule([{"params": params, "differentiable": True}]) if is_group else rule(params, differentiable=True)


@every_rule
def test_flags_are_switches(rule):
    with pytest.raises(ValueError, match=r"`capturable` \(=1\) must be one of True, False"):
        rule(parameters((2,)), capturable=1)


@every_rule
def test_what_is_empty_is_refused_as_torch_does(rule):
    with pytest.raises(ValueError, match="empty parameter list"):
        rule([])
    (param,) = parameters((2,))
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        rule([{"params": [param]}, {"params": [param]}])


@pytest.mark.long
@every_rule
@pytest.mark.parametrize("path", ["loop", "lists"])
def test_a_compiled_step_is_one_graph_and_the_same_step_on_each_path(rule, path):
    """On an accelerator lists are the default. Rounding of tensors where eager has numbers: some five times a step."""
    flags = {"maximize": True, "capturable": path == "lists", **PATHS[path]}
    (plain, params), (compiled, others) = pair(rule, flags)
    for group in compiled.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(compiled.step, backend="eager", fullgraph=True)
    for seed in range(2):
        set_grads(params, seed)
        set_grads(others, seed)
        plain.step()
        step()
    assert not torch._dynamo.utils.counters["graph_break"]
    close(others, params, 5e-6)
