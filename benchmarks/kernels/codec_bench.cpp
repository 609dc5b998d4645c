// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include <string>
#include <utility>
#include <vector>

#include "benchmarks/kernels/beside_copy.h"
#include "kernels/codec.h"

// Every registered codec on the CPU, through its interface, in float32: speed beside a plain copy, size and error.
namespace bagua {
namespace {

constexpr int64_t kRanks = 8;

// A chunk and what a codec needs about it.
struct Chunk {
  Chunk(const benchmark::State& state, const CodecInfo& info)
      : codec(*info.codec),
        values(at::randn({state.range(0) * 256})),
        copy(at::empty_like(values)),
        packed(at::empty({codec.layout().packedBytes(values.numel())}, at::kByte)) {
    encode({});
  }

  void encode(const Encoding& encoding) {
    codec.start(values, encoding, packed);
    codec.encode(values, {0, values.numel()}, encoding, packed);
  }

  void decode() { codec.decode(packed, {0, values.numel()}, copy); }

  const Codec& codec;
  at::Tensor values;
  at::Tensor copy;
  at::Tensor packed;
};

void encodeBench(benchmark::State& state, const CodecInfo& info) {
  Chunk chunk(state, info);
  besideCopy(state, chunk.values, chunk.copy, [&] { chunk.encode({}); });
  state.counters["bits"] = 8.0 * static_cast<double>(chunk.packed.numel()) / static_cast<double>(chunk.values.numel());
}

void encodeWithFeedbackBench(benchmark::State& state, const CodecInfo& info) {
  Chunk chunk(state, info);
  const at::Tensor residual = at::zeros_like(chunk.values);
  besideCopy(state, chunk.values, chunk.copy, [&] { chunk.encode({.residual = residual, .nextResidual = residual}); });
}

void decodeBench(benchmark::State& state, const CodecInfo& info) {
  Chunk chunk(state, info);
  besideCopy(state, chunk.values, chunk.copy, [&] { chunk.decode(); });
}

void decodeMeanBench(benchmark::State& state, const CodecInfo& info) {
  Chunk chunk(state, info);
  const at::Tensor copies = chunk.packed.repeat({kRanks, 1});
  besideCopy(state, chunk.values, chunk.copy, [&] {
    info.codec->decodeMean(copies, {0, chunk.values.numel()}, kRanks, {}, chunk.copy, chunk.packed);
  });
}

// Squared error over squared norm, of chunks of a million values.
double errorOn(const CodecInfo& info, const at::Tensor& values) {
  at::Tensor packed = at::empty({info.codec->layout().packedBytes(values.numel())}, at::kByte);
  at::Tensor decoded = at::empty_like(values);
  info.codec->start(values, {}, packed);
  info.codec->encode(values, {0, values.numel()}, {}, packed);
  info.codec->decode(packed, {0, values.numel()}, decoded);
  const auto norm = [](const at::Tensor& x) { return x.to(at::kDouble).square().sum().item<double>(); };
  return norm(decoded - values) / norm(values);
}

void errorBench(benchmark::State& state, const CodecInfo& info) {
  constexpr int64_t kLength = int64_t{1} << 20;
  at::manual_seed(7);
  const auto normal = [] { return at::randn({kLength}); };
  const at::Tensor laplace = at::empty({kLength}).exponential_() * at::randint(2, {kLength}).mul_(2).sub_(1);
  const at::Tensor studentT3 = normal() / ((normal().square() + normal().square() + normal().square()) / 3).sqrt();
  // Runs of 4096 values whose scales lie up to a thousand apart, as layers of a model do.
  const at::Tensor scales = at::pow(10.0, at::rand({kLength / 4096}) * 3).repeat_interleave(4096);
  for (auto _ : state) {
    state.counters["gauss"] = errorOn(info, normal());
    state.counters["laplace"] = errorOn(info, laplace);
    state.counters["t3"] = errorOn(info, studentT3);
    state.counters["mixed"] = errorOn(info, normal() * scales);
  }
}

void registerAll() {
  using Bench = void (*)(benchmark::State&, const CodecInfo&);
  const std::vector<std::pair<const char*, Bench>> benches = {{"encode", encodeBench},
                                                              {"encode_with_feedback", encodeWithFeedbackBench},
                                                              {"decode", decodeBench},
                                                              {"decode_mean", decodeMeanBench}};
  for (const auto& name : CodecRegistry::names()) {
    const CodecInfo& info = CodecRegistry::find(name);
    for (const auto& [what, bench] : benches) {
      benchmark::RegisterBenchmark((name + "/" + what).c_str(), bench, info)
          ->ArgName("KiB")
          ->ArgsProduct({{64, 1024, 65536}})
          ->Iterations(30)  // Each is a batch of calls.
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
    benchmark::RegisterBenchmark((name + "/error").c_str(), errorBench, info)->Iterations(1);
  }
}

}  // namespace
}  // namespace bagua

int main(int argc, char** argv) {
  at::set_num_threads(1);
  bagua::registerAll();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
