#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs tests and sums up: where the time went, and in the last line how many passed. test.sh VENV short|rest|all
# The marker `long` of pytest and the label `long` of CTest divide them: `short` is all without, `rest` all with it.
# BAGUA_STEPS names a file with a line for each step before the tests: its seconds and its name.
set -uo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${1:?usage: test.sh VENV short|rest|all} WHICH=${2:?usage: test.sh VENV short|rest|all}
PATH=$(cd "$VENV" && pwd)/bin:$PATH
BUILD=build/torch$(python -c 'import importlib.metadata as m; print(".".join(m.version("torch").split(".")[:2]))')
JOBS=${JOBS:-$(scripts/cores.sh)}
readonly BUILD JOBS REPORTS=$BUILD/reports/$WHICH
# Ranks are processes; without this each takes every core for itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

case $WHICH in
  short) labels=(-LE '^long$' --no-tests=error) marker='not long' ;;
  rest) labels=(-L '^long$') marker='long' ;;
  all) labels=(--no-tests=error) marker='' ;;
  *) echo "test.sh: $WHICH is none of short, rest and all" >&2; exit 2 ;;
esac
rm -rf "$REPORTS" "$BUILD/reports/units"
mkdir -p "$REPORTS"
STEPS=$REPORTS/steps.txt
if [ -n "${BAGUA_STEPS:-}" ]; then cp "$BAGUA_STEPS" "$STEPS"; fi
status=0

step() {  # step NAME command...
  local begin=$SECONDS
  "${@:2}" || status=1
  echo "$((SECONDS - begin)) $1" >>"$STEPS"
}

if [ -e "$BUILD/CTestTestfile.cmake" ]; then
  echo "== C++ units"
  step "C++ units" ctest --test-dir "$BUILD" --parallel "$JOBS" --output-on-failure "${labels[@]}" \
    --output-junit "$PWD/$REPORTS/ctest.xml"
  if [ -d "$BUILD/reports/units" ]; then mv "$BUILD/reports/units" "$REPORTS/units"; fi
else
  echo "== C++ units: skipped, GoogleTest is not installed"
fi
echo "== Python"
# Most tests wait for most of their time. A file stays in one process, whose ranks its tests share. A borrowed environment
# may lack the plugin. What tests/faults asks is how soon something happens: two of its files run at a time, and nothing
# else. Its ranks wait for most of their time too.
side_by_side=() in_pairs=()
if python -c 'import xdist' 2>/dev/null; then
  side_by_side=(--numprocesses "$JOBS" --dist loadfile)
  in_pairs=(--numprocesses 2 --dist loadfile)
fi
readonly KINDS=(-m "$marker" -o junit_family=xunit2)
step Python python -m pytest tests --ignore tests/faults "${KINDS[@]}" "${side_by_side[@]}" \
  --junitxml "$REPORTS/pytest.xml"
step "Python, faults" python -m pytest tests/faults "${KINDS[@]}" "${in_pairs[@]}" \
  --junitxml "$REPORTS/faults.xml"
python scripts/sum_reports.py --times "$REPORTS" || status=1
exit $status
