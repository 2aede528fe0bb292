// The optimizer's two passes over memory: AdamW, and the sum of squares behind gradient clipping.
//
// AdamW is elementwise: the operations of `plain.adamw`, one rounding each, in its order. The sum of squares of a
// block of 65,536 elements is the binary tree that adds the second half onto the first until one value is left, in
// double; a shorter block is padded with zeros to a power of two. Blocks are added by the same tree.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "team.h"
#include "vec16.h"

namespace lockstep {

void adamw(float* p, const float* g, float* m, float* v, int64_t count, const AdamWFactors& f) {
  const F16 scale = F16::all(f.scale), beta1 = F16::all(f.beta1), rest1 = F16::all(f.rest1);
  const F16 beta2 = F16::all(f.beta2), rest2 = F16::all(f.rest2), root = F16::all(f.root), eps = F16::all(f.eps);
  const F16 keep = F16::all(f.keep), lr = F16::all(f.lr);
  const bool scaled = f.scale != 1.0f, decays = f.keep != 1.0f;
  each_sixteen(count, 1, [=](int64_t i, auto n) INLINE {
    F16 gradient = load_part(g + i, n);
    if (scaled) gradient = gradient * scale;
    const F16 first = load_part(m + i, n) * beta1 + gradient * rest1;
    const F16 second = load_part(v + i, n) * beta2 + gradient * gradient * rest2;
    F16 weight = load_part(p + i, n);
    if (decays) weight = weight * keep;
    store_part(weight - first * lr / (sqrt(second) * root + eps), p + i, n);
    store_part(first, m + i, n);
    store_part(second, v + i, n);
  });
}

namespace {

double term(float x) { return double(x) * double(x); }
double term(double sum) { return sum; }

// Three levels of the tree in one pass over memory: out[i] joins the eight elements i, i + eighth, ... May be in place.
template <typename X>
void join_eight(const X* x, int64_t eighth, double* out) {
#pragma omp simd
  for (int64_t i = 0; i < eighth; i++) {
    const X* e = x + i;
    const double even = (term(e[0]) + term(e[4 * eighth])) + (term(e[2 * eighth]) + term(e[6 * eighth]));
    const double odd = (term(e[eighth]) + term(e[5 * eighth])) + (term(e[3 * eighth]) + term(e[7 * eighth]));
    out[i] = even + odd;
  }
}

// The rest of the tree, level by level.
double join_all(double* sums, int64_t size) {
  while (size > 1) {
    size /= 2;
    for (int64_t i = 0; i < size; i++) sums[i] = sums[i] + sums[i + size];
  }
  return sums[0];
}

double block_square_sum(const float* x, int64_t n, double* sums) {
  int64_t size = 8;
  while (size < n) size *= 2;
  std::vector<float> padded;
  if (size > n) {
    padded.assign(x, x + n);
    padded.resize(size);
    x = padded.data();
  }
  join_eight(x, size /= 8, sums);
  while (size >= 8) join_eight(sums, size /= 8, sums);
  return join_all(sums, size);
}

}  // namespace

double square_sum(const float* x, int64_t count) {
  const int64_t blocks = (count + SQUARE_BLOCK - 1) / SQUARE_BLOCK;
  int64_t size = 1;
  while (size < blocks) size *= 2;
  std::vector<double> sums(size);  // zero where there is no block
  auto held = [] { return std::vector<double>(SQUARE_BLOCK / 8); };
  each(blocks, SQUARE_BLOCK, held, [&](std::vector<double>& held, int64_t b) {
    sums[b] = block_square_sum(x + b * SQUARE_BLOCK, std::min(SQUARE_BLOCK, count - b * SQUARE_BLOCK), held.data());
  });
  return join_all(sums.data(), size);
}

}  // namespace lockstep
