// What tells a kernel where the rows of a batch belong, checked: a kernel follows these numbers into memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "call.h"

namespace lockstep {

// starts int32 [S + 1], from 0 to the number of rows; gives S.
inline int64_t checked_sequences(const Tensor& starts, int64_t rows) {
  TORCH_CHECK(starts.dim() == 1 && starts.size(0) > 0, "starts: expected [sequences + 1], got ", starts.sizes());
  const int64_t sequences = starts.size(0) - 1;
  const int32_t* at = data<int32_t>(starts);
  TORCH_CHECK(at[0] == 0 && at[sequences] == rows, "starts go from ", at[0], " to ", at[sequences], " for ", rows,
              " rows");
  for (int64_t s = 0; s < sequences; s++) TORCH_CHECK(at[s] <= at[s + 1], "starts fall behind sequence ", s);
  return sequences;
}

// Whole sequences: row r of sequence s has position r - starts[s].
inline void check_packed_positions(const AttentionShape& a) {
  for (int64_t s = 0; s < a.sequences; s++)
    for (int64_t t = a.starts[s]; t < a.starts[s + 1]; t++)
      TORCH_CHECK(a.positions[t] == t - a.starts[s], "row ", t, " is token ", t - a.starts[s],
                  " of its sequence, but its position is ", a.positions[t]);
}

// New tokens of sequences in pages: positions follow each other, and every block of keys that they see, with `written`
// only those that they are in, lies in one of `pages` pages. table: int32 [S, P].
inline const int32_t* checked_table(const AttentionShape& a, const Tensor& table, int64_t pages, bool written) {
  TORCH_CHECK(table.dim() == 2 && table.size(0) == a.sequences, "page table: expected a row for each of ", a.sequences,
              " sequences, got ", table.sizes());
  const int32_t* at = data<int32_t>(table);
  const int64_t width = table.size(1);
  for (int64_t s = 0; s < a.sequences; s++) {
    const int64_t begin = a.starts[s], end = a.starts[s + 1];
    if (begin == end) continue;
    const int64_t first = a.positions[begin], last = first + end - begin - 1;
    for (int64_t t = begin; t < end; t++)
      TORCH_CHECK(a.positions[t] == first + t - begin, "position ", a.positions[t], " of sequence ", s, " does not follow ",
                  a.positions[t - 1]);
    TORCH_CHECK(first >= 0 && last < width * BLOCK, "positions ", first, " to ", last, " of sequence ", s,
                " are not in a page table of ", width, " pages of ", BLOCK, " tokens");
    const int64_t seen = written ? first : a.window ? std::max<int64_t>(0, first - a.window + 1) : 0;
    for (int64_t b = seen / BLOCK; b <= last / BLOCK; b++)
      TORCH_CHECK(at[s * width + b] >= 0 && at[s * width + b] < pages, "page ", at[s * width + b], " of sequence ", s,
                  " is not one of ", pages);
  }
  return at;
}

}  // namespace lockstep
