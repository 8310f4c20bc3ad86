"""The passes of the fused LAMB on CUDA, as Triton kernels; tables and rules are those of `lars_kernels`.

    norms (of LARS)   per chunk     sum of g * g, where it is needed          reads g
    count             per tensor    steps, and the numbers of the passes      reads and writes the step counts
    moments           per chunk     moments, sums of w * w and of u * u       reads g, w, m, v; writes m, v
    rates             per tensor    norms -> trust ratio -> lr * ratio        reads the sums
    lamb_update       per chunk     the step                                  reads w, m, v; writes w, copy

They have run in Triton's interpreter, and on no GPU yet.
"""

import triton
import triton.language as tl

from lightning_hybrid.optim.fused.cuda.lars_kernels import _is_aligned, _places, _sum_of

# In the order of `option_table.lamb_options`; kernels read constants only.
_DECAY, _EPS, _CLIP, _MULT, _ADAPTED, _SIGN, _BETA1, _BETA2, _CORRECTED = (tl.constexpr(row) for row in range(1, 10))
NUM_LAMB = 7  # numbers per tensor: of the gradient, beta1, beta2, eps, decay, of the mean, of the root
_NUM = tl.constexpr(NUM_LAMB)


@triton.jit
def _correction(beta, step):
    """Compute 1 - beta ** step; beta may be 0."""
    return 1.0 - tl.exp(step * tl.log(tl.maximum(beta, 1e-300)))


@triton.jit
def count(steps, options, inverse_scale, found_inf, numbers, num_tensors):
    """Count the step of every tensor, float32, and write numbers (tensors, 7), float64; nothing if it is skipped."""
    tensor = tl.program_id(0)
    if tl.load(found_inf) <= 0:
        at = tl.load(steps + tensor).to(tl.pointer_type(tl.float32))
        step = tl.load(at) + 1.0
        tl.store(at, step)
        # 1 - 0.999 ** step would lose half its digits in float32.
        step = step.to(tl.float64)
        beta1 = tl.load(options + _BETA1 * num_tensors + tensor)
        beta2 = tl.load(options + _BETA2 * num_tensors + tensor)
        is_corrected = tl.load(options + _CORRECTED * num_tensors + tensor) > 0
        sign = tl.load(options + _SIGN * num_tensors + tensor)
        line = numbers + tensor * _NUM
        tl.store(line, sign * tl.load(inverse_scale).to(tl.float64))
        tl.store(line + 1, beta1)
        tl.store(line + 2, beta2)
        tl.store(line + 3, tl.load(options + _EPS * num_tensors + tensor))
        tl.store(line + 4, tl.load(options + _DECAY * num_tensors + tensor))
        tl.store(line + 5, tl.where(is_corrected, 1.0 / _correction(beta1, step), 1.0))
        tl.store(line + 6, tl.where(is_corrected, 1.0 / tl.sqrt(_correction(beta2, step)), 1.0))


@triton.jit
def _direction(w, m, v, is_in, line, STATE: tl.constexpr):
    """Compute the u of `LAMB`; elements outside the tensor are 0."""
    eps, decay = tl.load(line + 3).to(STATE), tl.load(line + 4).to(STATE)
    mean, root = tl.load(line + 5).to(STATE), tl.load(line + 6).to(STATE)
    # Outside of the tensor m, v and eps may all be 0: 0 / 0 would spoil the sum.
    denominator = tl.where(is_in, root * tl.sqrt(v) + eps, 1.0)
    return mean * m / denominator + decay * w


@triton.jit
def _take(
    grad,
    weight,
    first,
    second,
    at,
    is_in,
    line,
    sums,
    num_chunks,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    IS_GRAD_ALIGNED: tl.constexpr,
):
    first_at, second_at = _places(first, at, STATE, IS_ALIGNED), _places(second, at, STATE, IS_ALIGNED)
    g = tl.load(_places(grad, at, GRAD, IS_GRAD_ALIGNED), mask=is_in, other=0.0).to(STATE)
    g *= tl.load(line).to(STATE)
    w = tl.load(_places(weight, at, WEIGHT, IS_ALIGNED), mask=is_in, other=0.0).to(STATE)
    m, v = tl.load(first_at, mask=is_in, other=0.0), tl.load(second_at, mask=is_in, other=0.0)
    beta1, beta2 = tl.load(line + 1), tl.load(line + 2)
    m += (1.0 - beta1).to(STATE) * (g - m)
    v = beta2.to(STATE) * v + (1.0 - beta2).to(STATE) * (g * g)
    tl.store(first_at, m, mask=is_in)
    tl.store(second_at, v, mask=is_in)
    u = _direction(w, m, v, is_in, line, STATE)
    tl.store(sums, tl.sum(w * w, 0))
    tl.store(sums + num_chunks, tl.sum(u * u, 0))


