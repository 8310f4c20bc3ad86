"""The two passes of the fused LARS on CUDA, as Triton kernels that take all tensors of a group in one launch each.

    norms       per chunk     sum of g * g (joint: of d * d), and of w * w          reads g, w
    finalize    per tensor    norms -> trust ratio -> coefficients                  reads the sums
    lars_update per chunk     the step                                              reads g, w, v; writes w, v

A chunk is `CHUNK` elements in a row of one tensor's memory. Tensors are reached by their addresses, a table of int64
on the device; `tensor_of` and `index_of` hold the tensor of each chunk and its index there. A chunk's squares are added
in float32 in a tree, the chunks' sums in float64. A program takes one of three branches, by what it reads of its chunk:

    whole, all at multiples of 16 bytes       no masks; loads and stores of 128 bits
    whole, all but the gradient               the same, but for the gradient, which is loaded an element at a time
    else                                      masks

DDP packs gradients without padding, so that one odd bias puts those behind it off 16 bytes: only these are slower.
`STATE` is the dtype of the arithmetic. All scalars that may change from step to step (learning rate, scale, found_inf)
are read on the device: as arguments they would be frozen into a captured graph, and compiled in where they are 1.

Set `TRITON_INTERPRET=1` before Python starts, and they run on CPU tensors, one program after another; there (Triton
3.9) a bfloat16 store truncates, where a GPU rounds to nearest.
"""

import triton
import triton.language as tl

# In the order of `option_table.lars_options`; kernels read constants only.
_MOMENTUM, _DECAY, _TRUST, _EPS, _CLIP, _MULT, _FORM, _ADAPTED, _SIGN, _NESTEROV = (
    tl.constexpr(row) for row in range(1, 11)
)
NUM_LARS = 6  # numbers per tensor
_NUM = tl.constexpr(NUM_LARS)
_SUMS_PER_STEP = tl.constexpr(1024)


@triton.jit
def _places(address, at, DTYPE, IS_ALIGNED):
    """Return the pointers of elements; with `IS_ALIGNED`, at a multiple of 16 bytes, loads become 128 bits wide."""
    # The compiler attaches that to the pointer, for all its uses: so every branch makes a pointer of its own.
    base = address.to(tl.pointer_type(DTYPE))
    if IS_ALIGNED:
        base = tl.multiple_of(base, 16)
    return base + at


@triton.jit
def _case_of(is_whole, others, grad):
    """Return the branch of a chunk: 0 all wide, 1 all but the gradient, 2 masks; by the addresses of both."""
    return tl.where(is_whole & ((others & 15) == 0), ((grad & 15) != 0).to(tl.int32), 2)


@triton.jit
def _squares(grad, weight, at, numel, decay, weight_sum, WEIGHT, GRAD, STATE, IS_JOINT, CASE):
    """Store the sum of w * w, and return that of g * g, or of (g + decay * w) ** 2."""
    is_in = (at < numel) | (CASE < 2)
    g = tl.load(_places(grad, at, GRAD, CASE == 0), mask=is_in, other=0.0).to(STATE)
    w = tl.load(_places(weight, at, WEIGHT, CASE < 2), mask=is_in, other=0.0).to(STATE)
    tl.store(weight_sum, tl.sum(w * w, 0))
    if IS_JOINT:
        g += decay * w
    return tl.sum(g * g, 0)


