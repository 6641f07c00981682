// How the engine intercepts a Python module: InterceptedForward replaces an instance's `forward`,
// and ParameterDict replaces `_parameters`.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <exception>
#include <optional>

#include "bindings.h"

namespace strata::python {
namespace {

// Tensors in the containers that modules take and return: tuples, lists, dicts (and what derives
// from them, such as transformers' outputs) and dataclasses.
void collect_tensors(PyObject* object, std::vector<at::Tensor>& tensors, int depth) {
  if (THPVariable_Check(object)) {
    tensors.push_back(THPVariable_Unpack(object));
    return;
  }
  if (depth == 0 || PyUnicode_Check(object) || object == Py_None) return;
  if (PyTuple_Check(object) || PyList_Check(object)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      const auto kept = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(object, i));
      collect_tensors(kept.ptr(), tensors, depth - 1);
    }
  } else if (PyDict_Check(object)) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, &key, &value) != 0) {
      const auto kept = py::reinterpret_borrow<py::object>(value);  // checking it may run Python
      collect_tensors(value, tensors, depth - 1);
    }
  } else if (py::hasattr(object, "__dataclass_fields__") && py::hasattr(object, "__dict__")) {
    collect_tensors(py::object(py::handle(object).attr("__dict__")).ptr(), tensors, depth - 1);
  }
}

constexpr int kNesting = 6;

// An object in place of a module's `forward`, which it keeps and runs within a scope. Without a
// scope in place of the model's own forward, however it is called: a pass begins with it, and a
// backward pass that autograd runs alone begins at its outputs.
class InterceptedForward {
 public:
  InterceptedForward(std::shared_ptr<ShardedModel> model, std::optional<int> scope,
                     py::object forward)
      : model_(std::move(model)), scope_(scope), forward_(std::move(forward)) {}
  py::object forward() const { return forward_; }
  void forget_forward() { forward_ = py::none(); }

  py::object call(const py::args& args, const py::kwargs& kwargs) {
    if (!model_->alive()) return forward_(*args, **kwargs);
    {
      const py::gil_scoped_release release;
      scope_ ? model_->scopes().enter(*scope_) : model_->enter_root();
    }
    py::object result;
    try {
      std::optional<torch::AutocastGuard> autocast;
      if (!scope_) autocast.emplace(*model_);
      result = forward_(*args, **kwargs);
    } catch (...) {
      const py::gil_scoped_release release;
      if (!scope_)
        model_->leave_root({});
      else if (model_->alive())
        model_->scopes().abandon(*scope_);
      throw;
    }
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    if (at::GradMode::is_enabled()) {
      if (scope_) collect_tensors(args.ptr(), inputs, kNesting);
      if (scope_) collect_tensors(kwargs.ptr(), inputs, kNesting);
      collect_tensors(result.ptr(), outputs, kNesting);
    }
    const py::gil_scoped_release release;
    scope_ ? model_->scopes().leave(*scope_, inputs, outputs) : model_->leave_root(outputs);
    return result;
  }

 private:
  std::shared_ptr<ShardedModel> model_;
  std::optional<int> scope_;  // nullopt: the root
  py::object forward_;
};

// For Python's cyclic collector: the module has this object, and its bound method the module.
void make_collectable(PyHeapTypeObject* type) {
  type->ht_type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->ht_type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (py::detail::is_holder_constructed(self))
      Py_VISIT(py::cast<InterceptedForward&>(py::handle(self)).forward().ptr());
    return 0;
  };
  type->ht_type.tp_clear = [](PyObject* self) {
    if (py::detail::is_holder_constructed(self))
      py::cast<InterceptedForward&>(py::handle(self)).forget_forward();
    return 0;
  };
}

// Makes the object that replaces a module's `forward` look like it to inspect.signature, and to
// copies and pickles of the module, which get the plain forward.
void bind_forward(py::module_& module) {
  using Forward = InterceptedForward;
  py::class_<Forward>(module, "InterceptedForward", py::custom_type_setup(&make_collectable))
      .def(py::init<std::shared_ptr<ShardedModel>, std::optional<int>, py::object>())
      .def("__call__", &Forward::call)
      .def_property_readonly("forward", &Forward::forward)
      .def_property_readonly("__wrapped__", &Forward::forward)
      .def("__deepcopy__",
           [](const Forward& self, const py::dict& memo) {
             return py::module_::import("copy").attr("deepcopy")(self.forward(), memo);
           })
      .def("__reduce__", [](const Forward& self) { return self.forward().attr("__reduce__")(); });
}

