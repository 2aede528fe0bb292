// Rows of a block of keys or values as float32 panels, the form in which the micro-kernel reads a right-hand side.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "transpose.h"

namespace lockstep {

// Rows of dim elements, `row` apart, turned: [BLOCK / 16][dim][16], sixteen rows to a panel; zero behind the last row.
template <typename T>
void turned_panels(const T* x, int64_t row, int64_t count, int64_t dim, float* out) {
  alignas(64) float square[256];
  for (int64_t t = 0; t < BLOCK; t += 16)
    for (int64_t j = 0; j < dim; j += 16) {
      for (int64_t i = 0; i < 16; i++)
        (t + i < count ? F16::load(x + (t + i) * row + j) : F16::zero()).store(square + 16 * i);
      transpose16(square, out + (t / 16 * dim + j) * 16);
    }
}

// The same rows as they are: [dim / 16][BLOCK][16], sixteen elements of every row to a panel; zero behind the last row.
template <typename T>
void plain_panels(const T* x, int64_t row, int64_t count, int64_t dim, float* out) {
  for (int64_t t = 0; t < BLOCK; t++)
    for (int64_t j = 0; j < dim; j += 16)
      (t < count ? F16::load(x + t * row + j) : F16::zero()).store(out + j * BLOCK + t * 16);
}

}  // namespace lockstep
