"""Contract of all implementations of LARS and LAMB (loop, lists, C++), on whole tensors, parts and shards.

`fused/cuda/test_kernels.py` checks the Triton kernels, in an interpreter that needs a separate process.
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
    OptimizerPair,
    assert_same_bits,
    copies_of,
    layout_of,
    parameters,
    run,
    set_grads,
)
from tests.precision.test_optimizer_protocol import HostReads
from tests.scenes import same
from tests.toy import error_of

# ---- steps on whole tensors with any flags ---------------------------------------------------------------------------

SHAPES = [(6, 5), (), (0, 3), (3, 700)]
# Every pair of values.
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
    paths = {"default": {}, **PATHS}
    for rule, path, switches in itertools.product(LAST_SWITCH, paths, SWITCHES):
        name, default = LAST_SWITCH[rule]
        flags = {
            **paths[path],
            "maximize": switches[0],
            "capturable": switches[1],
            name: switches[2] != default,
        }
        bits = [str(int(switch)) for switch in switches]
        yield pytest.param(rule, flags, id="-".join([rule.func.__name__, path, *bits]))


every_case = pytest.mark.parametrize(("rule", "flags"), list(cases()))
every_rule = pytest.mark.parametrize("rule", LAST_SWITCH, ids=["LARS", "LAMB"])


def two_groups(params):
    return [{"params": params[:2]}, {"params": params[2:], "trust_ratio": False, "lr": 0.25}]


def pair(rule, flags, dtype=torch.float32):
    params = parameters(*SHAPES, dtype=dtype)
    second_params = copies_of(params)
    first = rule(two_groups(params), **flags)
    second = rule(two_groups(second_params), **flags)
    return (first, params), (second, second_params)


def assert_same_end(first_pair, second_pair, num_steps=2, first_step=3):
    for optimizer, params in (first_pair, second_pair):
        run(optimizer, params, num_steps, first=first_step)
    assert_same_bits(first_pair[1], second_pair[1])


@pytest.mark.sampled(3)
@every_case
def test_a_step_moves_parameters_with_a_gradient_alone_and_writes_no_gradient(rule, flags):
    (optimizer, params), _ = pair(rule, flags)
    before = copies_of(params)
    optimizer.step()  # without any gradient
    assert_same_bits(params, before)
    set_grads(params, 1)
    params[1].grad = None
    with_grad = [param for param in params if param.grad is not None]
    grads = [param.grad.clone() for param in with_grad]
    versions = [param.grad._version for param in with_grad]
    optimizer.step()
    assert same([param.grad for param in with_grad], grads)
    assert [param.grad._version for param in with_grad] == versions
    is_unchanged = list(map(torch.equal, params, before))
    assert is_unchanged == [False, True, True, False]
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
    """This includes half-precision parameters, whose state torch's own `load_state_dict` would round."""
    for dtype, medium in (
        (torch.bfloat16, "file"),
        (torch.bfloat16, "deepcopy"),
        (torch.float32, "pickle"),
    ):
        (optimizer, params), second = pair(rule, flags, dtype)
        run(optimizer, params, 3)
        run(*second, 3)
        if medium == "file":
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            resumed = rule(two_groups(copies_of(params)), **flags)
            resumed.load_state_dict(torch.load(file, weights_only=True))
        elif medium == "deepcopy":
            resumed = copy.deepcopy(optimizer)
        else:
            resumed = pickle.loads(pickle.dumps(optimizer))
        resumed_params = resumed.param_groups[0]["params"] + resumed.param_groups[1]["params"]
        assert resumed.param_groups[1]["lr"] == 0.25
        assert_same_end(second, (resumed, resumed_params))
        for param in resumed_params:
            assert {value.dtype for value in resumed.state[param].values()} == {torch.float32}


@every_rule
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(PATHS, 2)))
def test_state_saved_by_one_path_is_continued_by_another(rule, source, target):
    """Lists and loop continue each other bit for bit, and the fused step within five roundings per step."""
    (optimizer, params), whole = pair(rule, PATHS[source])
    run(optimizer, params, 3)
    run(*whole, 5)
    moved_params = copies_of(params)
    moved = rule(two_groups(moved_params), **PATHS[target])
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group.update({key: PATHS[target].get(key) for key in ("foreach", "fused") if key in group})
    moved.load_state_dict(saved)
    run(moved, moved_params, 2, first=3)
    bound = 2e-6 if "fused" in (source, target) else 0.0
    assert makers.distance(moved_params, whole[1]) <= bound


