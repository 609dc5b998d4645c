#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the project and installs it, editable, into the virtual environment:
# build.sh VENV [CUDA [CUDA_TOOLKIT [TARGET...]]]; without targets everything, the tests too.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${1:?usage: build.sh VENV [CUDA [CUDA_TOOLKIT [TARGET...]]]} CUDA=${2:-AUTO} CUDA_TOOLKIT=${3:-auto}
readonly TARGETS=("${@:4}")
BIN=$(cd "$VENV" && pwd)/bin
PATH=$BIN:$PATH
SITE=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
BUILD=build/torch$(python -c 'import importlib.metadata as m; print(".".join(m.version("torch").split(".")[:2]))')
readonly BIN SITE BUILD STAMP=$SITE/.bagua-editable
# BAGUA_CUDA_ARCHS= names the GPUs; else those that there are. Without any, one architecture shows that the kernels compile.
CUDA_ARCHS=${BAGUA_CUDA_ARCHS:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -u |
  paste -sd ';')} || true
[[ $CUDA_ARCHS =~ ^[0-9\;]+$ ]] || CUDA_ARCHS=80
readonly CUDA_ARCHS
readonly DEFINES=(
  BAGUA_BUILD_TESTS=ON BAGUA_WARNINGS_AS_ERRORS="${BAGUA_WARNINGS_AS_ERRORS:-OFF}"
  CMAKE_UNITY_BUILD="${BAGUA_UNITY_BUILD:-ON}" CMAKE_UNITY_BUILD_BATCH_SIZE="${BAGUA_UNITY_BATCH:-8}"
  BAGUA_CUDA="$CUDA" BAGUA_CUDA_TOOLKIT="$CUDA_TOOLKIT" BAGUA_CUDA_ARCHS="$CUDA_ARCHS"
  BAGUA_CUDA_WHEELS_DIR="${BIN%/bin}/cuda-toolkit"
)
# The installed link lists the Python modules, so that one that has moved is not found until it is made anew.
readonly WANTED="$PWD ${DEFINES[*]} $(find python_shim -name '*.py' | sort | cksum)"

# The metadata of the package, its entry points and the link to its Python sources. Finds the C++ parts built already.
install_editable() {
  local installer=(uv pip install --quiet --python "$BIN/python")
  command -v uv >/dev/null || installer=(python -m pip install --quiet --disable-pip-version-check)
  "${installer[@]}" --no-build-isolation --no-deps --editable . -C build-dir="$BUILD" \
    "${DEFINES[@]/#/-Ccmake.define.}"
  echo "$WANTED" >"$STAMP"
}

stale() {
  [ ! -e "$STAMP" ] || [ pyproject.toml -nt "$STAMP" ] || [ cmake/package_metadata.py -nt "$STAMP" ] ||
    [ "$(cat "$STAMP")" != "$WANTED" ]
}

if [ ! -e "$BUILD/build.ninja" ] || stale; then
  cmake -S . -B "$BUILD" -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$BIN/python" "${DEFINES[@]/#/-D}"
fi
cmake --build "$BUILD" ${TARGETS[@]:+--target "${TARGETS[@]}"}
if stale; then
  install_editable
fi
cmake --install "$BUILD" --prefix "$SITE" >/dev/null
ln -sfn "$BUILD/compile_commands.json" compile_commands.json
