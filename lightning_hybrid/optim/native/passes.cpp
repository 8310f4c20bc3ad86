// The passes of the fused LARS and LAMB on the CPU, each over all tensors of a kind, whatever their number and sizes.
//
//     measure         sum of g * g, or of (g + decay * w)^2; of w * w where asked        reads g, and w where asked
//     lars_update     the step of LARS, and the sum of the new w * w                     reads g, w, v; writes w, v, copy
//     lamb_moments    both moments, sums of w * w and of u * u                           reads g, w, m, v; writes m, v
//     lamb_update     the step of LAMB, with u made again: cheaper than to keep it       reads w, m, v; writes w, copy
//
// Sums of squares: a tile in float32 (float64 where the arithmetic is), the tiles of a block and the blocks of a tensor in
// float64 and in their order. So they are the same bits for any number of threads. inf and nan survive them.

#include "blocks.h"

namespace {

template <typename State>
void measure_blocks(const Table* table, const double* decays) {
  for_blocks(table, false, [=](int64_t block) {
    const int64_t measured = table->measured[table->tensor_of[block]];
    if (measured == 0) return;
    Tile<State> g_tile, w_tile;
    double squares = 0, weight_squares = 0;
    for_tiles(table, block, [&](int64_t tensor, int64_t at, int64_t num) {
      const State* w = nullptr;
      if (decays || (measured & 2)) w = w_tile.load(table->weights[tensor], table->weight_dtype, at, num);
      if (measured & 1) {
        const State* g = g_tile.load(table->grads[tensor], table->grad_dtype, at, num);
        squares += sum_of_squares<State>(g, decays ? w : nullptr, decays ? State(decays[tensor]) : State(0), num);
      }
      if (measured & 2) weight_squares += sum_of_squares<State>(w, nullptr, 0, num);
    });
    if (measured & 1) table->squares[block] = squares;
    if (measured & 2) table->weight_squares[block] = weight_squares;
  });
}

enum LarsNumber { SCALE, DECAY, MOMENTUM, INSIDE, OUTSIDE, LOOK, NUM_LARS };

template <typename State>
void lars_tile(const State* __restrict g, State* __restrict w, State* __restrict v, const double* numbers, int64_t num) {
  const State scale = State(numbers[SCALE]), decay = State(numbers[DECAY]), momentum = State(numbers[MOMENTUM]);
  const State inside = State(numbers[INSIDE]), outside = State(numbers[OUTSIDE]);
  if (!v) {
    for (int64_t i = 0; i < num; ++i) w[i] -= outside * (inside * (scale * g[i] + decay * w[i]));
  } else if (numbers[LOOK] == 0) {
    for (int64_t i = 0; i < num; ++i) {
      v[i] = momentum * v[i] + inside * (scale * g[i] + decay * w[i]);
      w[i] -= outside * v[i];
    }
  } else {
    for (int64_t i = 0; i < num; ++i) {
      const State step = inside * (scale * g[i] + decay * w[i]);
      v[i] = momentum * v[i] + step;
      w[i] -= outside * (momentum * v[i] + step);
    }
  }
}

template <typename State>
void lars_blocks(const Table* table, const double* numbers) {
  for_blocks(table, true, [=](int64_t block) {
    Tile<State> g_tile, w_tile;
    double weight_squares = 0;
    for_tiles(table, block, [&](int64_t tensor, int64_t at, int64_t num) {
      const State* g = g_tile.load(table->grads[tensor], table->grad_dtype, at, num);
      State* w = w_tile.load(table->weights[tensor], table->weight_dtype, at, num);
      State* v = table->firsts ? reinterpret_cast<State*>(table->firsts[tensor]) + at : nullptr;
      lars_tile(g, w, v, numbers + NUM_LARS * tensor, num);
      store_weight(table, w, tensor, at, num, w_tile);
      if (table->copies) weight_squares += sum_of_squares<State>(w, nullptr, 0, num);
    });
    if (table->copies) table->weight_squares[block] = weight_squares;
  });
}

enum LambNumber { GRAD_SCALE, BETA1, BETA2, EPS, WEIGHT_DECAY, FIRST, SECOND, NUM_LAMB };

// u = FIRST * m / (SECOND * sqrt(v) + EPS) + WEIGHT_DECAY * w
template <typename State>
void lamb_directions(const State* __restrict w, const State* __restrict m, const State* __restrict v,
                     State* __restrict u, const double* numbers, int64_t num) {
  const State eps = State(numbers[EPS]), decay = State(numbers[WEIGHT_DECAY]);
  const State first = State(numbers[FIRST]), second = State(numbers[SECOND]);
  for (int64_t i = 0; i < num; ++i) u[i] = first * m[i] / (second * std::sqrt(v[i]) + eps) + decay * w[i];
}

template <typename State>
void lamb_moments_blocks(const Table* table, const double* numbers) {
  for_blocks(table, true, [=](int64_t block) {
    Tile<State> g_tile, w_tile, u_tile;
    double squares = 0, weight_squares = 0;
    for_tiles(table, block, [&](int64_t tensor, int64_t at, int64_t num) {
      const double* line = numbers + NUM_LAMB * tensor;
      const State scale = State(line[GRAD_SCALE]), new_first = State(1 - line[BETA1]);
      const State beta2 = State(line[BETA2]), new_second = State(1 - line[BETA2]);
      const State* __restrict grad = g_tile.load(table->grads[tensor], table->grad_dtype, at, num);
      const State* w = w_tile.load(table->weights[tensor], table->weight_dtype, at, num);
      State* __restrict m = reinterpret_cast<State*>(table->firsts[tensor]) + at;
      State* __restrict v = reinterpret_cast<State*>(table->seconds[tensor]) + at;
      for (int64_t i = 0; i < num; ++i) {
        const State g = scale * grad[i];
        m[i] += new_first * (g - m[i]);
        v[i] = beta2 * v[i] + new_second * (g * g);
      }
      lamb_directions<State>(w, m, v, u_tile.values, line, num);
      squares += sum_of_squares<State>(u_tile.values, nullptr, 0, num);
      weight_squares += sum_of_squares<State>(w, nullptr, 0, num);
    });
    table->squares[block] = squares;
    table->weight_squares[block] = weight_squares;
  });
}

template <typename State>
void lamb_blocks(const Table* table, const double* numbers, const double* rates) {
  for_blocks(table, false, [=](int64_t block) {
    Tile<State> w_tile, u_tile;
    for_tiles(table, block, [&](int64_t tensor, int64_t at, int64_t num) {
      State* __restrict w = w_tile.load(table->weights[tensor], table->weight_dtype, at, num);
      const State* m = reinterpret_cast<State*>(table->firsts[tensor]) + at;
      const State* v = reinterpret_cast<State*>(table->seconds[tensor]) + at;
      const State* __restrict u = u_tile.values;
      const State rate = State(rates[tensor]);
      lamb_directions<State>(w, m, v, u_tile.values, numbers + NUM_LAMB * tensor, num);
      for (int64_t i = 0; i < num; ++i) w[i] -= rate * u[i];
      State* moved = w;
      store_weight(table, moved, tensor, at, num, w_tile);
    });
  });
}

}  // namespace

