#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes and checks what is published of a version, and uploads nothing: release.sh VENV [FOLDER]
# The sdist holds what is committed and nothing else. The wheels are built from it, by its own scripts/wheels.sh, which
# tries each (TORCHES=, PYTHONS=, BAGUA_CUDA_ARCHS= and JOBS= are its own). One is then installed as users do it.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=$(realpath "${1:?usage: release.sh VENV [FOLDER]}")
FOLDER=$(realpath -m "${2:-build/release}")
readonly VENV FOLDER WORK=$PWD/build/release_work TWINE=twine==7.0.0
PATH=$VENV/bin:$PATH

say() { printf 'release: %s\n' "$*"; }

refuse() {
  say "$*" >&2
  exit 1
}

changed=$(git status --porcelain)
[ -z "$changed" ] || refuse "commit these first, as a release has to follow from its commit:"$'\n'"$changed"
rm -rf "$FOLDER" "$WORK"
mkdir -p "$FOLDER" "$WORK"
python scripts/release_notes.py >/dev/null

python -c 'import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])' "$FOLDER" >/dev/null
sdist=$(ls "$FOLDER"/*.tar.gz)
tar -xzf "$sdist" -C "$WORK"
source=$(ls -d "$WORK"/bagua-*)
diff <(git ls-files | grep -v '^\.ci/' | sort) <(find "$source" -type f ! -name PKG-INFO -printf '%P\n' | sort) ||
  refuse "the sdist does not hold the files of the commit (<: it lacks them)"
say "$(basename "$sdist"): all files of $(git rev-parse --short HEAD) but .ci/"

"$source/scripts/wheels.sh" "$VENV" "$FOLDER"
wheels=("$FOLDER"/*.whl)

# A Python of its own with what the wheel asks for, and the smoke test out of the sdist.
newest=$(basename "${wheels[-1]}")
[[ $newest =~ -cp3([0-9]+)- ]]
uv venv --quiet --python "3.${BASH_REMATCH[1]}" "$WORK/venv"
uv pip install --quiet --python "$WORK/venv/bin/python" "${wheels[-1]}"
"$WORK/venv/bin/python" "$source/tests/smoke.py"
say "$newest: installed into an empty environment, and tried"

uv tool run --quiet --from "$TWINE" twine check --strict "$FOLDER"/*
(cd "$FOLDER" && sha256sum -- *.tar.gz *.whl >SHA256SUMS && sha256sum --check --quiet SHA256SUMS)
python scripts/release_notes.py "$FOLDER" >"$FOLDER/NOTES.md"
rm -rf "$WORK"
say "$FOLDER is ready to upload, to a page of releases or an index of your own: PyPI takes no version that names a torch"
ls -l "$FOLDER"
