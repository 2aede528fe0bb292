// Entry points of attention over pages in eight bits (attention_int8.cpp).
#pragma once

#include "kernels.h"

namespace lockstep {

// Of one layer: k [*, kv_heads, dim, BLOCK], v [*, kv_heads, BLOCK, v_dim], scales [*, kv_heads, BLOCK].
struct Int8Pages {
  int8_t *k, *v;
  float *k_scale, *v_scale;
};
template <typename T>
void write_kv_int8(const T* k, const T* v, const Int8Pages& pages, const int32_t* table, int64_t width,
                   const AttentionShape& shape);
template <typename T>
void attention_paged_int8(const T* q, const Int8Pages& pages, const int32_t* table, int64_t width, T* out,
                          const AttentionShape& shape);

}  // namespace lockstep