@pytest.mark.sampled(3)
@every_case
def test_a_closure_runs_with_autograd_before_the_step(rule, flags):
    (optimizer, params), (plain, plain_params) = pair(rule, flags)

    def closure(optimizer, params):
        loss = sum(param.square().sum() for param in params)
        loss.backward()
        return loss

    expected = sum(param.detach().square().sum() for param in params)
    assert torch.equal(optimizer.step(partial(closure, optimizer, params)), expected)
    closure(plain, plain_params)
    assert plain.step() is None
    assert_same_bits(params, plain_params)


@pytest.mark.sampled(3)
@every_case
def test_a_rate_may_be_a_tensor_and_change_in_place(rule, flags):
    (number, number_params), (tensor, tensor_params) = pair(rule, flags)
    for group in tensor.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    for step in range(3):
        for optimizer, params in ((number, number_params), (tensor, tensor_params)):
            run(optimizer, params, 1, first=step)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
    assert makers.distance(number_params, tensor_params) <= 1e-6
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
    """An optimizer declares the protocol of fused optimizers exactly if its step is fused."""
    (ours, our_params), (theirs, their_params) = pair(rule, flags)
    assert getattr(ours, "_step_supports_amp_scaling", False) is bool(flags.get("fused"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    scaler.scale(torch.ones(()))
    for step in range(3):
        set_grads(their_params, step)
        for our_param, their_param in zip(our_params, their_params, strict=True):
            our_param.grad = their_param.grad * scaler.get_scale()
        before = copies_of(our_params)
        if step == 1:
            our_params[0].grad[3, 3] = torch.inf
        scaler.step(ours)
        scaler.update()
        if step == 1:
            assert_same_bits(our_params, before)
        else:
            theirs.step()
    assert scaler.get_scale() == 2.0**9
    assert makers.distance(our_params, their_params) <= 2e-6


@pytest.mark.sampled(3)
@every_case
def test_capturable_reads_nothing_on_the_host_with_rates_as_tensors(rule, flags):
    """A CUDA graph needs `capturable`. Without it, rates and counts on a CPU are read, which costs nothing."""
    (optimizer, params), _ = pair(rule, flags)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    run(optimizer, params, 1)
    with HostReads() as reads:
        run(optimizer, params, 2, first=1)
    if flags["capturable"]:
        assert not reads.by_file
    else:
        assert reads.by_file or "fused" in flags


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
        words = [rule.func.__name__]
        words += [f"{key}={value}" for key, value in options.items()]
        words.append("scaled" if is_scaled else "plain")
        is_quick = rule is LAMB_ and options == {"foreach": True} and not is_scaled
        marks = [] if is_quick else [pytest.mark.long]
        yield pytest.param(rule, options, is_scaled, id="-".join(words), marks=marks)


@pytest.mark.parametrize(("rule", "options", "is_scaled"), list(compiled_cases()))
def test_a_compiled_step_is_one_graph_and_the_same_step(rule, options, is_scaled):
    """The learning rates change, so that a value frozen into the graph would show. Rounding differs slightly."""
    (plain, params), (compiled, compiled_params) = pair(rule, {"maximize": True, **options})
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
        set_grads(compiled_params, seed)
        for optimizer in (plain, compiled):
            if is_scaled:
                optimizer.grad_scale = torch.tensor(4.0)
                optimizer.found_inf = torch.tensor(float(seed == 1))
        plain.step()
        step()
        for group in (*plain.param_groups, *compiled.param_groups):
            group["lr"] *= 0.5
    # The first step creates the state, and the second one finds it. No rate and no count is compiled into a graph.
    assert 1 <= len(graphs) <= 2
    assert makers.distance(compiled_params, params) <= 5e-6


# ---- every maker compared with an optimizer of whole tensors ---------------------------------------------------------

RULE = {"LARS": LARS, "LAMB": LAMB}
# Maximum distance from whole tensors. Loop and lists add squares in float64, and parts in the order of blocks, which
# gives the same bits. Fused passes add 128 squares at a time in float32, which differs from the loop and depends on the
# cut.
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
OPTIONS_OF_EVERY_FORM = [
    {},
    {"nesterov": True},
    {"trust_clip": 1.0, "lr": 0.01},
    {"momentum": 0.0, "maximize": True, "excluded_lr_mult": 0.01},
]
FORMS_OF_LARS = itertools.product(
    get_args(MomentumForm), get_args(Denominator), OPTIONS_OF_EVERY_FORM
)
OPTIONS = {
    "LARS": [
        {"momentum_form": form, "denominator": denominator, **options}
        for form, denominator, options in FORMS_OF_LARS
    ],
    "LAMB": [
        {},
        {"max_grad_norm": 0.5, "maximize": True},
        {"bias_correction": False, "trust_clip": 0.05},
        {"weight_norm_bounds": (3.0, 4.0), "excluded_lr_mult": 0.25},
        {"bias_correction": False, "max_grad_norm": 0.5, "eps": 0.0},
    ],
}
# Every value of each option.
SOME = {"LARS": OPTIONS["LARS"][::5], "LAMB": OPTIONS["LAMB"][::2]}


def results_by_rank(request, kind, measure, *args):
    """Yield rank and result of `measure(kind, *args)`, from this process for whole tensors and else from two ranks."""
    if kind == "whole":
        results = [measure(kind, *args)]
    else:
        results = request.getfixturevalue("two_ranks").run(measure, kind, *args)
    return enumerate(results)


# Rows that ranks share evenly, unevenly, and of which only one rank has any, and a chunk of the fused passes with a
# remainder.
SHARDED = [(8, 5), (5, 7), (1, 6), (3,), (4, 5000), (2, 3, 2, 2)]


def pair_of(kind, path, rule, **options):
    whole_path = PATHS[path]
    if kind == "whole":
        whole_path = LOOP
    if kind == "shards":
        options["shapes"] = SHARDED
    return OptimizerPair(layout_of(kind), PATHS[path], RULE[rule], whole_path=whole_path, **options)


def distances(kind, path, rule, list_of_options):
    return [pair_of(kind, path, rule, **options).steps(3).distance() for options in list_of_options]


@pytest.mark.sampled(3)
@every_maker
@both_rules
def test_the_step_is_that_of_whole_tensors_in_every_form(request, kind, path, rule):
    options = OPTIONS[rule] if kind == "whole" else SOME[rule]
    for rank, result in results_by_rank(request, kind, distances, path, rule, options):
        assert max(result) <= BOUND[kind, path], f"rank {rank}: {result}"


@pytest.mark.sampled(5)
@every_maker
@both_rules
@pytest.mark.parametrize("dtypes", [{"half": torch.float16}, {"dtype": torch.float64}], ids=str)
def test_the_step_is_that_of_whole_tensors_of_any_dtype(request, kind, path, rule, dtypes):
    options = {"LARS": {"denominator": "joint"}, "LAMB": {"max_grad_norm": 0.5}}[rule]
    bound = BOUND[kind, path]
    if kind == "whole":
        bound = max(2e-6, bound)
    if "dtype" in dtypes:
        bound = 1e-13
    both_options = [dtypes, {**dtypes, **options}]
    for rank, result in results_by_rank(request, kind, distances, path, rule, both_options):
        assert max(result) <= bound, f"rank {rank}: {result}"


def overflow(kind, path, rule, spoilt, half, is_verdict_given, **options):
    if not options:
        options = {"LARS": {"denominator": "joint"}, "LAMB": {"max_grad_norm": 0.5}}[rule]
    both = pair_of(kind, path, rule, half=half, **options)
    return makers.overflow(both, spoilt, is_verdict_given)


@pytest.mark.sampled(5)
@every_maker
@both_rules
@pytest.mark.parametrize(
    ("spoilt", "half", "is_verdict_given"),
    [
        pytest.param((4, 7), torch.float16, False, id="in the first part"),
        pytest.param((4, -1), torch.bfloat16, False, id="in the last part"),
        pytest.param((5, 2), torch.float16, False, id="where all have it"),
        pytest.param(None, torch.float16, True, id="verdict given"),
    ],
)
def test_an_overflow_leaves_every_bit_and_the_next_step_is_as_if_nothing_had_been(
    request, kind, path, rule, spoilt, half, is_verdict_given
):
    args = (path, rule, spoilt, half, is_verdict_given)
    for rank, result in results_by_rank(request, kind, overflow, *args):
        verdicts, is_untouched, distance = result
        assert verdicts == [0.0, 1.0, 0.0], f"rank {rank}"
        assert is_untouched, f"rank {rank}"
        assert distance <= max(2e-6, BOUND[kind, path]), f"rank {rank}"


@pytest.mark.parametrize("path", ["loop", "lists"])
def test_an_overflow_of_an_orthogonal_step_leaves_every_bit_too(path):
    verdicts, is_untouched, distance = overflow(
        "whole", path, "LARS", (4, 7), torch.float16, False, direction="orthogonal"
    )
    assert verdicts == [0.0, 1.0, 0.0]
    assert is_untouched
    bound = 0.0 if path == "loop" else 1e-4  # five iterations in lists round differently
    assert distance <= bound


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan])
@pytest.mark.parametrize("path", PATHS)
@both_rules
def test_minus_infinity_and_nan_are_overflow_too(rule, path, bad):
    both = pair_of("whole", path, rule, half=torch.float16)
    verdicts, is_untouched, _ = makers.overflow(both, (0, -1), bad=bad)
    assert verdicts == [0.0, 1.0, 0.0]
    assert is_untouched
    if rule == "LAMB":
        assert {state["step"].item() for state in both.optimizer.state.values()} == {2}


