#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs the C++ tests under a sanitizer: sanitize.sh VENV asan|tsan [--build]
# With --build it only builds.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${1:?usage: sanitize.sh VENV asan|tsan [--build]} PRESET=${2:?usage: sanitize.sh VENV asan|tsan [--build]}
BIN=$(cd "$VENV" && pwd)/bin
PATH=$BIN:$PATH
readonly BIN
export OMP_NUM_THREADS=1

cmake --preset "$PRESET" -DPython_EXECUTABLE="$BIN/python" --log-level=WARNING
# Not the Python module: no C++ test needs it.
cmake --build --preset "$PRESET" --target unit_tests
if [ "${3:-}" = --build ]; then exit; fi
# What hundreds of processes do together, each of their parts does in another test, too.
left_out=many_ranks
# Arithmetic of one thread has no races to find. AddressSanitizer sees all of it.
if [ "$PRESET" = tsan ]; then
  left_out+='|(codec_.*contract|block_scaled|minmax_uint8|small_numbers|low_rank|adam|elements)_test'
  # They compare arithmetic, too, on ranks that other tests of the same executable have.
  export GTEST_FILTER=-*DeviceWays*
fi
rm -rf "build/$PRESET/reports"
mkdir -p "build/$PRESET/reports"
ctest --preset "$PRESET" --exclude-regex "^($left_out)$" --output-junit "$PWD/build/$PRESET/reports/ctest.xml" \
  --parallel "${JOBS:-$(scripts/cores.sh)}"
