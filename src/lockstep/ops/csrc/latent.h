// Entry points of attention over pages of latents (latent.cpp).
#pragma once

#include "kernels.h"

namespace lockstep {

// Latent of position p of sequence s: row p % BLOCK of page table[s * width + p / BLOCK]; pages [*, BLOCK, dim].
template <typename T>
void write_latents(const T* latents, T* pages, const int32_t* table, int64_t width, const AttentionShape& shape);
// q [tokens, heads, dim], out [tokens, heads, v_dim], v_dim <= dim.
template <typename T>
void attention_latent(const T* q, const T* pages, const int32_t* table, int64_t width, T* out,
                      const AttentionShape& shape);

}  // namespace lockstep
