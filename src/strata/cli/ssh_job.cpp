#include "strata/cli/ssh_job.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>

#include "strata/base/errno_text.h"
#include "strata/base/error.h"

namespace strata::cli {
namespace {

// Signals that end the job, taken by sigwaitinfo() while this lives.
class EndingSignals {
 public:
  EndingSignals() {
    ::sigemptyset(&signals_);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) ::sigaddset(&signals_, signal);
    ::sigprocmask(SIG_BLOCK, &signals_, &before_);
  }
  ~EndingSignals() { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }
  EndingSignals(const EndingSignals&) = delete;
  EndingSignals& operator=(const EndingSignals&) = delete;

  int wait() const {
    int signal = -1;
    while ((signal = ::sigwaitinfo(&signals_, nullptr)) < 0 && errno == EINTR) {
    }
    return signal;
  }
  const sigset_t& before() const { return before_; }

 private:
  sigset_t signals_{};
  sigset_t before_{};
};

class Processes {
 public:
  Processes() = default;
  ~Processes() {
    end(SIGTERM);
    for (const pid_t pid : running_) ::waitpid(pid, nullptr, 0);
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  void start(const std::string& program, std::vector<std::string> arguments,
             const sigset_t& signals) {
    arguments.insert(arguments.begin(), program);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawnattr_init(&attributes);
    ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    ::posix_spawnattr_setsigmask(&attributes, &signals);
    pid_t pid = -1;
    const int code =
        ::posix_spawnp(&pid, program.c_str(), &actions, &attributes, argv.data(), ::environ);
    ::posix_spawn_file_actions_destroy(&actions);
    ::posix_spawnattr_destroy(&attributes);
    if (code != 0) {
      throw Error(
          fmt::format("cannot run '{}', which reaches the hosts; install it, or use --no_ssh: {}",
                      program, errno_text(code)));
    }
    running_.push_back(pid);
  }

  void end(int signal) const {
    for (const pid_t pid : running_) ::kill(pid, signal);
  }

  // Of all that have ended since the last call: the exit code of one that failed, else 0.
  int collect() {
    int failed = 0;
    std::erase_if(running_, [&](pid_t pid) {
      int status = 0;
      if (::waitpid(pid, &status, WNOHANG) != pid) return false;
      const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      if (failed == 0) failed = code;
      return true;
    });
    return failed;
  }

  bool any() const { return !running_.empty(); }

 private:
  std::vector<pid_t> running_;
};

}  // namespace

int run_together(const std::string& program,
                 const std::vector<std::vector<std::string>>& commands) {
  const EndingSignals signals;
  Processes processes;
  for (const auto& arguments : commands) processes.start(program, arguments, signals.before());
  int result = 0;
  while (processes.any()) {
    const int signal = signals.wait();
    const int code = signal == SIGCHLD ? processes.collect() : 128 + signal;
    if (code == 0 || result != 0) continue;
    result = code;
    processes.end(SIGTERM);
  }
  return result;
}

}  // namespace strata::cli
