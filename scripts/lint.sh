#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks the sources: lint.sh VENV. Rewrites them where that can be done by rule: lint.sh VENV --format
set -uo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${1:?usage: lint.sh VENV [--format]} MODE=${2:-}
BIN=$(cd "$VENV" && pwd)/bin
PATH=$BIN:$PATH
readonly BIN BUILD=build/lint LAYERS=(kernels backend algorithms python_shim tests benchmarks)
mapfile -t CXX_FILES < <(find "${LAYERS[@]}" -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | sort)

if [ "$MODE" = --format ]; then
  clang-format -i "${CXX_FILES[@]}"
  ruff check --quiet --fix .
  ruff format .
  exit
fi

status=0
check() {  # check NAME command...
  local name=$1
  shift
  if "$@"; then echo "lint: $name is clean"; else echo "lint: $name FAILED"; status=1; fi
}

# A tree of its own, configured and not built: clang cannot read the precompiled headers that GCC makes. Most of the
# time goes into torch's headers, which a unity build reads once for several sources. The stable_sort of libstdc++ 12 uses
# what that deprecates; GCC still warns of ours. The function of C linkage is found by its name and called by us alone.
clang_tidy() {
  cmake -S . -B $BUILD -G Ninja -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DCMAKE_UNITY_BUILD=ON \
    -DPython_EXECUTABLE="$BIN/python" -DBAGUA_BUILD_TESTS=ON -DBAGUA_CUDA_WHEELS_DIR="${BIN%/bin}/cuda-toolkit" \
    --log-level=WARNING >/dev/null || return 1
  python -c 'import json, sys; print(*(entry["file"] for entry in json.load(sys.stdin)), sep="\0", end="")' \
    <$BUILD/compile_commands.json |
    xargs -0 -n 1 -P "${JOBS:-$(scripts/cores.sh)}" clang-tidy --quiet -p $BUILD --extra-arg=-Wno-unknown-warning-option \
      --extra-arg=-Wno-deprecated-declarations --extra-arg=-Wno-return-type-c-linkage
}

check "sizes and licences" python scripts/check_sources.py
check clang-format clang-format --dry-run -Werror "${CXX_FILES[@]}"
check "ruff check" ruff check --quiet .
check "ruff format" ruff format --quiet --check .
check mypy mypy
check clang-tidy clang_tidy
exit $status
