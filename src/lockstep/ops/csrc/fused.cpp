// Chains of operators in one pass over memory. Every one rounds where the chain rounds, in the chain's order: the bits
// are those of the operators one by one.
#include <algorithm>
#include <cmath>
#include <vector>

#include "activation.h"
#include "attend_tasks.h"
#include "product.h"

namespace lockstep {

namespace {

// x as it is after a store to T.
template <typename T>
F16 rounded(F16 x) {
  T held[16];
  x.store(held);
  return F16::load(held);
}

// Sixteen pairs of a rotary table row from pair j on.
struct Turn {
  F16 cos, sin;
  Turn(const float* row, int64_t j, int64_t n) {
    float c[16] = {}, s[16] = {};
    for (int64_t i = 0; i < n; i++) {
      c[i] = row[2 * (j + i)];
      s[i] = row[2 * (j + i) + 1];
    }
    cos = F16::load(c);
    sin = F16::load(s);
  }
};

// A head turned by its position: `rope`'s arithmetic. from and to may be the same.
template <typename S, typename T>
void turn_head(const S* from, const float* table_row, T* to, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t j = 0; j < half; j += 16) {
    const int64_t n = std::min<int64_t>(16, half - j);
    const Turn t(table_row, j, n);
    const F16 a = load_part(from + j, n), b = load_part(from + j + half, n);
    store_part(a * t.cos - b * t.sin, to + j, n);
    store_part(b * t.cos + a * t.sin, to + j + half, n);
  }
}

}  // namespace

template <typename T>
void gemm_gated(const T* a, const T* gate_weight, const T* up_weight, int kind, T* y, T* gate, T* up, int64_t m,
                int64_t n, int64_t k) {
  const Right<T, 2> right{{gate_weight, up_weight}, n};
  product<T, 2>(a, k, 1, right, m, k, from_zero, [&](const ProductTask& t, const float* c) {
    for (int64_t i = 0; i < t.rows; i++)
      for (int64_t j = 0; j < t.columns; j += 16) {
        const int64_t at = (t.i0 + i) * n + t.j0 + j, left = t.columns - j;
        const F16 g = rounded<T>(F16::load(c + i * t.width + j));
        const F16 u = rounded<T>(F16::load(c + t.side + i * t.width + j));
        if (gate) {
          store_part(g, gate + at, left);
          store_part(u, up + at, left);
        }
        store_part(activate(g, kind).value * u, y + at, left);
      }
  });
}

template <typename T>
void gemm_activation(const T* a, const T* weight, const T* bias, int kind, T* y, T* before, int64_t m, int64_t n,
                     int64_t k) {
  const Right<T, 1> right{{weight}, n};
  product<T, 1>(a, k, 1, right, m, k, from_zero, [&](const ProductTask& t, const float* c) {
    for (int64_t i = 0; i < t.rows; i++)
      for (int64_t j = 0; j < t.columns; j += 16) {
        const int64_t at = (t.i0 + i) * n + t.j0 + j, left = t.columns - j;
        F16 v = F16::load(c + i * t.width + j);
        if (bias) v = v + load_part(bias + t.j0 + j, left);
        v = rounded<T>(v);
        if (before) store_part(v, before + at, left);
        store_part(activate(v, kind).value, y + at, left);
      }
  });
}

template <typename T>
void gemm_three(const T* a, const Product<T> (&parts)[3], int64_t m, int64_t k) {
  Right<T, 1> right[3];
  for (int i = 0; i < 3; i++) right[i] = {{parts[i].weight}, parts[i].n};
  product<T, 1>(a, k, 1, std::span<const Right<T, 1>>(right), m, k, from_zero, [&](const ProductTask& t, const float* c) {
    const Product<T>& part = parts[t.part];
    for (int64_t i = 0; i < t.rows; i++)
      for (int64_t j = 0; j < t.columns; j += 16) {
        const int64_t left = t.columns - j;
        F16 v = F16::load(c + i * t.width + j);
        if (part.bias) v = v + load_part(part.bias + t.j0 + j, left);
        store_part(v, part.y + (t.i0 + i) * part.n + t.j0 + j, left);
      }
  });
}

template <typename T>
void gemm_add(const float* x, const T* a, const T* weight, float* y, int64_t m, int64_t n, int64_t k) {
  const Right<T, 1> right{{weight}, n};
  product<T, 1>(a, k, 1, right, m, k, from_zero, [&](const ProductTask& t, const float* c) {
    for (int64_t i = 0; i < t.rows; i++)
      for (int64_t j = 0; j < t.columns; j += 16) {
        const int64_t at = (t.i0 + i) * n + t.j0 + j, left = t.columns - j;
        store_part(load_part(x + at, left) + rounded<T>(F16::load(c + i * t.width + j)), y + at, left);
      }
  });
}

template <typename T>
void norm_rope(const T* x, const T* weight, float eps, float offset, const int32_t* positions, const float* table,
               T* y, float* rstd, int64_t tokens, int64_t heads, int64_t dim) {
  each(tokens * heads, dim, [&](int64_t row) {
    T* to = y + row * dim;
    rms_norm<T, T>(x + row * dim, weight, eps, offset, to, rstd + row, 1, dim, {});
    turn_head(to, table + positions[row / heads] * dim, to, dim);
  });
}

template <typename T>
void rope_write_kv(const T* k, const T* v, const float* rotary, T* k_pages, T* v_pages, const int32_t* table,
                   int64_t width, const AttentionShape& a) {
  // Every value of a key goes into a cache line of its own, which takes as long as some sixteen elements of a stream.
  each_head(a, 16, [&](int64_t s, int64_t h) {
    std::vector<T> turned(a.dim);
    for (int64_t t = a.starts[s]; t < a.starts[s + 1]; t++) {
      const int64_t page = table[s * width + a.positions[t] / BLOCK], slot = a.positions[t] % BLOCK;
      const int64_t head = t * a.kv_heads + h, paged = page * a.kv_heads + h;
      turn_head(k + head * a.dim, rotary + a.positions[t] * a.dim, turned.data(), a.dim);
      T* to = k_pages + paged * a.dim * BLOCK + slot;
      for (int64_t j = 0; j < a.dim; j++) to[j * BLOCK] = turned[j];
      std::copy_n(v + head * a.v_dim, a.v_dim, v_pages + (paged * BLOCK + slot) * a.v_dim);
    }
  });
}

#define FUSED(T)                                                                                                   \
  template void gemm_gated(const T*, const T*, const T*, int, T*, T*, T*, int64_t, int64_t, int64_t);              \
  template void gemm_activation(const T*, const T*, const T*, int, T*, T*, int64_t, int64_t, int64_t);             \
  template void gemm_three(const T*, const Product<T>(&)[3], int64_t, int64_t);                                    \
  template void gemm_add(const float*, const T*, const T*, float*, int64_t, int64_t, int64_t);                     \
  template void norm_rope(const T*, const T*, float, float, const int32_t*, const float*, T*, float*, int64_t,     \
                          int64_t, int64_t);                                                                       \
  template void rope_write_kv(const T*, const T*, const float*, T*, T*, const int32_t*, int64_t, const AttentionShape&)
FUSED(float);
FUSED(bf16);

}  // namespace lockstep
