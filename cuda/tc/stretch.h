// Which warp of gemv_tma multiplies what.
#pragma once
#include "../common.h"

constexpr uint32_t gemv_warps = 16;

// The most parts that equal stretches of `warps` make of one of `split` tiles
// of `pairs`: a tile is warps / split of them, and ends of the two meet at
// multiples of even.
DEVICE uint32_t parts_of_tile(uint32_t warps, uint32_t split, uint32_t pairs) {
  uint32_t even = split & -split;
  uint32_t inside = 2 * even > warps ? 0 : (warps - 2 * even) / split + 1;
  return min(pairs, inside + 1);
}

// A warp's stretch of every `split` tiles, of which the block has `tiles`, in
// segments: units from `unit` to `end` of a tile, of which there are `count`.
struct Stretch {
  uint32_t first_item, last_item; // pairs of units, tile by tile
  uint32_t first_tile, first_unit;
  uint32_t warps, split, tiles, count;
  uint32_t item = 0, base = 0, tile = 0, unit = 0, end = 0;

  DEVICE Stretch(
      uint32_t warp,
      uint32_t warps,
      uint32_t split,
      uint32_t tiles,
      uint32_t count,
      bool whole)
      : warps(warps), split(split), tiles(tiles), count(count) {
    uint32_t pairs = (count + 1) / 2;
    // Divided by `warps`, 16 or half of that.
    static_assert(gemv_warps == 16, "4 bits");
    uint32_t bits = warps == gemv_warps ? 4 : 3;
    auto share = [&](uint32_t i) { return i >> bits; };
    first_tile = share(warp * split);
    if (whole) {
      first_item = first_tile * pairs;
      last_item = share((warp + 1) * split) * pairs;
    } else {
      first_item = share(warp * split * pairs);
      last_item = share((warp + 1) * split * pairs);
    }
    first_unit = 2 * (first_item - first_tile * pairs);
    start();
  }
  // i / n for numbers whose halves and quotients a float tells apart.
  DEVICE static uint32_t small_quotient(uint32_t i, uint32_t n) {
    return uint32_t(__fdividef(float(i) + 0.5f, float(n)));
  }
  DEVICE void start() {
    item = first_item;
    tile = base + first_tile;
    unit = first_unit;
    if (first_item == last_item) { // of K's units, too, there may be none
      tile = tiles;
    }
    end = min(count, unit + 2 * (last_item - item));
  }
  // Which part of its tile the stretch of a warp starts with, past the first.
  DEVICE uint32_t part(uint32_t warp) const {
    uint32_t pairs = (count + 1) / 2, all = split * pairs;
    if (all < warps) { // a pair each, for some
      return first_unit / 2;
    }
    uint32_t item = first_tile * pairs;
    return warp - small_quotient(warps * item + warps - 1, all);
  }
  DEVICE bool done() const {
    return tile >= tiles;
  }
  DEVICE bool first_segment() const {
    return tile - base == first_tile;
  }
  DEVICE bool ends_tile() const {
    return end == count;
  }
  // To the segment after one that is over.
  DEVICE void turn() {
    uint32_t begin = tile - base == first_tile ? first_unit : 0;
    item += (end - begin + 1) / 2;
    if (item == last_item) {
      base += split;
      start();
    } else {
      ++tile;
      unit = 0;
      end = min(count, 2 * (last_item - item));
    }
  }
};