def written(kind, path, rule):
    return makers.written(pair_of(kind, path, rule, half=torch.float16))


@every_maker
@both_rules
def test_a_write_to_weights_between_steps_counts_in_their_norm(request, kind, path, rule):
    """Users may write parameters, even through `.data`, so no step may carry a norm over to the next one."""
    for rank, distance in results_by_rank(request, kind, written, path, rule):
        assert distance <= max(2e-6, BOUND[kind, path]), f"rank {rank}"


def of_half_parameters(kind, path, rule, dtype):
    both = pair_of(kind, path, rule, dtype=dtype).steps(1)
    dtypes = {value.dtype for state in both.optimizer.state.values() for value in state.values()}
    cuts = [both.layout.cut(whole.detach()) for whole in both.wholes]
    return makers.distance(both.params, cuts), dtypes


@pytest.mark.sampled(5)
@every_maker
@both_rules
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_parameters_have_float32_state(request, kind, path, rule, dtype):
    """After one step in float32, only the last rounding of a weight may differ, and only in a fused step."""
    bound = torch.finfo(dtype).eps / 5 if path == "fused" else 0.0
    for rank, result in results_by_rank(request, kind, of_half_parameters, path, rule, dtype):
        distance, dtypes = result
        assert distance <= bound, f"rank {rank}"
        assert dtypes == {torch.float32}, f"rank {rank}"


