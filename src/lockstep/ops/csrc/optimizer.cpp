// The optimizer's two passes over memory: AdamW, and the sum of squares behind gradient clipping.
//
// AdamW is elementwise: the operations of `plain.adamw`, one rounding each, in its order. The sum of squares of a
// block of 65,536 elements is the binary tree that adds the second half onto the first until one value is left, in
// double; a shorter block is padded with zeros to a power of two. Blocks are added by the same tree (in Python).
#include <algorithm>
#include <vector>

#include "kernels.h"

namespace lockstep {

void adamw(float* p, const float* g, float* m, float* v, int64_t count, const AdamWFactors& f) {
  const F16 scale = F16::all(f.scale), beta1 = F16::all(f.beta1), rest1 = F16::all(f.rest1);
  const F16 beta2 = F16::all(f.beta2), rest2 = F16::all(f.rest2), root = F16::all(f.root), eps = F16::all(f.eps);
  const F16 keep = F16::all(f.keep), lr = F16::all(f.lr);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t n = count - i;
    F16 gradient = load_part(g + i, n);
    if (f.scale != 1.0f) gradient = gradient * scale;
    const F16 first = load_part(m + i, n) * beta1 + gradient * rest1;
    const F16 second = load_part(v + i, n) * beta2 + gradient * gradient * rest2;
    F16 weight = load_part(p + i, n);
    if (f.keep != 1.0f) weight = weight * keep;
    store_part(weight - first * lr / (sqrt(second) * root + eps), p + i, n);
    store_part(first, m + i, n);
    store_part(second, v + i, n);
  }
}

namespace {

double block_square_sum(const float* x, int64_t n, double* buffer) {
  int64_t half = 1;
  while (2 * half < n) half *= 2;
  if (n == 1) return double(x[0]) * double(x[0]);
  const int64_t both = n - half;  // elements with a partner in the second half
  for (int64_t i = 0; i < both; i++) {
    const double a = x[i], b = x[i + half];
    buffer[i] = a * a + b * b;
  }
  for (int64_t i = both; i < half; i++) buffer[i] = double(x[i]) * double(x[i]);
  for (half /= 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; i++) buffer[i] = buffer[i] + buffer[i + half];
  return buffer[0];
}

}  // namespace

void square_sums(const float* x, int64_t count, double* sums) {
#pragma omp parallel
  {
    std::vector<double> buffer(SQUARE_BLOCK / 2 + 1);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < (count + SQUARE_BLOCK - 1) / SQUARE_BLOCK; b++)
      sums[b] = block_square_sum(x + b * SQUARE_BLOCK, std::min(SQUARE_BLOCK, count - b * SQUARE_BLOCK), buffer.data());
  }
}

}  // namespace lockstep
