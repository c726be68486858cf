#!/usr/bin/env bash
# Builds the CPU kernels with AddressSanitizer (and UndefinedBehaviorSanitizer), then with ThreadSanitizer, and runs
# tests/kernels/sanitize.cc over them. Ends with an error if one of them reports anything.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

build() { # name, flags...
  local name=$1
  shift
  local flags=(-std=c++17 -O1 -g -fno-omit-frame-pointer -fno-math-errno -Icsrc/include -Icsrc/cpu -Icsrc/planner_order "$@")
  local objects=()
  compile() { # object, source, flags...
    g++ "${flags[@]}" "${@:3}" -c "$2" -o "$work/$name-$1.o"
    objects+=("$work/$name-$1.o")
  }
  local x86=()
  if [[ $(uname -m) == x86_64 ]]; then
    x86=(-DGACC_X86)
    for source in kernels grouped_conv_kernels flash_kernels row_kernels; do
      compile "$source-avx2" "csrc/cpu/$source.cc" -DGACC_ISA=avx2 -mavx2 -mfma
      compile "$source-avx512" "csrc/cpu/$source.cc" -DGACC_ISA=avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma
    done
  fi
  for source in kernels grouped_conv_kernels flash_kernels row_kernels; do
    compile "$source-portable" "csrc/cpu/$source.cc" -DGACC_ISA=portable
  done
  for source in adam error flash host_stream isa products thread_pool; do
    compile "$source" "csrc/cpu/$source.cc" "${x86[@]}"
  done
  for source in highway_hash snappy; do
    compile "$source" "csrc/riegeli/$source.cc"
  done
  compile min_cut csrc/planner_order/min_cut.cc
  compile driver tests/kernels/sanitize.cc
  g++ "${flags[@]}" "${objects[@]}" -pthread -o "$work/$name"
}

echo "== AddressSanitizer"
build address -fsanitize=address,undefined -fno-sanitize-recover=all
ASAN_OPTIONS=detect_leaks=1 "$work/address"

echo "== ThreadSanitizer"
build thread -fsanitize=thread
TSAN_OPTIONS=halt_on_error=1 "$work/thread"
