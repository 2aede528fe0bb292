// The router of a mixture of experts: which experts a token goes to, with which weights, and the gradient of that.
//
// Order (the contract), for each token alone: softmax takes the exact maximum, sums exponentials in sixteen lanes over
// ascending experts and then by the tree of `sum`. Experts (and groups) are chosen by their score, of equal ones the
// lowest number; a NaN is larger than any number, so that it is never hidden. The chosen ones stand in ascending
// order, and their sum is taken in it, one after the other.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "math16.h"
#include "moe.h"
#include "team.h"

namespace lockstep {

namespace {

constexpr float TINY = 1e-20f;  // added to the sum of sigmoid scores, as DeepSeek-V3 does

bool better(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

void softmax(const float* logits, int64_t n, float* p) {
  F16 top = F16::all(-INFINITY);
  for (int64_t e = 0; e < n; e += 16) top = max(load_part(logits + e, n - e, -INFINITY), top);
  const F16 m = F16::all(largest(top));
  F16 total = F16::zero();
  for (int64_t e = 0; e < n; e += 16) {
    const F16 y = exp(load_part(logits + e, n - e, -INFINITY) - m);
    total = total + y;
    store_part(y, p + e, n - e);
  }
  const F16 s = F16::all(sum(total));
  for (int64_t e = 0; e < n; e += 16) store_part(load_part(p + e, n - e) / s, p + e, n - e);
}

void scores(const float* logits, const Routing& r, float* p) {
  if (!r.sigmoid) return softmax(logits, r.experts, p);
  for (int64_t e = 0; e < r.experts; e += 16)
    store_part(sigmoid(load_part(logits + e, r.experts - e)), p + e, r.experts - e);
}

// The `count` best of n where allowed, marked in `taken`.
void choose(const float* value, const std::vector<char>& allowed, int64_t n, int64_t count, std::vector<char>& taken) {
  std::fill(taken.begin(), taken.end(), 0);
  for (int64_t c = 0; c < count; c++) {
    int64_t best = -1;
    for (int64_t e = 0; e < n; e++)
      if (allowed[e] && !taken[e] && (best < 0 || better(value[e], value[best]))) best = e;
    taken[best] = 1;
  }
}

float group_score(const float* value, int64_t size, bool pairs) {
  float first = value[0], second = -INFINITY;
  for (int64_t e = 1; e < size; e++) {
    if (better(value[e], first)) {
      second = first;
      first = value[e];
    } else if (better(value[e], second)) {
      second = value[e];
    }
  }
  return pairs ? first + second : first;
}

struct Room {  // of one thread
  std::vector<float> p, choice, group;
  std::vector<char> allowed, taken, group_allowed, group_taken;
  explicit Room(const Routing& r)
      : p(r.experts), choice(r.experts), group(r.groups), allowed(r.experts), taken(r.experts),
        group_allowed(r.groups, 1), group_taken(r.groups) {}
};

void allow(const Routing& r, Room& w) {
  const int64_t size = r.experts / r.groups;
  if (r.groups > 1) {
    for (int64_t g = 0; g < r.groups; g++) w.group[g] = group_score(w.choice.data() + g * size, size, r.pairs);
    choose(w.group.data(), w.group_allowed, r.groups, r.top_groups, w.group_taken);
  }
  for (int64_t e = 0; e < r.experts; e++) w.allowed[e] = r.groups == 1 || w.group_taken[e / size];
}

// What the chosen scores are divided by.
float divisor(const float* p, const int32_t* chosen, const Routing& r) {
  if (!r.normalize) return 1.0f;
  float s = 0.0f;
  for (int64_t j = 0; j < r.top_k; j++) s += p[chosen[j]];
  return r.sigmoid ? s + TINY : s;
}

}  // namespace

void route(const float* logits, const float* bias, const Routing& r, int64_t tokens, int32_t* chosen, float* weights) {
  auto room = [&] { return Room(r); };
  each(tokens, r.experts, room, [&](Room& w, int64_t t) {
    scores(logits + t * r.experts, r, w.p.data());
    for (int64_t e = 0; e < r.experts; e++) w.choice[e] = bias ? w.p[e] + bias[e] : w.p[e];
    allow(r, w);
    choose(w.choice.data(), w.allowed, r.experts, r.top_k, w.taken);
    int32_t* ids = chosen + t * r.top_k;
    int64_t j = 0;
    for (int64_t e = 0; e < r.experts; e++)
      if (w.taken[e]) ids[j++] = int32_t(e);
    const float s = divisor(w.p.data(), ids, r);
    for (j = 0; j < r.top_k; j++) weights[t * r.top_k + j] = w.p[ids[j]] / s * r.scale;
  });
}

// With s the divisor: dp = scale / s (dw - sum(dw p) / s), without the second term where s is 1; then through softmax,
// dl = p (dp - sum(dp p)), or sigmoid, dl = dp p (1 - p). After normalised softmax that sum is zero, and left out.
void route_backward(const float* d_weights, const float* logits, const int32_t* chosen, const Routing& r,
                    int64_t tokens, float* d_logits) {
  auto room = [&] { return Room(r); };
  each(tokens, r.experts, room, [&](Room& w, int64_t t) {
    const int32_t* ids = chosen + t * r.top_k;
    const float* dw = d_weights + t * r.top_k;
    float* dl = d_logits + t * r.experts;
    scores(logits + t * r.experts, r, w.p.data());
    const float s = divisor(w.p.data(), ids, r);
    float along = 0.0f;
    if (r.normalize)
      for (int64_t j = 0; j < r.top_k; j++) along += dw[j] * (w.p[ids[j]] / s);
    for (int64_t j = 0; j < r.top_k; j++) w.choice[j] = r.scale / s * (dw[j] - along);
    float shared = 0.0f;
    if (!r.sigmoid && !r.normalize)
      for (int64_t j = 0; j < r.top_k; j++) shared += w.choice[j] * w.p[ids[j]];
    for (int64_t e = 0; e < r.experts; e++) dl[e] = shared == 0.0f ? 0.0f : -w.p[e] * shared;
    for (int64_t j = 0; j < r.top_k; j++) {
      const float p = w.p[ids[j]];
      dl[ids[j]] = r.sigmoid ? w.choice[j] * p * (1.0f - p) : p * (w.choice[j] - shared);
    }
  });
}

void softmax_sums(const float* logits, int64_t tokens, int64_t experts, float* sums) {
  std::vector<float> p(experts);
  std::fill(sums, sums + experts, 0.0f);
  for (int64_t t = 0; t < tokens; t++) {
    softmax(logits + t * experts, experts, p.data());
    for (int64_t e = 0; e < experts; e++) sums[e] += p[e];
  }
}

void balance_share(const std::vector<const int32_t*>& offsets, int64_t experts, int64_t rows, float* share) {
  const float factor = float(double(experts) / (double(rows) * double(rows)));
  for (int64_t e = 0; e < experts; e++) {
    int64_t count = 0;
    for (const int32_t* layer : offsets) count += layer[e + 1] - layer[e];
    share[e] = float(count) * factor;
  }
}

void softmax_sums_backward(const float* d_sums, const float* logits, int64_t tokens, int64_t experts, float* d_logits) {
  each(tokens, experts, [&](int64_t t) {
    float* d = d_logits + t * experts;
    softmax(logits + t * experts, experts, d);
    F16 along = F16::zero();
    for (int64_t e = 0; e < experts; e += 16)
      along = fma(load_part(d_sums + e, experts - e), load_part(d + e, experts - e), along);
    const F16 s = F16::all(sum(along));
    for (int64_t e = 0; e < experts; e += 16)
      store_part(load_part(d + e, experts - e) * (load_part(d_sums + e, experts - e) - s), d + e, experts - e);
  });
}

void group(const int32_t* chosen, int64_t tokens, int64_t top_k, int64_t experts, int32_t* offsets, int32_t* rows,
           int32_t* slots) {
  std::fill(offsets, offsets + experts + 1, 0);
  for (int64_t i = 0; i < tokens * top_k; i++) offsets[chosen[i] + 1]++;
  for (int64_t e = 0; e < experts; e++) offsets[e + 1] += offsets[e];
  std::vector<int32_t> next(offsets, offsets + experts);
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t j = 0; j < top_k; j++) {
      const int32_t row = next[chosen[t * top_k + j]]++;
      rows[row] = int32_t(t);
      slots[t * top_k + j] = row;
    }
}

}  // namespace lockstep
