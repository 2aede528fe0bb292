// How a product takes its operands of type T: by steps of k, of one element each, or, where the build multiplies
// bfloat16 by pairs (LOCKSTEP_BF16_PAIRS, device class cpu-avx512-bf16) or by tiles of them (LOCKSTEP_BF16_TILES,
// device class cpu-amx-bf16), of two neighbours.
//
// A step of the left-hand side is a word of 32 bits: a float32, or a pair. A step of a packed right-hand side has
// sixteen columns: sixteen elements, or sixteen pairs; the last element of an odd k stands alone, sixteen singles. So
// both are laid out in as much memory, and k_elements * PANEL lie between two panels.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "pairs16.h"

namespace lockstep {

#if defined(LOCKSTEP_BF16_TILES)
template <typename T>
constexpr bool BY_TILES = std::is_same_v<T, bf16>;
#else
template <typename T>
constexpr bool BY_TILES = false;
#endif
#if defined(LOCKSTEP_BF16_PAIRS)
template <typename T>
constexpr bool BY_PAIRS = std::is_same_v<T, bf16>;
#else
template <typename T>
constexpr bool BY_PAIRS = BY_TILES<T>;
#endif

template <typename T>
constexpr int64_t STEP = BY_PAIRS<T> ? 2 : 1;

// Steps of so many k.
template <typename T>
constexpr int64_t steps(int64_t depth) {
  return (depth + STEP<T> - 1) / STEP<T>;
}

// What of the processor a thread sets up for its part of a product.
template <typename T>
struct Unit {};

// n elements of a row or more than it has, as bfloat16; zeros behind them.
template <int64_t COUNT, typename S>
inline void as_bf16(const S* p, int64_t n, bf16* out) {
  for (int64_t i = 0; i < COUNT; i += 16) load_part(p + i, std::max<int64_t>(0, n - i)).store(out + i);
}
template <int64_t COUNT>
inline void as_bf16(const bf16* p, int64_t n, bf16* out) {
  if (n < COUNT) std::fill_n(out, COUNT, bf16{});
  std::memcpy(out, p, std::min(n, COUNT) * sizeof(bf16));
}

// Sixteen steps of one row (column) of a matrix whose k are neighbours in memory, of which `left` remain.
template <typename T, typename S>
inline F16 words_along(const S* p, int64_t left) {
  if constexpr (BY_PAIRS<T>) {
    if constexpr (std::is_same_v<S, bf16>)
      if (left >= 32) return F16::load_words(p);
    alignas(64) bf16 elements[32];
    as_bf16<32>(p, left, elements);
    return F16::load_words(elements);
  } else {
    return load_part(p, left);
  }
}

// One step of `count` (up to sixteen) rows whose elements are neighbours in memory and k lie `k_stride` apart.
template <typename T, typename S>
inline F16 words_across(const S* p, int64_t k_stride, int64_t left, int64_t count) {
  if constexpr (BY_PAIRS<T>) {
    alignas(32) bf16 even[16], odd[16] = {};
    as_bf16<16>(p, count, even);
    if (left > 1) as_bf16<16>(p + k_stride, count, odd);
    return interleaved(even, odd);
  } else {
    return load_part(p, count);
  }
}

// A step of sixteen columns into a packed right-hand side, with `left` of k to go.
template <typename T>
inline void store_step(F16 words, int64_t left, T* out) {
  if constexpr (BY_PAIRS<T>) {
    if (left > 1) return words.store_words(out);
    pair last[16];
    words.store_words(last);
    for (int i = 0; i < 16; i++) out[i] = last[i].even;
  } else {
    words.store(out);
  }
}

}  // namespace lockstep
