"""Reports of the stories' scripts about themselves: the start time of their process, and lines of JSON."""

import json
import os
import time


def began():
    """Seconds since the epoch at the start of this process."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK")


def tell(line):
    """Writes a dict as one line, in one call, so that ranks do not write into each other's."""
    os.write(1, f"{json.dumps(line)}\n".encode())
