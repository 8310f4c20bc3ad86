"""Exchange of fp32 parameters and half-precision copies, tensor by tensor, without a Trainer and without ranks."""

import copy
import pickle
import threading

import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils import parametrizations, prune

from lightning_hybrid.precision import device_writes, parameter_pair
from lightning_hybrid.precision.half_window import HalfPrecisionWindow
from lightning_hybrid.precision.parameter_pair import ParameterPair, check_exchange
from tests.scenes import same

F16 = torch.float16


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.batch_norm = nn.BatchNorm2d(4)
        self.plain_batch_norm = nn.BatchNorm2d(4, affine=False)
        self.layer_norm = nn.LayerNorm(4)
        self.group_norm = nn.GroupNorm(2, 4)
        self.rms_norm = nn.RMSNorm(4)
        self.instance_norm = nn.InstanceNorm1d(4, affine=True)
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight  # tied
        self.scale = nn.Parameter(torch.rand(4))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.rand(4), requires_grad=False)
        self.register_buffer("position", torch.rand(4))
        self.register_buffer("index", torch.arange(4))
        self.register_buffer("fp64", torch.rand(4, dtype=torch.float64))
        self.metric = torchmetrics.MeanMetric()
        self.metric.register_buffer("inside", torch.rand(2))


TRAINED = {
    "conv.weight",
    "conv.bias",
    "embedding.weight",
    "head.weight",
    "head.bias",
    "scale",
    "empty",
}


def halves(module):
    state = module.state_dict(keep_vars=True)
    return {name for name, tensor in state.items() if tensor.dtype is F16}


# ---- the exchange ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_trained_parameters_are_half_while_the_window_is_open_and_only_then(frozen):
    module = Everything()
    window = HalfPrecisionWindow(module, F16, frozen=frozen)
    assert halves(module) == set()
    with window.opened():
        assert halves(module) == (TRAINED | {"frozen"} if frozen else TRAINED)
        assert module.fp64.dtype is torch.float64
        assert module.metric.inside.dtype is torch.float32
    assert halves(module) == set()


def test_parameters_keep_identity_values_and_memory():
    module = Everything()
    before = copy.deepcopy(module.state_dict())
    identities = [id(parameter) for parameter in module.parameters()]
    addresses = [parameter.data_ptr() for parameter in module.parameters()]
    view = module.conv.weight.detach()
    window = HalfPrecisionWindow(module, F16)
    for _ in range(3):
        with window.opened():
            assert [id(parameter) for parameter in module.parameters()] == identities
            assert module.head.weight is module.embedding.weight
    assert same(module.state_dict(), before)
    assert [parameter.data_ptr() for parameter in module.parameters()] == addresses
    with torch.no_grad():
        module.conv.weight.add_(1.0)
    assert torch.equal(view, module.conv.weight)


def test_opening_rounds_what_was_written_outside_by_any_way():
    parameter = nn.Parameter(torch.zeros(3))
    module = nn.ParameterList([parameter])
    window = HalfPrecisionWindow(module, F16)
    writes = [
        lambda value: parameter.data.copy_(value),
        lambda value: setattr(parameter, "data", value.clone()),
        lambda value: parameter.detach().numpy().__setitem__(slice(None), value.numpy()),
        lambda value: module.load_state_dict({"0": value}),
        lambda value: module.state_dict()["0"].copy_(value),
    ]
    for index, write in enumerate(writes):
        value = torch.tensor([1.0, 1.0 + 2**-12, 3.1]) * (index + 1)
        write(value)
        with window.opened():
            assert torch.equal(parameter.detach(), value.half()), index
        assert torch.equal(parameter.detach(), value), "all fp32 digits stay"


def test_closing_takes_over_what_was_written_inside_and_nothing_else():
    value = torch.tensor([1.0 + 2**-12, 2.0 + 2**-11, 3.1, -0.0])
    parameter = nn.Parameter(value.clone())
    window = HalfPrecisionWindow(nn.ParameterList([parameter]), F16)
    with pytest.warns(UserWarning, match="was written inside"), window.opened():
        parameter.data[2] = 0.1
    assert torch.equal(
        parameter.detach(),
        torch.tensor([value[0], value[1], torch.tensor(0.1).half().float(), -0.0]),
    )


@pytest.fixture(params=["host", "device"])
def compared_on(request, monkeypatch):
    """Compare copies on the host, or as on a GPU, where the host does not wait for the result."""
    if request.param == "device":
        monkeypatch.setattr(parameter_pair, "_HOST_DEVICES", set())
    return request.param


