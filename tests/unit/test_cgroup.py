"""Control groups, against folders that imitate the kernel's, and against the real ones for reading."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from infervisor.supervisor import cgroup
from infervisor.supervisor.cgroup import Group, OomWatch, WorkerGroup, group_of, make_group, oom_kills

PID = 4242
V2 = "30 25 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 25 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
OTHER_V1 = "32 25 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
HYBRID_V2 = "40 25 0:35 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
NEW_GROUP = {"memory.max": "max\n", "memory.swap.max": "max\n", "memory.oom.group": "0\n", "cgroup.procs": ""}


def kernel(root: Path, mounts: str, lines: str, files: Mapping[str, str] | None = None) -> Path:
    """Write what /proc and /sys would say. files: below /sys/fs/cgroup; a name that ends in / is a folder."""
    for name in ("self", str(PID)):
        (root / "proc" / name).mkdir(parents=True)
        (root / "proc" / name / "cgroup").write_text(lines)
    (root / "proc/self/mountinfo").write_text("1 1 8:1 / / rw - ext4 /dev/x rw\nodd line\n" + mounts)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in (files or {}).items():
        path = root / "sys/fs/cgroup" / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(text)
    return root


def folder(root: Path, name: str = "") -> Path:
    return root / "sys/fs/cgroup" / name


# --- which group -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mounts", "lines", "version", "path"),
    [
        (V2, "0::/a/b\n", 2, "a/b"),
        (V2, "0::/\n", 2, ""),
        (OTHER_V1 + V1 + HYBRID_V2, "5:cpu,cpuacct:/x\n4:memory:/a/b\n0::/c\n", 1, "memory/a/b"),
        (OTHER_V1 + V1, "4:hugetlb,memory:/a:b\n", 1, "memory/a:b"),
        # Version 1 is mounted but has no memory: the controller is in version 2.
        (OTHER_V1 + HYBRID_V2, "5:cpu,cpuacct:/x\n0::/c\n", 2, "unified/c"),
        # A container that sees the host's names, and one whose mount shows only a part.
        (V2, "0::/docker/0123\n", 2, ""),
        (V2.replace(" / /sys", " /docker/0123 /sys"), "0::/docker/0123/a/b\n", 2, "a/b"),
        (V2.replace(" / /sys", " /docker/0123 /sys"), "0::/../other\n", 2, ""),
    ],
)
def test_the_group_that_accounts_memory_is_found(
    tmp_path: Path, mounts: str, lines: str, version: int, path: str
) -> None:
    made = {name: "" for name in ("a/b/", "memory/a/b/", "memory/a:b/", "unified/c/")}
    root = kernel(tmp_path, mounts, lines, made)
    found = group_of(PID, root)
    assert found is not None
    assert (found.version, found.path) == (version, folder(root, path))
    assert found.path.is_relative_to(found.mount)


@pytest.mark.parametrize(
    ("mounts", "lines"),
    [("", "0::/\n"), (OTHER_V1, "5:cpu,cpuacct:/x\n"), (V1, "0::/\n"), (V2, "4:memory:/\n")],
)
def test_without_the_controller_there_is_no_group(tmp_path: Path, mounts: str, lines: str) -> None:
    root = kernel(tmp_path, mounts, lines)
    assert group_of(PID, root) is None
    assert group_of(1, root) is None, "no such process"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_real_files_are_understood() -> None:
    group = group_of(os.getpid())
    if os.path.isdir("/sys/fs/cgroup/memory") or os.path.isfile("/sys/fs/cgroup/cgroup.controllers"):
        assert group is not None
        assert group.path.is_dir()
    kills = oom_kills(group)
    assert kills is not None
    assert kills >= 0
    assert not OomWatch(os.getpid()).was_oom()


# --- killed for memory -------------------------------------------------------------------------------


def test_kills_are_counted_where_the_kernel_counts_them(tmp_path: Path) -> None:
    files = {
        "a/memory.events": "low 0\noom 9\noom_kill 7\n",
        "b/memory.events": "oom_kill 7\n", "b/memory.events.local": "oom 9\noom_kill 3\n",
        "c/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        "d/": "",
    }  # fmt: skip
    root = kernel(tmp_path, V2, "0::/\n", files)
    (root / "proc/vmstat").write_text("pgfault 5\noom_kill 11\n")

    def count(name: str, version: int) -> int | None:
        return oom_kills(Group(version, folder(root, name), folder(root)), root)

    assert [count("a", 2), count("b", 2), count("c", 1)] == [7, 3, 2]
    assert count("d", 2) == 11, "the topmost group counts nothing, but the machine does"
    assert oom_kills(None, root) == 11
    (root / "proc/vmstat").unlink()
    assert count("d", 2) is None


def test_only_a_kill_after_the_last_look_counts(tmp_path: Path) -> None:
    root = kernel(tmp_path, V2, "0::/a\n", {"a/memory.events": "oom_kill 4\n"})
    watch = OomWatch(PID, root)
    assert not watch.was_oom()
    folder(root, "a/memory.events").write_text("oom_kill 5\n")
    assert watch.was_oom()
    watch.look()
    assert not watch.was_oom(), "that was somebody else, long ago"
    shutil.rmtree(root / f"proc/{PID}")
    folder(root, "a/memory.events").write_text("oom_kill 6\n")
    assert watch.was_oom(), "of a dead process only the group is left"


def test_a_group_that_is_gone_says_nothing(tmp_path: Path) -> None:
    root = kernel(tmp_path, V2, "0::/a\n", {"a/memory.events": "oom_kill 4\n"})
    watch = OomWatch(PID, root)
    shutil.rmtree(folder(root, "a"))
    assert not watch.was_oom()


# --- a group for a worker ----------------------------------------------------------------------------


@pytest.fixture
def cgroupfs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    """Let new folders hold the kernel's files, and go with them. Returns what sets the files of new ones."""
    contents: dict[str, str] = dict(NEW_GROUP)

    def make(path: str | Path) -> None:
        os.mkdir(path)
        for name, text in contents.items():
            Path(path, name).write_text(text)

    def remove(path: str | Path) -> None:
        for entry in Path(path).iterdir():
            if entry.is_dir() or (entry.name == "cgroup.procs" and entry.read_text()):
                raise OSError(errno.EBUSY, "busy")
        shutil.rmtree(path)

    def use(files: Mapping[str, str]) -> None:
        contents.clear()
        contents.update(files)

    monkeypatch.setattr(cgroup, "mkdir", make)
    monkeypatch.setattr(cgroup, "rmdir", remove)
    return use


