#include "strata/offload/nvme_store.h"

#include <filesystem>
#include <fstream>

#include "io/faulty_calls.h"
#include "offload/state_store_conformance.h"
#include "offload/store_harness.h"

namespace strata::offload {
namespace {

using ::testing::HasSubstr;
using VerifiedHarness = NvmeHarness<9, true>;

INSTANTIATE_TYPED_TEST_SUITE_P(TinyArena, StateStoreConformance, NvmeHarness<9>);
INSTANTIATE_TYPED_TEST_SUITE_P(MediumArena, StateStoreConformance, NvmeHarness<20>);
INSTANTIATE_TYPED_TEST_SUITE_P(AmpleArena, StateStoreConformance, NvmeHarness<300>);
INSTANTIATE_TYPED_TEST_SUITE_P(Verified, StateStoreConformance, VerifiedHarness);
INSTANTIATE_TYPED_TEST_SUITE_P(LateDevice, StateStoreConformance, LateNvmeHarness<9>);
INSTANTIATE_TYPED_TEST_SUITE_P(LateDeviceAmple, StateStoreConformance, LateNvmeHarness<300>);

}  // namespace
}  // namespace strata::offload
