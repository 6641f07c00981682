// The conformance suite of the Collectives seam. A test binary includes it in one source file and
// instantiates it for each of its backends:
//   INSTANTIATE_TEST_SUITE_P(Local, CollectivesMoveData, testing::Values(local_backend()));
//   INSTANTIATE_TEST_SUITE_P(Local, CollectivesReportErrors, testing::Values(local_backend()));
//   INSTANTIATE_TEST_SUITE_P(Local, OneSidedGathers, testing::Values(local_backend()));
// A backend whose gathers are not one-sided declares, instead of the last line,
//   GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OneSidedGathers);
// It links tests/comm/rank_runners.cpp, which runs ranks as threads or processes.
#pragma once

#include "comm/conformance_data.h"
#include "comm/conformance_errors.h"
#include "comm/conformance_one_sided.h"
