// exp2, exp, sigmoid and tanh on sixteen lanes: the same operations in every build, so the same bits.
#pragma once

#include "vec16.h"

namespace lockstep {

// Polynomials of degree 6 in Horner form, fitted for the least relative error over the range with coefficients that are
// float32; together with the roundings of Horner's form 2^r is within 0.79 and e^r within 0.89 units in the last place.

// 2^r for |r| <= 1/2. Truncation below 2^-28 of the result.
inline F16 exp2_reduced(F16 r) {
  F16 p = F16::all(1.53293105540797114e-4f);
  p = fma(p, r, F16::all(1.33909704163670540e-3f));
  p = fma(p, r, F16::all(9.61849931627511978e-3f));
  p = fma(p, r, F16::all(5.55035956203937531e-2f));
  p = fma(p, r, F16::all(2.40226477384567261e-1f));
  p = fma(p, r, F16::all(6.93147182464599609e-1f));
  return fma(p, r, F16::all(1.0f));
}

// e^r for |r| <= 0.347, a little over ln 2 / 2. Truncation below 2^-28 of the result.
inline F16 exp_reduced(F16 r) {
  F16 p = F16::all(1.38195115141570568e-3f);
  p = fma(p, r, F16::all(8.36869049817323685e-3f));
  p = fma(p, r, F16::all(4.16682809591293335e-2f));
  p = fma(p, r, F16::all(1.66665211319923401e-1f));
  p = fma(p, r, F16::all(4.99999940395355225e-1f));
  p = fma(p, r, F16::all(1.0f));
  return fma(p, r, F16::all(1.0f));
}

// 2^x. Exactly 0 below -126 (where the result would be subnormal), +inf above 128, NaN stays NaN.
inline F16 exp2(F16 x) {
  F16 n = min(F16::all(127.0f), nearest(x));  // this operand order keeps a NaN
  F16 y = exp2_reduced(x - n) * power_of_two(n);  // x - n is exact
  y = where_less(F16::all(128.0f), x, F16::all(INFINITY), y);
  return where_less(x, F16::all(-126.0f), F16::zero(), y);
}

// 2^x for x <= 1, the bits of `exp2`: what a softmax takes against its maximum needs no care for large x.
inline F16 exp2_low(F16 x) {
  F16 n = nearest(x);
  return where_less(x, F16::all(-126.0f), F16::zero(), exp2_reduced(x - n) * power_of_two(n));
}

// e^x by Cody-Waite reduction. Exactly 0 below -87, +inf above 88, NaN stays NaN.
inline F16 exp(F16 x) {
  F16 n = min(F16::all(127.0f), nearest(x * F16::all(1.44269504088896f)));
  F16 r = fma(n, F16::all(-0.693359375f), x);
  r = fma(n, F16::all(2.12194440e-4f), r);
  F16 y = exp_reduced(r) * power_of_two(n);
  y = where_less(F16::all(88.0f), x, F16::all(INFINITY), y);
  return where_less(x, F16::all(-87.0f), F16::zero(), y);
}

// e^x for x <= 88, the bits of `exp`: what is taken against a maximum needs no care for large x.
inline F16 exp_low(F16 x) {
  F16 n = nearest(x * F16::all(1.44269504088896f));
  F16 r = fma(n, F16::all(-0.693359375f), x);
  r = fma(n, F16::all(2.12194440e-4f), r);
  return where_less(x, F16::all(-87.0f), F16::zero(), exp_reduced(r) * power_of_two(n));
}

inline F16 sigmoid(F16 x) {
  F16 one = F16::all(1.0f);
  return one / (one + exp(F16::zero() - x));
}

// tanh(x) = 1 - 2 / (e^2x + 1); near zero, where that cancels, x - x^3/3 + 2x^5/15 - 17x^7/315.
inline F16 tanh(F16 x) {
  F16 one = F16::all(1.0f), two = F16::all(2.0f);
  F16 y = one - two / (exp(two * x) + one);
  F16 s = x * x;
  F16 p = fma(s, F16::all(-17.0f / 315.0f), F16::all(2.0f / 15.0f));
  p = fma(s, p, F16::all(-1.0f / 3.0f));
  F16 small = fma(x * s, p, x);
  return where_less(s, F16::all(0.01f), small, y);
}

// y = cap * tanh(x / cap), and its slope 1 - (y / cap)^2.
inline F16 capped(F16 x, float cap) { return F16::all(cap) * tanh(x / F16::all(cap)); }
inline F16 capped_slope(F16 y, float cap) {
  const F16 share = y / F16::all(cap);
  return F16::all(1.0f) - share * share;
}

}  // namespace lockstep
