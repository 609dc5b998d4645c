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
# They compare arithmetic, on ranks that other tests of the same executable have.
if [ "$PRESET" = tsan ]; then export GTEST_FILTER=-*DeviceWays*; fi
rm -rf "build/$PRESET/reports"
mkdir -p "build/$PRESET/reports"
ctest --preset "$PRESET" --output-junit "$PWD/build/$PRESET/reports/ctest.xml" --parallel "${JOBS:-$(scripts/cores.sh)}"
