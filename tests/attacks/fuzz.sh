#!/bin/sh
# Fuzzes the GGUF reader under AddressSanitizer and UBSan: fuzz.sh [SECONDS]
# Needs a C++20 compiler (CXX) and a Python with mlx (PYTHON), whose headers name
# the dtypes. Nothing of libmlx is linked.
set -eu

seconds=${1:-120}
here=$(cd "$(dirname "$0")" && pwd)
csrc=$here/../../csrc
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mlx=$("${PYTHON:-python3}" -c 'import importlib.util as u
print(u.find_spec("mlx").submodule_search_locations[0])')
"${PYTHON:-python3}" "$here/malformed.py" "$work/seeds"
# Nested 100000 deep: refused at once, but slow to copy for each mutation.
find "$work/seeds" -size +64k -delete

"${CXX:-c++}" -std=c++20 -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all \
  -I "$csrc" -isystem "$mlx/include" -o "$work/fuzz" \
  "$here/fuzz_reader.cpp" "$here/fuzz_main.cpp" "$csrc/formats.cpp" \
  "$csrc/gguf/error.cpp" "$csrc/gguf/value.cpp" "$csrc/gguf/parse.cpp" "$csrc/gguf/split.cpp"

# No input is larger than 64 KiB, so neither is any honest allocation much larger.
ASAN_OPTIONS=handle_abort=1:max_allocation_size_mb=16:detect_stack_use_after_return=1 \
UBSAN_OPTIONS=print_stacktrace=1 \
  "$work/fuzz" "$seconds" "$work"/seeds/*
