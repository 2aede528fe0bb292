// How kernels use threads: the independent tasks of a region are shared by a team (team.cpp).
//
// A region's tasks are taken one by one, in ascending order, by whoever is free: so a core that another program slows
// down takes fewer of them. Which thread takes a task, and how many threads there are, must change no bit: a task
// writes what no other task of its region reads or writes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "kernels.h"

#define INLINE __attribute__((always_inline))  // a body that is called would take its vectors from memory

namespace lockstep {

// Threads that a region which begins here may have: what `torch.set_num_threads` or OMP_NUM_THREADS said to this
// thread; one inside of a region.
int64_t threads();

class Tasks {
 public:
  explicit Tasks(int64_t count) : count_(count) {}
  // The next task that nobody has taken, or -1.
  int64_t take() {
    if (next_.load(std::memory_order_relaxed) >= count_) return -1;
    const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    return task < count_ ? task : -1;
  }
  void drop() { next_.store(count_, std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> next_{0};
  const int64_t count_;
};

// Runs body(tasks) on this thread and, where waking them is worth it, on those of the team that come before the tasks
// are all taken; returns when all are done. Throws what a body threw, after the others have stopped.
void share_tasks(int64_t count, bool worth, void (*body)(void*, Tasks&), void* context);

// The same for any callable. What a thread needs for its tasks it makes in body, once it has taken one.
template <typename Body>
void in_team(int64_t count, bool worth, Body body) {
  share_tasks(count, worth, [](void* context, Tasks& tasks) { (*static_cast<Body*>(context))(tasks); }, &body);
}

// body(i) for every task i.
template <typename Body>
void each_task(int64_t count, bool worth, Body body) {
  in_team(count, worth, [&](Tasks& tasks) {
    for (int64_t i; (i = tasks.take()) >= 0;) body(i);
  });
}

// body(held, i) for i = 0 .. count - 1, each of so many elements: small ones, taken in runs of neighbours. make() gives
// what a thread holds meanwhile.
template <typename Make, typename Body>
void each(int64_t count, int64_t elements, Make make, Body body) {
  const int64_t all = count * elements, most = std::min(count, 16 * threads());
  const int64_t runs = all > GRAIN ? std::clamp<int64_t>(all / (GRAIN / 8), 1, most) : 1;
  in_team(runs, true, [&](Tasks& tasks) {
    int64_t run = tasks.take();
    if (run < 0) return;
    const Body own = body;  // of this thread alone: what it captures by value may stay in registers
    for (auto held = make(); run >= 0; run = tasks.take())
      for (int64_t i = run * count / runs, end = (run + 1) * count / runs; i < end; i++) own(held, i);
  });
}

template <typename Body>
void each(int64_t count, int64_t elements, Body body) {
  each(count, elements, [] { return 0; }, [=](int, int64_t i) INLINE { body(i); });
}

// body(i, n) for i = 0, 16, ... below count, each of sixteen times so many elements: n is 16, known while compiling; at
// the end what is left.
template <typename Body>
void each_sixteen(int64_t count, int64_t elements, Body body) {
  each((count + 15) / 16, 16 * elements, [=](int64_t i) INLINE {
    const int64_t first = 16 * i;
    first + 16 <= count ? body(first, std::integral_constant<int64_t, 16>{}) : body(first, count - first);
  });
}

}  // namespace lockstep
