// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>

// One function per area of the extension module bagua._C.
namespace bagua {

void bindBackend(pybind11::module& module);
void bindAlgorithms(pybind11::module& module);
void bindAlgorithmOptions(pybind11::module& module);
void bindOperations(pybind11::module& module);

// For the end of whatever owns a transport: it joins threads, and a thread that drops the last reference to a tensor
// that Python knows needs the GIL for it.
template <typename Drop>
void withoutGil(Drop&& drop) {
  if (PyGILState_Check() == 0) return std::forward<Drop>(drop)();
  const pybind11::gil_scoped_release noGil;
  std::forward<Drop>(drop)();
}

// How Python holds a process group. Layout and meaning are those of the pointer inside, as torch's functions, which
// take and return that, expect of such a holder.
template <typename T>
class DroppedWithoutGil {
 public:
  DroppedWithoutGil() = default;
  // NOLINTNEXTLINE(google-explicit-constructor): factories return the pointer
  DroppedWithoutGil(c10::intrusive_ptr<T> pointer) : pointer_(std::move(pointer)) {}
  explicit DroppedWithoutGil(T* object) : pointer_(c10::intrusive_ptr<T>::unsafe_steal_from_new(object)) {}
  DroppedWithoutGil(const DroppedWithoutGil&) = default;
  DroppedWithoutGil(DroppedWithoutGil&&) noexcept = default;
  DroppedWithoutGil& operator=(const DroppedWithoutGil&) = delete;
  DroppedWithoutGil& operator=(DroppedWithoutGil&&) = delete;
  ~DroppedWithoutGil() {
    if (pointer_) withoutGil([this] { pointer_.reset(); });
  }

  T* get() const { return pointer_.get(); }
  T& operator*() const { return *pointer_; }
  T* operator->() const { return pointer_.get(); }

 private:
  c10::intrusive_ptr<T> pointer_;
};

}  // namespace bagua

// NOLINTNEXTLINE(misc-use-anonymous-namespace): the macro opens pybind11's namespace
PYBIND11_DECLARE_HOLDER_TYPE(T, bagua::DroppedWithoutGil<T>, true)
