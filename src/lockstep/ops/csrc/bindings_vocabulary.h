// Operators on the vocabulary.
#pragma once

#include <algorithm>

#include "call.h"

namespace lockstep {

// int64 tokens [rows], all below the vocabulary; with `ignored` negative ones may stand for none.
inline const int64_t* checked_tokens(const Tensor& tokens, int64_t rows, int64_t vocabulary, bool ignored) {
  expect_sizes("tokens", tokens, {rows});
  const int64_t* t = data<int64_t>(tokens);
  for (int64_t i = 0; i < rows; i++)
    TORCH_CHECK(t[i] < vocabulary && (ignored || t[i] >= 0), "token ", t[i], " is not in the vocabulary of ",
                vocabulary);
  return t;
}

inline void embedding_op(Call& call) {
  const Tensor &tokens = call.tensor(0), &weight = call.tensor(1);
  expect_dimensions("embedding", weight, 2);
  const int64_t rows = tokens.size(0), held = weight.size(0), d = weight.size(1);
  const int64_t* ids = checked_tokens(tokens, rows, call.integer(5), false);
  Tensor y = call.result({rows, d}, call.type(2));
  by_type(weight, [&](auto* s) {
    by_type(y, [&](auto* o) {
      embedding(ids, data<TYPE_OF(s)>(weight), call.number(3), data<TYPE_OF(o)>(y), rows, d, call.integer(4), held);
    });
  });
}

inline void embedding_backward_op(Call& call) {
  const Tensor &dy = call.tensor(0), &tokens = call.tensor(1);
  expect_dimensions("rows of a gradient", dy, 2);
  const int64_t held = call.integer(2), rows = dy.size(0), d = dy.size(1);
  expect_sizes("tokens", tokens, {rows});
  Tensor dw = call.result({held, d}, call.type(4));
  by_type(dy, [&](auto* s) {
    by_type(dw, [&](auto* o) {
      embedding_backward(data<int64_t>(tokens), data<TYPE_OF(s)>(dy), call.number(3), data<TYPE_OF(o)>(dw), rows, d,
                         call.integer(5), held);
    });
  });
}

inline void log_sum_exp_op(Call& call) {
  const Tensor& logits = call.tensor(0);
  expect_dimensions("logits", logits, 2);
  const int64_t rows = logits.size(0), vocabulary = logits.size(1), segments = call.integer(1);
  TORCH_CHECK(0 < segments && segments <= vocabulary, segments, " segments of ", vocabulary, " logits");
  Tensor lse = call.result({rows, segments}, at::kFloat);
  log_sum_exp(data<float>(logits), data<float>(lse), rows, vocabulary, segments);
}

inline void entropies_op(Call& call) {
  const Tensor &logits = call.tensor(0), &lse = call.tensor(1);
  expect_dimensions("logits", logits, 2);
  const int64_t rows = logits.size(0), vocabulary = logits.size(1), segments = call.integer(2);
  TORCH_CHECK(0 < segments && segments <= vocabulary, segments, " segments of ", vocabulary, " logits");
  expect_sizes("lse", lse, {rows});
  Tensor y = call.result({rows, segments}, at::kFloat);
  entropies(data<float>(logits), data<float>(lse), data<float>(y), rows, vocabulary, segments);
}

inline void cross_entropy_backward_op(Call& call) {
  const Tensor &logits = call.tensor(0), &lse = call.tensor(1), &targets = call.tensor(2), &weights = call.tensor(3);
  expect_dimensions("logits", logits, 2);
  const int64_t rows = logits.size(0);
  for (const Tensor* one : {&lse, &targets, &weights}) expect_sizes("of each row", *one, {rows});
  Tensor d = call.result(logits.sizes(), call.type(7));
  by_type(d, [&](auto* t) {
    cross_entropy_backward(data<float>(logits), data<float>(lse), data<int64_t>(targets), data<float>(weights),
                           call.number(4), call.number(5), data<TYPE_OF(t)>(d), logits.size(1), rows, logits.size(1),
                           call.integer(6));
  });
}

inline void log_softmax_op(Call& call) {
  const Tensor& logits = call.tensor(0);
  expect_dimensions("logits", logits, 2);
  Tensor y = call.result_like(logits);
  log_softmax(data<float>(logits), data<float>(y), logits.size(0), logits.size(1));
}

inline void softcap_op(Call& call) {
  const Tensor& logits = call.tensor(0);
  TORCH_CHECK(call.number(1) > 0, "softcap is ", call.number(1), ": expected a bound above 0");
  Tensor y = call.result_like(logits);
  softcap(data<float>(logits), call.number(1), data<float>(y), logits.numel());
}

// Consecutive arrays within the bytes of a workspace, each on a cache line of its own.
class Workspace {
 public:
  explicit Workspace(uint8_t* at) : at_(at) {}
  template <typename T>
  T* take(int64_t count) {
    T* here = reinterpret_cast<T*>(at_);
    used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    if (at_) at_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return here;
  }
  int64_t used() const { return used_; }

