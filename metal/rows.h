// Weights 16 p to 16 p + 15 of a row of K, whatever the type. Pieces that hang
// over a row's end, which only plain types have, are padded with zeros.
#pragma once
#include "formats/kquants.h"
#include "formats/plain.h"
#include "formats/q8_0.h"
#include "formats/tables.h"

template <typename F>
struct Row {
  static ulong size(uint K) {
    return ulong(K / F::block) * F::bytes;
  }
  static void decode(
      device const uchar* row, uint piece, uint K, thread float* w) {
    uint pieces = F::block / 16;
    F::decode(row + piece / pieces * F::bytes, piece % pieces, w);
  }
};

template <typename S>
struct Row<Plain<S>> {
  static ulong size(uint K) {
    return ulong(K) * sizeof(S);
  }
  static void decode(
      device const uchar* row, uint piece, uint K, thread float* w) {
    device const S* p = (device const S*)row + 16 * piece;
    UNROLL
    for (ushort i = 0; i < 16; ++i) {
      w[i] = 16 * piece + i < K ? float(p[i]) : 0.0f;
    }
  }
};
