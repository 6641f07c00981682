// The checkpoint that a path on the command line names (checkpoint/folder.h).
#pragma once

#include "strata/checkpoint/folder.h"

namespace strata::cli {

using checkpoint::choose_checkpoint;
using checkpoint::ChosenCheckpoint;
using checkpoint::has_manifest;
using checkpoint::holds_checkpoints;

}  // namespace strata::cli
