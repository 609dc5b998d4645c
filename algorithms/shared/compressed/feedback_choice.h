// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "algorithms/options.h"
#include "kernels/codec.h"

namespace bagua::compressed {

// The option "error_feedback": True, False, or "auto", which goes by what was measured (docs/convergence.md). It gained
// nothing from 8 bits on, helped with 4, and with 2 it helped SGD and harmed Adam, whose squares see the returned
// errors as noise of the gradients. With 1 bit it helped in one of four trainings, and lost most of all in the others.
// An optimizer that is not known is taken for one like Adam, because without feedback no training lost as much.
class FeedbackChoice {
 public:
  // Throws ValueError for another word.
  explicit FeedbackChoice(OptionValue value);

  void useOptimizer(bool isLinear) { isLinear_ = isLinear; }
  [[nodiscard]] bool isOnFor(const CodecInfo& codec) const;

 private:
  const OptionValue value_;
  bool isLinear_ = false;
};

}  // namespace bagua::compressed