def test_a_write_through_memory_that_was_kept_outside_is_undone_with_a_warning(compared_on):
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    kept = module.weight.data
    window = HalfPrecisionWindow(module, F16)
    with (
        pytest.warns(UserWarning, match="`weight` was written inside.*`.data` tensor.*are undone"),
        window.opened(),
    ):
        kept.fill_(7.0)
    assert torch.equal(module.weight.half(), before.half())


def test_a_write_inside_is_found_whichever_device_compares(compared_on):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    window = HalfPrecisionWindow(module, F16)
    with window.opened():
        pass
    with pytest.warns(UserWarning, match=r"`1.bias` was written inside"), window.opened():
        module[1].bias.data.fill_(3.0)
    assert module[1].bias.tolist() == [3.0, 3.0]


def test_a_device_is_searched_in_the_first_closings_and_in_some_later_ones(monkeypatch):
    monkeypatch.setattr(parameter_pair, "_HOST_DEVICES", set())
    searched = []
    window = HalfPrecisionWindow(nn.Linear(2, 2), F16)
    search = window._search
    for closing in range(device_writes.EVERY_CLOSINGS + 2):
        if search.is_on:
            searched.append(closing)
        with window.opened():
            pass
    first = list(range(device_writes.NUM_FIRST_CLOSINGS))
    assert searched == [*first, device_writes.EVERY_CLOSINGS]


