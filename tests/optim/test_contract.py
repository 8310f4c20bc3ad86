"""Contract of every implementation of LARS and LAMB (loop, lists, C++), on whole tensors, parts and shards.

The Triton kernels are held to it in `fused/cuda/test_kernels.py`, in an interpreter that needs a process of its own.
"""

import copy
import io
import itertools
import pickle
from functools import partial
from typing import get_args

import pytest
import torch
from torch import nn

from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.optim.diagnostics import trust_ratios
from lightning_hybrid.optim.lars import Denominator, MomentumForm
from tests.optim import makers
from tests.optim.makers import (
    LOOP,
    PATHS,
    Beside,
    assert_same_bits,
    copies_of,
    parameters,
    place_of,
    run,
    set_grads,
)
from tests.precision.test_optimizer_protocol import HostReads

# ---- of a step on whole tensors, whatever its flags ------------------------------------------------------------------

SHAPES = [(6, 5), (), (0, 3), (3, 700)]
# each pair of values
SWITCHES = [
    (False, False, False),
    (False, True, True),
    (True, False, True),
    (True, True, False),
]
LARS_ = partial(LARS, lr=2.0, weight_decay=0.01)
LAMB_ = partial(LAMB, lr=0.1, weight_decay=0.01)
LAST_SWITCH = {LARS_: ("nesterov", False), LAMB_: ("bias_correction", True)}


def cases():
    for rule, (path, flags), switches in itertools.product(
        LAST_SWITCH, {"default": {}, **PATHS}.items(), SWITCHES
    ):
        name, default = LAST_SWITCH[rule]
        flags = {
            **flags,
            "maximize": switches[0],
            "capturable": switches[1],
            name: switches[2] != default,
        }
        yield pytest.param(
            rule,
            flags,
            id="-".join([rule.func.__name__, path, *("01"[switch] for switch in switches)]),
        )


every_case = pytest.mark.parametrize(("rule", "flags"), list(cases()))
every_rule = pytest.mark.parametrize("rule", LAST_SWITCH, ids=["LARS", "LAMB"])


def two_groups(params):
    return [{"params": params[:2]}, {"params": params[2:], "trust_ratio": False, "lr": 0.25}]


def pair(rule, flags, dtype=torch.float32):
    params = parameters(*SHAPES, dtype=dtype)
    others = copies_of(params)
    return (rule(two_groups(params), **flags), params), (rule(two_groups(others), **flags), others)


def assert_same_end(one, other, num_steps=2, first=3):
    for optimizer, params in (one, other):
        run(optimizer, params, num_steps, first=first)
    assert_same_bits(one[1], other[1])


@pytest.mark.sampled(3)
@every_case
def test_it_moves_what_has_a_gradient_and_nothing_else_and_no_gradient_is_written(rule, flags):
    (optimizer, params), _ = pair(rule, flags)
    before = copies_of(params)
    optimizer.step()  # no gradient at all
    assert_same_bits(params, before)
    set_grads(params, 1)
    params[1].grad = None
    grads = [
        (param, param.grad.clone(), param.grad._version)
        for param in params
        if param.grad is not None
    ]
    optimizer.step()
    assert all(
        torch.equal(param.grad, old) and param.grad._version == version
        for param, old, version in grads
    )
    assert [torch.equal(param, old) for param, old in zip(params, before, strict=True)] == [
        False,
        True,
        True,
        False,
    ]
    assert params[1] not in optimizer.state
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)


ORTHOGONAL = [
    pytest.param(
        partial(LARS, lr=2.0, direction="orthogonal", nesterov=nesterov),
        PATHS[path],
        id=f"orthogonal-{path}",
    )
    for path, nesterov in (("loop", False), ("lists", True))
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("rule", "flags"), [*cases(), *ORTHOGONAL])
def test_what_was_saved_goes_on_bit_for_bit(rule, flags):
    """Of half-precision parameters too, whose state torch's own `load_state_dict` would round."""
    for dtype, medium in zip(
        [torch.bfloat16] * 2 + [torch.float32], ["file", "deepcopy", "pickle"], strict=True
    ):
        (optimizer, params), second = pair(rule, flags, dtype)
        run(optimizer, params, 3)
        run(*second, 3)
        if medium == "file":
            torch.save(optimizer.state_dict(), file := io.BytesIO())
            file.seek(0)
            resumed = rule(two_groups(copies_of(params)), **flags)
            resumed.load_state_dict(torch.load(file, weights_only=True))
        else:
            if medium == "deepcopy":
                resumed = copy.deepcopy(optimizer)
            else:
                resumed = pickle.loads(pickle.dumps(optimizer))
        own = [param for group in resumed.param_groups for param in group["params"]]
        assert resumed.param_groups[1]["lr"] == 0.25
        assert_same_end(second, (resumed, own))
        assert all(
            value.dtype is torch.float32 for param in own for value in resumed.state[param].values()
        )


