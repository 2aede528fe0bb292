// The activations and their slopes on sixteen lanes.
#pragma once

#include "kernels.h"
#include "math16.h"

namespace lockstep {

constexpr float GELU_A = 0.7978845608f;  // sqrt(2 / pi)
constexpr float GELU_B = 0.044715f;

struct Activated {
  F16 value, slope;
};

// silu(x) = x s, slope s (1 + x (1 - s)) with s = sigmoid(x). gelu (tanh form): x (1 + t) / 2.
inline Activated activate(F16 x, int activation) {
  const F16 one = F16::all(1.0f), half = F16::all(0.5f);
  if (activation == SILU) {
    F16 s = sigmoid(x);
    return {x * s, s * fma(x, one - s, one)};
  }
  F16 square = x * x;
  F16 t = tanh(F16::all(GELU_A) * fma(F16::all(GELU_B) * square, x, x));
  F16 inner = F16::all(GELU_A) * fma(F16::all(3.0f * GELU_B), square, one);
  F16 value = half * x * (one + t);
  return {value, fma(half * x * (one - t * t), inner, half * (one + t))};
}

}  // namespace lockstep
