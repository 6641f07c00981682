// Weights of a model that an earlier save left in a folder, in every form that readers look for:
// safetensors and files of torch.save, in one file or in shards with an index; also the temporary
// files of killed saves. A reader takes one form and never looks at the others, so it may load an
// older save that a new one leaves in place. Threads: any. Errors: IoError.
#pragma once

#include <set>
#include <string>
#include <string_view>

namespace strata::format {

inline constexpr std::string_view kSinglePickleName = "pytorch_model.bin";  // of torch.save

// Whether a reader may take a file of this name for a model's weights or their index.
bool is_weights_name(std::string_view file_name);

// Removes all such files of `folder` but `ours`. Indexes go first, so that none refers to what is
// gone.
void remove_other_weights(const std::string& folder, const std::set<std::string>& ours);

}  // namespace strata::format
