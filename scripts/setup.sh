#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the virtual environment with torch and the tools of this project: setup.sh VENV [TORCH]
# PYTHON= names the interpreter to use; otherwise one of 3.10 to 3.13 is found. `make setup` calls this.
# Where no package index can be reached, a Python that has torch lends what it has.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${1:?usage: setup.sh VENV [TORCH]}
TORCH=${2:-}
readonly DEFAULT_TORCH=2.15.0
readonly NEWEST_TORCH_FOR_PYTHON_3_10=2.14.0
readonly PYTHONS=(python3.12 python3.11 python3.13 python3 python3.10)
readonly DATASET=/usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# --- Packages of the system -------------------------------------------------------------------------------------------

can_use_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

apt_updated=no
apt_install() {
  if [ $apt_updated = no ]; then
    DEBIAN_FRONTEND=noninteractive apt-get update -qq </dev/null || say "apt-get update failed; trying what is known"
    apt_updated=yes
  fi
  say "apt-get install $*"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null >/dev/null
}

# Installs as root. Otherwise says in one line what to type, and fails when the project cannot be built without.
need() {  # need required|optional "what it is for" package...
  local kind=$1 purpose=$2
  shift 2
  if can_use_apt && apt_install "$@"; then return 0; fi
  local advice="missing for $purpose: sudo apt-get install -y $*"
  if [ "$kind" = required ]; then fail "$advice"; fi
  say "$advice"
}

cxx() { command -v "${CXX:-c++}" || command -v g++ || command -v clang++; }
cxx_finds() { echo "#include <$1>" | "$(cxx)" -std=c++20 -E -x c++ - >/dev/null 2>&1; }

install_system_packages() {
  cxx >/dev/null || need required "compiling C++20" g++
  cxx_finds gmock/gmock.h || need optional "the C++ unit tests (skipped until then)" libgtest-dev libgmock-dev
  cxx_finds openssl/ssl.h || need optional "BAGUA_JOB_SECRET (refused until then)" libssl-dev
  cxx_finds benchmark/benchmark.h || need optional "the C++ benchmarks" libbenchmark-dev
  command -v ip >/dev/null || need optional "the tests on emulated networks" iproute2
  [ -e $DATASET ] || need optional "make demo (or: --data DIR with the four files)" dataset-fashion-mnist
}

# --- Python -----------------------------------------------------------------------------------------------------------

python_minor() {
  "$1" -c 'import sys; v = sys.version_info; assert (3, 10) <= v[:2] <= (3, 13); print("%d.%d" % v[:2])' 2>/dev/null
}

# A Python without venv, or without the headers that an extension includes, is of no use here.
has_headers() {
  "$1" -c 'import os, sysconfig
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null
}
python_is_complete() { has_headers "$1" && "$1" -c 'import ensurepip, venv' 2>/dev/null; }

complete_python() {  # complete_python INTERPRETER: installs what a distribution's Python lacks
  local minor
  minor=$(python_minor "$1") || fail "$1 is not a Python of 3.10 to 3.13"
  python_is_complete "$1" || need required "building with $1" "python$minor-dev" "python$minor-venv"
  python_is_complete "$1" || fail "$1 lacks venv or its header files; PYTHON=... names another interpreter"
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    complete_python "$PYTHON"
    return
  fi
  for candidate in "${PYTHONS[@]}"; do
    if python_minor $candidate >/dev/null && python_is_complete $candidate; then PYTHON=$candidate; return; fi
  done
  for candidate in "${PYTHONS[@]}"; do
    if python_minor $candidate >/dev/null; then PYTHON=$candidate; complete_python $candidate; return; fi
  done
  need required "everything here (3.10 to 3.13)" python3 python3-dev python3-venv
  PYTHON=python3
  complete_python $PYTHON
}

# A venv of another torch is made anew: the libraries that torch pulls in share folders, and leftovers would be found.
drop_other_torch() {
  local stamp
  for stamp in "$VENV"/.setup-torch-*; do
    if [ -e "$stamp" ] && [ -n "$TORCH" ] && [ "${stamp##*-}" != "$TORCH" ]; then
      say "$VENV has torch ${stamp##*-}; making it anew for $TORCH"
      [ -n "${PYTHON:-}" ] || PYTHON=$("$VENV/bin/python" -c 'import os, sys; print(os.path.realpath(sys.executable))')
      rm -rf "$VENV"
    fi
  done
}

is_borrowed() { [ -e "$VENV/.borrowed" ]; }

make_venv() {
  if ! is_borrowed && [ -x "$VENV/bin/python" ] && { [ -z "${PYTHON:-}" ] ||
      [ "$(python_minor "$VENV/bin/python")" = "$(python_minor "$PYTHON")" ]; }; then
    return
  fi
  # First, for its own python may be the first on the PATH.
  rm -rf "$VENV"
  hash -r
  find_python
  say "making $VENV with $("$PYTHON" --version)"
  "$PYTHON" -m venv "$VENV"
}

# --- Packages of Python -----------------------------------------------------------------------------------------------

check_torch_choice() {
  case "$TORCH" in
    "") ;;
    2.11 | 2.12 | 2.13 | 2.14 | 2.15) TORCH=$TORCH.0 ;;
    2.11.* | 2.12.* | 2.13.* | 2.14.* | 2.15.*) ;;
    *) fail "TORCH=$TORCH is not supported: use 2.11 to 2.15, such as TORCH=$DEFAULT_TORCH" ;;
  esac
}

