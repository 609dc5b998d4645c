// SPDX-License-Identifier: Apache-2.0
#include "algorithms/capture.h"

#include <c10/util/Exception.h>

namespace bagua {

void refuseCapture(const ExecutorProvider& group, at::Device device, const char* kind, const std::string& name) {
  TORCH_CHECK(!group.isCapturing(device), "bagua: ", kind, name,
              " cannot be captured in a CUDA graph. It is not the same work ",
              "each time: it keeps something for the next step (residuals, replicas), draws at random, or goes by the "
              "number of the step or of the round. A replay would repeat the work of one step. Run it outside of the "
              "capture. What can be captured: gradient_allreduce; bytegrad, and quantized_allreduce with "
              "error_feedback=False, with codecs and a rounding that draw nothing at random (minmax_uint8, int8, 4bit; "
              "'nearest'); decentralized with peer_selection_mode='all' and communication_interval=1");
}

}  // namespace bagua
