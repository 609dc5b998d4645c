// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace bagua {

// " (did you mean 'bytegrad'?)" with those of `known` that `name` may have been meant to be; empty where it resembles
// none. Upper case counts as lower case, and hyphens and spaces as underscores.
std::string suggestionFor(const std::string& name, const std::vector<std::string>& known);

}  // namespace bagua
