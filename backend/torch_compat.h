// SPDX-License-Identifier: Apache-2.0
#pragma once

// The only place that compares torch's version. One build serves one torch minor version (c10d has no stable ABI).

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#define BAGUA_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

#if !BAGUA_TORCH_AT_LEAST(2, 11)
#error "bagua needs torch 2.11 or newer"
#endif

// Backend::gather_single / gather_into_tensor exist from 2.14 on.
#if BAGUA_TORCH_AT_LEAST(2, 14)
#define BAGUA_HAS_GATHER_INTO_TENSOR 1
#else
#define BAGUA_HAS_GATHER_INTO_TENSOR 0
#endif

// Backend::reconfigure exists from 2.14 on; before, a rank is a constant.
#if BAGUA_TORCH_AT_LEAST(2, 14)
#define BAGUA_HAS_RECONFIGURE 1
#else
#define BAGUA_HAS_RECONFIGURE 0
#endif
