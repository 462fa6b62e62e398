#pragma once

#include <cstdint>

namespace dyngran {

class Random {  // splitmix64: the same numbers on every machine
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  int below(int limit) { return limit <= 1 ? 0 : int((next() >> 32) * uint64_t(limit) >> 32); }
  double unit() { return double(next() >> 11) * 0x1p-53; }  // 0 to 1

 private:
  uint64_t state_;
};

}  // namespace dyngran
