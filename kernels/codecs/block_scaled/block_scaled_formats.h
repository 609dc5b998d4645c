// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/codecs/block_scaled/format_2bit_1bit.h"
#include "kernels/codecs/block_scaled/format_4bit.h"
#include "kernels/codecs/block_scaled/format_int8.h"