@triton.jit
def norms(
    weights,
    grads,
    numels,
    tensor_of,
    index_of,
    options,
    inverse_scale,
    sums,
    found_inf,
    num_tensors,
    num_chunks,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_JOINT: tl.constexpr,
):
    """Write sums (2, chunks): of w * w; of g * g, or (d / SCALE) ** 2.

    `found_inf` becomes 1 if a sum of gradients is inf or nan.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(tensor_of + chunk)
    begin = tl.load(index_of + chunk).to(tl.int64) * CHUNK
    at = begin + tl.arange(0, CHUNK)
    grad = tl.load(grads + tensor)
    weight = tl.load(weights + tensor)
    # Gradients are still scaled: |g / s + decay w| = |g + s decay w| / s, so that the decay is scaled instead.
    decay = 0.0
    if IS_JOINT:
        sign = tl.load(options + _SIGN * num_tensors + tensor)
        decay = (
            sign
            * tl.load(options + _DECAY * num_tensors + tensor)
            / tl.load(inverse_scale).to(tl.float64)
        )
        decay = decay.to(STATE)
    numel = tl.load(numels + tensor)
    weight_sum = sums + chunk
    case = _case_of(begin + CHUNK <= numel, weight, grad)
    total = tl.cast(0, STATE)
    # The same code three times: the compiler needs to know the alignment, and so each case is a branch of its own.
    for branch in tl.static_range(3):
        if case == branch:
            total = _squares(
                grad, weight, at, numel, decay, weight_sum, WEIGHT, GRAD, STATE, IS_JOINT, branch
            )
    tl.store(sums + num_chunks + chunk, total)
    is_finite = total < float("inf")  # nan is not
    # No atomic: all programs that write here write the same.
    tl.store(found_inf, 1.0, mask=is_finite == 0)


@triton.jit
def _sum_of(sums, begin, end):
    # In float64, so that the rounding of many chunks does not add up.
    offsets = tl.arange(0, _SUMS_PER_STEP)
    total = tl.zeros((_SUMS_PER_STEP,), tl.float64)
    for first in range(begin, end, _SUMS_PER_STEP):
        total += tl.load(sums + first + offsets, mask=first + offsets < end, other=0.0).to(
            tl.float64
        )
    return tl.sum(total, 0)


@triton.jit
def finalize(
    sums,
    first_chunk,
    options,
    lrs,
    inverse_scale,
    numbers,
    num_tensors,
    num_chunks,
    IS_JOINT: tl.constexpr,
):
    """Write numbers (tensors, 6): of the update, in float64, one program per tensor."""
    tensor = tl.program_id(0)
    begin, end = tl.load(first_chunk + tensor), tl.load(first_chunk + tensor + 1)
    scale = tl.load(inverse_scale).to(tl.float64)
    weight_norm = tl.sqrt(_sum_of(sums, begin, end))
    norm = tl.sqrt(_sum_of(sums + num_chunks, begin, end)) * scale

    decay = tl.load(options + _DECAY * num_tensors + tensor)
    eps = tl.load(options + _EPS * num_tensors + tensor)
    clip = tl.load(options + _CLIP * num_tensors + tensor)
    form = tl.load(options + _FORM * num_tensors + tensor)
    is_adapted = tl.load(options + _ADAPTED * num_tensors + tensor) > 0
    sign = tl.load(options + _SIGN * num_tensors + tensor)

    # tl.where computes both of its sides: a divisor of 0 is replaced before the division.
    denominator = norm + eps
    if not IS_JOINT:
        denominator += decay * weight_norm
    is_defined = (weight_norm > 0) & (norm > 0)
    trust = tl.load(options + _TRUST * num_tensors + tensor)
    ratio = tl.where(is_defined, trust * weight_norm / tl.where(is_defined, denominator, 1.0), 1.0)
    lr = tl.load(lrs + tensor)
    lr = tl.where(is_adapted, lr, lr * tl.load(options + _MULT * num_tensors + tensor))
    clipped = tl.where(lr > 0, tl.minimum(ratio / tl.where(lr > 0, lr, 1.0), clip), clip)
    ratio = tl.where(clip < float("inf"), clipped, ratio)
    ratio = tl.where(is_adapted, ratio, 1.0)

    # The momentum form is folded into two factors here, so that one update kernel does all three forms.
    line = numbers + tensor * _NUM
    tl.store(line, sign * scale)
    tl.store(line + 1, decay)
    tl.store(line + 2, tl.load(options + _MOMENTUM * num_tensors + tensor))
    tl.store(line + 3, tl.where(form == 0, lr * ratio, tl.where(form == 1, ratio, 1.0)))
    tl.store(line + 4, tl.where(form == 0, 1.0, tl.where(form == 1, lr, lr * ratio)))
    tl.store(line + 5, tl.load(options + _NESTEROV * num_tensors + tensor))


@triton.jit
def _move(grad, weight, buffer, at, numel, line, WEIGHT, GRAD, STATE, HAS_MOMENTUM, CASE):
    """Store the new weights of a chunk, and its new momentum."""
    is_in = (at < numel) | (CASE < 2)
    scale = tl.load(line).to(STATE)
    decay = tl.load(line + 1).to(STATE)
    inside = tl.load(line + 3).to(STATE)
    outside = tl.load(line + 4).to(STATE)
    weight_at = _places(weight, at, WEIGHT, CASE < 2)
    g = tl.load(_places(grad, at, GRAD, CASE == 0), mask=is_in, other=0.0).to(STATE)
    w = tl.load(weight_at, mask=is_in, other=0.0).to(STATE)
    step = inside * (scale * g + decay * w)
    if HAS_MOMENTUM:
        momentum = tl.load(line + 2).to(STATE)
        buffer_at = _places(buffer, at, STATE, CASE < 2)
        v = momentum * tl.load(buffer_at, mask=is_in, other=0.0) + step
        tl.store(buffer_at, v, mask=is_in)
        step = tl.where(tl.load(line + 5) > 0, momentum * v + step, v)
    tl.store(weight_at, (w - outside * step).to(WEIGHT), mask=is_in)


@triton.jit
def lars_update(
    weights,
    grads,
    buffers,
    numels,
    tensor_of,
    index_of,
    numbers,
    found_inf,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_MOMENTUM: tl.constexpr,
):
    """Step: d = SCALE * g + DECAY * w, v <- MOMENTUM * v + INSIDE * d, w <- w - OUTSIDE * v; none if `found_inf` > 0.

    A skipped step reads nothing either. `buffers` are addresses, 0 without momentum.
    """
    if tl.load(found_inf) <= 0:
        chunk = tl.program_id(0)
        tensor = tl.load(tensor_of + chunk)
        begin = tl.load(index_of + chunk).to(tl.int64) * CHUNK
        at = begin + tl.arange(0, CHUNK)
        grad = tl.load(grads + tensor)
        weight = tl.load(weights + tensor)
        buffer = tl.load(buffers + tensor)
        numel = tl.load(numels + tensor)
        line = numbers + tensor * _NUM
        case = _case_of(begin + CHUNK <= numel, weight | buffer, grad)
        for branch in tl.static_range(3):
            if case == branch:
                _move(
                    grad, weight, buffer, at, numel, line, WEIGHT, GRAD, STATE, HAS_MOMENTUM, branch
                )
