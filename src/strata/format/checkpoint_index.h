// A Hugging Face checkpoint folder: which tensor lies in which file, and where. model.safetensors
// if it is there, else the files that model.safetensors.index.json names; a path to one
// .safetensors file is a checkpoint of that file alone. All headers are read and checked when it is
// opened, by up to eight threads. Threads: immutable after construction; safe everywhere.
// Ownership: holds the open files. Errors: FormatError for an index that lies (a file outside of
// the folder, missing files, a tensor that its file lacks, a tensor in two files), what
// SafetensorsFile throws.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "strata/format/safetensors.h"
#include "strata/io/file.h"

namespace strata::format {

// A safetensors file opened for reading: its header is read and checked at once; callers read its
// data at TensorInfo::offset. IoError if it cannot be read, FormatError if its header lies.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::string path);

  const io::File& file() const { return file_; }
  const std::string& path() const { return file_.path(); }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }  // by offset
  const Metadata& metadata() const { return header_.metadata; }

 private:
  io::File file_;
  SafetensorsHeader header_;
};

// A tensor of a checkpoint: what its file says of it, and which of the checkpoint's files that is.
struct CheckpointTensor {
  std::size_t file = 0;
  TensorInfo info;
};

class CheckpointIndex {
 public:
  explicit CheckpointIndex(const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }
  // The same, as what reads them asks for them; the index's own.
  std::vector<const io::File*> open_files() const;
  // By file, then by offset. With an index, only what it names.
  const std::vector<CheckpointTensor>& tensors() const { return tensors_; }
  // Null if there is none of that name.
  const CheckpointTensor* find(std::string_view wanted) const;

 private:
  void read_files(const std::vector<std::string>& paths);
  void open_indexed(const std::string& index_path);
  void sort_names();
  const std::string& name(std::size_t tensor) const { return tensors_[tensor].info.name; }

  std::string path_;
  std::vector<SafetensorsFile> files_;
  std::vector<CheckpointTensor> tensors_;
  std::vector<std::size_t> by_name_;  // indices of tensors_, in the order of their names
};

// Whether two tensors hold the same bytes, which decides whether parameters that a model may tie
// are one or two; false, without reading, where dtype or shape differ. Reads pieces of bounded size
// on the calling thread. Errors: FormatError for a name that is not there; IoError.
bool same_tensor(const CheckpointIndex& checkpoint, std::string_view one, std::string_view other);

}  // namespace strata::format
