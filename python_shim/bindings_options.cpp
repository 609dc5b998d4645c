// SPDX-License-Identifier: Apache-2.0
// What Python knows of algorithms and their options, before one is at work.
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "algorithms/algorithm_interfaces.h"
#include "algorithms/registry.h"
#include "algorithms/shared/compressed/coding.h"
#include "kernels/closest_names.h"
#include "kernels/codec.h"
#include "python_shim/bindings.h"
#include "python_shim/bindings_algorithms.h"

namespace bagua {

namespace py = pybind11;

namespace {

// Words as "a, b", a mapping, where it is taken, as "a=b, c=d"; nothing for other values.
std::optional<std::string> textOf(const py::handle& value, bool takesMapping) {
  std::string text;
  const auto append = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (takesMapping && py::isinstance<py::dict>(value)) {
    for (const auto& [key, entry] : py::reinterpret_borrow<py::dict>(value)) {
      if (!py::isinstance<py::str>(key) || !py::isinstance<py::str>(entry)) return std::nullopt;
      append(py::cast<std::string>(key) + "=" + py::cast<std::string>(entry));
    }
    return text;
  }
  if (!py::isinstance<py::tuple>(value) && !py::isinstance<py::list>(value)) return std::nullopt;
  for (const auto& entry : py::reinterpret_borrow<py::sequence>(value)) {
    if (!py::isinstance<py::str>(entry)) return std::nullopt;
    append(py::cast<std::string>(entry));
  }
  return text;
}

const OptionInfo& optionOf(const std::string& algorithm, const std::string& name) {
  const auto& options = AlgorithmRegistry::find(algorithm).options;
  const auto found =
      std::find_if(options.begin(), options.end(), [&](const OptionInfo& option) { return option.name == name; });
  TORCH_INTERNAL_ASSERT(found != options.end());
  return *found;
}

// Python's integers have no end.
OptionValue wholeNumber(const std::string& algorithm, const OptionInfo& option, const py::handle& value) {
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow == 0) return number;
  if (std::holds_alternative<double>(option.defaultValue)) {
    const double rounded = PyLong_AsDouble(value.ptr());
    if (PyErr_Occurred() == nullptr) return rounded;
    PyErr_Clear();
    return std::numeric_limits<double>::infinity();
  }
  using Limits = std::numeric_limits<int64_t>;
  throw py::value_error("option '" + option.name + "' of algorithm '" + algorithm + "' takes whole numbers from " +
                        std::to_string(Limits::min()) + " to " + std::to_string(Limits::max()) + ", got one of " +
                        py::cast<std::string>(py::str(value.attr("bit_length")())) + " bits");
}

}  // namespace

py::dict pythonValues(const std::string& algorithm, const OptionValues& values) {
  py::dict dict;
  for (const auto& [name, value] : values) {
    const bool isNone = value == OptionValue(std::string()) && optionOf(algorithm, name).takesNone();
    dict[py::str(name)] = isNone ? py::none() : py::cast(value);
  }
  return dict;
}

OptionValues optionValues(const std::string& algorithm, const py::dict& given, const std::vector<std::string>& others) {
  const auto& declared = AlgorithmRegistry::find(algorithm).options;
  for (const auto& [name, value] : given) checkOptionName(algorithm, declared, py::cast<std::string>(name), others);
  OptionValues values;
  for (const auto& [name, value] : given) {
    const OptionInfo& option = optionOf(algorithm, py::cast<std::string>(name));
    OptionValue& converted = values[option.name];
    if (py::isinstance<py::bool_>(value)) {
      converted = py::cast<bool>(value);
    } else if (py::isinstance<py::int_>(value)) {
      converted = wholeNumber(algorithm, option, value);
    } else if (py::isinstance<py::float_>(value)) {
      converted = py::cast<double>(value);
    } else if (py::isinstance<py::str>(value)) {
      converted = py::cast<std::string>(value);
    } else if (const auto text = textOf(value, option.takesMapping)) {
      converted = *text;
    } else if (value.is_none() && option.takesNone()) {
      converted = std::string();
    } else {
      const bool isMapping = !option.takesMapping && py::isinstance<py::dict>(value);
      throw py::type_error("option '" + option.name + "' of algorithm '" + algorithm + "' takes " +
                           (isMapping ? "no mapping" : option.types()) + ", got " +
                           py::cast<std::string>(py::repr(value)));
    }
  }
  return values;
}