def test_an_answer_that_has_not_arrived_is_not_waited_for(monkeypatch):
    is_here = []
    monkeypatch.setattr(
        device_writes, "_sent_to_host", lambda counts: (counts, lambda: bool(is_here))
    )
    search = device_writes.WriteSearch()
    zero = torch.zeros(2, dtype=torch.int16)
    search.compare(["a", "b"], [zero, zero], [zero, zero + 1])
    search.end_closing()
    assert search.take_written() is None
    assert not search.is_on
    is_here.append(True)
    assert search.take_written() == "b"
    assert search.is_on


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_write_into_one_element_of_a_large_tensor_is_found(layout):
    numel = parameter_pair._BLOCK
    parameter = nn.Parameter(torch.rand(numel // 64 + 3, 4, 4, 4).to(memory_format=layout))
    before = parameter.detach().clone()
    window = HalfPrecisionWindow(nn.ParameterList([parameter]), F16)
    with pytest.warns(UserWarning, match="was written inside"), window.opened():
        parameter.data[-1, 1, 2, 3] = 7.0
    expected = before.clone()
    expected[-1, 1, 2, 3] = 7.0
    assert torch.equal(parameter.detach(), expected)


@pytest.mark.parametrize(
    "numel", [0, 1, 4, 7, parameter_pair._BLOCK + 1, parameter_pair._BLOCK + 4]
)
def test_a_difference_in_the_last_element_is_found_for_any_number_of_elements(numel):
    fp32 = torch.rand(numel)
    half = fp32.half()
    assert parameter_pair.is_rounded(half, fp32)
    half[-1:] = 7.0
    assert parameter_pair.is_rounded(half, fp32) == (numel == 0)


def test_large_parameters_of_other_devices_are_compared_without_blocks_in_the_hosts_memory(
    monkeypatch,
):
    """An unknown device type stands for a GPU, whose tensors cannot be compared with those of the host."""
    monkeypatch.setattr(parameter_pair, "_HOST_DEVICES", set())
    monkeypatch.delattr(parameter_pair, "_same_bits")
    parameter = nn.Parameter(torch.rand(parameter_pair._BLOCK + 4))
    window = HalfPrecisionWindow(nn.ParameterList([parameter]), F16)
    with window.opened():
        assert not window.is_written()


def test_the_comparison_of_other_devices_gives_the_bits_of_the_cpus():
    """The comparison without a result on the host matches the CPU's. Another device type enables it here."""
    value = torch.tensor([1.0 + 2**-12, float("nan"), float("inf"), 3.1, 1e-8, 7e4])
    written = torch.tensor([False, False, True, True, False, False])
    half = torch.where(written, torch.tensor(2.5), value).half()
    results = []
    for is_cpu in (True, False):
        pair = ParameterPair("p", nn.Parameter(value.clone()), F16)
        pair.open()
        pair.parameter.data.copy_(half)
        if is_cpu:
            pair.take_writes_()
        else:
            pair.take_writes_without_waiting_()
        results.append(pair.fp32.detach().clone())
        pair.close()
    assert results[0].view(torch.int32).tolist() == results[1].view(torch.int32).tolist()
    assert torch.equal(results[0][written], torch.tensor([2.5, 2.5]))
    assert torch.equal(results[0][~written].nan_to_num(9.0), value[~written].nan_to_num(9.0))


def test_a_graph_that_waits_for_its_backward_survives_another_opening_but_not_a_changed_weight():
    parameter = nn.Parameter(torch.ones(2, 2))
    window = HalfPrecisionWindow(nn.ParameterList([parameter]), F16)
    for changes in (False, True):
        x = torch.ones(2, 2, dtype=F16, requires_grad=True)
        with window.opened():
            loss = (x @ parameter).sum()
        if changes:
            with torch.no_grad():
                parameter.mul_(2.0)
        with window.opened():
            if changes:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()


def test_a_value_written_inside_through_a_state_dict_counts():
    module = nn.Linear(2, 2, bias=False)
    window = HalfPrecisionWindow(module, F16)
    with window.opened():
        module.state_dict()["weight"].fill_(1.0 + 2**-12)
    assert torch.equal(module.weight.detach(), torch.full((2, 2), 1.0 + 2**-12))


def test_an_interrupt_between_two_parameters_leaves_an_fp32_module(monkeypatch):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    window = HalfPrecisionWindow(module, F16)
    before = copy.deepcopy(module.state_dict())
    exchange = ParameterPair._exchange
    calls = []

    def interrupted(pair):
        calls.append(pair)
        if len(calls) == 3:
            raise KeyboardInterrupt
        exchange(pair)

    monkeypatch.setattr(ParameterPair, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        window.open()
    assert halves(module) == {"0.weight", "0.bias"}
    window.close()
    assert same(module.state_dict(), before)
    assert halves(module) == set()


def test_after_an_error_that_user_code_catches_a_step_goes_on_in_half_precision():
    module = nn.Linear(2, 2)
    window = HalfPrecisionWindow(module, F16)
    with window.opened():
        with pytest.raises(ZeroDivisionError), window.shut():
            raise ZeroDivisionError
        assert halves(module) == {"weight", "bias"}
    assert not halves(module)


def test_hooks_and_requires_grad_go_along():
    parameter = nn.Parameter(torch.ones(2))
    window = HalfPrecisionWindow(nn.ParameterList([parameter]), F16)
    calls = []
    parameter.register_hook(lambda gradient: calls.append(gradient.dtype))
    parameter.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    with window.opened():
        parameter.sum().backward()
    assert calls == [F16, "accumulated"]
    assert parameter.grad.dtype is torch.float32
    parameter.requires_grad_(False)
    with window.opened():
        assert not parameter.requires_grad
        parameter.requires_grad_(True)
    assert parameter.requires_grad


def test_memory_of_another_dtype_inside_of_a_step_is_refused_by_name():
    module = nn.Linear(2, 2)
    window = HalfPrecisionWindow(module, F16)
    window.open()
    module.weight.data = module.weight.data.float()
    with pytest.raises(RuntimeError, match=r"`weight.data` was replaced inside a training step"):
        window.check_dtypes()


def test_a_torch_that_does_not_exchange_is_refused_by_name(monkeypatch):
    check_exchange.cache_clear()
    check_exchange()
    check_exchange.cache_clear()
    monkeypatch.setattr(torch._C, "_swap_tensor_impl", lambda first, second: None)
    with pytest.raises(MisconfigurationException, match=r"`torch` \(=.*cannot swap the tensors"):
        check_exchange()


# ---- parameters that stay fp32 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reparametrize",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", amount=1),
    ],
    ids=["weight_norm", "spectral_norm", "pruned"],
)
def test_parameters_that_a_weight_is_computed_from_stay_fp32(reparametrize):
    layer = reparametrize(nn.Linear(4, 3, bias=False))
    window = HalfPrecisionWindow(nn.Sequential(layer, nn.Linear(3, 2)), F16)
    with window.opened():
        layer(torch.ones(1, 4))
        assert layer.weight.dtype is torch.float32


@pytest.mark.parametrize("first_is_kept", [True, False])
@pytest.mark.parametrize("kept", [nn.Embedding, nn.Linear])
def test_a_shared_parameter_stays_fp32_if_one_of_its_places_does(first_is_kept, kept):
    module = nn.Module()
    embedding = nn.Embedding(4, 3)
    head = nn.Linear(3, 4, bias=False)
    head.weight = embedding.weight
    if first_is_kept:
        names = ("embedding", "head")
    else:
        names = ("head", "embedding")
    for name in names:
        setattr(module, name, {"embedding": embedding, "head": head}[name])
    module.other = nn.Conv1d(1, 1, 1)
    window = HalfPrecisionWindow(module, F16, keep_fp32=(kept,))
    with window.opened():
        assert embedding.weight.dtype is torch.float32
        assert module.other.weight.dtype is F16


def test_a_trained_parameter_that_was_half_is_fp32_until_the_end():
    module = Everything()
    module.conv.bias.data = module.conv.bias.data.half()
    before = copy.deepcopy(module.state_dict())
    window = HalfPrecisionWindow(module, F16)
    assert module.conv.bias.dtype is torch.float32
    window.end()
    assert module.conv.bias.dtype is F16
    assert same(module.state_dict(), before)


@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "rms_norm", "instance_norm"])
def test_normalization_computes_in_fp32_and_returns_half_inside(name):
    """The squares of values of 300 are 90,000, which exceeds fp16, so only fp32 statistics work."""
    module = Everything()
    window = HalfPrecisionWindow(module, F16)
    layer = getattr(module, name)
    x = (300 * torch.randn(6, 4, 4)).half()
    expected = copy.deepcopy(layer)
    with window.opened():
        y = layer(x)
    assert y.dtype is F16
    assert torch.equal(y, expected(x.float()).half())
    assert torch.equal(layer(x.float()), expected(x.float())), "outside it is what it was"
    assert not layer._forward_hooks


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_state_dicts_copies_and_pickles_taken_inside_are_fp32():
    module = Everything()
    exact = copy.deepcopy(module.state_dict())
    window = HalfPrecisionWindow(module, F16)
    with window.opened():
        copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        for source in (module, *copies):
            assert same(dict(source.state_dict()), dict(exact))
        of_part = {f"conv.{name}": value for name, value in module.conv.state_dict().items()}
        assert same(of_part, {name: exact[name] for name in of_part})
        assert module.conv.state_dict(keep_vars=True)["weight"] is module.conv.weight
    for copied in copies:
        assert {type(parameter) for parameter in copied.parameters()} == {nn.Parameter}
        assert halves(copied) == set()


