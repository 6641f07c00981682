// Tells a misspelled key from a section that the user wrote for a program of their own. Pure
// functions.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace strata::engine {

// The known key that the unknown top-level key `name` was most likely meant to be; empty when it
// looks like none. It looks like one that
// - has the same last part elsewhere ("stage", "lr"), both being sections or both values;
// - is spelled nearly alike: one letter, or a quarter of the longer name, is different;
// - has effect and contains it, or is contained in it, by eight letters or more, as "batch_size"
//   is in "train_batch_size";
// and whatever names zero, optim, sched, bf16, fp16 or strata looks like that section.
std::string lookalike_of(std::string_view name, const nlohmann::json& value);

}  // namespace strata::engine
