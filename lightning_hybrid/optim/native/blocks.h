// What the passes are made of: half precision, tiles in the dtype of the arithmetic, blocks that threads take in turn.
//
// A block is a stretch of one tensor; threads take the next block whenever they are done with one, so that the sizes of
// tensors do not matter. A tile is 512 elements of it: small enough for the fastest cache, so that converting half
// precision by a buffer costs no memory traffic, and for sums of squares in float32.
//
// C++17 with the vector types of gcc and clang. Threads come from the OpenMP runtime of whoever calls: `parallel` is its
// GOMP_parallel. Half precision is rounded to nearest even, as torch does.

#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t TILE = 512;
enum Dtype : int64_t { FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };

}  // namespace

// Mirrored by `native.Table`, field by field. Addresses are of arrays; "tensors" and "blocks" are their lengths.
struct Table {
  int64_t num_blocks, block, num_threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // null: no threads
  int64_t state_dtype, grad_dtype, weight_dtype, copy_dtype;
  const uint64_t* grads;            // tensors; each entry the address of a tensor
  const uint64_t* weights;
  const uint64_t* firsts;           // momentum; null: none. LAMB: the first moment
  const uint64_t* seconds;          // LAMB: the second moment
  const uint64_t* copies;           // null: none
  const int64_t* numels;            // tensors
  const int64_t* tensor_of;         // blocks
  const int64_t* begin_of;          // blocks
  const int64_t* measured;          // tensors: 1: the gradient, 2: the weight, 3: both
  double* weight_squares;           // blocks
  double* squares;                  // blocks: of gradients, directions, updates
};

