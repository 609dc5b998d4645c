#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# How many processors this process may use. `nproc` alone answers with OMP_NUM_THREADS, which users of torch export.
exec env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc
