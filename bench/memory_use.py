"""Memory of a process as the kernel counts it (Linux, /proc)."""

MIB = 1 << 20


def peak_resident(pid="self"):
    """Bytes: the most that was resident since the start or the last ``forget_peak``. Pages of shared memory
    count in full in every process that touched them."""
    return _sum_of(f"/proc/{pid}/status", "VmHWM:")


def forget_peak():
    """Starts ``peak_resident`` of this process anew, where the kernel lets it."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def resident_data(pid="self"):
    """Bytes of data: anonymous and shared memory, the latter in full. The kernel keeps these counts.
    ``proportional_data`` instead walks all pages, and the process waits whenever it maps memory meanwhile."""
    return _sum_of(f"/proc/{pid}/status", "RssAnon:", "RssShmem:")


def proportional_data(pid="self"):
    """Bytes of data: anonymous and shared memory, the latter divided by the processes that map it. Pages of
    files (libraries, code) are left out."""
    return _sum_of(f"/proc/{pid}/smaps_rollup", "Pss_Anon:", "Pss_Shmem:")


def _sum_of(path, *keys):
    """Bytes, of lines such as "VmHWM:  12 kB"."""
    with open(path) as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith(keys))


