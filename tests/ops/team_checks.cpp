// Checks of the team of threads, run by test_team.py: `team_checks NAME` ends with 0 or says what failed.
#include "team.h"

#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using namespace lockstep;

namespace {

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

// Every task marks its place; each must be marked once.
bool all_done_once(int64_t count) {
  std::vector<int> done(count);
  each_task(count, true, [&](int64_t i) { done[i]++; });
  for (const int times : done)
    if (times != 1) return false;
  return true;
}

// As many tasks as threads, none of which ends before all have begun: all threads must come.
bool all_meet(int count) {
  std::atomic<int> here{0};
  each_task(count, true, [&](int64_t) {
    here++;
    for (int tries = 0; here < count && tries < 20000; tries++)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  return here == count;
}

size_t different_threads(int64_t count) {
  std::mutex lock;
  std::set<std::thread::id> seen;
  each_task(count, true, [&](int64_t) {
    const std::lock_guard held(lock);
    seen.insert(std::this_thread::get_id());
  });
  return seen.size();
}

int child_says(const std::function<bool()>& check) {
  const pid_t child = fork();
  if (child == 0) std::_Exit(check() ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

void counts() {
  for (const int threads : {1, 2, 4, 3, 1, 2}) {
    omp_set_num_threads(threads);
    for (const int64_t count : {0, 1, 2, 3, 7, 1000}) expect(all_done_once(count), "a task was not done once");
    for (const int64_t count : {0, 1, 5, 4096, 100001}) {
      std::vector<int> done(count + 16);
      each(count, 1, [&](int64_t i) { done[i]++; });
      each_sixteen(count, 1, [&](int64_t i, auto n) {
        for (int64_t j = 0; j < n; j++) done[i + j]++;
      });
      for (int64_t i = 0; i < count + 16; i++) expect(done[i] == (i < count ? 2 : 0), "an index was not met once by each");
    }
  }
}

void numbers_of_threads() {
  for (const int threads : {2, 4, 3}) {
    omp_set_num_threads(threads);
    expect(all_meet(threads), "not all threads came");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    expect(all_meet(threads), "not all threads came after a sleep");
  }
  omp_set_num_threads(1);
  expect(different_threads(1000) == 1, "one thread was asked for");
}

void many_callers() {
  std::vector<std::thread> callers;
  for (int c = 0; c < 6; c++)
    callers.emplace_back([] {
      omp_set_num_threads(3);
      for (int i = 0; i < 2000; i++) expect(all_done_once(i % 40), "a task was not done once");
    });
  for (auto& caller : callers) caller.join();
}

void nested() {
  omp_set_num_threads(3);
  std::atomic<int64_t> sum{0};
  each_task(6, true, [&](int64_t) {
    expect(threads() == 1, "a region within a region has one thread");
    each_task(10, true, [&](int64_t i) { sum += i; });
  });
  expect(sum == 6 * 45 && threads() == 3, "nested regions");
}

void thrown() {
  omp_set_num_threads(2);
  for (int64_t at = 0; at < 100; at++) {
    std::string said;
    std::atomic<int64_t> done{0};
    try {
      each_task(1000000, true, [&](int64_t i) {
        if (i == at) throw std::runtime_error("task " + std::to_string(i));
        done++;
      });
    } catch (const std::runtime_error& error) {
      said = error.what();
    }
    expect(said == "task " + std::to_string(at), "the exception did not come out");
    expect(done < 999999, "the other tasks were not given up");
    expect(threads() == 2 && all_done_once(100), "the team does not work after an exception");
  }
  expect(all_meet(2), "a thread was lost");
}

void forked() {
  omp_set_num_threads(3);
  expect(all_meet(3), "not all threads came");
  expect(child_says([] { return all_meet(3) && all_done_once(100); }) == 0, "a forked child's team");
  std::atomic<bool> over{false};
  std::thread other([&] {
    omp_set_num_threads(2);
    while (!over) expect(all_done_once(50), "a task was not done once");
  });
  for (int i = 0; i < 10; i++)
    expect(child_says([] { return all_meet(3); }) == 0, "a child forked during another thread's region");
  over = true;
  other.join();
  expect(all_meet(3), "not all threads came after a fork");
}

}  // namespace

int main(int, char** arguments) {
  const std::map<std::string, void (*)()> checks = {{"counts", counts}, {"numbers_of_threads", numbers_of_threads},
                                                    {"many_callers", many_callers}, {"nested", nested},
                                                    {"thrown", thrown}, {"forked", forked}};
  checks.at(arguments[1])();
}
