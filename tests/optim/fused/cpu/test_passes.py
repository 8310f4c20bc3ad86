"""The C++ of the fused steps: how it is built, cached, called, how it rounds. `test_contract.py`: what it computes."""

import ctypes
import os
import stat
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_hybrid.cpp import library as cpp_library
from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.optim.fused import availability
from lightning_hybrid.optim.fused.cpu import build
from lightning_hybrid.optim.fused.option_table import OptionTables, lars_options
from lightning_hybrid.optim.grad_scaling import GradScaling
from tests.optim.test_lars import copies_of, normals, parameters, run, set_grads
from tests.reference.coefficients import coefficients

QUICK = ("-std=c++17", "-O0", "-fPIC", "-shared", "-Wno-psabi")


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


@pytest.fixture(scope="module", params=["as here", "without half instructions"])
def library(request):
    """For this processor, and for one that has no instruction that converts half precision."""
    if request.param == "as here":
        return build.library()
    return build.PASSES.load(cpp_library.find_compiler(), cpp_library.FLAGS, cpp_library.cache_dir())


def test_every_half_is_widened_as_torch_does(library):
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    wide = torch.empty(2**16)
    library.half_to_float(halves.data_ptr(), wide.data_ptr(), 2**16)
    expected = halves.float()
    assert torch.equal(wide.nan_to_num(7.0).view(torch.int32), expected.nan_to_num(7.0).view(torch.int32))
    assert torch.equal(wide.isnan(), expected.isnan())


def test_floats_are_rounded_to_half_as_torch_does(library):
    """Every half, the middle between it and the next, and the floats next to that; infinities, nan, what overflows."""
    halves = torch.arange(0, 0x7C00).to(torch.int16).view(torch.float16).float()
    middles = (halves[1:] + halves[:-1]) / 2
    neighbours = [torch.nextafter(middles, torch.tensor(toward)) for toward in (0.0, torch.inf)]
    odd = torch.tensor([65519.996, 65520.0, 1e30, torch.inf, torch.nan, 2**-25, 1e-30, 0.0])
    floats = torch.cat([halves, middles, *neighbours, odd])
    floats = torch.cat([floats, -floats])
    floats = torch.cat([floats, floats.new_zeros(-len(floats) % 128)])
    rounded = torch.empty(len(floats), dtype=torch.float16)
    library.float_to_half(floats.data_ptr(), rounded.data_ptr(), len(floats))
    expected = floats.half()
    known = ~floats.isnan()
    assert torch.equal(rounded[known].view(torch.int16), expected[known].view(torch.int16))
    assert rounded[~known].isnan().all()


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("copy_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", [LARS, LAMB])
def test_copies_are_the_weights_rounded_as_torch_does(rule, weight_dtype, copy_dtype):
    """Of sizes that end in whole tiles and in parts of one, subnormal halves among them."""
    params = parameters((3, 1000), (128,), (5,), dtype=weight_dtype)
    with torch.no_grad():
        params[0][0].mul_(1e-6)
    optimizer = rule(params, lr=0.1, fused=True)
    optimizer.copies = {param: param.detach().to(copy_dtype) for param in params}
    run(optimizer, params, 2)
    for param, copy in optimizer.copies.items():
        assert torch.equal(copy, param.to(copy_dtype))


@pytest.mark.parametrize("param_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", [LARS, LAMB])
def test_half_parameters_step_as_by_lists_within_their_own_rounding(rule, param_dtype):
    """One step: arithmetic is float32, so that only the last rounding of a weight can fall either way."""
    params = parameters((20, 70), (5,), dtype=param_dtype)
    plain = copies_of(params)
    for own, path in ((params, {"fused": True}), (plain, {"foreach": False})):
        run(rule(own, lr=0.1, **path), own, 1)
    close(params, plain, torch.finfo(param_dtype).eps / 10)


