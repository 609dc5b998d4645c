// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>

namespace bagua {

// Where libbagua lies, and with it the libraries that are loaded at need.
std::filesystem::path ownFolder();

}  // namespace bagua