@every_rule
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(PATHS, 2)))
def test_state_goes_from_path_to_path(rule, source, target):
    """Bit for bit among lists and loop. To or from the fused step within five roundings of a step."""
    (optimizer, params), whole = pair(rule, PATHS[source])
    run(optimizer, params, 3)
    run(*whole, 5)
    own = copies_of(params)
    moved = rule(two_groups(own), **PATHS[target])
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group.update({key: PATHS[target].get(key) for key in ("foreach", "fused") if key in group})
    moved.load_state_dict(saved)
    run(moved, own, 2, first=3)
    assert makers.distance(own, whole[1]) <= (2e-6 if "fused" in (source, target) else 0)


@pytest.mark.sampled(3)
@every_case
def test_a_closure_runs_with_autograd_before_the_step(rule, flags):
    (optimizer, params), (plain, others) = pair(rule, flags)

    def closure(optimizer, params):
        loss = sum(param.square().sum() for param in params)
        loss.backward()
        return loss

    expected = sum(param.detach().square().sum() for param in params)
    assert torch.equal(optimizer.step(partial(closure, optimizer, params)), expected)
    closure(plain, others)
    assert plain.step() is None
    assert_same_bits(params, others)


@pytest.mark.sampled(3)
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
    assert makers.distance(params, others) <= 1e-6
    assert isinstance(tensor.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.sampled(3)
@every_case
def test_a_sparse_gradient_is_refused_by_name_before_anything_moves(rule, flags):
    embedding = nn.Embedding(5, 3, sparse=True)
    dense = nn.Parameter(torch.ones(3))
    optimizer = rule([("dense", dense), ("embedding.weight", embedding.weight)], **flags)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(
        ValueError,
        match=r"`embedding.weight.grad.layout` \(=torch.sparse_coo\) must be torch.strided",
    ):
        optimizer.step()


@pytest.mark.sampled(3)
@every_case
def test_the_stock_grad_scaler_unscales_skips_and_steps(rule, flags):
    """The protocol of fused optimizers is declared where the step is fused, and nowhere else."""
    (ours, params), (theirs, others) = pair(rule, flags)
    assert getattr(ours, "_step_supports_amp_scaling", False) is bool(flags.get("fused"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    scaler.scale(torch.ones(()))
    for step in range(3):
        set_grads(others, step)
        for first, second in zip(params, others, strict=True):
            first.grad = second.grad * scaler.get_scale()
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
    assert makers.distance(params, others) <= 2e-6


@pytest.mark.sampled(3)
@every_case
def test_capturable_reads_nothing_on_the_host_with_rates_as_tensors(rule, flags):
    """What a CUDA graph needs. Without the flag rates and counts on a CPU are read, where that costs nothing."""
    (optimizer, params), _ = pair(rule, flags)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    run(optimizer, params, 1)
    with HostReads() as reads:
        run(optimizer, params, 2, first=1)
    assert not reads.by_file if flags["capturable"] else reads.by_file or "fused" in flags


COMPILED_OPTIONS = [
    *[
        (rule, {"capturable": path == "lists", **flags})
        for path, flags in PATHS.items()
        for rule in LAST_SWITCH
    ],
    (LAMB_, {"foreach": True}),
    (LAMB_, {"max_grad_norm": 0.5, "trust_clip": 1.0, "weight_norm_bounds": (0.1, 2.0)}),
    (LAMB_, {"bias_correction": False}),
    (LARS_, {"denominator": "joint", "trust_clip": 1.0}),
    (LARS_, {"momentum_form": "ratio_outside", "nesterov": True}),
    (LARS_, {"momentum": 0.0}),
    (LARS_, {"direction": "orthogonal"}),
]


def compiled_cases():
    for (rule, options), is_scaled in itertools.product(COMPILED_OPTIONS, (False, True)):
        words = [f"{key}={value}" for key, value in options.items()]
        is_quick = rule is LAMB_ and options == {"foreach": True} and not is_scaled
        yield pytest.param(
            rule,
            options,
            is_scaled,
            id="-".join([rule.func.__name__, *words, "scaled" if is_scaled else "plain"]),
            marks=[] if is_quick else [pytest.mark.long],
        )


@pytest.mark.parametrize(("rule", "options", "is_scaled"), list(compiled_cases()))
def test_a_compiled_step_is_one_graph_and_the_same_step(rule, options, is_scaled):
    """The rates change, so that a value frozen into the graph would show. Other rounding: some five times a step."""
    (plain, params), (compiled, others) = pair(rule, {"maximize": True, **options})
    for group in compiled.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    graphs = []

    def keep_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step = torch.compile(compiled.step, backend=keep_graph, fullgraph=True)
    for seed in range(3):
        set_grads(params, seed)
        set_grads(others, seed)
        for optimizer in (plain, compiled):
            if is_scaled:
                optimizer.grad_scale = torch.tensor(4.0)
                optimizer.found_inf = torch.tensor(float(seed == 1))
        plain.step()
        step()
        for group in (*plain.param_groups, *compiled.param_groups):
            group["lr"] *= 0.5
    # The first step makes the state, and the second one finds it: no rate and no count is compiled into a graph.
    assert 1 <= len(graphs) <= 2
    assert makers.distance(others, params) <= 5e-6


# ---- of every maker, next to an optimizer of whole tensors -----------------------------------------------------------

RULE = {"LARS": LARS, "LAMB": LAMB}
# How far from whole tensors. Loop and lists add squares in float64, parts of a sum in the order of blocks: the same
# bits. Fused passes add 128 squares at a time in float32: other than the loop does, and than a cut elsewhere does.
BOUND = {
    ("whole", "lists"): 0.0,
    ("whole", "fused"): 2e-6,
    ("parts", "lists"): 0.0,
    ("parts", "fused"): 0.0,
    ("shards", "lists"): 0.0,
    ("shards", "fused"): 2e-6,
}
every_maker = pytest.mark.parametrize(("kind", "path"), BOUND)
both_rules = pytest.mark.parametrize("rule", RULE)
MORE = [{}, {"nesterov": True}, {"trust_clip": 1.0, "lr": 0.01}]
MORE += [{"momentum": 0.0, "maximize": True, "excluded_lr_mult": 0.01}]
OPTIONS = {
    "LARS": [
        {"momentum_form": form, "denominator": one, **more}
        for form, one, more in itertools.product(
            get_args(MomentumForm), get_args(Denominator), MORE
        )
    ],
    "LAMB": [
        {},
        {"max_grad_norm": 0.5, "maximize": True},
        {"bias_correction": False, "trust_clip": 0.05},
        {"weight_norm_bounds": (3.0, 4.0), "excluded_lr_mult": 0.25},
        {"bias_correction": False, "max_grad_norm": 0.5, "eps": 0.0},
    ],
}
# every value of each
SOME = {rule: options[:: 5 if rule == "LARS" else 2] for rule, options in OPTIONS.items()}


def held(request, kind, promise, *args):
    if kind == "whole":
        return [promise(kind, *args)]
    return request.getfixturevalue("two_ranks").run(promise, kind, *args)


# Rows that ranks share evenly, unevenly, and of which only one rank has any; a chunk of the fused passes and a rest.
SHARDED = [(8, 5), (5, 7), (1, 6), (3,), (4, 5000), (2, 3, 2, 2)]


def beside(kind, path, rule, **more):
    more |= {"shapes": SHARDED} if kind == "shards" else {}
    return Beside(
        place_of(kind),
        PATHS[path],
        RULE[rule],
        whole_path=LOOP if kind == "whole" else PATHS[path],
        **more,
    )


def distances(kind, path, rule, kinds):
    return [beside(kind, path, rule, **more).steps(3).distance() for more in kinds]


@every_maker
@both_rules
def test_the_step_is_that_of_whole_tensors_in_every_form(request, kind, path, rule):
    for result in held(
        request, kind, distances, path, rule, (OPTIONS if kind == "whole" else SOME)[rule]
    ):
        assert max(result) <= BOUND[kind, path], result


@pytest.mark.sampled(5)
@every_maker
@both_rules
@pytest.mark.parametrize("more", [{"half": torch.float16}, {"dtype": torch.float64}], ids=str)
def test_the_step_is_that_of_whole_tensors_of_any_dtype(request, kind, path, rule, more):
    options = {"LARS": {"denominator": "joint"}, "LAMB": {"max_grad_norm": 0.5}}[rule]
    bound = (
        1e-13
        if "dtype" in more
        else max(2e-6, BOUND[kind, path])
        if kind == "whole"
        else BOUND[kind, path]
    )
    for result in held(request, kind, distances, path, rule, [more, {**more, **options}]):
        assert max(result) <= bound


def overflow(kind, path, rule, spoilt, half, given, **options):
    options = options or ({"denominator": "joint"} if rule == "LARS" else {"max_grad_norm": 0.5})
    return makers.overflow(beside(kind, path, rule, half=half, **options), spoilt, given)


@pytest.mark.sampled(5)
@every_maker
@both_rules
@pytest.mark.parametrize(
    ("spoilt", "half", "given"),
    [
        pytest.param((4, 7), torch.float16, False, id="in the first part"),
        pytest.param((4, -1), torch.bfloat16, False, id="in the last part"),
        pytest.param((5, 2), torch.float16, False, id="where all have it"),
        pytest.param(None, torch.float16, True, id="given"),
    ],
)
def test_an_overflow_leaves_every_bit_and_the_next_step_is_as_if_nothing_had_been(
    request, kind, path, rule, spoilt, half, given
):
    for result, is_untouched, far in held(request, kind, overflow, path, rule, spoilt, half, given):
        assert result == [0.0, 1.0, 0.0]
        assert is_untouched
        assert far <= max(2e-6, BOUND[kind, path])


@pytest.mark.parametrize("path", ["loop", "lists"])
def test_an_overflow_of_an_orthogonal_step_leaves_every_bit_too(path):
    found, is_untouched, far = overflow(
        "whole", path, "LARS", (4, 7), torch.float16, False, direction="orthogonal"
    )
    assert (found, is_untouched) == ([0.0, 1.0, 0.0], True)
    assert far <= (0 if path == "loop" else 1e-4)  # five iterations in lists round otherwise


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan])
@pytest.mark.parametrize("path", PATHS)
@both_rules
def test_minus_infinity_and_nan_are_overflow_too(rule, path, bad):
    both = beside("whole", path, rule, half=torch.float16)
    found, is_untouched, _ = makers.overflow(both, (0, -1), bad=bad)
    assert (found, is_untouched) == ([0.0, 1.0, 0.0], True)
    if rule == "LAMB":
        assert {state["step"].item() for state in both.optimizer.state.values()} == {2}


def written(kind, path, rule):
    return makers.written(beside(kind, path, rule, half=torch.float16))


@every_maker
@both_rules
def test_a_write_to_weights_between_steps_counts_in_their_norm(request, kind, path, rule):
    """Parameters belong to the user, who may write them by `.data` too: no step may carry a norm to the next."""
    for result in held(request, kind, written, path, rule):
        assert result <= max(2e-6, BOUND[kind, path])


def of_half_parameters(kind, path, rule, dtype):
    both = beside(kind, path, rule, dtype=dtype).steps(1)
    dtypes = {value.dtype for state in both.optimizer.state.values() for value in state.values()}
    return makers.distance(
        both.own, [both.place.cut(whole.detach()) for whole in both.wholes]
    ), dtypes


@pytest.mark.sampled(5)
@every_maker
@both_rules
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_parameters_have_float32_state(request, kind, path, rule, dtype):
    """One step: arithmetic is float32, so that only the last rounding of a weight can fall either way, if fused."""
    for result, dtypes in held(request, kind, of_half_parameters, path, rule, dtype):
        assert result <= (torch.finfo(dtype).eps / 5 if path == "fused" else 0)
        assert dtypes == {torch.float32}


def ratios_beside(kind, path, rule):
    both = beside(kind, path, rule).steps(2)
    return [[one.item() for group in trust_ratios(each) for one in group.values()]
            for each in (both.optimizer, both.reference)]  # fmt: skip


@pytest.mark.sampled(5)
@every_maker
@both_rules
def test_the_trust_ratios_that_are_logged_are_those_of_whole_tensors(request, kind, path, rule):
    for result, expected in held(request, kind, ratios_beside, path, rule):
        assert result == pytest.approx(
            expected, rel=1e-5 if kind == "whole" or path == "fused" else 1e-9
        )
        assert len(result) == 3


def backward_after_a_step(kind, path, rule):
    both = beside(kind, path, rule)
    out = (both.own[0] * both.own[0]).sum()
    both.step(1)
    try:
        (out.full_tensor() if kind == "shards" else out).backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.sampled(5)
@every_maker
@both_rules
def test_autograd_sees_that_the_step_wrote(request, kind, path, rule):
    for message in held(request, kind, backward_after_a_step, path, rule):
        assert "modified by an inplace operation" in message