@pytest.mark.parametrize("rule", [LARS, LAMB])
def test_the_number_of_threads_changes_no_bit(rule):
    """Blocks are summed in their order, whichever thread took them. Enough elements that threads are used."""
    ends = []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            params, copies = masters((300, 700), (50_000,), (5,))
            optimizer = rule(params, lr=1.0, weight_decay=0.01, fused=True)
            optimizer.copies = copies
            for step in range(3):
                set_scaled_grads(params, step, 1.0)
                optimizer.step()
            ends.append(params)
    finally:
        torch.set_num_threads(before)
    for one, *others in zip(*ends, strict=True):
        assert all(torch.equal(one, other) for other in others)


@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"trust_clip": 1e-3}, {"momentum_form": "ratio_outside", "eps": 0.5}, {"momentum": 0.0, "maximize": True}],
    ids=str,
)
def test_the_numbers_per_tensor_are_those_of_torchs_own_operations(options, is_joint):
    groups = [LARS(parameters((4,)), lr=3.0, weight_decay=0.1, **options).param_groups[0] for _ in range(3)]
    groups[2] |= {"trust_ratio": False, "excluded_lr_mult": 0.25, "nesterov": True}
    table = lars_options()
    OptionTables([(table, groups)], torch.device("cpu")).take()
    sums = torch.tensor([[4.0, 0.0, 9.0], [0.25, 1.0, 0.0]], dtype=torch.float64)
    scale = torch.tensor(0.25, dtype=torch.float64)
    numbers = torch.empty(3, 6, dtype=torch.float64)
    from lightning_hybrid.optim.fused.cpu.passes import Table

    where = (table.table.data_ptr(), table["lr"].data_ptr(), scale.data_ptr(), sums.data_ptr(), numbers.data_ptr())
    build.library().lars_numbers(ctypes.byref(Table(num_tensors=3)), is_joint, *where)
    expected = coefficients(sums, table, GradScaling(inverse_scale=scale), is_joint=is_joint)
    torch.testing.assert_close(numbers, expected, rtol=1e-15, atol=0)


def test_threads_are_torchs_own():
    """The address is in the OpenMP runtime that torch brought into the process."""
    address = build.openmp_parallel()
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc/self/maps to look at")
    spans = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "omp" in line]
    owners = {span[-1] for span in spans if int(span[0].split("-")[0], 16) <= address < int(span[0].split("-")[1], 16)}
    assert len(owners) == 1
    assert all("torch" in owner for owner in owners)


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


@pytest.mark.parametrize("rule", [LARS, LAMB])
def test_fused_is_refused_where_it_cannot_be(rule):
    with pytest.raises(ValueError, match=r"`fused` \(=True\) excludes `foreach` \(=True\)"):
        rule(parameters((2,)), lr=0.1, fused=True, foreach=True)
    with pytest.raises(ValueError, match=rf"`fused` \(=True\) must be the optimizer's \(=None\).* to {rule.__name__}"):
        rule([{"params": parameters((2,)), "fused": True}], lr=0.1)
    with pytest.raises(ValueError, match=r"`fused` \(=1\) must be one of"):
        rule(parameters((2,)), lr=0.1, fused=1)


# ---- building --------------------------------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch):
    """The commands that built something."""
    commands, original = [], cpp_library._run

    def run_(command):
        if "-o" in command:
            commands.append(command)
        return original(command)

    monkeypatch.setattr(cpp_library, "_run", run_)
    return commands


def test_it_is_built_once_and_then_loaded(tmp_path, built):
    for _ in range(2):
        assert build.PASSES.load(cpp_library.find_compiler(), QUICK, tmp_path / "new").lars_update
    assert len(built) == 1
    (file,) = (tmp_path / "new").iterdir()
    assert file.suffix == ".so"
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_many_at_once_each_load_a_whole_file(tmp_path):
    libraries, threads = [], []
    for _ in range(3):
        threads.append(
            threading.Thread(
                target=lambda: libraries.append(build.PASSES.load(cpp_library.find_compiler(), QUICK, tmp_path))
            )
        )
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(libraries) == 3
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