choose_default_torch() {
  local minor
  minor=$(python_minor "$VENV/bin/python") || fail "$VENV is not of Python 3.10 to 3.13: remove it, and type make setup"
  if [ -z "$TORCH" ] && [ "$minor" = 3.10 ]; then
    TORCH=$NEWEST_TORCH_FOR_PYTHON_3_10
    say "torch $TORCH, the newest for Python 3.10"
  fi
  TORCH=${TORCH:-$DEFAULT_TORCH}
}

install_python_packages() {
  # uv installs torch and its CUDA libraries in seconds; pip takes minutes and does the same.
  local installer
  if "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check uv; then
    # Byte code too: elsewhere it is made at the first import, unless PYTHONDONTWRITEBYTECODE has each process make its own.
    installer=("$VENV/bin/uv" pip install --quiet --compile-bytecode --python "$VENV/bin/python")
  else
    say "uv cannot be installed; going on with pip"
    "$VENV/bin/python" -m pip install --quiet --upgrade "pip>=25.1" ||
      fail "no package can be installed, see above. Without an index, PYTHON= has to name a Python that has torch $TORCH"
    installer=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)
  fi
  say "installing torch $TORCH and the tools of the project"
  "${installer[@]}" "torch==$TORCH" --group dev --constraint scripts/constraints.txt
}

# --- Without a package index ------------------------------------------------------------------------------------------

torch_of() {  # torch_of INTERPRETER: the version of its torch, if it is one that this project builds with
  python_minor "$1" >/dev/null || return 1
  "$1" -c 'import importlib.metadata as m, re; print(re.match(r"2\.1[1-5]\.\d+", m.version("torch"))[0])' 2>/dev/null
}

# Whether the usual way would go on with the environment that is there. Such a one is never replaced by a borrowed one.
keeps_venv() {
  [ -x "$VENV/bin/python" ] && ! is_borrowed && { [ -z "$TORCH" ] || [ -e "$VENV/.setup-torch-$TORCH" ]; }
}

# A Python with the torch that is wanted, and not the environment that is to be made.
find_lender() {
  local candidate candidates own torch
  own=$(realpath -m "$VENV/bin")
  if [ -n "${PYTHON:-}" ]; then
    candidates=$(type -P "$PYTHON") || return 1
  else
    candidates=$(type -aP python3 python "${PYTHONS[@]}") || true
  fi
  while IFS= read -r candidate; do
    if [ "$(realpath "$(dirname "$candidate")")" = "$own" ] || ! torch=$(torch_of "$candidate"); then continue; fi
    if [ "${TORCH:-$torch}" = "$torch" ]; then printf '%s\n' "$candidate"; return; fi
  done <<<"$candidates"
  return 1
}

# Asks with a pip, which knows the index that is configured here: the interpreter's, or one made for the purpose. Where
# there is neither, the usual way says what is missing.
reaches_an_index() {
  local folder python=$1 status=0
  folder=$(mktemp -d)
  if ! "$python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv "$folder/venv" >/dev/null 2>&1 && python=$folder/venv/bin/python
  fi
  if "$python" -m pip --version >/dev/null 2>&1; then
    PIP_REQUIRE_VIRTUALENV=0 "$python" -m pip download --quiet --disable-pip-version-check --retries 1 --no-deps \
      --dest "$folder" pluggy >/dev/null 2>&1 || status=1
  fi
  rm -r "$folder"
  return $status
}

# The new environment finds the packages of the interpreter behind its own: nothing is written among them.
borrow_packages() {  # borrow_packages INTERPRETER
  local bin program
  TORCH=$(torch_of "$1")
  say "no package index can be reached: $VENV borrows torch $TORCH and the tools of $1, of whatever version they are"
  has_headers "$1" || fail "$1 lacks its header files (Python.h), which the build includes"
  "$1" scripts/missing_packages.py || fail "$1 cannot lend what the build needs"
  rm -rf "$VENV"
  "$1" -m venv --without-pip "$VENV"
  touch "$VENV/.borrowed"
  "$1" -c 'import sys
for folder in sys.path:
    if folder.endswith(("/site-packages", "/dist-packages")):
        print(f"import site; site.addsitedir({folder!r})")' \
    >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed_packages.pth"
  bin=$(realpath "$(dirname "$1")")
  for program in cmake ctest ninja; do
    if [ -x "$bin/$program" ]; then ln -s "$bin/$program" "$VENV/bin/$program"; fi
  done
  printf '#!/bin/sh\nexec "%s/bin/python" -m torch.distributed.run "$@"\n' "$(realpath "$VENV")" >"$VENV/bin/torchrun"
  chmod +x "$VENV/bin/torchrun"
}

check_torch_choice
install_system_packages
if ! keeps_venv && LENDER=$(find_lender) && ! reaches_an_index "$LENDER"; then
  borrow_packages "$LENDER"
else
  drop_other_torch
  make_venv
  choose_default_torch
  install_python_packages
fi
rm -f "$VENV"/.setup-torch-*
touch "$VENV/.setup-torch-$TORCH"
say "$VENV is ready: $("$VENV/bin/python" --version), torch $TORCH"
