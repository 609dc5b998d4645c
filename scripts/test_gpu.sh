#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every GPU test, folder by folder, or those of the folders named: test_gpu.sh VENV [FOLDER...]
# Exit codes: 0 all passed, 1 some failed, 2 nothing was run for want of a GPU.
# BAGUA_TEST_DEVICE=cpu runs what of tests/gpu makes sense on the CPU, to try the tests themselves; it tests no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${1:?usage: test_gpu.sh VENV [FOLDER...]}
PATH=$(cd "$VENV" && pwd)/bin:$PATH
# Ranks are processes; without this each takes every core for itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} BAGUA_TEST_DEVICE=${BAGUA_TEST_DEVICE:-cuda}

folders=("${@:2}")
[ ${#folders[@]} -gt 0 ] || folders=(tests/gpu)
if [ "$BAGUA_TEST_DEVICE" = cuda ]; then
  python tests/support/gpus.py || exit
  if [ $# -eq 1 ]; then  # what is about GPUs alone stays first
    mapfile -t -O 1 folders < <(grep -rl --include='test_*.py' any_device tests | xargs dirname | sort -u |
      grep -vx tests/gpu)
  fi
fi
BUILD=build/torch$(python -c 'import importlib.metadata as m; print(".".join(m.version("torch").split(".")[:2]))')
readonly REPORTS=$BUILD/reports-gpu NO_TESTS=5
mkdir -p "$REPORTS"
rm -f "$REPORTS"/*.xml
status=0
for folder in "${folders[@]}"; do
  echo "== $folder"
  python -m pytest "$folder" --junitxml "$REPORTS/$(basename "$folder").xml" -o junit_family=xunit2
  ended=$?
  [ $ended -eq 0 ] || [ $ended -eq $NO_TESTS ] || status=1
done
python scripts/sum_reports.py "$REPORTS" || status=1
exit $status
