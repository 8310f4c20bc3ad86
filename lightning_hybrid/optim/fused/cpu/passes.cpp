// The passes of the fused LARS and LAMB on the CPU. Each takes all tensors of a tensor group, whatever their number and
// sizes.
//
//     measure_grads   sum of g * g, for LAMB                                             reads g
//     measure_layers  sums of w * w and of g * g, or of (g + decay * w)^2, for LARS      reads g, w
//     lars_update     the step of LARS                                                   reads g, w, v, writes w, v
//     lamb_moments    both moments, sums of w * w and of u * u                           reads g, w, m, v, writes m, v
//     lamb_update     the step of LAMB, which computes u again: cheaper than storing it  reads w, m, v, writes w
//
// Sums of squares are float32 within a tile (float64 for float64 tensors). The tiles of a block and the blocks of a
// tensor are added in float64 and in their order. So the sums have the same bits for any number of threads. inf and nan
// survive them.

#include "blocks.h"

namespace {

template <typename State>
void measure_grad_blocks(const Table* table) {
  for_blocks(table, false, [=](int64_t block) {
    const int64_t tensor = table->tensor_of[block];
    if (!table->is_measured[tensor]) return;
    Tiles<State> grads(table->grads, tensor, table->grad_dtype);
    Squares<State> squares;
    for_tiles(table, block, [&](int64_t begin, int64_t num) { squares.add(grads.load(begin, num)); });
    table->squares[block] = squares.result();
  });
}

template <typename State>
void measure_layer_blocks(const Table* table, const double* decays) {
  for_blocks(table, false, [=](int64_t block) {
    const int64_t tensor = table->tensor_of[block];
    if (!table->is_measured[tensor]) return;
    Tiles<State> grads(table->grads, tensor, table->grad_dtype);
    Tiles<State> weights(table->weights, tensor, table->weight_dtype);
    Squares<State> squares, weight_squares;
    if (decays) {
      const State decay = State(decays[tensor]);
      for_tiles(table, block, [&](int64_t begin, int64_t num) {
        weights.prefetch(begin);
        grads.prefetch(begin);
        const State* w = weights.load(begin, num);
        const State* g = grads.load(begin, num);
        alignas(64) State sums[TILE];
        for (int64_t i = 0; i < TILE; ++i) sums[i] = g[i] + decay * w[i];
        weight_squares.add(w);
        squares.add(sums);
      });
    } else {
      for_tiles(table, block, [&](int64_t begin, int64_t num) {
        weights.prefetch(begin);
        grads.prefetch(begin);
        weight_squares.add(weights.load(begin, num));
        squares.add(grads.load(begin, num));
      });
    }
    table->squares[block] = squares.result();
    table->weight_squares[block] = weight_squares.result();
  });
}

// Returns 1 if a measured gradient is inf or nan, else 0.
float overflow_of(const Table* table) {
  double total = 0;
  for (int64_t block = 0; block < table->num_blocks; ++block)
    if (table->is_measured[table->tensor_of[block]]) total += table->squares[block];
  return std::isfinite(total) ? 0.0f : 1.0f;
}

// Rows of the table of options, see `option_table.py`.
enum LarsOption { OF_LR, OF_MOMENTUM, OF_DECAY, OF_TRUST, OF_EPS, OF_CLIP, OF_MULT, OF_FORM, OF_TRUST_RATIO, OF_SIGN,
                  OF_NESTEROV };
enum LarsNumber { SCALE, DECAY, MOMENTUM, INSIDE, OUTSIDE, NESTEROV, NUM_LARS };

template <typename State>
void lars_tile(const State* __restrict g, State* __restrict w, State* __restrict v, const double* numbers) {
  const State scale = State(numbers[SCALE]), decay = State(numbers[DECAY]), momentum = State(numbers[MOMENTUM]);
  const State inside = State(numbers[INSIDE]), outside = State(numbers[OUTSIDE]);
  if (!v) {
    for (int64_t i = 0; i < TILE; ++i) w[i] -= outside * (inside * (scale * g[i] + decay * w[i]));
  } else if (numbers[NESTEROV] == 0) {
    for (int64_t i = 0; i < TILE; ++i) {
      v[i] = momentum * v[i] + inside * (scale * g[i] + decay * w[i]);
      w[i] -= outside * v[i];
    }
  } else {
    for (int64_t i = 0; i < TILE; ++i) {
      const State step = inside * (scale * g[i] + decay * w[i]);
      v[i] = momentum * v[i] + step;
      w[i] -= outside * (momentum * v[i] + step);
    }
  }
}

template <typename State>
void lars_blocks(const Table* table, const double* numbers) {
  for_blocks(table, true, [=](int64_t block) {
    const int64_t tensor = table->tensor_of[block];
    Tiles<State> grads(table->grads, tensor, table->grad_dtype);
    Tiles<State> weights(table->weights, tensor, table->weight_dtype);
    Tiles<State> buffers(table->firsts, tensor, dtype_of<State>);
    for_tiles(table, block, [&](int64_t begin, int64_t num) {
      State* w = weights.load(begin, num);
      State* v = buffers.base ? buffers.load(begin, num) : nullptr;
      lars_tile(grads.load(begin, num), w, v, numbers + NUM_LARS * tensor);
      if (v) buffers.store(begin, num, v);
      weights.store(begin, num, w);
    });
  });
}

enum LambOption { BY_LR, BY_DECAY, BY_EPS, BY_CLIP, BY_MULT, BY_TRUST_RATIO, BY_SIGN, BY_BETA1, BY_BETA2, BY_CORRECTION,
                  BY_LOW, BY_HIGH };
enum LambNumber { GRAD_SCALE, BETA1, BETA2, EPS, WEIGHT_DECAY, FIRST, SECOND, NUM_LAMB };

// u = FIRST * m / (SECOND * sqrt(v) + EPS) + WEIGHT_DECAY * w
template <typename State>
void lamb_directions(const State* __restrict w, const State* __restrict m, const State* __restrict v,
                     State* __restrict u, const double* numbers) {
  const State eps = State(numbers[EPS]), decay = State(numbers[WEIGHT_DECAY]);
  const State first = State(numbers[FIRST]), second = State(numbers[SECOND]);
  for (int64_t i = 0; i < TILE; ++i) u[i] = first * m[i] / (second * std::sqrt(v[i]) + eps) + decay * w[i];
}

template <typename State>
void lamb_moments_tile(const State* __restrict grads, State* __restrict m, State* __restrict v, const double* numbers) {
  const State scale = State(numbers[GRAD_SCALE]), new_first = State(1 - numbers[BETA1]);
  const State beta2 = State(numbers[BETA2]), new_second = State(1 - numbers[BETA2]);
  for (int64_t i = 0; i < TILE; ++i) {
    const State g = scale * grads[i];
    m[i] += new_first * (g - m[i]);
    v[i] = beta2 * v[i] + new_second * (g * g);
  }
}

template <typename State>
void lamb_moments_blocks(const Table* table, const double* numbers) {
  for_blocks(table, true, [=](int64_t block) {
    const int64_t tensor = table->tensor_of[block];
    const double* line = numbers + NUM_LAMB * tensor;
    Tiles<State> grads(table->grads, tensor, table->grad_dtype), weights(table->weights, tensor, table->weight_dtype);
    Tiles<State> firsts(table->firsts, tensor, dtype_of<State>), seconds(table->seconds, tensor, dtype_of<State>);
    Squares<State> squares, weight_squares;
    for_tiles(table, block, [&](int64_t begin, int64_t num) {
      alignas(64) State u[TILE];
      State *m = firsts.load(begin, num), *v = seconds.load(begin, num);
      const State* w = weights.load(begin, num);
      lamb_moments_tile(grads.load(begin, num), m, v, line);
      firsts.store(begin, num, m);
      seconds.store(begin, num, v);
      lamb_directions<State>(w, m, v, u, line);
      for (int64_t i = num; i < TILE; ++i) u[i] = 0;  // with EPS = 0 the padding would be 0 / 0
      squares.add(u);
      weight_squares.add(w);
    });
    table->squares[block] = squares.result();
    table->weight_squares[block] = weight_squares.result();
  });
}

template <typename State>
void lamb_blocks(const Table* table, const double* numbers, const double* rates) {
  for_blocks(table, false, [=](int64_t block) {
    const int64_t tensor = table->tensor_of[block];
    const State rate = State(rates[tensor]);
    Tiles<State> weights(table->weights, tensor, table->weight_dtype);
    Tiles<State> firsts(table->firsts, tensor, dtype_of<State>), seconds(table->seconds, tensor, dtype_of<State>);
    for_tiles(table, block, [&](int64_t begin, int64_t num) {
      alignas(64) State u[TILE];
      State* __restrict w = weights.load(begin, num);
      lamb_directions<State>(w, firsts.load(begin, num), seconds.load(begin, num), u, numbers + NUM_LAMB * tensor);
      for (int64_t i = 0; i < TILE; ++i) w[i] -= rate * u[i];
      weights.store(begin, num, w);
    });
  });
}

}  // namespace

