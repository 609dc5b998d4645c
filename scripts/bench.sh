#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs the benchmarks, about 50 minutes on two cores: bench.sh VENV [arguments of Google Benchmark]
# Those between emulated hosts need root and iproute2. They write benchmarks/results/ and docs/figures/.
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
echo "== single calls inside a host"
torchrun --standalone --nproc-per-node 2 benchmarks/in_host/single_calls.py benchmarks/results/in_host.json
echo "== training steps between emulated hosts"
if [ "$(id -u)" != 0 ] || ! command -v tc >/dev/null; then
  echo "skipped: they need root and iproute2 (sudo make bench)"
  exit 0
fi
python benchmarks/hosts/run.py
python benchmarks/hosts/run.py --grid
python benchmarks/hosts/plots.py benchmarks/results docs/figures
echo "== what a job secret costs"
python benchmarks/hosts/encryption.py
