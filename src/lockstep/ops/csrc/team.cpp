// The team: threads that wait for regions, one region at a time.
//
// A region is one word of memory: its number, the seats left for threads that may yet come, and the threads inside. The
// calling thread opens it, works on it like the others, closes it when no task is left, and waits for those inside:
// a thread that another program keeps from running is not waited for unless it holds a task. A second thread that
// calls meanwhile, or a body that itself calls, runs its tasks alone.
//
// Waiting is adaptive. Asleep, a thread costs nothing but comes late (some 50 microseconds on a virtual machine);
// spinning, it comes at once but holds a core that others may want. So a thread spins a bounded time, only while
// regions have lately followed one another that closely, and not for a while after a thread of ours had to wait for a
// core.
#include "team.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <omp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

namespace lockstep {

namespace {

using Nanoseconds = int64_t;
constexpr Nanoseconds SPIN = 80'000;     // at most, of a wait: a task of a product, and what lies between regions
constexpr Nanoseconds LOOK = 4'000'000;  // between two looks at how long a thread waited for a core
constexpr int64_t CROWDED = 16;          // where that was more than such a part of the time, others want the cores
constexpr Nanoseconds SHORTEST = LOOK, LONGEST = 200'000'000;  // without spinning then

Nanoseconds now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The word of a region.
constexpr uint32_t INSIDE = 1, SEAT = 1 << 10, NUMBER = 1 << 20;
constexpr uint32_t inside(uint32_t word) { return word % SEAT; }
constexpr uint32_t seats(uint32_t word) { return word % NUMBER / SEAT; }
constexpr uint32_t number(uint32_t word) { return word / NUMBER; }
constexpr int64_t MOST = SEAT - 1;

// Who sleeps on the word: threads that wait for a region, or the one that waits for those inside.
enum Sleeper : uint32_t { WORKER = 1, CALLER = 2 };

void sleep_while(const std::atomic<uint32_t>& word, uint32_t value, Sleeper who) {
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, value, nullptr, nullptr, who);
}
void wake(const std::atomic<uint32_t>& word, int64_t count, Sleeper who) {
  syscall(SYS_futex, &word, FUTEX_WAKE_BITSET_PRIVATE, int(count), nullptr, nullptr, who);
}

thread_local bool in_region = false;

// How long this thread was ready to run and had no core.
Nanoseconds waited_for_core() {
  const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
  char text[64];
  const ssize_t length = file < 0 ? 0 : read(file, text, sizeof text - 1);
  if (file >= 0) close(file);
  text[std::max<ssize_t>(length, 0)] = 0;
  long long ran, waited;
  return std::sscanf(text, "%lld %lld", &ran, &waited) == 2 ? waited : 0;
}

// Whether the cores are ours alone, as far as our threads have seen.
class Quiet {
 public:
  bool at(Nanoseconds time) const { return time >= from_.load(std::memory_order_relaxed); }

  void disturbed(Nanoseconds time) {
    const Nanoseconds from = from_.load(std::memory_order_relaxed);
    if (time < from) return;
    const Nanoseconds last = length_.load(std::memory_order_relaxed);
    // Again soon after the last time: for longer.
    const Nanoseconds length = time - from < 4 * last ? std::min(2 * last, LONGEST) : SHORTEST;
    length_.store(length, std::memory_order_relaxed);
    from_.store(time + length, std::memory_order_relaxed);
  }

 private:
  std::atomic<Nanoseconds> from_{0}, length_{SHORTEST};
};

Quiet quiet;

// How one thread waits.
class Patience {
 public:
  // Spins until done() or for as long as that is worth while; whether done.
  template <typename Done>
  bool spin(Done done) {
    began_ = now();
    look();
    if (score_ < 0 || !quiet.at(began_)) return false;
    for (Nanoseconds time = began_; time - began_ < SPIN; time = now())
      for (int i = 0; i < 8; i++) {
        if (done()) return true;
        pause();
      }
    return false;
  }

  // What was waited for came then.
  void came(Nanoseconds time) { score_ = time - began_ < SPIN ? std::min(score_ + 1, 4) : std::max(score_ - 1, -4); }
  void came_in_time() { score_ = std::min(score_ + 1, 4); }

 private:
  // Kernel threads take a core for microseconds, hundreds of times a second; what counts is the time lost.
  void look() {
    const Nanoseconds since = began_ - looked_;
    if (since < LOOK) return;
    const Nanoseconds waited = waited_for_core();
    if ((waited - waited_) * CROWDED > since) quiet.disturbed(began_);
    looked_ = began_, waited_ = waited;
  }

