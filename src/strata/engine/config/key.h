// The tables of configuration keys: path, type, default, limits, treatment and meaning of every key
// that a config may hold, and which key a misspelled one was meant to be. The parser walks the
// tables; docs/CONFIG.md is rendered from them. Immutable data and pure functions; safe everywhere.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace strata::engine {

enum class Kind : std::uint8_t {
  kFlag,      // true or false; 1 and 0 are read as these
  kInteger,   // a whole number; 2.0 is one
  kNumel,     // a number of elements; 5e8 and 3774873.6 are fine, fractions are cut off
  kBytes,     // bytes: a number, or text like "512MiB"
  kNumber,    // any finite number
  kCount,     // a number that may be Infinity: how often, how long
  kText,      // text
  kChoice,    // text, one of `limits`
  kWord,      // the same, in any case of letters
  kStrings,   // a list of texts
  kTexts,     // a text, or a list of texts; a list in canonical form
  kNumbers,   // a list of numbers of one length: `limits` says which
  kPerGroup,  // a number, or a list of one number a parameter group
  kSection,   // an object whose keys have rows of their own
  kRules,     // a list of objects, which its reader checks, or "auto"
  kParams,    // an object that the optimizer or scheduler of that name checks
  kSwitch,    // an object of a feature; `limits`: the keys that turn it on, "a|b.c" (leaves_off())
};

enum class Treatment : std::uint8_t {
  kHonoured,  // has a typed field in Config
  kShown,     // honoured, and says what this rank prints or writes: ranks may differ
  kHint,      // accepted; has no effect, and the row says why
  kMissed,    // a hint that asks for memory or output: a warning where it is not at its default
  kRefused,   // accepted only at its default; the row says what to write instead
};

constexpr bool has_effect(Treatment treatment) {
  return treatment == Treatment::kHonoured || treatment == Treatment::kShown;
}

struct Key {
  std::string path;  // "zero_optimization.stage"
  Kind kind;
  std::string fallback;  // the default, as JSON
  std::string limits;    // "0..3", ">= 0", "> 0"; of a choice or word: "none|cpu"
  Treatment treatment;
  std::string meaning;
  std::string note;  // a hint: why it has no effect; a refused key: what to write instead
};

// A table of docs/CONFIG.md.
struct KeyTable {
  std::string title;
  std::vector<Key> keys;
};

// The text of the tables (keys_*.cpp). "# TITLE" begins a table. Each other line is a row; lines
// that begin with blanks continue it:
//   name kind(limits) = default, treatment | meaning | note
// Kinds and treatments have the names of the enums in lower case. A row without limits has none;
// the other parts that may be absent are the default (null; {} of sections and params), the
// treatment (honoured), and a note that is that of the row before. A name has a dot for each
// section around it, which is the last name above that has a dot less. A line of a name alone is no
// row.
extern const std::string_view kTrainingTables;
extern const std::string_view kFeatureTables;

std::span<const KeyTable> key_tables();
// The rows of the table with this title; empty if there is none.
std::span<const Key> keys_of(std::string_view title);
// The rows of all tables except those of parameters.
std::span<const Key> config_keys();
// Rows of optimizer.params for Adam and AdamW.
std::span<const Key> adam_keys();
// Rows of scheduler.params for one of DeepSpeed's schedulers; empty when `type` is none of them.
std::span<const Key> scheduler_keys(std::string_view type);

inline constexpr std::array<std::string_view, 5> kSchedulerTypes{
    "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"};

// An old or second name of a key.
struct Alias {
  std::string_view old_path;
  std::string_view path;
};
std::span<const Alias> config_aliases();

const Key* find_key(std::span<const Key> keys, std::string_view path);
// "stage" of "zero_optimization.stage"; "zero_optimization" is the parent.
std::string_view leaf_of(std::string_view path);
std::string_view parent_of(std::string_view path);
std::string join_path(std::string_view parent, std::string_view leaf);
// The parts of "none|cpu|nvme".
std::vector<std::string_view> choices_in(std::string_view limits);
// "a number of elements >= 0", "one of none, cpu, nvme": what a message asks for.
std::string wanted(const Key& key);

// `text` with its ASCII letters in lower case.
std::string lower_case(std::string_view text);

// Edits (insert, remove, replace, swap of neighbours) that turn `a` into `b`, letter case ignored.
int edit_distance(std::string_view a, std::string_view b);

// The closest of `known`, the first of equals; empty when `known` is empty.
std::string_view nearest_of(std::string_view word, std::span<const std::string_view> known);

// The known key that the unknown top-level key `name` was most likely meant to be; empty when it
// looks like none, so that it is the user's, for another program. It looks like one that
// - has the same last part elsewhere ("stage", "lr"), both being sections or both values;
// - is spelled nearly alike: one letter, or a quarter of the longer name, is different;
// - has effect and contains it, or is contained in it, by eight letters or more, as "batch_size"
//   is in "train_batch_size";
// and whatever names zero, optim, sched, bf16, fp16 or strata looks like that section.
// `section`: its value is an object.
std::string lookalike_of(std::string_view name, bool section);

}  // namespace strata::engine
