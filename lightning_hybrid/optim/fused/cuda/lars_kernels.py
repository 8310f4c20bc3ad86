"""Triton kernels of the fused LARS step, each of which processes a whole tensor group in one launch.

    norms       per chunk     sum of g * g (joint: of d * d), and of w * w          reads g, w
    finalize    per tensor    norms -> trust ratio -> coefficients                  reads the sums
    lars_update per chunk     the step                                              reads g, w, v, writes w, v

A chunk is `CHUNK` consecutive elements in the memory of a tensor. The kernels get the addresses of tensors in an int64
tensor on the device. `tensor_of` and `index_of` hold the tensor of each chunk and the index of the chunk in the
tensor. The squares of a chunk are added in float32 in a tree, and the sums of chunks in float64. A program runs one of
three branches, which depends on the memory of its chunk:

    full chunk, all addresses at multiples of 16 bytes      no masks, loads and stores of 128 bits
    full chunk, all addresses except that of the gradient   the same, but the gradient is loaded element by element
    otherwise                                               masks

DDP packs gradients without padding. A bias of odd length therefore misaligns the gradients after it, and only these
are slower. `STATE` is the dtype of the arithmetic. Scalars that may change between steps (learning rate, scale,
found_inf) are read on the device. As arguments they would be constants in a captured graph, and Triton would compile
a separate kernel for the value 1.

With `TRITON_INTERPRET=1` set before Python starts, the kernels run on CPU tensors, one program after another. The
interpreter (Triton 3.9) truncates in a bfloat16 store, whereas a GPU rounds to nearest.
"""

import triton
import triton.language as tl

# Rows of the table `option_table.lars_options`. Kernels can read constants only.
_MOMENTUM = tl.constexpr(1)
_DECAY = tl.constexpr(2)
_TRUST = tl.constexpr(3)
_EPS = tl.constexpr(4)
_CLIP = tl.constexpr(5)
_MULT = tl.constexpr(6)
_FORM = tl.constexpr(7)
_ADAPTED = tl.constexpr(8)
_SIGN = tl.constexpr(9)
_NESTEROV = tl.constexpr(10)

NUM_LARS = 6  # coefficients per tensor
_NUM = tl.constexpr(NUM_LARS)
_SUMS_PER_STEP = tl.constexpr(1024)


@triton.jit
def _pointers(address, offsets, DTYPE, IS_ALIGNED):
    """Return pointers to elements, with an alignment hint for 128-bit loads if `IS_ALIGNED` is set.

    By setting `IS_ALIGNED`, the caller guarantees that the address is a multiple of 16 bytes.
    """
    # The compiler applies the guarantee to all uses of a pointer, so every branch creates its own pointer.
    base = address.to(tl.pointer_type(DTYPE))
    if IS_ALIGNED:
        base = tl.multiple_of(base, 16)
    return base + offsets


@triton.jit
def _case_of(is_whole, addresses, grad_address):
    """Return the index (0, 1 or 2) of the memory-access branch that processes a chunk.

    The module's docstring lists the branches in this order. `addresses` is the bitwise or of all addresses except that
    of the gradient.
    """
    is_wide = is_whole & ((addresses & 15) == 0)
    is_grad_narrow = ((grad_address & 15) != 0).to(tl.int32)
    return tl.where(is_wide, is_grad_narrow, 2)