// A dict that gathers a released parameter when its item is read by key, as nn.Module.__getattr__
// does. Iterating (parameters(), state_dict()) gathers nothing. A copy behaves as an ordinary dict,
// since only attach() gives it a model.
struct ParameterDict {
  PyDictObject dict;
  std::weak_ptr<ShardedModel>* model;
};

ParameterDict* as_parameter_dict(PyObject* self) {
  return reinterpret_cast<ParameterDict*>(self);
}

bool gather_if_released(PyObject* self, PyObject* value) {
  const at::Tensor& tensor = THPVariable_Unpack(value);
  if (tensor.numel() != 0 || as_parameter_dict(self)->model == nullptr) return true;
  const std::shared_ptr<ShardedModel> model = as_parameter_dict(self)->model->lock();
  if (model == nullptr || !model->alive()) return true;
  const int param = model->index_of(tensor);
  if (param < 0) return true;
  try {
    const py::gil_scoped_release release;
    model->read(param);
    return true;
  } catch (...) {  // sets the error as a bound function's would be set: with its own Python class
    const py::cpp_function rethrow(
        [error = std::current_exception()] { std::rethrow_exception(error); });
    Py_XDECREF(PyObject_CallObject(rethrow.ptr(), nullptr));
    return false;
  }
}

PyObject* parameter_dict_subscript(PyObject* self, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(self, key);
  if (value == nullptr) {
    if (PyErr_Occurred() == nullptr) PyErr_SetObject(PyExc_KeyError, key);
    return nullptr;
  }
  // A gather lets other threads run, which may replace the item.
  Py_INCREF(value);
  if (THPVariable_Check(value) && !gather_if_released(self, value)) {
    Py_DECREF(value);
    return nullptr;
  }
  return value;
}

void parameter_dict_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete as_parameter_dict(self)->model;
  as_parameter_dict(self)->model = nullptr;
  PyDict_Type.tp_dealloc(self);
  Py_DECREF(type);
}

py::object make_parameter_dict_type() {
  static PyType_Slot slots[] = {
      {Py_tp_base, &PyDict_Type},
      {Py_mp_subscript, reinterpret_cast<void*>(&parameter_dict_subscript)},
      {Py_tp_dealloc, reinterpret_cast<void*>(&parameter_dict_dealloc)},
      {Py_tp_doc,
       const_cast<char*>("dict that gathers released parameters when they are read by key")},
      {0, nullptr}};
  static PyType_Spec spec{"strata._C.ParameterDict", static_cast<int>(sizeof(ParameterDict)), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
  return py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
}

}  // namespace

void bind_interception(py::module_& module) {
  bind_forward(module);
  const py::object type = make_parameter_dict_type();
  module.attr("ParameterDict") = type;
  module.def("gather_released_parameter", [](const py::object& dict, const py::object& value) {
    if (!gather_if_released(dict.ptr(), value.ptr())) throw py::error_already_set();
  });
  // torch.compile goes by the type's `__getitem__`, and traces it if it is written in Python. The
  // interpreter goes by the slot, which setting the attribute changes, and which here gets its
  // function in C back.
  module.def("trace_parameter_reads", [type](const py::function& getitem) {
    py::setattr(type, "__getitem__", getitem);
    auto* object = reinterpret_cast<PyTypeObject*>(type.ptr());
    object->tp_as_mapping->mp_subscript = &parameter_dict_subscript;
    PyType_Modified(object);
  });
  module.def("attach_parameter_dict",
             [type](const py::object& dict, const std::shared_ptr<ShardedModel>& model) {
               STRATA_ASSERT(py::isinstance(dict, type));
               auto& slot = as_parameter_dict(dict.ptr())->model;
               delete slot;
               slot = new std::weak_ptr<ShardedModel>(model);
             });
}

}  // namespace strata::python
