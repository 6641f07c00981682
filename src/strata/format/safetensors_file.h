// A safetensors file opened for reading: its header is read and checked at once; callers read its
// data at TensorInfo::offset, through an IoEngine or io::read_fully. Threads:
// immutable after construction; safe everywhere. Ownership: holds the open file. Errors: IoError if
// it cannot be read, FormatError if its header lies.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "strata/format/safetensors_header.h"
#include "strata/io/file.h"

namespace strata::format {

class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::string path);

  const io::File& file() const { return file_; }
  const std::string& path() const { return file_.path(); }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }  // by offset
  const Metadata& metadata() const { return header_.metadata; }
  // Null if there is none of that name. Valid as long as this object, also after a move of it.
  const TensorInfo* find(std::string_view name) const;

 private:
  io::File file_;
  SafetensorsHeader header_;
  std::vector<std::size_t> by_name_;  // indices of tensors, in the order of their names
};

}  // namespace strata::format