@triton.jit
def moments(
    weights,
    grads,
    firsts,
    seconds,
    numels,
    tensor_of,
    index_of,
    numbers,
    found_inf,
    sums,
    num_chunks,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Take the gradients into both moments; sums (2, chunks): of w * w and of u * u. Nothing if it is skipped."""
    if tl.load(found_inf) <= 0:
        chunk = tl.program_id(0)
        tensor = tl.load(tensor_of + chunk)
        begin = tl.load(index_of + chunk).to(tl.int64) * CHUNK
        at = begin + tl.arange(0, CHUNK)
        grad, weight = tl.load(grads + tensor), tl.load(weights + tensor)
        first, second = tl.load(firsts + tensor), tl.load(seconds + tensor)
        numel = tl.load(numels + tensor)
        line = numbers + tensor * _NUM
        everywhere = tl.full((CHUNK,), 1, tl.int1)
        is_wide = (begin + CHUNK <= numel) & _is_aligned(weight | first | second)
        if is_wide & _is_aligned(grad):
            _take(
                *(grad, weight, first, second, at, everywhere, line, sums + chunk, num_chunks, WEIGHT, GRAD, STATE),
                IS_ALIGNED=True,
                IS_GRAD_ALIGNED=True,
            )
        elif is_wide:
            _take(
                *(grad, weight, first, second, at, everywhere, line, sums + chunk, num_chunks, WEIGHT, GRAD, STATE),
                IS_ALIGNED=True,
                IS_GRAD_ALIGNED=False,
            )
        else:
            _take(
                *(grad, weight, first, second, at, at < numel, line, sums + chunk, num_chunks, WEIGHT, GRAD, STATE),
                IS_ALIGNED=False,
                IS_GRAD_ALIGNED=False,
            )


@triton.jit
def rates(sums, first_chunk, options, lrs, rates, num_tensors, num_chunks):
    """Write rates (tensors), float64: lr * ratio, or lr * mult of an excluded tensor; one program per tensor."""
    tensor = tl.program_id(0)
    begin, end = tl.load(first_chunk + tensor), tl.load(first_chunk + tensor + 1)
    weight_norm, norm = tl.sqrt(_sum_of(sums, begin, end)), tl.sqrt(_sum_of(sums + num_chunks, begin, end))
    is_defined = (weight_norm > 0) & (norm > 0)
    ratio = tl.where(is_defined, weight_norm / tl.where(is_defined, norm, 1.0), 1.0)
    ratio = tl.minimum(ratio, tl.load(options + _CLIP * num_tensors + tensor))
    is_adapted = tl.load(options + _ADAPTED * num_tensors + tensor) > 0
    ratio = tl.where(is_adapted, ratio, tl.load(options + _MULT * num_tensors + tensor))
    tl.store(rates + tensor, tl.load(lrs + tensor) * ratio)


@triton.jit
def _move(
    weight,
    first,
    second,
    copy,
    at,
    is_in,
    line,
    rate,
    WEIGHT: tl.constexpr,
    COPY: tl.constexpr,
    STATE: tl.constexpr,
    HAS_COPY: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    weight_at = _places(weight, at, WEIGHT, IS_ALIGNED)
    w = tl.load(weight_at, mask=is_in, other=0.0).to(STATE)
    m = tl.load(_places(first, at, STATE, IS_ALIGNED), mask=is_in, other=0.0)
    v = tl.load(_places(second, at, STATE, IS_ALIGNED), mask=is_in, other=0.0)
    moved = (w - rate * _direction(w, m, v, is_in, line, STATE)).to(WEIGHT)
    tl.store(weight_at, moved, mask=is_in)
    if HAS_COPY:
        tl.store(_places(copy, at, COPY, IS_ALIGNED), moved.to(COPY), mask=is_in)


@triton.jit
def lamb_update(
    weights,
    firsts,
    seconds,
    copies,
    numels,
    tensor_of,
    index_of,
    numbers,
    rates,
    found_inf,
    WEIGHT: tl.constexpr,
    COPY: tl.constexpr,
    STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_COPY: tl.constexpr,
):
    """W <- w - rate * u. Nothing if it is skipped."""
    # u is made again: that costs less than to keep it.
    if tl.load(found_inf) <= 0:
        chunk = tl.program_id(0)
        tensor = tl.load(tensor_of + chunk)
        begin = tl.load(index_of + chunk).to(tl.int64) * CHUNK
        at = begin + tl.arange(0, CHUNK)
        weight, copy = tl.load(weights + tensor), tl.load(copies + tensor)
        first, second = tl.load(firsts + tensor), tl.load(seconds + tensor)
        numel = tl.load(numels + tensor)
        line = numbers + tensor * _NUM
        rate = tl.load(rates + tensor).to(STATE)
        if (begin + CHUNK <= numel) & _is_aligned(weight | first | second | copy):
            everywhere = tl.full((CHUNK,), 1, tl.int1)
            _move(weight, first, second, copy, at, everywhere, line, rate, WEIGHT, COPY, STATE, HAS_COPY, True)
        else:
            _move(weight, first, second, copy, at, at < numel, line, rate, WEIGHT, COPY, STATE, HAS_COPY, False)
