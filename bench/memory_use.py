"""Memory of a process as the kernel counts it (Linux, /proc)."""

MIB = 1 << 20


def peak_resident(pid="self"):
    """Bytes: the most that was resident since the start or the last ``forget_peak``. Pages of shared memory
    count in full in every process that touched them."""
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def forget_peak():
    """Starts ``peak_resident`` of this process anew, where the kernel lets it."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def resident_data(pid="self"):
    """Bytes of data: anonymous and shared memory, the latter in full. What the kernel keeps count of: unlike
    ``proportional_data``, which walks all pages and has the process wait meanwhile whenever it maps memory."""
    kibibytes = 0
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith(("RssAnon:", "RssShmem:")):
                kibibytes += int(line.split()[1])
    return kibibytes * 1024


def proportional_data(pid="self"):
    """Bytes of data: anonymous and shared memory, the latter divided by the processes that map it. Pages of
    files (libraries, code) are left out."""
    kibibytes = 0
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                kibibytes += int(line.split()[1])
    return kibibytes * 1024


