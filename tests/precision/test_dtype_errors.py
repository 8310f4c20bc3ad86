"""Notes on errors about half-precision dtypes: each note gives a remedy that works, and other errors get no note."""

import builtins
import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn

from lightning_hybrid import MasterWeightPrecision
from lightning_hybrid.flavours.fabric import MasterWeightPrecision as FabricMasterWeightPrecision
from lightning_hybrid.precision.dtype_errors import add_cure
from lightning_hybrid.precision.fp16_emulation import Fp16MatmulEmulation
from tests.checkout import ROOT
from tests.scenes import fit
from tests.toy import NUM_FEATURES, Toy

HALF = {"16-true": torch.float16, "bf16-true": torch.bfloat16}
# torch 2.13 supports complex64 from bfloat16 and an imaginary number, so the operations below work.
HAS_COMPLEX_BFLOAT16 = hasattr(torch, "bcomplex32")
START = "keeps trained parameters in half precision"


def notes_of(error, precision="16-true"):
    add_cure(error, precision)
    return getattr(error, "__notes__", [])


def notes_of_text(kind, message):
    return notes_of(getattr(builtins, kind, Exception)(message))


# ---- errors with a note ----------------------------------------------------------------------------------------------


def put_by_index(x, w):
    x.clone()[torch.zeros(1, dtype=torch.int64)] = w[:1]


ROW = torch.zeros(2, 4, dtype=torch.int64)
TWO_TENSORS = {
    "lerp": lambda x, w: torch.lerp(x, w, 0.5),
    "index_add": lambda x, w: x.index_add(0, ROW[:, 0], w),
    "index_copy": lambda x, w: x.clone().index_copy_(0, ROW[:, 0], w),
    "scatter": lambda x, w: x.scatter(0, ROW, w),
    "scatter_add": lambda x, w: x.scatter_add(0, ROW, w),
    "scatter_reduce": lambda x, w: x.scatter_reduce(0, ROW, w, "amax"),
    "masked_scatter": lambda x, w: x.masked_scatter(ROW == 0, w),
    "index_put": put_by_index,
    "complex": lambda x, w: torch.complex(x, w),
    "lu_solve": lambda x, w: torch.linalg.lu_solve(
        x[:, :2], torch.tensor([1, 2], dtype=torch.int32), w[:, :2]
    ),
    "without autocast": lambda x, w: torch.autocast("cpu", enabled=False)(F.linear)(x, w),
    "cell without autocast": lambda x, w: torch.autocast("cpu", enabled=False)(nn.GRU(4, 4))(w),
}
HALF_ALONE = {
    "complex number": lambda w: torch.exp(w * 1j),
    "product of complex numbers": lambda w: torch.linalg.inv(w[:, :2] * 1j),
    "determinant": lambda w: torch.linalg.det(w[:, :2]),
    "bessel function": lambda w: torch.special.bessel_j0(w),
    "powers": lambda w: torch.linalg.vander(w),
}


def error_in_a_step(function, *tensors, dtype):
    emulation = Fp16MatmulEmulation(with_products=dtype is torch.float16)
    with (
        torch.autocast("cpu", dtype=dtype),
        emulation,
        pytest.raises((RuntimeError, TypeError, ValueError)) as raised,
    ):
        function(*tensors)
    return raised.value


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("name", TWO_TENSORS)
def test_operations_that_take_one_dtype_get_the_cure(name, precision):
    x = torch.eye(2, 4)
    w = torch.eye(2, 4).to(HALF[precision])
    (note,) = notes_of(error_in_a_step(TWO_TENSORS[name], x, w, dtype=HALF[precision]), precision)
    assert START in note
    assert "dtype)`" in note, "names the cast"


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("name", HALF_ALONE)
def test_operations_that_take_no_half_precision_get_the_cure(name, precision):
    if "complex" in name and precision == "bf16-true" and not HAS_COMPLEX_BFLOAT16:
        pytest.skip("this torch has no complex bfloat16")
    w = torch.eye(2, 4).to(HALF[precision])
    (note,) = notes_of(error_in_a_step(HALF_ALONE[name], w, dtype=HALF[precision]), precision)
    assert START in note


