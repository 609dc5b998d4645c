#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every GPU test: test_gpu.sh VENV
# Exit codes: 0 all passed, 1 some failed, 2 nothing was run for want of a GPU.
# BAGUA_TEST_DEVICE=cpu runs what of tests/gpu makes sense on the CPU, to try the tests themselves; it tests no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${1:?usage: test_gpu.sh VENV}
PATH=$(cd "$VENV" && pwd)/bin:$PATH
# Ranks are processes; without this each takes every core for itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} BAGUA_TEST_DEVICE=${BAGUA_TEST_DEVICE:-cuda}

tests=tests
if [ "$BAGUA_TEST_DEVICE" = cuda ]; then
  python tests/support/gpus.py || exit
else
  tests=tests/gpu
fi
BUILD=build/torch$(python -c 'import importlib.metadata as m; print(".".join(m.version("torch").split(".")[:2]))')
mkdir -p "$BUILD/reports-gpu"
status=0
python -m pytest "$tests" --junitxml "$BUILD/reports-gpu/pytest.xml" -o junit_family=xunit2 || status=1
python scripts/sum_reports.py "$BUILD/reports-gpu/pytest.xml" || status=1
exit $status
