// What `strata run` would start: hostfiles, filters, and the arguments of torchrun. Nothing runs.
#include "strata/cli/job_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/command_run.h"
#include "strata/base/error.h"

namespace strata::cli {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;
using ::testing::SizeIs;

constexpr const char* kTwoHosts = "# the cluster\nworker-0 slots=4\n\n  worker-1\tslots=2 # half\n";

JobRequest request_of(std::vector<std::string> command = {"train.py", "--lr", "1"}) {
  JobRequest request;
  request.command = std::move(command);
  return request;
}

std::string message_of(const JobRequest& request, const Machine& machine) {
  try {
    plan_job(request, machine);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(HostList, ReadsHostsSlotsAndComments) {
  EXPECT_THAT(parse_hostfile(kTwoHosts, "hosts"),
              ElementsAre(Host{"worker-0", {0, 1, 2, 3}}, Host{"worker-1", {0, 1}}));
}

TEST(HostList, SaysWhichLineIsWrong) {
  for (const char* text : {"a slots=1\nb", "a slots=1\nb slots=x", "a slots=1\na slots=2",
                           "a slots=1\nb slots=0", "a slots=1\nb slots=1 max=2"}) {
    try {
      parse_hostfile(text, "hosts");
      FAIL() << text;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("hosts:2:"));
    }
  }
  EXPECT_THROW(parse_hostfile("# nobody\n", "hosts"), UsageError);
}

TEST(HostList, IncludesAndExcludesAsDeepSpeedDoes) {
  const auto hosts = parse_hostfile(kTwoHosts, "hosts");
  EXPECT_THAT(choose_hosts(hosts, "worker-1@worker-0:2,0", ""),
              ElementsAre(Host{"worker-0", {0, 2}}, Host{"worker-1", {0, 1}}));
  EXPECT_THAT(choose_hosts(hosts, "worker-0:1@worker-0:1,3", ""),
              ElementsAre(Host{"worker-0", {1, 3}}));
  EXPECT_THAT(choose_hosts(hosts, "", "worker-1@worker-0:0"),
              ElementsAre(Host{"worker-0", {1, 2, 3}}));
  for (const char* wrong : {"worker-2", "worker-1:2", "worker-1:", "worker-0:a"})
    EXPECT_THROW(choose_hosts(hosts, wrong, ""), UsageError) << wrong;
  EXPECT_THROW(choose_hosts(hosts, "worker-0", "worker-1"), UsageError);
  EXPECT_THROW(choose_hosts(hosts, "", "worker-0@worker-1"), UsageError);
}

TEST(JobPlan, StartsAllGpusOfThisHostOnAFreePort) {
  const auto starts = plan_job(request_of(), {.environment = {}, .passed_on = {}, .gpus = 4});
  ASSERT_THAT(starts, SizeIs(1));
  EXPECT_EQ(starts[0].host, "");
  EXPECT_THAT(starts[0].arguments,
              ElementsAre("-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone",
                          "--module", "strata.compat.run", "train.py", "--lr", "1"));
  EXPECT_THAT(starts[0].environment, ElementsAre(Pair("STRATA_COMPAT", "deepspeed")));
}

TEST(JobPlan, TakesDeepSpeedsOptions) {
  JobRequest request = request_of({"package.train"});
  request.num_gpus = 2;
  request.master_port = 1234;
  request.module = request.no_local_rank = true;
  request.log_folder = "logs";
  EXPECT_THAT(plan_job(request, Machine{})[0].arguments,
              ElementsAre("-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=1",
                          "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=1234",
                          "--log-dir=logs", "--redirects=3", "--module", "strata.compat.run",
                          "--no_local_rank", "--module", "package.train"));
  request.module = request.no_local_rank = false;
  request.no_python = true;
  request.command = {"./train.sh"};
  EXPECT_THAT(plan_job(request, Machine{})[0].arguments,
              ::testing::IsSupersetOf({"--no-python", "./train.sh"}));
}

TEST(JobPlan, ChosenGpusAreThoseThatTheUserSees) {
  JobRequest request = request_of();
  request.include = "localhost:1,2";
  Machine machine{.environment = {{"CUDA_VISIBLE_DEVICES", "4,5, 7"}}, .passed_on = {}, .gpus = 8};
  auto start = plan_job(request, machine)[0];
  EXPECT_THAT(start.arguments, Contains("--nproc-per-node=2"));
  EXPECT_THAT(start.environment, Contains(Pair("CUDA_VISIBLE_DEVICES", "5,7")));
  machine.environment.clear();
  request.include.clear();
  request.exclude = "localhost:0";
  start = plan_job(request, machine)[0];
  EXPECT_THAT(start.environment, Contains(Pair("CUDA_VISIBLE_DEVICES", "1,2,3,4,5,6,7")));
}

TEST(JobPlan, ReachesTheHostsOfAHostfileInItsOrder) {
  JobRequest request = request_of();
  request.hostfile = "hosts";
  request.exclude = "worker-0:3";
  request.ssh_port = 2222;
  const Machine machine{.environment = {{"NCCL_DEBUG", "it's"}, {"SECRET", "x"}, {"PATH", "p"}},
                        .passed_on = {{"MINE", "1"}},
                        .gpus = 0,
                        .folder = "/a b",
                        .hostfile = kTwoHosts};
  const auto starts = plan_job(request, machine);
  ASSERT_THAT(starts, SizeIs(2));
  EXPECT_EQ(starts[1].host, "worker-1");
  EXPECT_THAT(starts[1].arguments,
              ElementsAre("-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=2",
                          "--node-rank=1", "--master-addr=worker-0", "--master-port=29500",
                          "--module", "strata.compat.run", "train.py", "--lr", "1"));
  EXPECT_THAT(starts[0].environment, Contains(Pair("CUDA_VISIBLE_DEVICES", "0,1,2")));
  const auto ssh = ssh_arguments(starts[0], request, machine, "/py");
  EXPECT_THAT(std::vector(ssh.begin(), ssh.end() - 1),
              ElementsAre("-tt", "-o", "BatchMode=yes", "-p", "2222", "worker-0"));
  EXPECT_THAT(ssh.back(),
              HasSubstr("cd '/a b' && exec env 'NCCL_DEBUG=it'\\''s' 'MINE=1' "
                        "'STRATA_COMPAT=deepspeed' 'CUDA_VISIBLE_DEVICES=0,1,2' '/py'"));
  EXPECT_THAT(ssh.back(), Not(HasSubstr("SECRET")));
}

TEST(JobPlan, OneHostNeedsNoSsh) {
  JobRequest request = request_of();
  request.hostfile = "hosts";
  request.num_nodes = 1;
  const Machine machine{
      .environment = {}, .passed_on = {}, .gpus = 0, .folder = "", .hostfile = kTwoHosts};
  EXPECT_THAT(plan_job(request, machine)[0].host, IsEmpty());
  request.force_multi = true;
  EXPECT_EQ(plan_job(request, machine)[0].host, "worker-0");
  request.force_multi = false;
  request.num_nodes = 2;
  request.no_ssh = true;
  request.node_rank = 1;
  request.master_addr = "10.0.0.1";
  const auto starts = plan_job(request, machine);
  ASSERT_THAT(starts, SizeIs(1));
  EXPECT_THAT(starts[0].host, IsEmpty());
  EXPECT_THAT(starts[0].arguments,
              ::testing::IsSupersetOf({"--node-rank=1", "--master-addr=10.0.0.1"}));
}

TEST(JobPlan, SaysWhatCannotBeMeant) {
  const Machine gpus{.environment = {}, .passed_on = {}, .gpus = 2};
  EXPECT_THAT(message_of(request_of({}), gpus), HasSubstr("strata run SCRIPT"));
  EXPECT_THAT(message_of(request_of(), Machine{}),
              HasSubstr("--num_gpus N starts N ranks on the CPU"));
  JobRequest request = request_of();
  request.num_gpus = 3;
  EXPECT_THAT(message_of(request, gpus), HasSubstr("--num_gpus 3: host 'localhost' has 2"));
  request.include = "localhost:0";
  EXPECT_THAT(message_of(request, gpus), HasSubstr("leave --num_gpus and --num_nodes out"));
  request = request_of();
  request.num_nodes = 2;
  EXPECT_THAT(message_of(request, gpus), HasSubstr("give a --hostfile"));
  request = request_of();
  request.launcher = "openmpi";
  EXPECT_THAT(message_of(request, gpus), HasSubstr("by ssh alone"));
  request = request_of();
  request.no_ssh = true;
  EXPECT_THAT(message_of(request, gpus), HasSubstr("--node_rank and --master_addr"));
}

TEST(JobPlan, TheCommandLineTeachesIt) {
  const CommandRun help = run({"run", "--help"});
  EXPECT_EQ(help.code, kDone);
  EXPECT_THAT(help.out, HasSubstr("--hostfile"));
  EXPECT_EQ(run({"run"}).code, kUsage);
  EXPECT_EQ(run({"run", "--num_gpus", "none", "x.py"}).code, kUsage);
  const CommandRun missing = run({"run", "--hostfile", "/nowhere", "x.py"});
  EXPECT_EQ(missing.code, kUsage);
  EXPECT_THAT(missing.err, HasSubstr("'/nowhere' cannot be read"));
}

}  // namespace
}  // namespace strata::cli
