#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fuzzes the targets of tests/fuzz with libFuzzer, all or those named: fuzz.sh VENV [SECONDS [TARGET...]]
# What is found lies in build/fuzz/findings; new inputs worth keeping are merged into tests/fuzz/corpus.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${1:?usage: fuzz.sh VENV [SECONDS [TARGET...]]} SECONDS_EACH=${2:-60} BUILD=build/fuzz MOST_BYTES=1024
TARGETS=("${@:3}")
if [ ${#TARGETS[@]} -eq 0 ]; then
  for source in tests/fuzz/*_fuzz.cpp; do TARGETS+=("$(basename "$source" _fuzz.cpp)"); done
fi
readonly TARGETS
BIN=$(cd "$VENV" && pwd)/bin
PATH=$BIN:$PATH
readonly BIN
export OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1

# C++20 as our sources use it came with clang 16.
find_clang() {
  local candidate
  for candidate in clang++-{21,20,19,18,17,16} clang++; do
    if command -v "$candidate" >/dev/null && [ "$("$candidate" -dumpversion | cut -d. -f1)" -ge 16 ]; then
      echo "$candidate"
      return
    fi
  done
  echo "fuzz: needs clang 16 or later with libFuzzer (Debian: apt-get install clang-19 libclang-rt-19-dev)" >&2
  return 1
}

CLANG=$(find_clang)
readonly CLANG
cmake --preset fuzz -DCMAKE_CXX_COMPILER="$CLANG" -DPython_EXECUTABLE="$BIN/python" --log-level=WARNING
cmake --build --preset fuzz --target fuzz_targets
mkdir -p $BUILD/findings
for target in "${TARGETS[@]}"; do
  corpus=tests/fuzz/corpus/$target
  mkdir -p "$BUILD/corpus/$target" "$corpus"
  echo "fuzz: $target, $SECONDS_EACH s"
  $BUILD/tests/fuzz/"${target}_fuzz" -max_total_time="$SECONDS_EACH" -max_len=$MOST_BYTES -timeout=20 -rss_limit_mb=4096 \
    -print_final_stats=1 -verbosity=1 -artifact_prefix="$BUILD/findings/$target-" "$BUILD/corpus/$target" "$corpus" \
    2>"$BUILD/$target.log" || { tail -n 60 "$BUILD/$target.log"; echo "fuzz: $target FAILED" >&2; exit 1; }
  grep -E "^(Done|stat::number_of_executed_units)" "$BUILD/$target.log"
  $BUILD/tests/fuzz/"${target}_fuzz" -merge=1 -max_len=$MOST_BYTES "$corpus" "$BUILD/corpus/$target" \
    2>>"$BUILD/$target.log" || { tail -n 60 "$BUILD/$target.log"; echo "fuzz: $target could not be merged" >&2; exit 1; }
done