  int score_ = 0;  // of the last waits, how many more were short than long
  Nanoseconds began_ = now(), looked_ = began_, waited_ = waited_for_core();
};

class Team {
 public:
  // False where another thread has the team.
  bool run(int64_t count, int64_t threads, void (*body)(void*, Tasks&), void* context) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    const int64_t wanted = std::min({threads, count, MOST + 1}) - 1;
    while (started_ < wanted && start()) started_++;
    Tasks tasks(count);
    tasks_ = &tasks, body_ = body, context_ = context;
    open(std::min(wanted, started_));
    work();
    close();
    const std::exception_ptr thrown = std::exchange(thrown_, nullptr);
    has_thrown_.store(false, std::memory_order_relaxed);
    busy_.store(false, std::memory_order_release);
    if (thrown) std::rethrow_exception(thrown);
    return true;
  }

 private:
  alignas(64) std::atomic<uint32_t> word_{0};
  alignas(64) std::atomic<uint32_t> asleep_{0};  // workers, asleep or about to be
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<Nanoseconds> opened_{0};  // the region that found sleepers
  alignas(64) std::atomic<bool> busy_{false};
  int64_t started_ = 0;
  // The region's, while its seats are taken or may be.
  Tasks* tasks_ = nullptr;
  void (*body_)(void*, Tasks&) = nullptr;
  void* context_ = nullptr;
  std::exception_ptr thrown_;
  std::atomic<bool> has_thrown_{false};

  bool start() {
    // Signals are for the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = true;
    try {
      std::thread([this] { wait_for_regions(); }).detach();
    } catch (const std::system_error&) {
      started = false;  // no more threads are to be had: then there are fewer
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
  }

  void open(int64_t seats) {
    const uint32_t next = (number(word_.load(std::memory_order_relaxed)) + 1) * NUMBER;
    word_.store(next + uint32_t(seats) * SEAT);
    if (asleep_.load()) {
      opened_.store(now(), std::memory_order_relaxed);
      wake(word_, seats, WORKER);
    }
  }

  void close() {
    uint32_t word = word_.load();
    while (!word_.compare_exchange_weak(word, word - seats(word) * SEAT)) continue;
    if (!inside(word)) return;
    thread_local Patience patience;
    auto done = [&] { return !inside(word_.load(std::memory_order_acquire)); };
    if (patience.spin(done)) return;
    caller_sleeps_.store(true);
    while (inside(word = word_.load())) sleep_while(word_, word, CALLER);
    caller_sleeps_.store(false);
  }

  void work() {
    in_region = true;
    try {
      body_(context_, *tasks_);
    } catch (...) {
      if (!has_thrown_.exchange(true)) thrown_ = std::current_exception();
      tasks_->drop();
    }
    in_region = false;
  }

  // A worker's life.
  void wait_for_regions() {
    Patience patience;
    for (uint32_t seen = 0;;) {
      auto fresh = [&] {
        const uint32_t word = word_.load(std::memory_order_relaxed);
        return seats(word) && number(word) != seen;
      };
      if (patience.spin(fresh)) {
        patience.came_in_time();
      } else {
        asleep_.fetch_add(1);
        uint32_t word = word_.load();
        for (; !seats(word) || number(word) == seen; word = word_.load()) sleep_while(word_, word, WORKER);
        asleep_.fetch_sub(1);
        patience.came(opened_.load(std::memory_order_relaxed));
      }
      uint32_t word = word_.load();
      while (seats(word) && number(word) != seen)
        if (word_.compare_exchange_weak(word, word - SEAT + INSIDE)) {
          seen = number(word);
          work();
          word = word_.fetch_sub(INSIDE);
          if (inside(word) == 1 && caller_sleeps_.load()) wake(word_, 1, CALLER);
          break;
        }
    }
  }
};

Team* team = nullptr;

// The threads are not there in a forked child: a team of its own starts them. Never destroyed: its threads live as long
// as the process.
void begin_team() { team = new Team; }

const int begun = [] {
  begin_team();
  return pthread_atfork(nullptr, nullptr, begin_team);
}();

}  // namespace

int64_t threads() { return in_region ? 1 : omp_get_max_threads(); }

void share_tasks(int64_t count, bool worth, void (*body)(void*, Tasks&), void* context) {
  if (worth && count > 1 && threads() > 1 && team->run(count, threads(), body, context)) return;
  Tasks tasks(count);
  body(context, tasks);
}

}  // namespace lockstep
