// Python's view of gguf/: what python/mlx_gguf/file.py is written on.
#include "bindings/bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "gguf/array.h"
#include "gguf/file.h"

namespace nb = nanobind;

namespace mlx_gguf {

using namespace gguf;

namespace {

nb::object checked(nb::object o) {
  if (!o.is_valid()) {
    nb::raise_python_error();
  }
  return o;
}

// Bytes that are not UTF-8 become lone surrogates, so nothing is lost.
nb::object text(std::string_view s) {
  return checked(
      nb::steal(PyUnicode_DecodeUTF8(
          s.data(), static_cast<Py_ssize_t>(s.size()), "surrogateescape")));
}

nb::object path_text(const std::string& s) {
  return checked(
      nb::steal(PyUnicode_DecodeFSDefaultAndSize(
          s.data(), static_cast<Py_ssize_t>(s.size()))));
}

// Builds Python objects from a metadata value; arrays become lists.
class PythonSink {
 public:
  void number(bool x) {
    add(nb::bool_(x));
  }
  void number(uint64_t x) {
    add(nb::int_(x));
  }
  void number(int64_t x) {
    add(nb::int_(x));
  }
  void number(double x) {
    add(nb::float_(x));
  }
  void string(std::string_view s) {
    add(text(s));
  }
  void begin(const ArrayHeader& header) {
    auto size = static_cast<Py_ssize_t>(header.count);
    open_.push_back({checked(nb::steal(PyList_New(size))), 0});
  }
  void end() {
    nb::object list = std::move(open_.back().list);
    open_.pop_back();
    add(std::move(list));
  }
  nb::object take() {
    return std::move(result_);
  }

 private:
  struct Level {
    nb::object list;
    Py_ssize_t filled;
  };

  void add(nb::object o) {
    if (open_.empty()) {
      result_ = std::move(o);
    } else {
      Level& level = open_.back();
      PyList_SET_ITEM(level.list.ptr(), level.filled++, o.release().ptr());
    }
  }

  std::vector<Level> open_;
  nb::object result_;
};

// Opaque to Python; file.py wraps it.
struct OpenFile {
  std::shared_ptr<const File> file;

  const Entry& entry(size_t i) const {
    return file->metadata().at(i);
  }
};

nb::list keys(const OpenFile& f) {
  nb::list out;
  for (const Entry& e : f.file->metadata()) {
    out.append(text(e.key));
  }
  return out;
}

nb::object value(const OpenFile& f, size_t i) {
  PythonSink sink;
  f.file->decode(f.entry(i).value, sink);
  return sink.take();
}

// (type, element type or None, length or None)
auto value_type(const OpenFile& f, size_t i) {
  const Value& v = f.entry(i).value;
  bool array = v.type == ValueType::array;
  return std::tuple(
      std::string(name_of(v.type)),
      array ? std::optional(std::string(name_of(v.element_type)))
            : std::nullopt,
      array ? std::optional(v.count) : std::nullopt);
}

// (name, type, shape, nbytes, offset, shard) of every tensor
nb::list tensors(const OpenFile& f) {
  nb::list out;
  for (const TensorInfo& t : f.file->tensors()) {
    nb::list shape;
    for (int32_t dim : t.shape) {
      shape.append(dim);
    }
    out.append(
        nb::make_tuple(
            text(t.name),
            t.format->name,
            nb::tuple(shape),
            t.nbytes,
            t.offset,
            t.shard));
  }
  return out;
}

nb::list paths(const OpenFile& f) {
  nb::list out;
  for (const std::string& path : f.file->paths()) {
    out.append(path_text(path));
  }
  return out;
}

// The class of python/mlx_gguf/errors.py that an error becomes.
const char* class_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::not_gguf:
      return "NotGGUFError";
    case ErrorKind::version:
      return "VersionError";
    case ErrorKind::truncated:
      return "TruncatedError";
    case ErrorKind::malformed:
      return "MalformedError";
    case ErrorKind::unsupported_type:
      return "UnsupportedTypeError";
    case ErrorKind::io:
      break;
  }
  return "GGUFError";
}

void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const Error& e) {
    nb::object message = path_text(e.what());
    if (e.kind() == ErrorKind::io) {
      // OSError picks its subclass, such as FileNotFoundError, by errno.
      nb::object args =
          nb::make_tuple(e.os_error(), message, path_text(e.path()));
      PyErr_SetObject(PyExc_OSError, args.ptr());
      return;
    }
    nb::object errors = nb::module_::import_("mlx_gguf.errors");
    nb::object type = errors.attr(class_of(e.kind()));
    PyErr_SetObject(type.ptr(), message.ptr());
  }
}

} // namespace

void bind_gguf(nb::module_& m) {
  nb::register_exception_translator(translate);
  nb::class_<OpenFile>(m, "OpenFile", "An open GGUF file or split set.")
      .def("paths", paths)
      .def_prop_ro(
          "version", [](const OpenFile& f) { return f.file->version(); })
      .def("keys", keys)
      .def("value", value, nb::arg("index"))
      .def("value_type", value_type, nb::arg("index"))
      .def("tensors", tensors)
      .def(
          "array",
          [](const OpenFile& f, size_t i, bool later) {
            return tensor_array(f.file, f.file->tensors().at(i), later);
          },
          nb::arg("index"),
          nb::arg("later") = false,
          nb::call_guard<nb::gil_scoped_release>());
  m.def("release_pages", release_pages, nb::arg("array"));
  m.def(
      "open_file",
      [](nb::bytes path, bool copy) {
        std::string name(path.c_str(), path.size());
        nb::gil_scoped_release release;
        return OpenFile{File::open(name, copy)};
      },
      nb::arg("path"),
      nb::arg("copy") = false);
}

} // namespace mlx_gguf
