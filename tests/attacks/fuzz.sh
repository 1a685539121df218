#!/bin/sh
# Fuzzes the GGUF reader under AddressSanitizer and UBSan:
#   fuzz.sh [SECONDS]        fuzz, 120 seconds by default
#   fuzz.sh merge FOLDER     add what a long run found in FOLDER to corpus.zip
#   fuzz.sh coverage         how much of the reader the corpus reaches (needs llvm-cov)
# With a clang that has libFuzzer (CLANG, else the first of clang++, clang++-*) the
# fuzzing is guided by coverage; with another compiler (CXX) fuzz_main.cpp mutates
# blindly. A long run keeps what it finds in FUZZ_CORPUS. Needs a Python with mlx
# (PYTHON), whose headers name the dtypes. Nothing of libmlx is linked.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
csrc=$here/../../csrc
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mlx=$("$python" -c 'import importlib.util as u
print(u.find_spec("mlx").submodule_search_locations[0])')
"$python" "$here/malformed.py" "$work/seeds"
# Nested 100000 deep: refused at once, but slow to copy for each mutation.
find "$work/seeds" -size +64k -delete
"$python" -m zipfile -e "$here/corpus.zip" "$work/corpus"

build() { # COMPILER OUTPUT FLAGS AND DRIVER...
  compiler=$1 output=$2
  shift 2
  "$compiler" -std=c++20 -g -O1 "$@" -I "$csrc" -isystem "$mlx/include" -o "$output" \
    "$here/fuzz_reader.cpp" "$csrc/formats.cpp" "$csrc/gguf/error.cpp" "$csrc/gguf/value.cpp" \
    "$csrc/gguf/parse.cpp" "$csrc/gguf/split.cpp"
}

sanitizers='-fsanitize=address,undefined -fno-sanitize-recover=all'
clang=
for candidate in ${CLANG:-clang++ clang++-21 clang++-19 clang++-18 clang++-16 clang++-14}; do
  if command -v "$candidate" >/dev/null &&
    build "$candidate" "$work/fuzz" $sanitizers -fsanitize=fuzzer 2>"$work/log"; then
    clang=$candidate
    break
  fi
done
# No input is larger than 64 KiB, so neither is any honest allocation much larger.
export UBSAN_OPTIONS=print_stacktrace=1
asan=handle_abort=1

case ${1:-120} in
merge)
  mkdir "$work/merged"
  "$work/fuzz" -merge=1 "$work/merged" "$work/corpus" "$2"
  rm "$here/corpus.zip"
  "$python" "$here/pack.py" "$work/merged" "$here/corpus.zip"
  ;;
coverage)
  build "$clang" "$work/covered" -fsanitize=fuzzer -fprofile-instr-generate -fcoverage-mapping
  LLVM_PROFILE_FILE="$work/profile" "$work/covered" -runs=0 "$work/corpus" "$work/seeds"
  version=${clang#clang++}
  "llvm-profdata$version" merge "$work/profile" -o "$work/data"
  "llvm-cov$version" report "$work/covered" -instr-profile="$work/data" "$csrc/gguf" \
    "$csrc/formats.cpp"
  ;;
*)
  if [ -n "$clang" ]; then
    found=${FUZZ_CORPUS:-$work/found}
    mkdir -p "$found"
    ASAN_OPTIONS=$asan "$work/fuzz" -max_total_time="${1:-120}" -timeout=10 -malloc_limit_mb=16 \
      -max_len=8192 -dict="$here/reader.dict" -artifact_prefix=fuzz-crash- -print_final_stats=1 \
      -verbosity=0 "$found" "$work/corpus" "$work/seeds"
  else
    echo "no clang with libFuzzer: fuzzing without coverage" >&2
    build "${CXX:-c++}" "$work/fuzz" $sanitizers "$here/fuzz_main.cpp"
    ASAN_OPTIONS=$asan:max_allocation_size_mb=16 \
      "$work/fuzz" "${1:-120}" "$work"/seeds/* "$work"/corpus/*
  fi
  ;;
esac
