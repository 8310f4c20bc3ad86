// Building blocks of the passes: half precision, tiles in the dtype of the arithmetic, blocks that threads take in turn.
//
// A block is a contiguous part of one tensor. A thread takes the next block whenever it has finished one, so the sizes
// of tensors do not matter. A tile is 128 elements of a block. That is so few that the processor starts the next tile
// before it has finished one, and memory never waits for arithmetic. With tiles of 512 an update takes a tenth longer.
//
// The code is C++17 with the vector types of gcc and clang. Threads come from the caller's OpenMP runtime: `parallel`
// is its GOMP_parallel. Half precision is rounded to nearest even, as in torch.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#endif

#include "../../../cpp/float_bits.h"

namespace {

constexpr int64_t TILE = 128;
constexpr int64_t PREFETCHED = 8;
enum Dtype : int64_t { FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };

}  // namespace

// Mirrored by `passes.Table` in Python, field by field. All addresses are addresses of arrays. The comments name the
// length of each array: the number of tensors or the number of blocks.
struct Table {
  int64_t num_tensors, num_blocks, block, num_threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // null: no threads
  int64_t state_dtype, grad_dtype, weight_dtype;
  const uint64_t* grads;            // tensors: the address of each gradient
  const uint64_t* weights;          // tensors: the address of each weight
  const uint64_t* firsts;           // tensors: LARS the momentum, or null without momentum. LAMB: the first moment
  const uint64_t* seconds;          // tensors: LAMB the second moment
  const int64_t* numels;            // tensors: the number of elements
  const int64_t* tensor_of;         // blocks: the index of the block's tensor
  const int64_t* begin_of;          // blocks: the index of the block's first element in its tensor
  const int64_t* is_measured;       // tensors: 1 if `measure_grads` and `measure_layers` read the tensor, else 0
  double* weight_squares;           // blocks: the sum of squares of weights
  double* squares;                  // blocks: the sum of squares of gradients, directions or updates
};