def test_numpy_without_bfloat16_gets_the_cure():
    error = error_in_a_step(lambda w: w.numpy(), torch.ones(2).bfloat16(), dtype=torch.bfloat16)
    assert START in notes_of(error, "bf16-true")[0]


OF_OTHER_DEVICES = (
    "Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the same",
    "Input and parameter tensors are not the same dtype, found input tensor with Float and parameter tensor with Half",
    "cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a signal "
    "size of[12]",
    "expected scalar type Half but found Float",
    "This function doesn't handle types other than float and double",
    "\"erfcx_cuda\" not implemented for 'BFloat16'",
)


@pytest.mark.parametrize("message", OF_OTHER_DEVICES)
def test_messages_of_other_devices_get_the_cure(message):
    assert START in notes_of(RuntimeError(message))[0]


def test_an_error_of_compiled_code_gets_the_cure_only_if_it_is_about_dtypes():
    call = "call_function <built-in method mm>(*(FakeTensor(..., size=(2, 3), dtype=torch.float16),), **{}): got "
    assert notes_of(
        RuntimeError(
            f"{call}RuntimeError('expected dtype torch.float32, but got dtype torch.float16')"
        )
    )
    assert not notes_of(
        RuntimeError(f"{call}RuntimeError('a and b must have same reduction dim, but got [2, 3]')")
    )


ABOUT_OTHER_THINGS = (
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x12 and 16x3)"),
    RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Double"),
    RuntimeError("mat1 and mat2 must have the same dtype, but got Half and Long"),
    RuntimeError("expected scalar type Long but found Half"),
    RuntimeError("index 7 is out of bounds for dimension 0 with size 3"),
    RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    ),
    RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn"),
    RuntimeError(
        "Detected mismatch between collectives. Rank 0 is running ALLREDUCE(TensorDtypes=Half), rank 1 not"
    ),
    RuntimeError(
        "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1"
    ),
    torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB"
    ),
    ValueError("`weight.dtype` (=torch.int64) must be float16, bfloat16, float32 or float64."),
    ValueError(
        "Expected value argument to be within the support (GreaterThanEq()) of the distribution HalfNormal()"
    ),
    ValueError(
        "Expected parameter loc of Normal to satisfy Real(), but found tensor([nan], dtype=torch.float16)"
    ),
    KeyError("expected scalar type Float but found Half"),
)


@pytest.mark.parametrize("error", ABOUT_OTHER_THINGS, ids=str)
def test_errors_about_other_things_get_no_note(error):
    assert notes_of(error) == []


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed", None])
def test_other_precisions_get_no_note(precision):
    assert notes_of(RuntimeError("expected scalar type Float but found Half"), precision) == []


def test_an_error_that_is_seen_twice_gets_one_note():
    error = RuntimeError("expected scalar type Float but found Half")
    assert len(notes_of(error)) == len(notes_of(error)) == 1


