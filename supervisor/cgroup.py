"""Control groups: whether the kernel killed a worker for memory, and a group that keeps a worker's hard limit.

Reads both versions; makes groups of version 2 alone, where that was delegated to this process, and says why it
can't otherwise. Never moves the host process and never fails: memory is guarded without it, too. Runs in the
loop's thread.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from os import mkdir, rmdir
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class Mount:
    """Where a hierarchy is mounted, and which of its groups is seen there."""

    point: Path
    top: str


@dataclass(frozen=True, slots=True)
class Group:
    """A control group that accounts memory, as a folder. version: 1 or 2. mount: where its hierarchy begins."""

    version: int
    path: Path
    mount: Path


def _mounts(root: Path) -> dict[int, Mount]:
    """Return where memory is accounted, by version. root: where /proc and /sys are."""
    found: dict[int, Mount] = {}
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 3:
            continue
        version = {"cgroup2": 2, "cgroup": 1}.get(tail[0])
        if version == 2 or (version == 1 and "memory" in tail[2].split(",")):
            found.setdefault(version, Mount(root / fields[4].lstrip("/"), fields[3]))
    return found


def group_of(pid: int, root: Path = ROOT) -> Group | None:
    """Return the group in which the memory of a living process is accounted, or None if it can't be seen.

    A machine may have both versions mounted: the one that has the memory controller counts.
    """
    try:
        lines = (root / f"proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    mounts = _mounts(root)
    paths: dict[int, str] = {}
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for version in (1, 2):
        if version in paths and version in mounts:
            mount = mounts[version]
            folder = _below(mount, paths[version])
            if folder is not None:
                return Group(version, folder, mount.point)
    return None


def _below(mount: Mount, path: str) -> Path | None:
    relative = os.path.relpath(path, mount.top)
    folder = mount.point if relative == "." else mount.point / relative
    if relative.startswith("..") or not folder.is_dir():
        # In a container the path may be the host's, while only what is below it is mounted.
        folder = mount.point
    return folder if folder.is_dir() else None


def _numbers(file: Path) -> dict[str, int]:
    """Return the lines `name number` of a file; empty if it isn't there."""
    try:
        pairs = (line.split() for line in file.read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    except OSError:
        return {}


def oom_kills(group: Group | None, root: Path = ROOT) -> int | None:
    """Return how many processes the kernel has killed for memory: of this group, or of the machine."""
    files = {
        1: ("memory.oom_control",),
        # The local count leaves out groups below; older kernels have only the other one.
        2: ("memory.events.local", "memory.events"),
    }
    for name in () if group is None else files[group.version]:
        assert group is not None
        count = _numbers(group.path / name).get("oom_kill")
        if count is not None:
            return count
    # The topmost group has no such file.
    return _numbers(root / "proc/vmstat").get("oom_kill")


class OomWatch:
    """Says of one worker that died by SIGKILL whether the kernel had killed for memory in its group.

    Call `look` now and then while it lives, so that another process's end long ago isn't taken for this one's.
    """

    def __init__(self, pid: int, root: Path = ROOT) -> None:
        self._root = root
        # Found while it lives: of a dead process the kernel no longer says it.
        self.group = group_of(pid, root)
        self._count = oom_kills(self.group, root)

    def entered(self, group: Group) -> None:
        """The worker was moved into another group."""
        self.group = group
        self.look()

    def look(self) -> None:
        """Take the count as it is while the worker lives."""
        self._count = oom_kills(self.group, self._root)

    def was_oom(self) -> bool:
        """Whether the count has grown since the last look. Ask before the worker's own group is removed."""
        count = oom_kills(self.group, self._root)
        return count is not None and self._count is not None and count > self._count


class WorkerGroup:
    """A group of version 2 with one worker in it. Made by `make_group`; remove it when the worker is collected."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def members(self) -> tuple[int, ...]:
        """Return the processes in it, those included that left the worker's process group."""
        try:
            return tuple(int(pid) for pid in (self.group.path / "cgroup.procs").read_text().split())
        except (OSError, ValueError):
            return ()

    def kill(self) -> None:
        """Kill whatever is in it; since Linux 5.14."""
        with contextlib.suppress(OSError):
            _write(self.group.path / "cgroup.kill", "1")

    def remove(self) -> bool:
        """Remove it. Returns whether it is gone; while something lives in it, it isn't."""
        try:
            rmdir(self.group.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


def make_group(pid: int, hard_bytes: int, root: Path = ROOT) -> WorkerGroup | str:
    """Put a worker into a group of its own in which the kernel keeps its memory below hard_bytes.

    Returns the group, or the reason why there is none; nothing is left behind then.
    """
    mount = _mounts(root).get(2)
    if mount is None:
        return "no control groups of version 2 are mounted here"
    own = group_of(pid, root)
    if own is None or own.version != 2:
        return "the memory controller isn't in the control groups of version 2 on this machine"
    reasons: list[str] = []
    # Beside the host's own group, or below it where that has no processes: a group with processes can't give its
    # children controllers.
    for above in dict.fromkeys((own.path, own.path.parent if own.path != own.mount else own.path)):
        reason = _cannot_have_children(above)
        if reason is None:
            made = _make_below(above, pid, hard_bytes)
            if isinstance(made, WorkerGroup):
                return made
            reason = made
        reasons.append(reason)
    return "; ".join(reasons) + (
        ": let a service manager delegate a group (systemd: Delegate=memory, DelegateSubgroup=main)"
    )


def _cannot_have_children(above: Path) -> str | None:
    try:
        if "memory" not in (above / "cgroup.controllers").read_text().split():
            return f"{above} has no memory controller"
        if "memory" in (above / "cgroup.subtree_control").read_text().split():
            return None
        _write(above / "cgroup.subtree_control", "+memory")
    except OSError as error:
        return f"{above} can't give its children a memory controller ({error.strerror})"
    return None


def _make_below(above: Path, pid: int, hard_bytes: int) -> WorkerGroup | str:
    folder = above / f"infervisor-{os.getpid()}-{pid}"
    try:
        mkdir(folder)
    except OSError as error:
        return f"no group can be made in {above} ({error.strerror})"
    made = WorkerGroup(Group(2, folder, above))
    try:
        _write(folder / "memory.max", str(hard_bytes))
        # Without the first of them memory would only be moved out; without the second a part of the worker could
        # live on. Old kernels lack them.
        for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
            with contextlib.suppress(FileNotFoundError):
                _write(folder / name, value)
        _write(folder / "cgroup.procs", str(pid))
    except OSError as error:
        made.remove()
        return f"a worker can't be moved into {folder} ({error.strerror})"
    return made


def _write(file: Path, text: str) -> None:
    # Without O_CREAT: these files are the kernel's, and none is ever made.
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
