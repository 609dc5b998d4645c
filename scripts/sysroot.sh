#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Unpacks headers and libraries of an older glibc, for cmake/old_glibc.cmake to build with: sysroot.sh FOLDER
# Those of Debian 11, the oldest that Debian's mirrors (MIRROR=) still have; nothing of it runs. OpenSSL's are this machine's,
# as Debian 11 had version 1 only. Needs mmdebstrap and the keys of debian-archive-keyring; no root.
set -euo pipefail
cd "$(dirname "$0")/.."

FOLDER=$(realpath -m "${1:?usage: sysroot.sh FOLDER}")
readonly FOLDER MIRROR=${MIRROR:-http://deb.debian.org/debian} TRIPLE=x86_64-linux-gnu

[ ! -e "$FOLDER/.complete" ] || exit 0
rm -rf "$FOLDER"
mkdir -p "$FOLDER"
mmdebstrap --quiet --variant=extract --include=libc6-dev,libstdc++-10-dev,linux-libc-dev bullseye "$FOLDER" "$MIRROR"
# An absolute link would lead out of the folder.
find "$FOLDER"/{lib,lib64,usr/lib} -type l -lname '/*' -printf '%p %l\n' | while read -r link target; do
  ln -sfrn "$FOLDER$target" "$link"
done
cp -r /usr/include/openssl "$FOLDER/usr/include/"
cp -r /usr/include/$TRIPLE/openssl "$FOLDER/usr/include/$TRIPLE/"
cp -P /usr/lib/$TRIPLE/lib{ssl,crypto}.so* "$FOLDER/usr/lib/$TRIPLE/"
# What the headers of GCC ask for and these libraries lack, to be linked into each library.
libraries=$FOLDER/usr/lib/$TRIPLE
"${CXX:-g++}" --sysroot="$FOLDER" -std=c++20 -O2 -fPIC -c cmake/old_glibc.cpp -o "$libraries/old_glibc.o"
ar rcs "$libraries/libold_glibc.a" "$libraries/old_glibc.o"
touch "$FOLDER/.complete"
