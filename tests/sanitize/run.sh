#!/bin/sh
# The extension under sanitizers, on Linux with gcc: run.sh [PYTEST_ARGUMENTS]
#   1. the thread pool by itself: ThreadSanitizer, then AddressSanitizer and UBSan;
#   2. the op suite on an extension with AddressSanitizer and UBSan;
#   3. leaks at exit, of memory and of nanobind's objects;
#   4. evaluation from eight threads on an extension with ThreadSanitizer.
# Needs a Python with what the tests need (PYTHON), cmake and ninja.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=$(command -v "${PYTHON:-python3}")
out=${SANITIZE_BUILD:-$root/build/sanitize}
mkdir -p "$out"

extension() { # NAME FLAGS: build, and lay out a package that Python finds first
  cmake -G Ninja -S "$root" -B "$out/$1" -DPython_EXECUTABLE="$python" \
    -DCMAKE_BUILD_TYPE=Sanitize -DCMAKE_CXX_FLAGS="-O1 -g $2 -fno-omit-frame-pointer" >/dev/null
  cmake --build "$out/$1"
  mkdir -p "$out/$1/python/mlx_gguf"
  ln -sf "$root"/python/mlx_gguf/* "$out/$1/python/mlx_gguf/"
  rm -f "$out/$1"/python/mlx_gguf/_ext*.so
  ln -sf "$out/$1"/_ext*.so "$out/$1/python/mlx_gguf/"
}

sanitized() { # NAME LIBRARIES COMMAND...: run Python on that build
  name=$1 preload=
  for library in $2; do
    preload="$preload $(${CXX:-g++} -print-file-name="$library")"
  done
  shift 2
  # Python's own allocator would hide what lies beside an object.
  env LD_PRELOAD="${preload# }" PYTHONMALLOC=malloc MLX_GGUF_TUNED=0 \
    PYTHONPATH="$out/$name/python:$root/tests${PYTHONPATH:+:$PYTHONPATH}" \
    ASAN_OPTIONS="$asan" \
    LSAN_OPTIONS="suppressions=$here/leaks.txt:print_suppressions=0" \
    UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
    TSAN_OPTIONS="suppressions=$here/races.txt:halt_on_error=1:ignore_noninstrumented_modules=0" \
    "$python" "$@"
}
# Without detect_stack_use_after_return: gcc's frames for it are not aligned to vectors.
# A fault of a file that was cut off is the system's, as the tests want it.
asan=detect_leaks=0:handle_sigbus=0

for flags in thread address,undefined; do
  ${CXX:-g++} -std=c++20 -g -O1 -fsanitize=$flags -fno-sanitize-recover=all -pthread \
    -I "$root/csrc" -o "$out/threads_test" "$here/threads_test.cpp" "$root/csrc/cpu/threads.cpp"
  "$out/threads_test"
done

extension address "-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all"
suite="matmul gather dequantize layouts transforms validation streams stress nn gguf_reader"
suite="$suite gguf_mapping isa blocks formats export fixed_point cpu_gate fused step"
files=$(for name in $suite; do echo "$root/tests/test_$name.py"; done)
sanitized address "libasan.so libubsan.so" -m pytest -q -p no:cacheprovider $files \
  "$root/tests/attacks/test_attacks.py" -s "$@"

# Whole stacks, so that what is let off can be named by who asked for it.
asan=detect_leaks=1:malloc_context_size=40:fast_unwind_on_malloc=0
sanitized address "libasan.so libubsan.so" "$here/everything.py" 2>"$out/leaks" || {
  cat "$out/leaks"
  exit 1
}
if grep -q "leaked.*mlx_gguf" "$out/leaks"; then
  cat "$out/leaks"
  exit 1
fi

extension thread "-fsanitize=thread"
sanitized thread libtsan.so "$here/everything.py" threads
echo "sanitize: passed"
