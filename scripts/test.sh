#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every test and sums up in the last line: test.sh VENV
set -uo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${1:?usage: test.sh VENV}
PATH=$(cd "$VENV" && pwd)/bin:$PATH
BUILD=build/torch$(python -c 'import importlib.metadata as m; print(".".join(m.version("torch").split(".")[:2]))')
readonly BUILD REPORTS=$BUILD/reports
# Ranks are processes; without this each takes every core for itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

mkdir -p "$REPORTS"
rm -f "$REPORTS"/*.xml
status=0
if [ -e "$BUILD/CTestTestfile.cmake" ]; then
  echo "== C++ units"
  ctest --test-dir "$BUILD" --parallel "$(nproc)" --output-on-failure --no-tests=error --output-junit "$PWD/$REPORTS/ctest.xml" || status=1
else
  echo "== C++ units: skipped, GoogleTest is not installed"
fi
echo "== Python"
python -m pytest tests --junitxml "$REPORTS/pytest.xml" -o junit_family=xunit2 || status=1
python scripts/sum_reports.py "$REPORTS"/*.xml || status=1
exit $status