def delegated(
    *, own_children: str = "", above_children: str = "memory", own: str = "memory"
) -> dict[str, str]:
    return {
        "service/cgroup.controllers": "cpu memory\n",
        "service/cgroup.subtree_control": above_children + "\n",
        "service/main/cgroup.controllers": own + "\n",
        "service/main/cgroup.subtree_control": own_children + "\n",
    }


def test_a_worker_gets_a_group_beside_the_hosts(
    tmp_path: Path, cgroupfs: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = kernel(tmp_path, V2, "0::/service/main\n", delegated())
    write = cgroup._write

    def busy(file: Path, text: str) -> None:
        if file.name == "cgroup.subtree_control":
            # What the kernel says of a group with processes.
            raise OSError(errno.EBUSY, "Device or resource busy")
        write(file, text)

    monkeypatch.setattr(cgroup, "_write", busy)
    made = make_group(PID, 123_456_789, root)
    assert isinstance(made, WorkerGroup)
    path = folder(root, f"service/infervisor-{os.getpid()}-{PID}")
    assert made.group.path == path
    told = {name: (path / name).read_text() for name in NEW_GROUP}
    assert told["memory.max"].startswith("123456789")
    assert told["memory.swap.max"].startswith("0")
    assert told["memory.oom.group"].startswith("1")
    assert told["cgroup.procs"].startswith(str(PID))
    assert made.members() == (PID,)
    assert not made.remove(), "it lives"
    (path / "cgroup.procs").write_text("")
    assert made.members() == ()
    assert made.remove()
    assert made.remove(), "it is gone already"
    assert not path.exists()


def test_a_worker_gets_a_group_below_the_hosts_where_that_may_have_children(
    tmp_path: Path, cgroupfs: object
) -> None:
    root = kernel(tmp_path, V2, "0::/service/main\n", delegated(own_children="memory"))
    made = make_group(PID, 1 << 30, root)
    assert isinstance(made, WorkerGroup)
    assert made.group.path.parent == folder(root, "service/main")


def test_old_kernels_lack_some_files(tmp_path: Path, cgroupfs: Callable[[Mapping[str, str]], None]) -> None:
    cgroupfs({"memory.max": "max", "cgroup.procs": ""})
    root = kernel(tmp_path, V2, "0::/service/main\n", delegated(own_children="memory"))
    made = make_group(PID, 1 << 30, root)
    assert isinstance(made, WorkerGroup)
    assert sorted(os.listdir(made.group.path)) == ["cgroup.procs", "memory.max"], "none was invented"


def test_everything_left_in_a_group_can_be_killed(
    tmp_path: Path, cgroupfs: Callable[[Mapping[str, str]], None]
) -> None:
    cgroupfs({**NEW_GROUP, "cgroup.kill": ""})
    root = kernel(tmp_path, V2, "0::/service/main\n", delegated(own_children="memory"))
    made = make_group(PID, 1 << 30, root)
    assert isinstance(made, WorkerGroup)
    made.kill()
    assert (made.group.path / "cgroup.kill").read_text() == "1"


@pytest.mark.parametrize(
    ("mounts", "lines", "files", "reason"),
    [
        ("", "0::/\n", {}, "no control groups of version 2"),
        (V1, "4:memory:/\n0::/\n", {"memory/": ""}, "no control groups of version 2"),
        (V1 + HYBRID_V2, "4:memory:/\n0::/\n", {"memory/": "", "unified/": ""}, "memory controller isn't"),
        (V2, "0::/\n", {}, "can't give its children"),
        (
            V2,
            "0::/service/main\n",
            {**delegated(own="cpu"), "service/cgroup.controllers": "cpu\n"},
            "has no memory",
        ),
    ],
)
def test_the_reason_why_there_is_no_group(
    tmp_path: Path, cgroupfs: object, mounts: str, lines: str, files: dict[str, str], reason: str
) -> None:
    root = kernel(tmp_path, mounts, lines, files)
    before = sorted(root.rglob("*"))
    said = make_group(PID, 1 << 30, root)
    assert isinstance(said, str)
    assert reason in said
    assert sorted(root.rglob("*")) == before


@pytest.mark.parametrize("broken", ["mkdir", "memory.max", "cgroup.procs"])
def test_a_group_that_cannot_be_finished_is_removed(
    tmp_path: Path, cgroupfs: object, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    root = kernel(tmp_path, V2, "0::/service/main\n", delegated(own_children="memory"))
    write = cgroup._write

    def refuse(file: Path, text: str) -> None:
        if file.name == broken:
            raise PermissionError(errno.EACCES, "Permission denied")
        write(file, text)

    def no_folder(_path: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(cgroup, "_write", refuse)
    if broken == "mkdir":
        monkeypatch.setattr(cgroup, "mkdir", no_folder)
    before = sorted(root.rglob("*"))
    said = make_group(PID, 1 << 30, root)
    assert isinstance(said, str)
    assert "Permission denied" in said
    assert "delegate" in said
    assert sorted(root.rglob("*")) == before


def test_after_a_move_the_new_group_counts(
    tmp_path: Path, cgroupfs: Callable[[Mapping[str, str]], None]
) -> None:
    cgroupfs({**NEW_GROUP, "memory.events": "oom_kill 0\n"})
    files = {**delegated(own_children="memory"), "service/main/memory.events": "oom_kill 8\n"}
    root = kernel(tmp_path, V2, "0::/service/main\n", files)
    watch = OomWatch(PID, root)
    made = make_group(PID, 1 << 30, root)
    assert isinstance(made, WorkerGroup)
    watch.entered(made.group)
    assert not watch.was_oom()
    (made.group.path / "memory.events").write_text("oom_kill 1\n")
    assert watch.was_oom()
