#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs tests and sums up: where the time went, and in the last line how many passed. test.sh VENV quick|short|rest|all
# The marker `long` of pytest and the label `long` of CTest divide them: `short` is all without, `rest` all with it.
# `quick` is the fast part of `short`: units, a file of two ranks, and one of each kind.
# BAGUA_STEPS names a file with a line for each step before the tests: its seconds and its name.
set -uo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${1:?usage: test.sh VENV quick|short|rest|all} WHICH=${2:?usage: test.sh VENV quick|short|rest|all}
PATH=$(cd "$VENV" && pwd)/bin:$PATH
BUILD=build/torch$(python -c 'import importlib.metadata as m; print(".".join(m.version("torch").split(".")[:2]))')
JOBS=${JOBS:-$(scripts/cores.sh)}
readonly BUILD JOBS REPORTS=$BUILD/reports/$WHICH
# Ranks are processes; without this each takes every core for itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Executables that take longest.
readonly SLOW='(cpu_collectives|algorithm_contract|codec_.*contract|transport|health|os|compressed|cpu_executor|security|nccl)_test|many_ranks'
# Units, a file of two ranks, and one of each kind.
readonly QUICK=(
  tests/unit
  tests/multiprocess/test_fuse_with_ddp.py
  'tests/conformance/test_torch_suite.py::test_torch_suite[2-test_all_reduce_sum]'
  'tests/examples/test_examples.py::test_training_with_compressed_gradients[]'
  'tests/faults/test_deaths.py::test_a_death_is_noticed_within_two_seconds_by_all[all_reduce-in-host]'
  'tests/multiprocess/test_algorithm_simulations.py::test_low_precision_decentralized_between_hosts[AAB]'
  'tests/multiprocess/test_collectives.py::test_all_reduce[2-ranks-SUM]'
  'tests/soak/test_soak.py::test_random_operations_give_what_a_plain_reference_gives[3-an uneven pair]'
)

case $WHICH in
  quick) labels=(-LE '^long$' -E "^($SLOW)$" --no-tests=error) marker='not long' ;;
  short) executables=short-build labels=(-LE '^long$' --no-tests=error) marker='not long' ;;
  rest) executables=build labels=(-L '^long$') marker='long' ;;
  all) executables=build labels=(--no-tests=error) marker='' ;;
  *) echo "test.sh: $WHICH is none of quick, short, rest and all" >&2; exit 2 ;;
esac
rm -rf "$REPORTS" "$BUILD/reports/units"
mkdir -p "$REPORTS"
STEPS=$REPORTS/steps.txt
if [ -n "${BAGUA_STEPS:-}" ]; then cp "$BAGUA_STEPS" "$STEPS"; fi
status=0

step() {  # step NAME command...
  local begin=$SECONDS result=0
  "${@:2}" || result=1
  echo "$((SECONDS - begin)) $1" >>"$STEPS"
  return $result
}

# Tests wait for a part of their time, in which one more runs. Each process that runs some imports torch twice, for
# itself and for its ranks. A file stays in one, whose ranks its tests share: 3 GB at most. A borrowed environment may
# lack the plugin.
workers() {
  local -i fitting
  fitting=$(awk '/^MemAvailable/ { print int($2 / 3e6) }' /proc/meminfo)
  echo $((fitting < 1 ? 1 : fitting < JOBS + 1 ? fitting : JOBS + 1))
}
side_by_side=() in_turns=()
if python -c 'import xdist' 2>/dev/null; then
  side_by_side=(--numprocesses "$(workers)" --dist loadfile)
  in_turns=(--numprocesses 3 --dist loadfile)
fi
readonly KINDS=(-m "$marker" -o junit_family=xunit2)

units() {
  if [ ! -e "$BUILD/CTestTestfile.cmake" ]; then
    echo "== C++ units: skipped, GoogleTest is not installed"
    return
  fi
  step "C++ units" ctest --test-dir "$BUILD" --parallel "$JOBS" --output-on-failure "${labels[@]}" \
    --output-junit "$PWD/$REPORTS/ctest.xml"
  local result=$?
  if [ -d "$BUILD/reports/units" ]; then mv "$BUILD/reports/units" "$REPORTS/units"; fi
  return $result
}

beside() {
  local result=0
  echo "== C++ units"
  units || result=1
  if python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("lightning") is None)'; then
    echo "== Python, Lightning"
    # In one process, and not in each that collects other tests: it takes ten seconds to import.
    step "Python, Lightning" python -m pytest tests/lightning "${KINDS[@]}" --junitxml "$REPORTS/lightning.xml" || result=1
  else
    echo "== Python, Lightning: skipped, Lightning is not installed"
  fi
  return $result
}

in_background() {  # in_background FILE command...: in a process group of its own, to end all of it by
  set -m
  "${@:2}" >"$1" 2>&1 &
  set +m
  CHILD=$!
}
CHILD=0
trap '[ $CHILD = 0 ] || kill -- -$CHILD 2>/dev/null' EXIT

finished() {  # finished FILE: wait for what is in the background
  local result=0
  wait "$CHILD" || result=1
  CHILD=0
  if [ $result != 0 ] || [ "${2:-}" = shown ]; then cat "$1"; fi
  return $result
}

if [ "$WHICH" = quick ]; then
  in_background "$REPORTS/units.log" units
  step Python python -m pytest "${QUICK[@]}" "${KINDS[@]}" "${side_by_side[@]}" \
    --junitxml "$REPORTS/pytest.xml" || status=1
  finished "$REPORTS/units.log" shown || status=1
  python scripts/sum_reports.py --times "$REPORTS" || status=1
  exit $status
fi

echo "== Python, faults"
# They ask how soon something happens: three files run at a time. Their ranks wait for most of their time, in which the
# executables of the C++ tests are built.
in_background "$REPORTS/build.log" nice -n 19 make "$executables"
step "Python, faults" python -m pytest tests/faults "${KINDS[@]}" "${in_turns[@]}" \
  --junitxml "$REPORTS/faults.xml" || status=1
step "build of the C++ tests, what was left of it" finished "$REPORTS/build.log" || status=1
echo "== Python, and beside it the C++ units and Lightning"
in_background "$REPORTS/beside.log" beside
step Python python -m pytest tests --ignore tests/faults --ignore tests/lightning "${KINDS[@]}" "${side_by_side[@]}" \
  --junitxml "$REPORTS/pytest.xml" || status=1
finished "$REPORTS/beside.log" shown || status=1
python scripts/sum_reports.py --times "$REPORTS" || status=1
exit $status
