#include "mapped_files.h"

#include <ATen/MapAllocator.h>
#include <torch/csrc/DynamicTypes.h>

#include <unordered_set>
#include <utility>

#include "bindings.h"

namespace strata::python {
namespace {

// What frees a storage that was cut out of another one; its context is that other one. Found by
// cutting one, since torch does not tell; null where it works in another way.
c10::DeleterFnPtr deleter_of_cuts() {
  py::object whole = py::module_::import("torch").attr("UntypedStorage")(2);
  const py::object part = whole[py::slice(0, 1, 1)];
  const c10::Storage first = ::torch::createStorage(whole.ptr());
  const c10::Storage second = ::torch::createStorage(part.ptr());
  if (second.data_ptr().get_context() != first.unsafeGetStorageImpl()) return nullptr;
  // An object of Python that only the storage refers to counts among the storage's users.
  whole = py::none();
  constexpr std::size_t kUsers = 3;  // that object, what was cut, and `first`
  return first.use_count() == kUsers ? second.data_ptr().get_deleter() : nullptr;
}

// What the storage was cut out of at last, if anything.
c10::StorageImpl* origin_of(c10::StorageImpl* storage, c10::DeleterFnPtr cut) {
  while (storage->data_ptr().get_deleter() == cut)
    storage = static_cast<c10::StorageImpl*>(storage->data_ptr().get_context());
  return storage;
}

bool is_unused(const c10::Storage& storage) {
  PyObject* const object = storage.unsafeGetStorageImpl()->pyobj_slot()->load_pyobj();
  if (object == nullptr) return storage.use_count() == 1;
  return storage.use_count() == 2 && Py_REFCNT(object) == 1;
}

}  // namespace

MappedFiles::MappedFiles(const std::vector<at::Tensor>& tensors) {
  const c10::DeleterFnPtr cut = deleter_of_cuts();
  if (cut == nullptr) return;
  std::unordered_set<c10::StorageImpl*> seen;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage()) continue;
    c10::StorageImpl* const origin = origin_of(tensor.storage().unsafeGetStorageImpl(), cut);
    if (at::MapAllocator::fromDataPtr(origin->data_ptr()) == nullptr) continue;
    if (!seen.insert(origin).second) continue;
    files_.emplace_back(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(origin));
  }
}

std::vector<c10::DataPtr> MappedFiles::take_unused() {
  std::vector<c10::DataPtr> taken;
  for (c10::Storage& file : files_) {
    if (is_unused(file))
      taken.push_back(file.set_data_ptr(c10::DataPtr(nullptr, c10::DeviceType::CPU)));
  }
  files_.clear();
  return taken;
}

}  // namespace strata::python
