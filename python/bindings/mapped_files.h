// Files that were mapped whole, and of which storages were cut: what safetensors and
// torch.load(mmap) make, and the parameters that transformers leaves as they were read. The last
// one to go unmaps the file, which takes a while for many gigabytes; since an object of Python owns
// the mapping, it is done under Python's lock, and everybody waits. What is taken here is unmapped
// without.
//
// Threads: any, with Python's lock. Ownership: shares the mappings. Errors: none; where torch cuts
// storages in a way that is not known here, no files are found, and nothing changes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <vector>

namespace strata::python {

class MappedFiles {
 public:
  // Those of these tensors, which may be undefined.
  explicit MappedFiles(const std::vector<at::Tensor>& tensors);

  std::size_t size() const { return files_.size(); }
  // The mappings that nobody but this object has any more. The others stay with who has them.
  std::vector<c10::DataPtr> take_unused();

 private:
  std::vector<c10::Storage> files_;
};

}  // namespace strata::python
