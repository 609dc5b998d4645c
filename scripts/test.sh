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
  short) executables=short-build labels=(-LE '^long$' --no-tests=error) marker='not long' ;;
  rest) executables=build labels=(-L '^long$') marker='long' ;;
  all) executables=build labels=(--no-tests=error) marker='' ;;
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

echo "== Python"
# Tests wait for half of their time, so that two share a core, and the executables of the C++ tests are built beside them.
# A file stays in one process, whose ranks its tests share: 3 GB at most. A borrowed environment may lack the plugin.
workers() {
  local -i fitting
  fitting=$(awk '/^MemAvailable/ { print int($2 / 3e6) }' /proc/meminfo)
  echo $((fitting < 1 ? 1 : fitting < 2 * JOBS ? fitting : 2 * JOBS))
}
side_by_side=() in_turns=()
if python -c 'import xdist' 2>/dev/null; then
  side_by_side=(--numprocesses "$(workers)" --dist loadfile)
  in_turns=(--numprocesses 3 --dist loadfile)
fi
readonly KINDS=(-m "$marker" -o junit_family=xunit2)
set -m  # A process group of its own, to end all of it by.
nice -n 19 make "$executables" >"$REPORTS/build.log" 2>&1 &
set +m
readonly BUILDER=$!
trap 'kill -- -$BUILDER 2>/dev/null' EXIT
step Python python -m pytest tests --ignore tests/faults "${KINDS[@]}" "${side_by_side[@]}" \
  --junitxml "$REPORTS/pytest.xml"
built() { wait "$BUILDER" || { cat "$REPORTS/build.log" && false; }; }
step "build of the C++ tests, what was left of it" built
if [ -e "$BUILD/CTestTestfile.cmake" ]; then
  echo "== C++ units"
  step "C++ units" ctest --test-dir "$BUILD" --parallel "$JOBS" --output-on-failure "${labels[@]}" \
    --output-junit "$PWD/$REPORTS/ctest.xml"
  if [ -d "$BUILD/reports/units" ]; then mv "$BUILD/reports/units" "$REPORTS/units"; fi
else
  echo "== C++ units: skipped, GoogleTest is not installed"
fi
echo "== Python, faults"
# They ask how soon something happens: three files run at a time, and nothing else. Their ranks wait for most of their time.
step "Python, faults" python -m pytest tests/faults "${KINDS[@]}" "${in_turns[@]}" \
  --junitxml "$REPORTS/faults.xml"
python scripts/sum_reports.py --times "$REPORTS" || status=1
exit $status