@triton.jit
def _squares(grad, weight, offsets, numel, decay, weight_sum, WEIGHT, GRAD, STATE, IS_JOINT, CASE):
    """Store the sum of w * w of a chunk, and return the sum of g * g or of (g + decay * w) ** 2."""
    is_inside = (offsets < numel) | (CASE < 2)
    grad_pointers = _pointers(grad, offsets, GRAD, CASE == 0)
    weight_pointers = _pointers(weight, offsets, WEIGHT, CASE < 2)
    g = tl.load(grad_pointers, mask=is_inside, other=0.0).to(STATE)
    w = tl.load(weight_pointers, mask=is_inside, other=0.0).to(STATE)
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
    """Write the sums of squares of each chunk to `sums`, with one program per chunk.

    `sums` has the shape (2, chunks). The first row is for weights w. The second row is for scaled gradients g, or with
    `IS_JOINT` for scaled directions g + decay * w. `found_inf` becomes 1 if a sum in the second row is inf or nan.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(tensor_of + chunk)
    begin = tl.load(index_of + chunk).to(tl.int64) * CHUNK
    offsets = begin + tl.arange(0, CHUNK)
    grad = tl.load(grads + tensor)
    weight = tl.load(weights + tensor)
    # Gradients are still scaled. The decay is scaled instead, because |g / s + decay w| = |g + s decay w| / s.
    decay = 0.0
    if IS_JOINT:
        sign = tl.load(options + _SIGN * num_tensors + tensor)
        weight_decay = tl.load(options + _DECAY * num_tensors + tensor)
        decay = sign * weight_decay / tl.load(inverse_scale).to(tl.float64)
        decay = decay.to(STATE)
    numel = tl.load(numels + tensor)
    weight_sum = sums + chunk
    case = _case_of(begin + CHUNK <= numel, weight, grad)
    total = tl.cast(0, STATE)
    # The compiler needs to know the alignment, so the code is compiled once for each case.
    for branch in tl.static_range(3):
        if case == branch:
            total = _squares(
                grad,
                weight,
                offsets,
                numel,
                decay,
                weight_sum,
                WEIGHT,
                GRAD,
                STATE,
                IS_JOINT,
                branch,
            )
    tl.store(sums + num_chunks + chunk, total)
    is_finite = total < float("inf")  # This is False for nan as well.
    # No atomic operation is needed, because all programs that write here write the same value.
    tl.store(found_inf, 1.0, mask=is_finite == 0)


@triton.jit
def _sum_of(sums, begin, end):
    """Add the sums of the chunks from `begin` up to `end` in float64, to avoid rounding errors."""
    offsets = tl.arange(0, _SUMS_PER_STEP)
    total = tl.zeros((_SUMS_PER_STEP,), tl.float64)
    for first in range(begin, end, _SUMS_PER_STEP):
        is_inside = first + offsets < end
        chunk_sums = tl.load(sums + first + offsets, mask=is_inside, other=0.0)
        total += chunk_sums.to(tl.float64)
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
    """Compute the update coefficients of each tensor from its norms, with one program per tensor.

    They are written to `numbers`, a float64 tensor of shape (tensors, 6).
    """
    tensor = tl.program_id(0)
    begin = tl.load(first_chunk + tensor)
    end = tl.load(first_chunk + tensor + 1)
    scale = tl.load(inverse_scale).to(tl.float64)
    weight_norm = tl.sqrt(_sum_of(sums, begin, end))
    norm = tl.sqrt(_sum_of(sums + num_chunks, begin, end)) * scale

    decay = tl.load(options + _DECAY * num_tensors + tensor)
    eps = tl.load(options + _EPS * num_tensors + tensor)
    clip = tl.load(options + _CLIP * num_tensors + tensor)
    form = tl.load(options + _FORM * num_tensors + tensor)
    is_adapted = tl.load(options + _ADAPTED * num_tensors + tensor) > 0
    sign = tl.load(options + _SIGN * num_tensors + tensor)

    # tl.where computes both operands, so a divisor of 0 is replaced before the division.
    denominator = norm + eps
    if not IS_JOINT:
        denominator += decay * weight_norm
    is_defined = (weight_norm > 0) & (norm > 0)
    trust = tl.load(options + _TRUST * num_tensors + tensor)
    divisor = tl.where(is_defined, denominator, 1.0)
    ratio = tl.where(is_defined, trust * weight_norm / divisor, 1.0)
    lr = tl.load(lrs + tensor)
    excluded_lr_mult = tl.load(options + _MULT * num_tensors + tensor)
    lr = tl.where(is_adapted, lr, lr * excluded_lr_mult)
    lr_divisor = tl.where(lr > 0, lr, 1.0)
    clipped = tl.where(lr > 0, tl.minimum(ratio / lr_divisor, clip), clip)
    ratio = tl.where(clip < float("inf"), clipped, ratio)
    ratio = tl.where(is_adapted, ratio, 1.0)

    # The momentum form is expressed by two factors, so that one update kernel is enough for all three forms.
    momentum = tl.load(options + _MOMENTUM * num_tensors + tensor)
    inside = tl.where(form == 0, lr * ratio, tl.where(form == 1, ratio, 1.0))
    outside = tl.where(form == 0, 1.0, tl.where(form == 1, lr, lr * ratio))
    nesterov = tl.load(options + _NESTEROV * num_tensors + tensor)
    line = numbers + tensor * _NUM
    tl.store(line, sign * scale)
    tl.store(line + 1, decay)
    tl.store(line + 2, momentum)
    tl.store(line + 3, inside)
    tl.store(line + 4, outside)
    tl.store(line + 5, nesterov)


@triton.jit
def _move(grad, weight, buffer, offsets, numel, line, WEIGHT, GRAD, STATE, HAS_MOMENTUM, CASE):
    """Update the weights and the momentum of one chunk."""
    is_inside = (offsets < numel) | (CASE < 2)
    scale = tl.load(line).to(STATE)
    decay = tl.load(line + 1).to(STATE)
    inside = tl.load(line + 3).to(STATE)
    outside = tl.load(line + 4).to(STATE)
    weight_pointers = _pointers(weight, offsets, WEIGHT, CASE < 2)
    grad_pointers = _pointers(grad, offsets, GRAD, CASE == 0)
    g = tl.load(grad_pointers, mask=is_inside, other=0.0).to(STATE)
    w = tl.load(weight_pointers, mask=is_inside, other=0.0).to(STATE)
    step = inside * (scale * g + decay * w)
    if HAS_MOMENTUM:
        momentum = tl.load(line + 2).to(STATE)
        buffer_pointers = _pointers(buffer, offsets, STATE, CASE < 2)
        v = momentum * tl.load(buffer_pointers, mask=is_inside, other=0.0) + step
        tl.store(buffer_pointers, v, mask=is_inside)
        step = tl.where(tl.load(line + 5) > 0, momentum * v + step, v)
    tl.store(weight_pointers, (w - outside * step).to(WEIGHT), mask=is_inside)


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
    """Update the weights and the momentum of all chunks, with one program per chunk.

    Nothing is written if `found_inf` is above 0.

        d = scale * g + decay * w
        v <- momentum * v + inside * d
        w <- w - outside * v                             (with Nesterov: momentum * v + inside * d in place of v)

    The coefficients are those of `finalize`. A skipped step does not read any tensor. `buffers` are addresses, which
    are 0 without momentum.
    """
    if tl.load(found_inf) <= 0:
        chunk = tl.program_id(0)
        tensor = tl.load(tensor_of + chunk)
        begin = tl.load(index_of + chunk).to(tl.int64) * CHUNK
        offsets = begin + tl.arange(0, CHUNK)
        grad = tl.load(grads + tensor)
        weight = tl.load(weights + tensor)
        buffer = tl.load(buffers + tensor)
        numel = tl.load(numels + tensor)
        line = numbers + tensor * _NUM
        # 0: full chunk, aligned; 1: full chunk, gradient not aligned; 2: masked.
        case = _case_of(begin + CHUNK <= numel, weight | buffer, grad)
        for branch in tl.static_range(3):
            if case == branch:
                _move(
                    grad,
                    weight,
                    buffer,
                    offsets,
                    numel,
                    line,
                    WEIGHT,
                    GRAD,
                    STATE,
                    HAS_MOMENTUM,
                    branch,
                )