def test_a_state_dict_that_is_loaded_inside_keeps_all_digits():
    module = nn.Linear(3, 2)
    window = HalfPrecisionWindow(module, F16)
    state = {name: torch.rand_like(value) for name, value in module.state_dict().items()}
    with window.opened():
        module.load_state_dict(state)
        assert torch.equal(module.weight.detach(), state["weight"].half())
    assert same(dict(module.state_dict()), state)


def test_a_copy_made_outside_is_a_plain_module():
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    window = HalfPrecisionWindow(module, F16)
    copied = copy.deepcopy(module)
    pickled = pickle.loads(pickle.dumps(module))
    scripted = torch.jit.script(module)
    with window.opened():
        assert module[0].weight.dtype is F16
    for network in (copied, pickled, scripted, module):
        assert torch.equal(network(x), copy.deepcopy(module)(x))


def test_another_thread_that_calls_the_module_inside_is_refused_by_name():
    module = nn.Sequential(nn.Linear(2, 2))
    window = HalfPrecisionWindow(module, F16)
    errors = []

    def play():
        try:
            module(torch.ones(1, 2))
        except RuntimeError as error:
            errors.append(str(error))

    for is_open in (False, True):
        if is_open:
            window.open()
        thread = threading.Thread(target=play, name="player")
        thread.start()
        thread.join()
    assert len(errors) == 1
    assert "was called in thread `player` during a training step" in errors[0]


def test_a_write_inside_is_said_once_with_the_name_of_the_parameter():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    window = HalfPrecisionWindow(module, F16)
    with window.opened():
        pass

    def write():
        with window.opened(), torch.no_grad():
            module[1].bias.add_(1.0)

    with pytest.warns(UserWarning, match=r"`1.bias` was written inside a training step"):
        write()
    write()


def test_copies_of_a_dead_module_are_removed_unless_another_module_shares_them():
    first = nn.Linear(2, 2)
    second = nn.Linear(2, 2)
    second.weight = first.weight
    window = HalfPrecisionWindow(first, torch.float16)
    window.add(second)
    bias = id(first.bias)
    assert window.remove_dead() == set()
    del first
    assert window.remove_dead() == {bias}
    assert set(window.pairs) == {id(second.weight), id(second.bias)}
    with window.opened():
        assert second.weight.dtype is torch.float16