def check_all_operations(device, path):
    # Run in a separate process, because torch's tests change settings of torch when they are imported. Run as a script,
    # because torch reads the stack for each of its operations, which takes minutes if `runpy` is on the stack.
    program = [
        sys.executable,
        str(ROOT / "tests" / "precision" / "torch_operations.py"),
        device,
        str(path),
    ]
    done = subprocess.run(
        program,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    errors = json.loads(path.read_text())

    need_half = [error for error in errors if error["needs_half"]]
    assert len(need_half) > 300
    assert [
        error for error in need_half if not notes_of_text(error["kind"], error["message"])
    ] == []

    texts = {error["message"] for error in need_half}
    in_fp32 = [
        error for error in errors if not error["needs_half"] and error["message"] not in texts
    ]
    assert len(in_fp32) > 300
    assert [error for error in in_fp32 if notes_of_text(error["kind"], error["message"])] == []


@pytest.mark.long
def test_every_operation_of_torch_gets_the_cure_in_half_precision_and_none_in_fp32(tmp_path):
    check_all_operations("cpu", tmp_path / "errors.json")


@pytest.mark.long
@pytest.mark.gpu
def test_every_operation_on_cuda_gets_the_cure_in_half_precision_and_none_in_fp32(tmp_path):
    check_all_operations("cuda", tmp_path / "errors.json")


# ---- remedies in the note --------------------------------------------------------------------------------------------


class StateSpace(nn.Module):
    """Diagonal state-space layer with complex numbers, as in S4D."""

    def __init__(self):
        super().__init__()
        self.log_decay = nn.Parameter(torch.zeros(4))
        self.frequency = nn.Parameter(torch.arange(4.0))

    def forward(self, x):
        kernel = torch.exp(-self.log_decay.exp() + 1j * self.frequency)
        return x * kernel.real.sum()


class Tokens(nn.Module):
    """Layer that writes a list of tokens into a batch."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.ParameterList([torch.ones(NUM_FEATURES)])

    def forward(self, x):
        indices = torch.zeros(len(x), dtype=torch.int64)
        return x.index_add(0, indices, self.tokens[0].expand(len(x), -1))


class WithLayer(Toy):
    def __init__(self, layer):
        super().__init__()
        self.net.insert(0, layer())


class Activations(Toy):
    """Module that mixes half activations with an fp32 batch, without parameters in the failing operation."""

    def training_step(self, batch, batch_idx):
        return torch.lerp(batch[0][:, :3], self.net(batch[0]), 0.5).mean()


class Perceptron(nn.Sequential):
    """Perceptron that consists only of torch layers."""

    def __init__(self):
        super().__init__(nn.Linear(NUM_FEATURES, NUM_FEATURES))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


LAYERS = {"StateSpace": StateSpace, "torch.nn.ParameterList": Tokens, "torch.nn.Linear": Perceptron}


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("name", LAYERS)
def test_the_note_names_a_type_to_keep_in_fp32_and_with_it_the_module_trains(
    one_rank, name, precision
):
    if name == "StateSpace" and precision == "bf16-true" and not HAS_COMPLEX_BFLOAT16:
        pytest.skip("this torch has no complex bfloat16")
    module = partial(WithLayer, LAYERS[name])
    (seen,) = fit(one_rank, module, precision=precision, raises=True, warns=True)
    assert f"plugins=[MasterWeightPrecision('{precision}', keep_fp32=({name},))]" in seen.error

    kept = getattr(nn, name.removeprefix("torch.nn."), LAYERS[name])
    plugins = [MasterWeightPrecision(precision, keep_fp32=(kept,))]
    (seen,) = fit(one_rank, module, strategy="hybrid_allreduce", plugins=plugins)
    assert seen.losses[-1] < seen.losses[0]


def test_where_no_module_has_the_parameter_the_note_names_none(one_rank):
    (seen,) = fit(one_rank, Activations, precision="16-true", raises=True)
    assert "keep_fp32=(ItsClass,)" in seen.error
    assert "precision='16-mixed'" in seen.error


class TwiceTheLoss(torch.autograd.Function):
    """Loss whose backward mixes dtypes."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x.float()

    @staticmethod
    def backward(ctx, gradient):
        return torch.lerp(gradient, gradient.half(), 0.5)


def fabric_errors():
    fabric = Fabric(
        strategy="hybrid_allreduce",
        plugins=[FabricMasterWeightPrecision("16-true")],
        accelerator="cpu",
        devices=dist.get_world_size(),
    )
    fabric.launch()
    try:
        layer = nn.Sequential(StateSpace())
        model = fabric.setup_module(layer)
        with pytest.raises(RuntimeError) as in_forward:
            model(torch.ones(2, 4))
        model = fabric.setup_module(nn.Linear(4, 4))
        with pytest.raises(RuntimeError) as in_backward:
            fabric.backward(TwiceTheLoss.apply(model(torch.ones(2, 4)).mean()))
        return in_forward.value.__notes__, in_backward.value.__notes__
    finally:
        fabric.strategy.teardown()


def test_errors_in_a_loop_of_fabric_get_the_cure(one_rank):
    ((in_forward, in_backward),) = one_rank.run(fabric_errors)
    assert len(in_forward) == len(in_backward) == 1
    assert "keep_fp32=(StateSpace,)" in in_forward[0]
    assert START in in_backward[0]
