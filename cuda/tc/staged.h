// How x comes into a block of gemv_tma.
#pragma once
#include "columns.h"
#include "stretch.h"

// x on its way into shared memory and what units want of it, task by task: a
// unit of a row each, which the warp that copies it prepares in its place. Up
// to 8 of a warp's tasks are on their way, and prepared as they arrive.
template <typename T, typename Task, bool MANY>
struct Staged {
  static constexpr int ahead = 8;
  // A warp's task: row m of unit u.
  struct Cursor {
    uint32_t task, u, m;
  };
  uint8_t* held;
  const T* x;
  uint32_t first, K, tasks, M, inverse, lane;
  Cursor asked, arrived;

  // Of rows of K, from weight `first` on. Past the end of a row there are
  // zeros.
  DEVICE Staged(
      uint8_t* held,
      const T* x,
      uint32_t first,
      uint32_t count,
      const Params& p,
      uint32_t warp,
      uint32_t lane)
      : held(held),
        x(x),
        first(first),
        K(p.K),
        tasks(count * p.M),
        M(p.M),
        inverse(p.inverse),
        lane(lane) {
    uint32_t u = quotient(warp, p.inverse);
    asked = arrived = {warp, u, warp - u * p.M};
  }
  DEVICE void step(Cursor& at) const {
    uint32_t units = quotient(gemv_warps, inverse);
    at.task += gemv_warps;
    at.u += units;
    at.m += gemv_warps - units * M;
    if (at.m >= M) {
      at.m -= M;
      ++at.u;
    }
  }
  DEVICE uint8_t* row_of(const Cursor& at) const {
    return held + at.u * Task::unit_bytes(M) + at.m * Task::row_bytes;
  }
  DEVICE bool one() const { // a task for a warp at most
    return tasks <= gemv_warps;
  }
  DEVICE void ask() {
    if (asked.task < tasks) {
      uint32_t k = first + 256 * asked.u + 8 * lane;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                       shared_address(row_of(asked)) + 16 * lane),
                   "l"(x + (k < K ? asked.m * K + k : 0)),
                   "r"(k < K ? 16 : 0)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  DEVICE void ask_next() {
    step(asked);
    ask();
  }
  DEVICE void start() {
    ask();
    if (!one()) {
#pragma unroll 1
      for (int i = 1; i < ahead; ++i) {
        ask_next();
      }
    }
  }
  DEVICE void wait() const {
    if (one()) {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group %0;" ::"n"(ahead - (MANY ? 2 : 1))
                   : "memory");
    }
    __syncwarp();
  }
  // Calls between() after each turn.
  template <typename Between>
  DEVICE void put(const Between& between) {
#pragma unroll 1
    while (arrived.task < tasks) {
      wait();
      uint8_t* row = row_of(arrived);
      step(arrived);
      if constexpr (MANY) {
        // Two at a time, for each waits for shuffles. An odd one is done twice.
        uint8_t* other = arrived.task < tasks ? row_of(arrived) : row;
        step(arrived);
        Task::put2(row, other, lane);
        ask_next();
      } else {
        Task::put(row, lane);
      }
      ask_next();
      between();
    }
  }
};