namespace {

// ---- half precision --------------------------------------------------------------------------------------------------

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of_half(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t exponent = magnitude < 0x7c00u ? 112u << 23 : 224u << 23;  // inf and nan: the largest there is
  const float normal = as_float((magnitude << 13) + exponent);
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  return as_float(as_bits(magnitude < 0x400u ? small : normal) | (half & 0x8000u) << 16);
}

inline uint16_t half_of_float(float value) {
  const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const uint32_t small = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);  // a unit of 0.5f is the least half
  uint32_t half = magnitude < 113u << 23 ? small : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // 65520 and more
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  return static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

inline float float_of_bfloat(uint16_t value) { return as_float(static_cast<uint32_t>(value) << 16); }

inline uint16_t bfloat_of_float(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

inline void widen(const uint16_t* from, float* to, int64_t num) {
  int64_t i = 0;
#if defined(__AVX2__) && defined(__F16C__)
  for (; i + 8 <= num; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
  for (; i < num; ++i) to[i] = float_of_half(from[i]);
}

inline void narrow(const float* from, uint16_t* to, int64_t num) {
  int64_t i = 0;
#if defined(__AVX2__) && defined(__F16C__)
  for (; i + 8 <= num; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
  for (; i < num; ++i) to[i] = half_of_float(from[i]);
}

// ---- tiles -----------------------------------------------------------------------------------------------------------

template <typename State>
constexpr Dtype dtype_of = sizeof(State) == 4 ? FLOAT32 : FLOAT64;

inline char* place(uint64_t base, int64_t dtype, int64_t at) {
  return reinterpret_cast<char*>(base) + at * (dtype == FLOAT64 ? 8 : dtype == FLOAT32 ? 4 : 2);
}

template <typename State>
struct Tile {
  // `num` elements from `at` on in the dtype of the arithmetic: where they are, or in this tile.
  State* load(uint64_t base, int64_t dtype, int64_t at, int64_t num) {
    char* from = place(base, dtype, at);
    if (dtype == dtype_of<State>) return reinterpret_cast<State*>(from);
    if (dtype == FLOAT16) {
      if constexpr (sizeof(State) == 4) {
        widen(reinterpret_cast<const uint16_t*>(from), values, num);
      } else {
        for (int64_t i = 0; i < num; ++i) values[i] = float_of_half(reinterpret_cast<const uint16_t*>(from)[i]);
      }
    } else if (dtype == BFLOAT16) {
      for (int64_t i = 0; i < num; ++i) values[i] = float_of_bfloat(reinterpret_cast<const uint16_t*>(from)[i]);
    } else if (dtype == FLOAT32) {
      for (int64_t i = 0; i < num; ++i) values[i] = reinterpret_cast<const float*>(from)[i];
    } else {
      for (int64_t i = 0; i < num; ++i) values[i] = static_cast<State>(reinterpret_cast<const double*>(from)[i]);
    }
    return values;
  }

  alignas(64) State values[TILE];
};

// Round to `dtype` and store; nothing if `from` is `to`. float64 goes to half by way of float32, as in torch.
template <typename State>
void store(const State* from, char* to, int64_t dtype, int64_t num) {
  if (reinterpret_cast<const char*>(from) == to) return;
  if (dtype == FLOAT16) {
    if constexpr (sizeof(State) == 4) {
      narrow(from, reinterpret_cast<uint16_t*>(to), num);
    } else {
      auto* halves = reinterpret_cast<uint16_t*>(to);
      for (int64_t i = 0; i < num; ++i) halves[i] = half_of_float(static_cast<float>(from[i]));
    }
  } else if (dtype == BFLOAT16) {
    auto* halves = reinterpret_cast<uint16_t*>(to);
    for (int64_t i = 0; i < num; ++i) halves[i] = bfloat_of_float(static_cast<float>(from[i]));
  } else if (dtype == FLOAT32) {
    for (int64_t i = 0; i < num; ++i) reinterpret_cast<float*>(to)[i] = static_cast<float>(from[i]);
  } else {
    for (int64_t i = 0; i < num; ++i) reinterpret_cast<double*>(to)[i] = from[i];
  }
}

// sum of (x + factor * y)^2 over a tile; y may be null. 64 lanes (float64: 32) add 8 squares each, then float64 adds.
template <typename State>
double sum_of_squares(const State* x, const State* y, State factor, int64_t num) {
  constexpr int64_t LANES = 64 / sizeof(State), STEP = 4 * LANES;
  typedef State Lanes __attribute__((vector_size(64)));
  Lanes sums[4] = {};
  int64_t i = 0;
  for (; i + STEP <= num; i += STEP) {
    for (int64_t k = 0; k < 4; ++k) {
      Lanes value;
      std::memcpy(&value, x + i + k * LANES, 64);
      if (y) {
        Lanes other;
        std::memcpy(&other, y + i + k * LANES, 64);
        value += factor * other;
      }
      sums[k] += value * value;
    }
  }
  double total = 0;
  for (; i < num; ++i) {
    const State value = y ? x[i] + factor * y[i] : x[i];
    total += static_cast<double>(value) * value;
  }
  const Lanes all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (int64_t k = 0; k < LANES; ++k) total += all[k];
  return total;
}

// ---- blocks ----------------------------------------------------------------------------------------------------------

constexpr int64_t GRAIN = 32768;  // elements below which threads cost more than they save; torch's own number

template <typename Work>
struct Job {
  static void run(void* data) {
    auto* job = static_cast<Job*>(data);
    const int64_t num = job->table->num_blocks;
    for (int64_t i = job->next++; i < num; i = job->next++) job->work(job->is_backwards ? num - 1 - i : i);
  }

  const Table* table;
  const Work& work;
  bool is_backwards;
  std::atomic<int64_t> next{0};
};

// `work(block)` for every block. Backwards: what the pass before read last is still in cache.
template <typename Work>
void for_blocks(const Table* table, bool is_backwards, const Work& work) {
  Job<Work> job{table, work, is_backwards};
  int64_t numel = 0;
  for (int64_t k = 0; k < table->num_blocks && numel < GRAIN; ++k) {
    const int64_t rest = table->numels[table->tensor_of[k]] - table->begin_of[k];
    numel += rest < table->block ? rest : table->block;
  }
  if (table->parallel && table->num_threads > 1 && numel >= GRAIN)
    table->parallel(Job<Work>::run, &job, static_cast<unsigned>(table->num_threads), 0);
  else
    Job<Work>::run(&job);
}

// `work(tensor, begin, num)` for every tile of a block.
template <typename Work>
void for_tiles(const Table* table, int64_t block, const Work& work) {
  const int64_t tensor = table->tensor_of[block], begin = table->begin_of[block], numel = table->numels[tensor];
  const int64_t end = begin + table->block < numel ? begin + table->block : numel;
  for (int64_t at = begin; at < end; at += TILE) work(tensor, at, end - at < TILE ? end - at : TILE);
}

// What was computed in `w` goes to the weight and to its copy; `w` is then what was stored.
template <typename State>
void store_weight(const Table* table, State*& w, int64_t tensor, int64_t at, int64_t num, Tile<State>& tile) {
  store(w, place(table->weights[tensor], table->weight_dtype, at), table->weight_dtype, num);
  if (!table->copies) return;
  w = tile.load(table->weights[tensor], table->weight_dtype, at, num);
  store(w, place(table->copies[tensor], table->copy_dtype, at), table->copy_dtype, num);
}

}  // namespace