 private:
  uint8_t* at_;
  int64_t used_ = 0;
};

template <typename T>
LinearCrossEntropy<T> cross_entropy_buffers(Workspace& w, int64_t rows, int64_t d, int64_t vocabulary, bool d_hidden,
                                            bool d_weight) {
  LinearCrossEntropy<T> c{};
  c.rows = rows, c.width = d, c.vocabulary = vocabulary;
  c.step = std::min(rows, std::max<int64_t>(32, LOGITS_HELD / vocabulary / 32 * 32));
  c.columns = w.take<T>(panels(vocabulary) * PANEL * d);
  c.logits = w.take<float>(c.step * vocabulary);
  c.lse = w.take<float>(c.step);
  c.losses = w.take<float>(rows);
  if (d_hidden) c.rows_of_weight = w.take<T>(panels(d) * PANEL * vocabulary);
  if (d_weight) c.rows_of_hidden = w.take<T>(panels(d) * PANEL * c.step);
  return c;
}

inline void linear_cross_entropy_op(Call& call) {
  const Tensor &hidden = call.tensor(0), &weight = call.tensor(1), &weights = call.tensor(3);
  TORCH_CHECK(hidden.dim() == 2 && weight.dim() == 2 && weight.size(0) > 0 && weight.size(1) == hidden.size(1), "hidden ",
              hidden.sizes(), " with a weight ", weight.sizes());
  const int64_t rows = hidden.size(0), d = hidden.size(1), vocabulary = weight.size(0);
  expect_sizes("token_weights", weights, {rows});
  TORCH_CHECK(call.number(5) >= 0, "softcap is ", call.number(5), ": expected a bound above 0, or 0 for none");
  const int64_t* targets = checked_tokens(call.tensor(2), rows, vocabulary, true);
  const bool entropy = call.flag(6), d_hidden = call.flag(7), d_weight = call.flag(8);
  Tensor loss = call.result({}, at::kFloat), logprobs = call.result({rows}, at::kFloat);
  Tensor entropies = call.result({entropy ? rows : 0}, at::kFloat);
  Tensor dx = d_hidden ? call.result_like(hidden) : call.result({0}, hidden.scalar_type());
  Tensor dw = d_weight ? call.result(weight.sizes(), at::kFloat) : call.result({0}, at::kFloat);
  by_type(hidden, [&](auto* h) {
    using T = TYPE_OF(h);
    Workspace measured(nullptr);
    cross_entropy_buffers<T>(measured, rows, d, vocabulary, d_hidden, d_weight);
    Workspace workspace(data<uint8_t>(call.workspace(measured.used())));
    LinearCrossEntropy<T> c = cross_entropy_buffers<T>(workspace, rows, d, vocabulary, d_hidden, d_weight);
    c.hidden = data<T>(hidden), c.targets = targets, c.token_weights = data<float>(weights);
    c.z_loss = call.number(4), c.softcap = call.number(5);
    c.loss = data<float>(loss), c.logprobs = data<float>(logprobs);
    if (entropy) c.entropies = data<float>(entropies);
    if (d_hidden) c.d_hidden = data<T>(dx);
    if (d_weight) c.d_weight = data<float>(dw);
    by_type(weight, [&](auto* s) { linear_cross_entropy(c, data<TYPE_OF(s)>(weight)); });
  });
}

inline void scaled_op(Call& call) {
  const Tensor &x = call.tensor(0), &scale = call.tensor(1);
  TORCH_CHECK(scale.numel() == 1, "expected one factor, got ", scale.sizes());
  Tensor y = call.result(x.sizes(), call.type(2));
  by_type(x, [&](auto* s) {
    by_type(y, [&](auto* o) {
      scaled(data<TYPE_OF(s)>(x), *data<float>(scale), data<TYPE_OF(o)>(y), x.numel());
    });
  });
}

inline void register_vocabulary(torch::Library& m) {
  OPERATOR(m, embedding);
  OPERATOR(m, embedding_backward);
  OPERATOR(m, log_sum_exp);
  OPERATOR(m, entropies);
  OPERATOR(m, cross_entropy_backward);
  OPERATOR(m, log_softmax);
  OPERATOR_OVER(m, softcap);
  OPERATOR(m, linear_cross_entropy);
  OPERATOR_OVER(m, scaled);
}

}  // namespace lockstep
