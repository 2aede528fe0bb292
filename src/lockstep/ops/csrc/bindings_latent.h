// Attention over pages of latents as operators.
#pragma once

#include "batch_checks.h"
#include "call.h"
#include "latent.h"

namespace lockstep {

// x [tokens, ..., dim]; at: where starts and positions stand in the schema.
inline AttentionShape latent_shape(const Call& call, const Tensor& x, const Tensor& pages, int64_t heads, int64_t v_dim,
                                   size_t at) {
  const int64_t dim = x.size(-1);
  TORCH_CHECK(heads > 0 && dim > 0 && v_dim > 0, heads, " heads over latents of ", dim, " with values of ", v_dim);
  TORCH_CHECK(dim % 16 == 0 && v_dim % 16 == 0 && v_dim <= dim, "latents of ", dim, " with values of ", v_dim,
              ": both must be multiples of 16");
  expect_sizes("pages", pages, {pages.size(0), BLOCK, dim});
  const Tensor &starts = call.tensor(at), &positions = call.tensor(at + 1);
  expect_sizes("positions", positions, {x.size(0)});
  return {x.size(0), checked_sequences(starts, x.size(0)), heads, 1, dim, v_dim, data<int32_t>(starts),
          data<int32_t>(positions), 1.0f, 0, 0.0f};
}

inline void write_latents_op(Call& call) {
  const Tensor &latents = call.tensor(0), &pages = call.tensor(1), &table = call.tensor(2);
  expect_dimensions("latents", latents, 2);
  const AttentionShape a = latent_shape(call, latents, pages, 1, latents.size(1), 3);
  const int32_t* in = checked_table(a, table, pages.size(0), true);
  by_type(latents, [&](auto* t) {
    using T = TYPE_OF(t);
    write_latents(data<T>(latents), data<T>(pages), in, table.size(1), a);
  });
}

inline void attention_latent_op(Call& call) {
  const Tensor &q = call.tensor(0), &pages = call.tensor(1), &table = call.tensor(2);
  expect_dimensions("queries", q, 3);
  AttentionShape a = latent_shape(call, q, pages, q.size(1), call.integer(5), 3);
  const int32_t* in = checked_table(a, table, pages.size(0), false);
  a.scale = call.number(6);
  Tensor out = call.result({a.tokens, a.heads, a.v_dim}, q.scalar_type());
  by_type(q, [&](auto* t) {
    using T = TYPE_OF(t);
    attention_latent(data<T>(q), data<T>(pages), in, table.size(1), data<T>(out), a);
  });
}

inline void register_latent(torch::Library& m) {
  IN_PLACE(m, write_latents);
  OPERATOR(m, attention_latent);
}

}  // namespace lockstep
