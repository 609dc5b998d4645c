// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "benchmarks/kernels/beside_copy.h"
#include "kernels/codecs/minmax_uint8/minmax_uint8.h"

// The codec on the CPU beside a plain copy of the same tensor. `over_us` is what a call takes more than the target
// allows (60 % of the copy's speed to compress, 70 % to decompress): negative where the target is met.
namespace bagua::minmax_uint8 {
namespace {

constexpr double kCompressTarget = 0.6;
constexpr double kDecompressTarget = 0.7;

template <class F>
void besideCopyWithTarget(benchmark::State& state, const at::Tensor& source, at::Tensor& destination, double target,
                          const F& f) {
  const auto [seconds, copySeconds] = besideCopy(state, source, destination, f);
  state.counters["over_us"] = (seconds - copySeconds / target) * 1e6;
}

at::Tensor tensorOf(const benchmark::State& state, at::ScalarType dtype) {
  const auto bytes = state.range(0) * 1024;
  return at::randn({bytes / static_cast<int64_t>(c10::elementSize(dtype))}).to(dtype);
}

void compressBench(benchmark::State& state, at::ScalarType dtype) {
  const at::Tensor source = tensorOf(state, dtype);
  at::Tensor copy = at::empty_like(source);
  at::Tensor packed = at::empty({packedBytes(source.numel(), state.range(1))}, at::kByte);
  besideCopyWithTarget(state, source, copy, kCompressTarget, [&] { compress(source, state.range(1), packed); });
}

void decompressBench(benchmark::State& state, at::ScalarType dtype) {
  const at::Tensor source = tensorOf(state, dtype);
  at::Tensor copy = at::empty_like(source);
  at::Tensor packed = at::empty({packedBytes(source.numel(), state.range(1))}, at::kByte);
  compress(source, state.range(1), packed);
  besideCopyWithTarget(state, source, copy, kDecompressTarget, [&] { decompress(packed, state.range(1), copy); });
}

// One rank's part of a tensor shared out over `copies` ranks; a copy of that part is the measure.
void reduceBench(benchmark::State& state, at::ScalarType dtype) {
  const at::Tensor source = tensorOf(state, dtype);
  at::Tensor copy = at::empty_like(source);
  const int64_t copies = state.range(1);
  const int64_t chunkBytes = packedBytes(source.numel(), 1);
  at::Tensor packed = at::empty({chunkBytes}, at::kByte);
  at::Tensor received = at::empty({copies * chunkBytes}, at::kByte);
  compress(source, 1, packed);
  received.view({copies, chunkBytes}).copy_(packed.expand({copies, chunkBytes}));
  besideCopyWithTarget(state, source, copy, kCompressTarget, [&] {
    reduceAndCompress(received, copies, source.numel(), source.numel(), dtype, static_cast<float>(copies), packed);
  });
}

void registerAll() {
  using Bench = void (*)(benchmark::State&, at::ScalarType);
  const auto add = [](const char* name, Bench bench, at::ScalarType dtype, const std::vector<int64_t>& kibibytes) {
    const std::string full = std::string(name) + "/" + c10::toString(dtype);
    benchmark::RegisterBenchmark(full.c_str(), bench, dtype)
        ->ArgNames({"KiB", name == std::string("reduce") ? "copies" : "chunks"})
        ->ArgsProduct({kibibytes, {1, 2, 8}})
        ->Iterations(30)  // Each is a batch of calls.
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  };
  add("compress", compressBench, at::kFloat, {4, 64, 1024, 8192, 65536});
  add("decompress", decompressBench, at::kFloat, {4, 64, 1024, 8192, 65536});
  add("reduce", reduceBench, at::kFloat, {64, 8192});
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kDouble}) {
    add("compress", compressBench, dtype, {64, 65536});
    add("decompress", decompressBench, dtype, {64, 65536});
  }
}

}  // namespace
}  // namespace bagua::minmax_uint8

int main(int argc, char** argv) {
  at::set_num_threads(1);  // The targets are those of one thread.
  bagua::minmax_uint8::registerAll();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
