#include "strata/torch/cpp/module_description.h"

#include <gmock/gmock.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "strata/torch/base/tensor_search.h"

namespace strata::torch {
namespace {

namespace nn = ::torch::nn;
using ::testing::ElementsAre;

struct PartImpl : nn::Module {
  PartImpl() : linear(register_module("linear", nn::Linear(2, 3))) {}
  nn::Linear linear;
};
TORCH_MODULE(Part);

struct WholeImpl : nn::Module {
  WholeImpl() : scale(register_parameter("scale", ::torch::ones({4}))) {
    list->push_back(Part());
    list->push_back(Part());
    register_module("list", list);
    register_module("alias", list[0]->as<PartImpl>()->linear);
  }
  at::Tensor scale;
  nn::ModuleList list;
};

TEST(ModuleDescription, NamesEveryParameterOnceInTheOrderOfRegistration) {
  const WholeImpl whole;
  std::vector<std::string> names;
  for (const auto& parameter : describe_module(whole).input.parameters)
    names.push_back(parameter.name);
  EXPECT_THAT(names, ElementsAre("scale", "list.0.linear.weight", "list.0.linear.bias",
                                 "list.1.linear.weight", "list.1.linear.bias"));
}

TEST(ModuleDescription, SpellsClassesAsAConfigurationDoes) {
  const WholeImpl whole;
  const ModuleDescription description = describe_module(whole);
  std::vector<std::string> classes;
  for (const auto& node : description.input.tree) classes.push_back(node.class_name);
  EXPECT_THAT(classes, ElementsAre("Whole", "ModuleList", "Part", "Linear", "Part", "Linear"));
  EXPECT_FALSE(description.input.tree[1].callable) << "a list is never called";
  EXPECT_TRUE(description.input.tree[2].callable);
  EXPECT_EQ(description.modules[0], &whole);
}

TEST(ModuleDescription, TellsEachParameterItsGroup) {
  const WholeImpl whole;
  const auto description = describe_module(whole, {{whole.scale.unsafeGetTensorImpl(), 1}});
  EXPECT_EQ(description.input.parameters[0].group, 1);
  EXPECT_EQ(description.input.parameters[1].group, 0);
}

TEST(TensorSearch, LooksIntoEveryContainerOfTensors) {
  const at::Tensor a = ::torch::ones({1}), b = ::torch::ones({2}), c = ::torch::ones({3});
  const auto value =
      std::make_tuple(a, std::vector<std::optional<at::Tensor>>{b, std::nullopt},
                      std::map<std::string, std::pair<int, at::Tensor>>{{"c", {1, c}}},
                      std::string("no tensor"), 7, 0.5);
  std::vector<at::Tensor> found;
  collect_tensors(value, found);
  ASSERT_EQ(found.size(), 3U);
  EXPECT_TRUE(found[0].is_same(a));
  EXPECT_TRUE(found[1].is_same(b));
  EXPECT_TRUE(found[2].is_same(c));
}

}  // namespace
}  // namespace strata::torch