def ratios_of_both(kind, path, rule):
    both = pair_of(kind, path, rule).steps(2)
    return ratios_of(both.optimizer), ratios_of(both.reference)


def ratios_of(optimizer):
    ratios = []
    for group in trust_ratios(optimizer):
        ratios += [ratio.item() for ratio in group.values()]
    return ratios


@pytest.mark.sampled(5)
@every_maker
@both_rules
def test_the_trust_ratios_that_are_logged_are_those_of_whole_tensors(request, kind, path, rule):
    bound = 1e-5 if kind == "whole" or path == "fused" else 1e-9
    for rank, result in results_by_rank(request, kind, ratios_of_both, path, rule):
        ratios, expected = result
        assert ratios == pytest.approx(expected, rel=bound), f"rank {rank}"
        assert len(ratios) == 3, f"rank {rank}"


def backward_after_a_step(kind, path, rule):
    both = pair_of(kind, path, rule)
    out = (both.params[0] * both.params[0]).sum()
    if kind == "shards":
        out = out.full_tensor()
    both.step(1)
    return error_of(out.backward)


@pytest.mark.sampled(5)
@every_maker
@both_rules
def test_autograd_sees_that_the_step_wrote(request, kind, path, rule):
    for rank, message in results_by_rank(request, kind, backward_after_a_step, path, rule):
        assert "modified by an inplace operation" in message, f"rank {rank}"