extern "C" {

// Here and in `measure_layers`, `found_inf` becomes 1 if a measured gradient is inf or nan, else 0.
void measure_grads(const Table* table, float* found_inf) {
  table->state_dtype == FLOAT64 ? measure_grad_blocks<double>(table) : measure_grad_blocks<float>(table);
  *found_inf = overflow_of(table);
}

// `decays` holds for each tensor the factor on w before it is added to g. If it is null, g alone is measured.
void measure_layers(const Table* table, const double* decays, float* found_inf) {
  table->state_dtype == FLOAT64 ? measure_layer_blocks<double>(table, decays)
                                : measure_layer_blocks<float>(table, decays);
  *found_inf = overflow_of(table);
}

// Writes sums (2, tensors): of the squares of weights in the first row, and of the squares of gradients, directions or
// updates in the second.
void add_up(const Table* table, double* sums) {
  const int64_t num = table->num_tensors;
  std::memset(sums, 0, 2 * num * sizeof(double));
  for (int64_t block = 0; block < table->num_blocks; ++block) {
    sums[table->tensor_of[block]] += table->weight_squares[block];
    sums[num + table->tensor_of[block]] += table->squares[block];
  }
}

// Writes numbers (tensors, 6) for `lars_update`, from the table of options, a learning rate for each tensor, and the
// sums. A null `inverse_scale` stands for 1.
void lars_numbers(const Table* table, int64_t is_joint, const double* options, const double* rates,
                  const double* inverse_scale, const double* sums, double* numbers) {
  const int64_t num = table->num_tensors;
  const double scale = inverse_scale ? *inverse_scale : 1.0;
  for (int64_t tensor = 0; tensor < num; ++tensor, numbers += NUM_LARS) {
    const auto option = [=](LarsOption row) { return options[row * num + tensor]; };
    const double weight_norm = std::sqrt(sums[tensor]), norm = std::sqrt(sums[num + tensor]) * scale;
    const double decay = option(OF_DECAY), clip = option(OF_CLIP);
    double rate = rates[tensor], ratio = 1;
    if (option(OF_TRUST_RATIO) > 0) {
      const double denominator = norm + (is_joint ? 0 : decay * weight_norm) + option(OF_EPS);
      if (weight_norm > 0 && norm > 0) ratio = option(OF_TRUST) * weight_norm / denominator;
      if (std::isfinite(clip)) ratio = ratio / rate > clip ? clip : ratio / rate;  // the clip at a rate of 0
    } else {
      rate *= option(OF_MULT);
    }
    const double form = option(OF_FORM);
    numbers[SCALE] = option(OF_SIGN) * scale;
    numbers[DECAY] = decay;
    numbers[MOMENTUM] = option(OF_MOMENTUM);
    numbers[NESTEROV] = option(OF_NESTEROV);
    if (form == 0) {  // "lr_inside"
      numbers[INSIDE] = rate * ratio;
      numbers[OUTSIDE] = 1;
    } else if (form == 1) {  // "lr_outside"
      numbers[INSIDE] = ratio;
      numbers[OUTSIDE] = rate;
    } else {  // "ratio_outside"
      numbers[INSIDE] = 1;
      numbers[OUTSIDE] = rate * ratio;
    }
  }
}

// Here and below, `found_inf` is null, or above 0 if the step must be skipped. Then no tensor is read or written.
void lars_update(const Table* table, const double* numbers, const float* found_inf) {
  if (found_inf && *found_inf > 0) return;
  table->state_dtype == FLOAT64 ? lars_blocks<double>(table, numbers) : lars_blocks<float>(table, numbers);
}

// Counts the step of every tensor, where `steps` holds addresses of float32. Then writes numbers (tensors, 7) for the
// passes below.
void lamb_numbers(const Table* table, const uint64_t* steps, const double* options, const double* inverse_scale,
                  double* numbers, const float* found_inf) {
  if (found_inf && *found_inf > 0) return;
  const int64_t num = table->num_tensors;
  for (int64_t tensor = 0; tensor < num; ++tensor, numbers += NUM_LAMB) {
    const auto option = [=](LambOption row) { return options[row * num + tensor]; };
    float* count = reinterpret_cast<float*>(steps[tensor]);
    *count += 1;
    const double step = *count;
    const double beta1 = option(BY_BETA1), beta2 = option(BY_BETA2);
    const bool is_corrected = option(BY_CORRECTION) > 0;
    numbers[GRAD_SCALE] = option(BY_SIGN) * (inverse_scale ? *inverse_scale : 1.0);
    numbers[BETA1] = beta1;
    numbers[BETA2] = beta2;
    numbers[EPS] = option(BY_EPS);
    numbers[WEIGHT_DECAY] = option(BY_DECAY);
    numbers[FIRST] = is_corrected ? 1 / (1 - std::pow(beta1, step)) : 1;
    numbers[SECOND] = is_corrected ? 1 / std::sqrt(1 - std::pow(beta2, step)) : 1;
  }
}

// Writes rates (tensors) for `lamb_update`: lr * ratio.
void lamb_rates(const Table* table, const double* options, const double* lrs, const double* sums, double* rates) {
  const int64_t num = table->num_tensors;
  for (int64_t tensor = 0; tensor < num; ++tensor) {
    const auto option = [=](LambOption row) { return options[row * num + tensor]; };
    const double norm = std::sqrt(sums[num + tensor]), clip = option(BY_CLIP);
    const double weight_norm = std::min(std::max(std::sqrt(sums[tensor]), option(BY_LOW)), option(BY_HIGH));
    double ratio = weight_norm > 0 && norm > 0 ? weight_norm / norm : 1;
    ratio = ratio > clip ? clip : ratio;
    rates[tensor] = lrs[tensor] * (option(BY_TRUST_RATIO) > 0 ? ratio : option(BY_MULT));
  }
}

void lamb_moments(const Table* table, const double* numbers, const float* found_inf) {
  if (found_inf && *found_inf > 0) return;
  table->state_dtype == FLOAT64 ? lamb_moments_blocks<double>(table, numbers)
                                : lamb_moments_blocks<float>(table, numbers);
}

void lamb_update(const Table* table, const double* numbers, const double* rates, const float* found_inf) {
  if (found_inf && *found_inf > 0) return;
  table->state_dtype == FLOAT64 ? lamb_blocks<double>(table, numbers, rates)
                                : lamb_blocks<float>(table, numbers, rates);
}

// For tests of the rounding. `num` is the number of elements, a multiple of 128.
void half_to_float(const uint16_t* from, float* to, int64_t num) {
  for (int64_t i = 0; i < num; i += TILE) widen(from + i, to + i);
}

void float_to_half(const float* from, uint16_t* to, int64_t num) {
  for (int64_t i = 0; i < num; i += TILE) narrow(from + i, to + i);
}

}  // extern "C"