namespace {

// ---- half precision --------------------------------------------------------------------------------------------------

inline float float_of_half(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu;
  const uint32_t exponent = magnitude < 0x7c00u ? 112u << 23 : 224u << 23;  // inf and nan get the largest exponent
  const float normal = as_float((magnitude << 13) + exponent);
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  return as_float(as_bits(magnitude < 0x400u ? small : normal) | (half & 0x8000u) << 16);
}

inline uint16_t half_of_float(float value) {
  const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const uint32_t small = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);  // a unit of 0.5f is the smallest half
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

// Converts 128 elements from half precision to float, and `narrow` converts them back.
inline void widen(const uint16_t* __restrict from, float* __restrict to) {
#if defined(__AVX512F__)
  for (int64_t i = 0; i < TILE; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#elif defined(__AVX2__) && defined(__F16C__)
  for (int64_t i = 0; i < TILE; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#else
  for (int64_t i = 0; i < TILE; ++i) to[i] = float_of_half(from[i]);
#endif
}

inline void narrow(const float* __restrict from, uint16_t* __restrict to) {
#if defined(__AVX512F__)
  for (int64_t i = 0; i < TILE; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), 0));
#elif defined(__AVX2__) && defined(__F16C__)
  for (int64_t i = 0; i < TILE; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#else
  for (int64_t i = 0; i < TILE; ++i) to[i] = half_of_float(from[i]);
#endif
}

// ---- tiles -----------------------------------------------------------------------------------------------------------

template <typename State>
constexpr Dtype dtype_of = sizeof(State) == 4 ? FLOAT32 : FLOAT64;

inline int64_t bytes_of(int64_t dtype) {
  if (dtype == FLOAT64) return 8;
  if (dtype == FLOAT32) return 4;
  return 2;
}

template <typename To, typename From>
void convert(const From* __restrict from, To* __restrict to) {
  for (int64_t i = 0; i < TILE; ++i) to[i] = static_cast<To>(from[i]);
}

template <typename State>
void widen_tile(const char* from, int64_t dtype, State* to) {
  if (dtype == FLOAT32) return convert(reinterpret_cast<const float*>(from), to);
  if (dtype == FLOAT64) return convert(reinterpret_cast<const double*>(from), to);
  alignas(64) float values[TILE];
  const auto* halves = reinterpret_cast<const uint16_t*>(from);
  if (dtype == FLOAT16) {
    widen(halves, values);
  } else {
    for (int64_t i = 0; i < TILE; ++i) values[i] = float_of_bfloat(halves[i]);
  }
  convert(values, to);
}

// float64 goes to half precision by way of float32, as in torch.
template <typename State>
void narrow_tile(const State* from, char* to, int64_t dtype) {
  if (dtype == FLOAT32) return convert(from, reinterpret_cast<float*>(to));
  if (dtype == FLOAT64) return convert(from, reinterpret_cast<double*>(to));
  alignas(64) float values[TILE];
  convert(from, values);
  auto* halves = reinterpret_cast<uint16_t*>(to);
  if (dtype == FLOAT16) return narrow(values, halves);
  for (int64_t i = 0; i < TILE; ++i) halves[i] = bfloat_of_float(values[i]);
}

// A tensor, read tile by tile in the dtype of the arithmetic. A full tile of a tensor with this dtype is used in place.
// Any other tile is copied to `values`. The last tile is filled up with zeros, so that the arithmetic always covers
// full tiles.
template <typename State>
struct Tiles {
  Tiles(const uint64_t* tensors, int64_t tensor, int64_t dtype)
      : base(tensors ? reinterpret_cast<char*>(tensors[tensor]) : nullptr), dtype(dtype), bytes(bytes_of(dtype)) {}

  State* load(int64_t begin, int64_t num) {
    char* from = base + begin * bytes;
    if (num == TILE) {
      if (dtype == dtype_of<State>) return reinterpret_cast<State*>(from);
      if (dtype == FLOAT16 && sizeof(State) == 4)  // without a copy in between
        widen(reinterpret_cast<const uint16_t*>(from), reinterpret_cast<float*>(values));
      else
        widen_tile(from, dtype, values);
    } else {
      alignas(64) char part[TILE * 8] = {};
      std::memcpy(part, from, num * bytes);
      widen_tile(part, dtype, values);
    }
    return values;
  }

  // Prefetches the tile that follows `PREFETCHED` tiles later, also past the end of a tensor. Without the prefetch the
  // sums of two tensors took up to twice as long, depending on the order in which the compiler placed the loads.
  void prefetch(int64_t begin) const {
    const char* from = base + (begin + PREFETCHED * TILE) * bytes;
    for (int64_t line = 0; line < TILE * bytes; line += 64) __builtin_prefetch(from + line);
  }

  // Writes a tile, rounded to nearest. The tile may be the changed one that `load` returned.
  void store(int64_t begin, int64_t num, const State* tile) const {
    char* to = base + begin * bytes;
    if (num == TILE) {
      if (reinterpret_cast<const char*>(tile) == to) return;
      if (dtype == FLOAT16 && sizeof(State) == 4)
        narrow(reinterpret_cast<const float*>(tile), reinterpret_cast<uint16_t*>(to));
      else
        narrow_tile(tile, to, dtype);
    } else {
      alignas(64) char part[TILE * 8];
      narrow_tile(tile, part, dtype);
      std::memcpy(to, part, num * bytes);
    }
  }

  char* base;
  int64_t dtype, bytes;
  alignas(64) State values[TILE];
};

// `Lanes` is 64 bytes in the dtype of the arithmetic, `Wide` is the same number of float64.
template <typename State>
struct Vector;
template <>
struct Vector<float> {
  typedef float Lanes __attribute__((vector_size(64)));
  typedef double Wide __attribute__((vector_size(128)));
};
template <>
struct Vector<double> {
  typedef double Lanes __attribute__((vector_size(64)));
  typedef double Wide __attribute__((vector_size(64)));
};

// A sum of squares. Within a tile up to 8 squares in a row are added in the dtype of the arithmetic, namely two in each
// of four sums, which are then added up. Everything else is added in float64.
template <typename State>
struct Squares {
  using Lanes = typename Vector<State>::Lanes;
  static constexpr int64_t LANES = 64 / sizeof(State);

  void add(const State* tile) {
    Lanes sums[4] = {};
    for (int64_t i = 0; i < TILE; i += 4 * LANES) {
      for (int64_t k = 0; k < 4; ++k) {
        Lanes value;
        std::memcpy(&value, tile + i + k * LANES, 64);
        sums[k] += value * value;
      }
    }
    totals += __builtin_convertvector((sums[0] + sums[1]) + (sums[2] + sums[3]), typename Vector<State>::Wide);
  }

  double result() const {
    double all = 0;
    for (int64_t k = 0; k < LANES; ++k) all += totals[k];
    return all;
  }

  typename Vector<State>::Wide totals = {};
};

// ---- blocks ----------------------------------------------------------------------------------------------------------

constexpr int64_t GRAIN = 32768;  // with fewer elements threads cost more than they save, by torch's own number

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

// Calls `work(block)` for every block. Backwards, because the blocks that the pass before read last are still in cache.
template <typename Work>
void for_blocks(const Table* table, bool is_backwards, const Work& work) {
  Job<Work> job{table, work, is_backwards};
  int64_t numel = 0;
  for (int64_t k = 0; k < table->num_blocks && numel < GRAIN; ++k) {
    const int64_t remaining = table->numels[table->tensor_of[k]] - table->begin_of[k];
    numel += remaining < table->block ? remaining : table->block;
  }
  if (table->parallel && table->num_threads > 1 && numel >= GRAIN)
    table->parallel(Job<Work>::run, &job, static_cast<unsigned>(table->num_threads), 0);
  else
    Job<Work>::run(&job);
}

// Calls `work(begin, num)` for every tile of a block: `num` elements from index `begin` of the tensor.
template <typename Work>
void for_tiles(const Table* table, int64_t block, const Work& work) {
  const int64_t begin = table->begin_of[block];
  const int64_t numel = table->numels[table->tensor_of[block]];
  const int64_t end = begin + table->block < numel ? begin + table->block : numel;
  for (int64_t tile_begin = begin; tile_begin < end; tile_begin += TILE)
    work(tile_begin, end - tile_begin < TILE ? end - tile_begin : TILE);
}

}  // namespace
