// SPDX-License-Identifier: Apache-2.0
#include "algorithms/hook/codec_check.h"

#include <sstream>

#include "kernels/codec.h"

namespace bagua {

void checkCodecs(const std::string& algorithm, const Options& options, at::Device device) {
  const auto option = options.values().find("codec");
  if (option == options.values().end() || !std::holds_alternative<std::string>(option->second)) return;
  std::istringstream entries(std::get<std::string>(option->second));
  for (std::string entry; std::getline(entries, entry, ',');) {
    const auto begin = entry.find_first_not_of(' ', entry.find('=') + 1);
    if (begin == std::string::npos) continue;
    const std::string name = entry.substr(begin, entry.find_last_not_of(' ') - begin + 1);
    CodecRegistry::find(name).checkDevice(device, c10::str("bagua: algorithm '", algorithm, "'"));
  }
}

}  // namespace bagua
