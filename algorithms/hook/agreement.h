// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "backend/executor.h"

namespace bagua {

// What has to be the same on all ranks, as text.
struct Registration {
  // All ranks' are shown where they differ; empty on a rank that cannot go on and is about to say why.
  std::string text;
  // Longer; of this only the rank's own is shown.
  std::string detail;
};

// How an error goes on after "rank 1 ".
struct AgreementWords {
  const char* refuses;
  const char* otherText;
  const char* otherDetail;
};

// Of the algorithm and its options, and of the shapes and dtypes of the model's parameters.
inline constexpr AgreementWords kOfRegistration{"could not register its algorithm",
                                                "registered another algorithm or other options than rank 0",
                                                "registered its algorithm on a model of other parameters than rank 0"};

// The ranks compare what the bits of sums and products depend on, besides the numbers.
inline constexpr AgreementWords kOfArithmetic{"could not register its algorithm",
                                              "computes with another kind of GPU, or with other settings, than rank 0, "
                                              "so that their weights would drift apart",
                                              ""};

// Collective. Throws ValueError on every rank unless all come with the same own.
void agreeOn(const Registration& own, const AgreementWords& words, ExecutorProvider& executors, at::Device device);

}  // namespace bagua
