// How x comes into a block of gemv_tma.
#pragma once
#include "columns.h"
#include "stretch.h"

// A lane's 8 numbers of 256, from x[k] or zeros past the end of a row.
template <typename T>
DEVICE void copy_or_zero(
    uint8_t* row, const T* x, uint32_t k, bool inside, uint32_t lane) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   shared_address(row) + 16 * lane),
               "l"(x + (inside ? k : 0)),
               "r"(inside ? 16 : 0)
               : "memory");
}

// One row of x on its way into shared memory, unit by unit; the warp that asks
// for a unit prepares it in its place.
template <typename T, typename Task>
struct StagedRow {
  uint8_t* held;
  const T* x;
  uint32_t left, count, warp, lane; // of the row, from `first` on

  DEVICE StagedRow(
      uint8_t* held,
      const T* x,
      uint32_t first,
      uint32_t count,
      const Params& p,
      uint32_t warp,
      uint32_t lane)
      : held(held),
        x(x + first),
        left(p.K - first),
        count(count),
        warp(warp),
        lane(lane) {}
  DEVICE void start() const {
#pragma unroll 1
    for (uint32_t u = warp; u < count; u += gemv_warps) {
      uint32_t k = 256 * u + 8 * lane;
      copy_or_zero(held + u * Task::row_bytes, x, k, k < left, lane);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  DEVICE void put() const {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
#pragma unroll 1
    for (uint32_t u = warp; u < count; u += gemv_warps) {
      Task::put(held + u * Task::row_bytes, lane);
    }
  }
};

// Rows of x on their way into shared memory and what units want of it, task by
// task: a unit of a row each, which the warp that copies it prepares in its
// place. Up to 8 of a warp's tasks are on their way, and prepared as they
// arrive.
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
  bool few; // all of a warp's tasks are on their way

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
  // What there is to ask for; a group in any case, for groups are counted.
  DEVICE void ask() {
    if (asked.task < tasks) {
      uint32_t k = first + 256 * asked.u + 8 * lane;
      copy_or_zero(row_of(asked), x, asked.m * K + k, k < K, lane);
      step(asked);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  DEVICE void start() {
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
      ask();
      if (!MANY && asked.task >= tasks) { // no more groups to come
        break;
      }
    }
    few = !MANY && asked.task >= tasks;
  }
  DEVICE void wait() const {
    if (few) {
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
        ask();
      } else {
        Task::put(row, lane);
      }
      if (!few) {
        ask();
      }
      between();
    }
  }
};

template <typename T, typename Task, int ROWS, bool MANY>
struct Staging {
  typedef Staged<T, Task, MANY> Type;
};
template <typename T, typename Task>
struct Staging<T, Task, 1, false> {
  typedef StagedRow<T, Task> Type;
};
