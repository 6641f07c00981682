// How long the spans of one activity took in a step that was recorded. Threads: values. Units:
// seconds. Errors: none.
#pragma once

#include "strata/engine/record/step_record.h"

namespace strata::engine {

// All added up.
double summed(const StepRecord& record, Activity activity);
// The seconds in which at least one span of this activity ran.
double covered(const StepRecord& record, Activity activity);
// The bytes of the spans of this activity.
Bytes moved(const StepRecord& record, Activity activity);

}  // namespace strata::engine
