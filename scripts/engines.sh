#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what the tests of tests/engines need beside the project's own set-up, and runs them: engines.sh VENV
# torch stays as it is. `make test-engines` calls this.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly VENV=${1:?usage: engines.sh VENV}
readonly PY=$VENV/bin/python SLURM=(munge slurm-client slurmctld slurmd)
readonly TORCHTITAN=torchtitan==0.3.0 TORCHTITAN_VENV=$VENV/torchtitan
say() { printf 'engines: %s\n' "$*"; }
torch_of() { "$1" -c 'import importlib.metadata as m; print(m.version("torch"))'; }

# As root; otherwise one line says what to type, and the tests are skipped.
install_slurm() {
  local program
  for program in munged sbatch slurmctld slurmd; do
    if command -v "$program" >/dev/null; then continue; fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      say "apt-get install ${SLURM[*]}"
      DEBIAN_FRONTEND=noninteractive apt-get update -qq </dev/null || say "apt-get update failed; trying what is known"
      if DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${SLURM[@]}" \
          </dev/null >/dev/null; then return; fi
    fi
    say "missing for Slurm's tests (skipped until then): sudo apt-get install -y ${SLURM[*]}"
    return
  done
}

install_packages() {
  "$PY" -m pip install --quiet --disable-pip-version-check --requirement tests/engines/packages.txt \
    --constraint scripts/constraints.txt "torch==$(torch_of "$PY")"
}

# torchtitan requires older versions of packages that the project's own environment pins (fsspec, by way of datasets). It
# gets an environment of its own, which finds the other's packages, torch and bagua among them, behind its own.
install_torchtitan() {
  if ! "$PY" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "torchtitan requires Python 3.11; its test is skipped"
    return
  fi
  if [ ! -x "$TORCHTITAN_VENV/bin/python" ]; then "$PY" -m venv "$TORCHTITAN_VENV"; fi
  "$PY" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
    >"$("$TORCHTITAN_VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed_packages.pth"
  "$TORCHTITAN_VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$TORCHTITAN" \
    "torch==$(torch_of "$PY")"
}

install_slurm
install_packages
install_torchtitan
OMP_NUM_THREADS=1 "$PY" -m pytest tests/engines tests/examples tests/lightning \
  tests/unit/test_fuse_unknown_optimizers.py
