#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs the benchmarks in C++: bench.sh VENV [arguments of Google Benchmark]
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${1:?usage: bench.sh VENV [ARGUMENT...]}
shift
PATH=$(cd "$VENV" && pwd)/bin:$PATH
BUILD=build/torch$(python -c 'import importlib.metadata as m; print(".".join(m.version("torch").split(".")[:2]))')

cmake -S . -B "$BUILD" -DBAGUA_BUILD_BENCHMARKS=ON --log-level=WARNING >/dev/null
cmake --build "$BUILD"
for benchmark in "$BUILD"/benchmarks/*_bench; do
  echo "== $(basename "$benchmark")"
  "$benchmark" "$@"
done
echo "== fuse_optimizer"
python benchmarks/fuse_optimizer.py
