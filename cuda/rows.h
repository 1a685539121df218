// Weights 16 p to 16 p + 15 of a row of K, whatever the type. Pieces that hang
// over a row's end, which only plain types have, are padded with zeros.
#pragma once
#include "formats/kquants.h"
#include "formats/plain.h"
#include "formats/q8_0.h"
#include "formats/tables.h"

template <typename F>
struct Row {
  DEVICE static uint64_t size(uint32_t K) {
    return uint64_t(K / F::block) * F::bytes;
  }
  DEVICE static void decode(
      const uint8_t* row, uint32_t piece, uint32_t, float* w) {
    constexpr uint32_t pieces = F::block / 16;
    F::decode(row + uint64_t(piece / pieces) * F::bytes, piece % pieces, w);
  }
};

template <typename S>
struct Row<Plain<S>> {
  DEVICE static uint64_t size(uint32_t K) {
    return uint64_t(K) * sizeof(S);
  }
  DEVICE static void decode(
      const uint8_t* row, uint32_t piece, uint32_t K, float* w) {
    const S* p = (const S*)row + 16 * piece;
    UNROLL
    for (uint32_t i = 0; i < 16; ++i) {
      w[i] = 16 * piece + i < K ? widen(p[i]) : 0.0f;
    }
  }
};
