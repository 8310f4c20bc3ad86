"""C++ of the fused steps: build, cache, calls and rounding. `test_contract.py` checks the results."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from lightning_hybrid.cpp import library as cpp_library
from lightning_hybrid.optim import LAMB, LARS
from lightning_hybrid.optim.fused import availability
from lightning_hybrid.optim.fused.cpu import build
from tests.optim.makers import (
    FUSED,
    OptimizerPair,
    Whole,
    assert_same_bits,
    copies_of,
    distance,
    normals,
    parameters,
    run,
    set_grads,
)

QUICK = ("-std=c++17", "-O0", "-fPIC", "-shared", "-Wno-psabi")


def on_half_gradients(rule, *shapes):
    """Return a fused step of fp32 parameters on scaled fp16 gradients, together with the loop."""
    return OptimizerPair(Whole(), FUSED, rule, shapes=shapes, half=torch.float16)


@pytest.fixture(scope="module", params=["as here", "without half instructions"])
def library(request):
    """Build the library for this processor, and for one without half-precision conversion."""
    if request.param == "as here":
        return build.library()
    compiler = cpp_library.find_compiler()
    return build.PASSES.load(compiler, cpp_library.FLAGS, cpp_library.cache_dir())


def test_every_half_is_widened_as_torch_does(library):
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    wide = torch.empty(2**16)
    library.half_to_float(halves.data_ptr(), wide.data_ptr(), 2**16)
    expected = halves.float()
    assert torch.equal(wide.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(wide[numbers].view(torch.int32), expected[numbers].view(torch.int32))


def test_floats_are_rounded_to_half_as_torch_does(library):
    """The test covers every half, the midpoints between halves, their neighbors, infinities, nan and overflows."""
    halves = torch.arange(0, 0x7C00).to(torch.int16).view(torch.float16).float()
    middles = (halves[1:] + halves[:-1]) / 2
    neighbors = [torch.nextafter(middles, torch.tensor(toward)) for toward in (0.0, torch.inf)]
    odd = torch.tensor([65519.996, 65520.0, 1e30, torch.inf, torch.nan, 2**-25, 1e-30, 0.0])
    floats = torch.cat([halves, middles, *neighbors, odd])
    floats = torch.cat([floats, -floats])
    floats = torch.cat([floats, floats.new_zeros(-len(floats) % 128)])
    rounded = torch.empty(len(floats), dtype=torch.float16)
    library.float_to_half(floats.data_ptr(), rounded.data_ptr(), len(floats))
    expected = floats.half()
    numbers = ~floats.isnan()
    assert torch.equal(rounded[numbers].view(torch.int16), expected[numbers].view(torch.int16))
    assert rounded[~numbers].isnan().all()


@pytest.mark.parametrize("rule", [LARS, LAMB])
def test_the_number_of_threads_changes_no_bit(rule):
    """Blocks are added in order, whichever thread computed them. The sizes are large enough to use threads."""
    ends = []
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            both = on_half_gradients(rule, (300, 700), (50_000,), (5,)).steps(3)
            ends.append(both.params)
    finally:
        torch.set_num_threads(before)
    for end in ends[1:]:
        assert_same_bits(ends[0], end)


@pytest.mark.long
@pytest.mark.parametrize("values", ["equal", "normal"])
def test_norms_are_right_to_a_millionth_at_37_million_elements(values):
    """Norms are checked before the first update, and after it has moved the weights."""
    if values == "equal":
        weight = nn.Parameter(torch.full((9216, 4096), 0.1))
        grad = torch.ones(9216, 4096)
    else:
        weight = nn.Parameter(torch.randn(9216, 4096))
        grad = torch.randn(9216, 4096)
    weight.grad_dtype = None
    weight.grad = grad.half()
    # The step moves a tenth of the weights, and their norm by half a per cent.
    optimizer = LARS([weight], lr=100.0, fused=True)
    for _ in range(2):
        exact = []
        for tensor in (weight.detach(), weight.grad):
            exact.append(torch.linalg.vector_norm(tensor, dtype=torch.float64).item())
        optimizer.step()
        sums = optimizer._fused._tensor_groups[0].engine.sums
        assert sums.sqrt().flatten().tolist() == pytest.approx(exact, rel=1e-6)


def test_channels_last_expanded_and_missing_gradients():
    kernel = normals(40, 30, 5, 5, dtype=torch.float32)
    weights = [nn.Parameter(kernel.to(memory_format=torch.channels_last))]
    weights += parameters((40, 30, 5, 5), (9000,), (9,))
    plain = copies_of(weights)
    ours = LARS(weights, lr=2.0, weight_decay=0.1, fused=True)
    theirs = LARS(plain, lr=2.0, weight_decay=0.1)
    for step in range(5):
        set_grads(plain, step)
        plain[2].grad = torch.full((), 0.5).expand(9000)
        if step == 2:
            plain[3].grad = None
        for weight, plain_weight in zip(weights, plain, strict=True):
            weight.grad = plain_weight.grad
        ours.step()
        theirs.step()
    assert distance(weights, plain) <= 1e-6


@pytest.fixture
def built(monkeypatch):
    commands = []
    original = cpp_library._run

    def run_(command):
        if "-o" in command:
            commands.append(command)
        return original(command)

    monkeypatch.setattr(cpp_library, "_run", run_)
    return commands


def test_the_library_is_built_once_then_loaded_and_rebuilt_if_its_file_is_damaged(tmp_path, built):
    folder = tmp_path / "new"
    compiler = cpp_library.find_compiler()
    path = folder / f"{build.PASSES.fingerprint(compiler, QUICK)}.so"
    for _ in range(2):
        assert build.PASSES.load(compiler, QUICK, folder).lars_update
    assert len(built) == 1
    assert list(folder.iterdir()) == [path]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    broken = tmp_path / "broken" / path.name  # a path that was loaded is not loaded again
    broken.parent.mkdir()
    broken.write_bytes(b"half a file")
    assert build.PASSES.load(compiler, QUICK, broken.parent).measure_layers
    assert len(built) == 2
    assert broken.stat().st_size > 1000


def test_many_at_once_each_load_a_whole_file(tmp_path):
    args = (cpp_library.find_compiler(), QUICK, tmp_path)
    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(build.PASSES.load, *args) for _ in range(2)]
    for load in loads:
        assert load.result().lars_update
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


def test_the_name_changes_with_source_flags_compiler_and_processor(monkeypatch, tmp_path):
    compiler = cpp_library.find_compiler()
    names = {
        build.PASSES.fingerprint(compiler, QUICK),
        build.PASSES.fingerprint(compiler, cpp_library.FLAGS),
    }
    monkeypatch.setattr(cpp_library, "_processor", lambda: "another")
    names.add(build.PASSES.fingerprint(compiler, QUICK))
    (tmp_path / "passes.cpp").write_text("int other;")
    changed_source = cpp_library.CppSource(files=(tmp_path / "passes.cpp",), functions={})
    names.add(changed_source.fingerprint(compiler, QUICK))
    assert len(names) == 4


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
    ("cxx", "said"),
    [("no-such-compiler", "the compiler no-such-compiler, set by"), ("false", "false failed: ")],
)
def test_without_a_compiler_the_lists_step_and_one_warning_says_so(rule, cxx, said, monkeypatch):
    monkeypatch.setenv("CXX", cxx)
    params = parameters((9, 8), (4,))
    plain = parameters((9, 8), (4,))
    ours = rule(params, lr=0.1, fused=True)
    message = f"`fused` .=True. needs a C.. compiler on a CPU.*{said}.*multi-tensor implementation is used"
    with pytest.warns(RuntimeWarning, match=message) as seen:
        run(ours, params, 1)
    assert len(seen) == 1
    assert not ours._step_supports_amp_scaling
    run(ours, params, 1, first=1)  # another warning would be an error
    run(rule(plain, lr=0.1), plain, 2)
    assert_same_bits(params, plain)


def test_compiler_and_cache_are_those_that_the_environment_names(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "env c++")
    assert cpp_library.find_compiler() == ("env", "c++")
    assert os.environ["CXX"] == "env c++"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cpp_library.cache_dir() == tmp_path / "lightning_hybrid" / "cpp"


@pytest.mark.parametrize("rule", [LARS, LAMB])
def test_memory_that_moved_between_steps_is_found_again(rule):
    ends = []
    for moves in (False, True):
        both = on_half_gradients(rule, (20, 70), (5,), (300,), (9,))
        state = both.optimizer.state
        if rule is LARS:
            name = "momentum_buffer"
        else:
            name = "exp_avg_sq"
        for step in range(4):
            both.step(step)
            if moves and step == 0:
                both.params[0].data = both.params[0].data.clone()
            if moves and step == 1:
                buffer = state[both.params[2]][name]
                buffer.data = buffer.data.clone()
            if moves and step == 2:
                state[both.params[3]][name] = state[both.params[3]][name].clone()
        assert both.distance() <= 2e-6
        ends.append(both.params)
    assert_same_bits(*ends)
