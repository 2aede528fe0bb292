// The largest number of each row: what greedy decoding draws, and whether the row can be drawn from at all.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "vec16.h"

namespace lockstep {
namespace {

constexpr int64_t BLOCK = 256;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

// The place of the first of the largest in x[0 .. n); -1 where a number is NaN or infinite, but for -infinity, unless
// that is all there is.
int64_t largest_of(const float* x, int64_t n) {
  const F16 bound = F16::all(INFINITE), one = F16::all(1.0f);
  F16 broken = F16::zero();
  float found = -INFINITE;
  int64_t first = 0;  // of the block that has it
  for (int64_t at = 0; at < n; at += BLOCK) {
    const int64_t end = std::min(at + BLOCK, n);
    F16 most = F16::all(-INFINITE);
    for (int64_t i = at; i < end; i += 16) {
      const F16 some = i + 16 <= end ? F16::load(x + i) : load_part(x + i, end - i, -INFINITE);
      most = max(some, most);
      broken = where_less(some, bound, broken, one);
    }
    const float here = largest(most);
    if (here > found) found = here, first = at;
  }
  if (largest(broken) > 0.0f || found == -INFINITE) return -1;
  return std::find(x + first, x + n, found) - x;
}

}  // namespace
}  // namespace lockstep

// x [rows, width] -> places [rows].
extern "C" void lockstep_largest(const float* x, int64_t rows, int64_t width, int64_t* places) {
  for (int64_t row = 0; row < rows; ++row) places[row] = lockstep::largest_of(x + row * width, width);
}
