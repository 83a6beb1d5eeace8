"""What this machine can carry: processor cores for the default thread count, and the memory that is free.

Reads the operating system's counts, decides nothing. Called once by `load()`, in the work loop's thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from infervisor.worker.engines.llama.memory_estimate import FreeMemory
from infervisor.worker.engines.llama.options import MAX_THREADS

UNLIMITED_BYTES = 1 << 60
"""A control group of version 1 without a limit says almost 2**63."""


def default_threads(workers: int = 1, root: Path = Path("/")) -> int:
    """Return one worker's share of the physical cores, at least 1, when `workers` like it share the machine."""
    return max(1, usable_cores(root) // max(1, workers))


def usable_cores(root: Path = Path("/")) -> int:
    """Return the physical cores that this process may use, at least 1.

    Two threads on one core's hyper-threads slow decoding down, so siblings count once; an affinity mask and
    a container's processor quota are respected. root: where /proc and /sys are.
    """
    if not hasattr(os, "sched_getaffinity"):
        return max(1, (os.cpu_count() or 2) // 2)
    cores = {_core_of(cpu, root) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(cores), MAX_THREADS, *_quotas(root)))


def _core_of(cpu: int, root: Path) -> str:
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    try:
        return (topology / "thread_siblings_list").read_text().strip()
    except OSError:
        return f"cpu {cpu}"


def _quotas(root: Path) -> list[int]:
    """Return the whole processors that this process's control groups allow, where they limit them."""
    quotas: list[int] = []
    for level in _levels_v2(root):
        quotas.extend(_processors(level, "cpu.max"))
    for level in _levels_v1(root, "cpu"):
        quotas.extend(_processors(level, "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return quotas


def _processors(level: Path, *names: str) -> list[int]:
    try:
        quota, period = " ".join((level / name).read_text() for name in names).split()
        return [int(quota) // int(period)] if int(quota) > 0 else []
    except (OSError, ValueError, ZeroDivisionError):
        # No such file, or the quota is "max"; −1 is none either.
        return []


def free_memory(root: Path = Path("/")) -> FreeMemory:
    """Return how much memory could be taken without swapping: of the machine, or of its tightest control group.

    What the kernel would give back at once, such as pages of files, counts as free. root: where /proc and /sys are.
    """
    return min([_machine(root), *_group_v2(root), *_group_v1(root)], key=lambda free: free.total)


def _machine(root: Path) -> FreeMemory:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return FreeMemory(sizes["MemAvailable"], sizes["MemTotal"])
    except (OSError, ValueError, IndexError, KeyError):
        # Not Linux, or one without /proc: unused pages where they are counted, all pages otherwise.
        page_bytes, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
        unused = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else pages
        return FreeMemory(unused * page_bytes, pages * page_bytes)


def _group_v2(root: Path) -> list[FreeMemory]:
    return _left(_levels_v2(root), "memory.max", "memory.current", ("inactive_file", "active_file"))


def _group_v1(root: Path) -> list[FreeMemory]:
    reclaimable = ("total_inactive_file", "total_active_file")
    return _left(_levels_v1(root, "memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", reclaimable)


def _levels_v2(root: Path) -> list[Path]:
    return _levels(root, root / "sys/fs/cgroup", lambda controllers: controllers == "")


def _levels_v1(root: Path, controller: str) -> list[Path]:
    mount = root / "sys/fs/cgroup" / controller
    return _levels(root, mount, lambda controllers: controller in controllers.split(","))


def _levels(root: Path, mount: Path, is_meant: Callable[[str], bool]) -> list[Path]:
    """Return this process's group and those above it, as far as they can be seen here."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if is_meant(controllers):
            group = mount / path.lstrip("/")
            # In a container the path may be the host's, while only what is below it is mounted.
            group = group if group.is_dir() and ".." not in group.parts else mount
            return [group, *(above for above in group.parents if above.is_relative_to(mount))]
    return []


def _left(levels: list[Path], limit: str, usage: str, reclaimable: tuple[str, ...]) -> list[FreeMemory]:
    """Return what each level that has a limit still gives."""
    found: list[FreeMemory] = []
    for level in levels:
        try:
            # "max" is no number, and neither has the top a limit.
            most = int((level / limit).read_text())
            used = int((level / usage).read_text())
            stat = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
            given_back = sum(int(stat.get(name, 0)) for name in reclaimable)
        except (OSError, ValueError):
            continue
        if most < UNLIMITED_BYTES:
            left = most - max(0, used - given_back)
            found.append(FreeMemory(max(0, left), most, "this process's control group"))
    return found
