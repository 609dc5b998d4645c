// SPDX-License-Identifier: Apache-2.0
#include "backend/os/own_folder.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace bagua {

std::filesystem::path ownFolder() {
  Dl_info info{};
  const bool isKnown = dladdr(reinterpret_cast<const void*>(&ownFolder), &info) != 0 && info.dli_fname != nullptr;
  TORCH_INTERNAL_ASSERT(isKnown, "libbagua does not know where it lies");
  return std::filesystem::path(info.dli_fname).parent_path();
}

}  // namespace bagua