extern "C" {

// `decays`: for each tensor what w is multiplied by before it is added to g; null: g alone. `found_inf` becomes 1 if a
// measured gradient is inf or nan, else 0.
void measure(const Table* table, const double* decays, float* found_inf) {
  table->state_dtype == FLOAT64 ? measure_blocks<double>(table, decays) : measure_blocks<float>(table, decays);
  double total = 0;
  for (int64_t block = 0; block < table->num_blocks; ++block)
    if (table->measured[table->tensor_of[block]] & 1) total += table->squares[block];
  *found_inf = std::isfinite(total) ? 0.0f : 1.0f;
}

// sums (2, tensors): of the squares of weights; of gradients, directions or updates.
void add_up(const Table* table, int64_t num_tensors, double* sums) {
  std::memset(sums, 0, 2 * num_tensors * sizeof(double));
  for (int64_t block = 0; block < table->num_blocks; ++block) {
    sums[table->tensor_of[block]] += table->weight_squares[block];
    sums[num_tensors + table->tensor_of[block]] += table->squares[block];
  }
}

// `found_inf`, here and below: if there is one and it is more than 0, nothing is read or written.
void lars_update(const Table* table, const double* numbers, const float* found_inf) {
  if (found_inf && *found_inf > 0) return;
  table->state_dtype == FLOAT64 ? lars_blocks<double>(table, numbers) : lars_blocks<float>(table, numbers);
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

// For whoever wants to check the rounding.
void half_to_float(const uint16_t* from, float* to, int64_t num) { widen(from, to, num); }
void float_to_half(const float* from, uint16_t* to, int64_t num) { narrow(from, to, num); }

}  // extern "C"
