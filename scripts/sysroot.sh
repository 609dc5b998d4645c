#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Unpacks headers and libraries of an older glibc, for cmake/old_glibc.cmake to build with: sysroot.sh FOLDER
# They are of Debian 11, the oldest that Debian's mirrors (MIRROR=) still have; nothing of it runs. OpenSSL's are this machine's,
# as Debian 11 had version 1 only. Needs mmdebstrap, debian-archive-keyring and libssl-dev; no root.
set -euo pipefail
cd "$(dirname "$0")/.."

FOLDER=$(realpath -m "${1:?usage: sysroot.sh FOLDER}")
readonly FOLDER MIRROR=${MIRROR:-http://deb.debian.org/debian} TRIPLE=x86_64-linux-gnu
read -ra compiler <<<"${CXX:-g++}"

if [ ! -e "$FOLDER/.unpacked" ]; then
  rm -rf "$FOLDER"
  mkdir -p "$FOLDER"
  # By way of an archive, as what mmdebstrap unpacks for others than root belongs to users of its own.
  mmdebstrap --quiet --variant=extract --include=libc6-dev,libstdc++-10-dev,linux-libc-dev bullseye - "$MIRROR" |
    tar -x --no-same-owner --exclude='./dev/*' -C "$FOLDER"
  # An absolute link would lead out of the folder.
  find "$FOLDER"/{lib,lib64,usr/lib} -type l -lname '/*' -printf '%p\0%l\0' |
    while IFS= read -r -d '' link && IFS= read -r -d '' target; do
      ln -sfrn "$FOLDER$target" "$link"
    done
  touch "$FOLDER/.unpacked"
fi
if [ ! -e /usr/include/$TRIPLE/openssl ]; then
  echo "sysroot: the headers of OpenSSL 3 are missing: install libssl-dev" >&2
  exit 1
fi
cp -r /usr/include/openssl "$FOLDER/usr/include/"
cp -r /usr/include/$TRIPLE/openssl "$FOLDER/usr/include/$TRIPLE/"
cp -P /usr/lib/$TRIPLE/lib{ssl,crypto}.so* "$FOLDER/usr/lib/$TRIPLE/"
"${compiler[@]}" --sysroot="$FOLDER" -std=c++20 -O2 -fPIC -c cmake/old_glibc.cpp -o "$FOLDER/old_glibc.o"
