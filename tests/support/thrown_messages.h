// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>

namespace bagua::testing {

// Returns the text of the Error that `call` throws; empty where it throws nothing. What is no Error goes through.
template <typename Error = std::exception, typename Call>
std::string messageThrownBy(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace bagua::testing
