// For C++ programs: which rank this process is, and how its ranks meet. The path is theirs and
// stays, wherever the library itself keeps what is in it.
#pragma once

#include "strata/torch/ranks/rank_environment.h"