namespace {

py::dict infoDict(const std::string& name) {
  const auto& info = AlgorithmRegistry::find(name);
  py::list options;
  for (const auto& option : info.options) {
    py::dict entry;
    entry["name"] = option.name;
    entry["default"] = option.defaultValue == OptionValue(std::string()) ? py::none() : py::cast(option.defaultValue);
    entry["summary"] = option.summary;
    options.append(entry);
  }
  py::dict dict;
  dict["name"] = info.name;
  dict["summary"] = info.summary;
  dict["optimizer"] = info.optimizer;
  dict["runs_in_background"] = info.runsInBackground;
  dict["steps_may_differ"] = info.stepsMayDiffer;
  dict["is_exact"] = info.agreement == Agreement::kIdentical;
  dict["options"] = options;
  return dict;
}

}  // namespace

void bindAlgorithmOptions(py::module& module) {
  module.def("algorithm_names", &AlgorithmRegistry::names);
  module.def("algorithm_info", &infoDict, py::arg("name"));
  module.def("codec_names", &CodecRegistry::names);
  module.def(
      "packed_bytes",
      [](const std::string& codec, int64_t numel) {
        return CodecRegistry::find(codec).codec->layout().packedBytes(numel);
      },
      py::arg("codec"), py::arg("numel"), "What a codec makes of so many elements that are coded together.");
  module.def(
      "code_and_decode",
      [](const std::string& name, at::Tensor values) {
        const py::gil_scoped_release noGil;
        const auto& codec = *CodecRegistry::find(name).codec;
        at::Tensor packed = at::empty({codec.layout().packedBytes(values.numel())}, at::kByte);
        const Piece all{0, values.numel()};
        codec.start(values, {}, packed);
        codec.encode(values, all, {}, packed);
        codec.decode(packed, all, values);
      },
      py::arg("codec"), py::arg("values"), "Makes of values what arrives of them, to see what a codec costs.");
  module.attr("DEFAULT_CODEC") = compressed::kDefaultCodec;
  module.def(
      "check_options",
      [](const std::string& name, const py::dict& options, const std::vector<std::string>& others) {
        const auto& info = AlgorithmRegistry::find(name);
        const Options complete(name, info.options, optionValues(name, options, others));
        // Its constructor knows which values there are.
        static_cast<void>(info.create(complete));
        return pythonValues(name, complete.values());
      },
      py::arg("name"), py::arg("options"), py::arg("other_names") = std::vector<std::string>(),
      "All options of an algorithm with the defaults filled in. Unknown names are a ValueError that lists the valid "
      "ones and suggests one of them, or of other_names, which the caller takes besides; so are values out of range. "
      "Values of a wrong type are a TypeError.");
  module.def(
      "check_names",
      [](const std::string& name, const py::dict& options, const std::optional<std::vector<std::string>>& names) {
        const auto& info = AlgorithmRegistry::find(name);
        const auto algorithm = info.create(Options(name, info.options, optionValues(name, options)));
        if (const auto* const reads = algorithm->as<ReadsNames>()) reads->checkNames(names);
      },
      py::arg("name"), py::arg("options"), py::arg("names"),
      "ValueError where an option names what is none of the model's parameters, or, for names=None, where it needs a "
      "model.");
  module.def("suggestion_for", &suggestionFor, py::arg("name"), py::arg("known"),
             "\" (did you mean 'bytegrad'?)\", or nothing.");
}

}  // namespace bagua
