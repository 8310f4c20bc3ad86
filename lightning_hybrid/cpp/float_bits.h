// Conversion between float32 numbers and their bits, for all C++ sources of the package (`cpp/library.py`).

#pragma once

#include <cstdint>
#include <cstring>

namespace {

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

}  // namespace
