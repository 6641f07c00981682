// Waits that the libstdc++ of GCC 11 has, too. GCC 12's headers call a version of
// std::condition_variable::wait() that came with GCC 12. No other symbol keeps the package from
// systems with GCC 11's library, such as RHEL 9. The linker puts the function below in its place
// (--wrap) in the core's library, the modules and the program.
#include <pthread.h>

#include <condition_variable>
#include <mutex>

extern "C" void __wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(
    std::condition_variable* condition, std::unique_lock<std::mutex>& lock);

// As std::condition_variable's own: the lock is held by the caller, and is held again afterwards.
void __wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(
    std::condition_variable* condition, std::unique_lock<std::mutex>& lock) {
  ::pthread_cond_wait(condition->native_handle(), lock.mutex()->native_handle());
}