def test_a_file_that_is_no_library_is_built_anew(tmp_path, built):
    place = tmp_path / f"{build.PASSES.fingerprint(cpp_library.find_compiler(), QUICK)}.so"
    place.write_bytes(b"half a file")
    assert build.PASSES.load(cpp_library.find_compiler(), QUICK, tmp_path).measure
    assert len(built) == 1
    assert place.stat().st_size > 1000


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert build.PASSES.load(cpp_library.find_compiler(), QUICK, tmp_path / "file" / "cache").measure
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_name_changes_with_source_flags_compiler_and_processor(monkeypatch, tmp_path):
    compiler = cpp_library.find_compiler()
    names = {build.PASSES.fingerprint(compiler, QUICK), build.PASSES.fingerprint(compiler, cpp_library.FLAGS)}
    monkeypatch.setattr(cpp_library, "_processor", lambda: "another")
    names.add(build.PASSES.fingerprint(compiler, QUICK))
    (tmp_path / "passes.cpp").write_text("int other;")
    other = cpp_library.CppSource(files=(tmp_path / "passes.cpp",), functions={})
    names.add(other.fingerprint(compiler, QUICK))
    assert len(names) == 4


def test_the_cache_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpp_library.cache_dir() == tmp_path / "lightning_hybrid" / "cpp"


@pytest.fixture
def _nothing_loaded():
    for cached in (build.library, availability.has_kernels):
        cached.cache_clear()
    yield
    for cached in (build.library, availability.has_kernels):
        cached.cache_clear()


@pytest.mark.usefixtures("_nothing_loaded")
@pytest.mark.parametrize("rule", [LARS, LAMB])
@pytest.mark.parametrize(
    ("cxx", "said"), [("no-such-compiler", "there is no no-such-compiler, which"), ("false", "false said: ")]
)
def test_without_a_compiler_the_lists_step_and_one_warning_says_so(rule, cxx, said, monkeypatch):
    monkeypatch.setenv("CXX", cxx)
    params, plain = parameters((9, 8), (4,)), parameters((9, 8), (4,))
    ours, theirs = rule(params, lr=0.1, fused=True), rule(plain, lr=0.1)
    message = f"`fused` .=True. on a CPU needs a C.. compiler.*{said}.*lists are used"
    with pytest.warns(RuntimeWarning, match=message) as seen:
        run(ours, params, 1)
    assert len(seen) == 1
    run(theirs, plain, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not ours._step_supports_amp_scaling
        run(ours, params, 1, first=1)
    run(theirs, plain, 1, first=1)
    close(params, plain, 0.0)


def test_the_compiler_is_the_one_that_cxx_names(monkeypatch):
    monkeypatch.setenv("CXX", "env c++")
    assert cpp_library.find_compiler() == ("env", "c++")
    assert os.environ["CXX"] == "env c++"


@pytest.mark.parametrize("rule", [LARS, LAMB])
def test_memory_that_moved_between_steps_is_found_again(rule):
    """Of a parameter, of a copy, of state, and state that is another tensor: a step at the old place would be lost."""
    ends = []
    for moves in (False, True):
        params, copies = masters((20, 70), (5,), (300,), (9,))
        optimizer = rule(params, lr=0.1, fused=True)
        optimizer.copies = copies
        for step in range(4):
            set_scaled_grads(params, step, 1.0)
            optimizer.step()
            if moves and step < 3:
                state = optimizer.state[params[2]]
                name = "momentum_buffer" if rule is LARS else "exp_avg_sq"
                for tensor in ((params[0],), (copies[params[1]],), (state[name],))[step]:
                    tensor.data = tensor.data.clone()
                if step == 2:
                    optimizer.state[params[3]][name] = optimizer.state[params[3]][name].clone()
        for param, copy in copies.items():
            assert torch.equal(copy, param.half())
        ends.append(params)
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
