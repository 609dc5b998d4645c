// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <vector>

namespace bagua {

// What a thread of its own is to run: `call`, after `prepareThread`. A failure of the latter is logged.
std::function<void()> inOwnThread(std::function<void()> prepareThread, std::function<void()> call);

// Makes blocking calls at the same time, each in a prepared thread of its own, and returns when all have returned. In
// this thread where there are no others to be had. Throws what one of those that threw has thrown.
void runTogether(const std::function<void()>& prepareThread, const std::vector<std::function<void()>>& calls);

}  // namespace bagua
