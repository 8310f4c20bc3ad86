// CPU implementation of the int8 and int4 codecs, which encodes tensors and adds messages. See `block_format.py`.
//
// Results are bitwise equal to those of `torch_passes.py` with any compiler. Every rounded result comes from a single
// multiplication, division or addition. A product that is added to another number is exact, so a fused multiply-add
// changes nothing. inf and nan are detected by their bits, and a block that contains inf or nan gets the scale nan.

#include <cstdint>
#include <cstring>

#include "../../cpp/float_bits.h"

namespace {

constexpr int64_t BLOCK = 256, LANES = BLOCK / 4;  // one Philox counter yields four words
constexpr int32_t ONE = 1 << 23;                   // one step of a code, in fixed point
constexpr uint32_t INFINITE = 0x7f800000u, LEAST = 31u << 23;  // bits of inf and 2^-96; smaller maxima count as 0
constexpr uint16_t NAN_SCALE = 0x7fc0;

// Philox-4x32-10: words[w][j] of the counter (j, block, sender, round).
void philox(uint32_t block, uint32_t sender, uint32_t round, uint32_t key0, uint32_t key1, uint32_t* __restrict words) {
  for (uint32_t j = 0; j < LANES; ++j) {
    uint32_t c0 = j, c1 = block, c2 = sender, c3 = round, k0 = key0, k1 = key1;
#pragma GCC unroll 10
    for (int i = 0; i < 10; ++i) {
      const uint64_t first = uint64_t(0xD2511F53u) * c0, second = uint64_t(0xCD9E8D57u) * c2;
      c0 = uint32_t(second >> 32) ^ c1 ^ k0;
      c1 = uint32_t(second);
      c2 = uint32_t(first >> 32) ^ c3 ^ k1;
      c3 = uint32_t(first);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    words[j] = c0;
    words[LANES + j] = c1;
    words[2 * LANES + j] = c2;
    words[3 * LANES + j] = c3;
  }
}

// Unscaled Walsh-Hadamard transform in place, in 8 stages of sums and differences.
template <int64_t HALF>
inline void butterflies(float* y) {
  for (int64_t at = 0; at < BLOCK; at += 2 * HALF)
    for (int64_t i = at; i < at + HALF; ++i) {
      const float a = y[i], b = y[i + HALF];
      y[i] = a + b;
      y[i + HALF] = a - b;
    }
}

void hadamard(float* y) {
  butterflies<1>(y);
  butterflies<2>(y);
  butterflies<4>(y);
  butterflies<8>(y);
  butterflies<16>(y);
  butterflies<32>(y);
  butterflies<64>(y);
  butterflies<128>(y);
}

template <int BITS>
constexpr int64_t CODE_BYTES = BLOCK * BITS / 8;

template <int BITS>
void encode_block(const float* __restrict y, const uint32_t* __restrict words, uint16_t* scale, uint8_t* __restrict to,
                  double* noise) {
  constexpr int32_t MOST = (1 << (BITS - 1)) - 1;
  uint32_t most = 0;
  for (int64_t i = 0; i < BLOCK; ++i) {
    const uint32_t magnitude = as_bits(y[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  if (most >= INFINITE || most < LEAST) {
    *scale = most >= INFINITE ? NAN_SCALE : 0;
    std::memset(to, 0, CODE_BYTES<BITS>);
    return;
  }
  // The scale is rounded up to bfloat16, so that no code exceeds the largest one.
  *scale = uint16_t((as_bits(as_float(most) * (1.0f / MOST)) + 0xffffu) >> 16);
  const float step = as_float(uint32_t(*scale) << 16), steps = float(ONE) / step;
  alignas(64) int32_t fixed[BLOCK];
  alignas(64) int8_t codes[BLOCK];
  for (int64_t i = 0; i < BLOCK; ++i) {
    const int32_t value = int32_t(y[i] * steps);
    fixed[i] = value > MOST * ONE ? MOST * ONE : value < -MOST * ONE ? -MOST * ONE : value;
  }
  for (int64_t i = 0; i < BLOCK; ++i) {
    const int32_t addend = words ? int32_t(words[i] >> 9) : ONE / 2;
    codes[i] = int8_t((fixed[i] + addend) >> 23);
  }
  if (noise) {
    float error = 0, power = 0;
    for (int64_t i = 0; i < BLOCK; ++i) {
      const float missing = float(codes[i] * ONE - fixed[i]) * (1.0f / ONE), value = float(fixed[i]) * (1.0f / ONE);
      error += missing * missing;
      power += value * value;
    }
    noise[0] += double(error) * step * step;
    noise[1] += double(power) * step * step;
  }
  if (BITS == 8) {
    std::memcpy(to, codes, BLOCK);
  } else {
    for (int64_t i = 0; i < BLOCK / 2; ++i) to[i] = uint8_t((codes[i] & 15) | (codes[i + BLOCK / 2] & 15) << 4);
  }
}

template <int BITS>
void encode_all(const float* from, int64_t numel, const int32_t* ids, const float* signs, const uint32_t* key,
                int64_t sample_every, uint8_t* message, double* noise) {
  const int64_t num_blocks = (numel + BLOCK - 1) / BLOCK;
  auto* scales = reinterpret_cast<uint16_t*>(message);
  uint8_t* codes = message + 2 * num_blocks;
  alignas(64) float y[BLOCK];
  alignas(64) uint32_t words[BLOCK];
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t num = numel - block * BLOCK < BLOCK ? numel - block * BLOCK : BLOCK;
    std::memcpy(y, from + block * BLOCK, num * sizeof(float));
    if (num < BLOCK) std::memset(y + num, 0, (BLOCK - num) * sizeof(float));
    if (signs) {
      for (int64_t i = 0; i < BLOCK; ++i) y[i] *= signs[i];
      hadamard(y);
    }
    if (key) philox(uint32_t(ids[block]), key[2], key[3], key[0], key[1], words);
    encode_block<BITS>(y, key ? words : nullptr, scales + block, codes + block * CODE_BYTES<BITS>,
                       block % sample_every == 0 ? noise : nullptr);
  }
}

template <int BITS>
void add_all(const uint8_t* messages, int64_t num_messages, int64_t stride, int64_t numel, const float* signs, float* to) {
  const int64_t num_blocks = (numel + BLOCK - 1) / BLOCK;
  alignas(64) float sum[BLOCK];
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (int64_t index = 0; index < num_messages; ++index) {
      const uint8_t* message = messages + index * stride;
      const float step = as_float(uint32_t(reinterpret_cast<const uint16_t*>(message)[block]) << 16);
      const uint8_t* codes = message + 2 * num_blocks + block * CODE_BYTES<BITS>;
      alignas(64) float values[BLOCK];
      if (BITS == 8) {
        for (int64_t i = 0; i < BLOCK; ++i) values[i] = float(int8_t(codes[i])) * step;
      } else {
        for (int64_t i = 0; i < BLOCK / 2; ++i) {
          values[i] = float(int8_t(codes[i] << 4) >> 4) * step;
          values[i + BLOCK / 2] = float(int8_t(codes[i]) >> 4) * step;
        }
      }
      if (index == 0) {
        std::memcpy(sum, values, sizeof(sum));
      } else {
        for (int64_t i = 0; i < BLOCK; ++i) sum[i] += values[i];
      }
    }
    if (signs) {
      hadamard(sum);
      for (int64_t i = 0; i < BLOCK; ++i) sum[i] *= signs[i];
    }
    const int64_t num = numel - block * BLOCK < BLOCK ? numel - block * BLOCK : BLOCK;
    std::memcpy(to + block * BLOCK, sum, num * sizeof(float));
  }
}

}  // namespace

extern "C" {

// `key` holds seed, step, sender and round, or is null to round to the nearest code. The sum of squared errors and the
// sum of squared values are added to `noise`.
void encode(const float* from, int64_t numel, int64_t bits, const int32_t* ids, const float* signs, const uint32_t* key,
            int64_t sample_every, uint8_t* message, double* noise) {
  bits == 8 ? encode_all<8>(from, numel, ids, signs, key, sample_every, message, noise)
            : encode_all<4>(from, numel, ids, signs, key, sample_every, message, noise);
}

// Each message begins `stride` bytes after the previous one.
void add_messages(const uint8_t* messages, int64_t num_messages, int64_t stride, int64_t numel, int64_t bits,
                  const float* signs, float* to) {
  bits == 8 ? add_all<8>(messages, num_messages, stride, numel, signs, to)
            : add_all<4>(messages, num_messages, stride, numel, signs, to);
}

}  // extern "C"
