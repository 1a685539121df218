// A small mutating driver for compilers without libFuzzer:
//   fuzz SECONDS SEED_FILE...
// or, to run one input again, `fuzz 0 FILE`. The input that breaks the target
// is left in ./fuzz-crash.
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed | 1) {}
  uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  size_t below(size_t n) {
    return n == 0 ? 0 : next() % n;
  }

 private:
  uint64_t state_;
};

// Values that lengths, counts, dims and offsets go wrong at.
constexpr uint64_t edges[] = {
    0,
    1,
    2,
    3,
    5,
    8,
    9,
    12,
    13,
    31,
    32,
    33,
    64,
    255,
    256,
    1u << 20,
    0x7fffffff,
    0x80000000,
    0xffffffff,
    1ull << 32,
    1ull << 61,
    1ull << 62,
    1ull << 63,
    ~uint64_t{0},
    ~uint64_t{31}};

// Overwrites 1, 4 or 8 bytes by an edge, or by the old number plus or minus a
// little.
void change_field(Bytes& b, Random& r) {
  constexpr size_t widths[] = {1, 4, 8};
  size_t width = widths[r.below(3)];
  if (b.size() < width) {
    return;
  }
  size_t at = r.below(b.size() - width + 1);
  uint64_t value = 0;
  std::memcpy(&value, &b[at], width);
  value =
      r.below(2) ? edges[r.below(std::size(edges))] : value + r.below(9) - 4;
  std::memcpy(&b[at], &value, width);
}

void mutate(Bytes& b, const std::vector<Bytes>& seeds, Random& r) {
  size_t at = r.below(b.size() + 1);
  size_t length = std::min(r.below(40), b.size() - at);
  auto begin = b.begin() + static_cast<ptrdiff_t>(at);
  auto end = begin + static_cast<ptrdiff_t>(length);
  switch (r.below(8)) {
    case 0: // flip a bit
      if (at < b.size()) {
        b[at] ^= static_cast<uint8_t>(1u << r.below(8));
      }
      return;
    case 1: // cut the end off
      b.resize(at);
      return;
    case 2: // remove a piece
      b.erase(begin, end);
      return;
    case 3: { // repeat a piece
      Bytes piece(begin, end);
      b.insert(begin, piece.begin(), piece.end());
      return;
    }
    case 4: { // continue as another seed
      const Bytes& other = seeds[r.below(seeds.size())];
      size_t from = std::min(at, other.size());
      b.resize(at);
      b.insert(
          b.end(), other.begin() + static_cast<ptrdiff_t>(from), other.end());
      return;
    }
    default: // numbers are where most of the format is
      change_field(b, r);
  }
}

Bytes current;

void save_current() {
  std::ofstream("fuzz-crash", std::ios::binary)
      .write(
          reinterpret_cast<const char*>(current.data()),
          static_cast<std::streamsize>(current.size()));
}

void run(const Bytes& input) {
  current = input;
  // Of the exact size, so that reading one byte too far is seen.
  std::unique_ptr<uint8_t[]> exact(new uint8_t[input.size()]);
  std::copy(input.begin(), input.end(), exact.get());
  LLVMFuzzerTestOneInput(exact.get(), input.size());
}

} // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s SECONDS SEED_FILE...\n", argv[0]);
    return 2;
  }
  __sanitizer_set_death_callback(save_current);
  std::vector<Bytes> seeds;
  for (int i = 2; i < argc; ++i) {
    std::ifstream in(argv[i], std::ios::binary);
    seeds.emplace_back(
        std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    run(seeds.back());
  }

  using Clock = std::chrono::steady_clock;
  auto start = Clock::now();
  auto stop = start + std::chrono::seconds(std::atoi(argv[1]));
  auto seed = static_cast<uint64_t>(start.time_since_epoch().count());
  Random random(seed);
  uint64_t runs = 0;
  while (Clock::now() < stop) {
    for (int i = 0; i < 1000; ++i, ++runs) {
      Bytes input = seeds[random.below(seeds.size())];
      for (size_t n = 1 + random.below(4); n > 0; --n) {
        mutate(input, seeds, random);
      }
      run(input);
    }
  }
  std::printf(
      "%llu inputs from %zu seeds, generator %llu: no fault\n",
      static_cast<unsigned long long>(runs),
      seeds.size(),
      static_cast<unsigned long long>(seed));
  return 0;
}
