// What happens to weights, as operators: the optimizer's update, sums of squares, dequantisation.
#pragma once

#include "call.h"

namespace lockstep {

inline void adamw_op(Call& call) {
  const Tensor &p = call.tensor(0), &g = call.tensor(1), &m = call.tensor(2), &v = call.tensor(3);
  TORCH_CHECK(p.numel() == g.numel() && p.numel() == m.numel() && p.numel() == v.numel(), "parameter, gradient and moments have ", p.sizes(), ", ",
              g.sizes(), ", ", m.sizes(), " and ", v.sizes());
  const AdamWFactors f{call.number(4), call.number(5),  call.number(6),  call.number(7), call.number(8),
                       call.number(9), call.number(10), call.number(11), call.number(12)};
  adamw(data<float>(p), data<float>(g), data<float>(m), data<float>(v), p.numel(), f);
}

inline void square_sum_op(Call& call) {
  const Tensor& x = call.tensor(0);
  *data<double>(call.result({}, at::kDouble)) = square_sum(data<float>(x), x.numel());
}

inline void dequantize_op(Call& call) {
  const Tensor &blocks = call.tensor(0), &out = call.tensor(4);
  const int64_t kind = call.integer(1), size = call.integer(2), count = call.integer(3);
  TORCH_CHECK(blocks.scalar_type() == at::kByte && blocks.is_contiguous(), "expected contiguous bytes");
  TORCH_CHECK(count > 0 && out.numel() % count == 0 && blocks.numel() == out.numel() / count * size, blocks.numel(),
              " bytes are not the blocks of ", out.numel(), " values");
  by_type(out, [&](auto* t) {
    const bool known = dequantize(int(kind), data<uint8_t>(blocks), out.numel(), data<TYPE_OF(t)>(out));
    TORCH_CHECK(known, "unknown ggml format ", kind);
  });
}

inline void register_optimizer(torch::Library& m) {
  IN_PLACE(m, adamw);
  OPERATOR(m, square_sum);
  IN_PLACE(m, dequantize);
}

}  // namespace lockstep
