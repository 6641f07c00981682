// For C++ programs: which rank this process is, and how it finds the other ranks. Programs include
// this path, so it stays even if the library moves the declarations.
#pragma once

#include "strata/torch/ranks/rank_environment.h"
