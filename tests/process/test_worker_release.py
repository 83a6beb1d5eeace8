"""What a real process takes while it lives, and what is left of it when it is gone."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from infervisor.supervisor import process as process_module
from infervisor.supervisor.cgroup import OomWatch
from infervisor.supervisor.process import Sample, WorkerProcess
from infervisor.supervisor.release import ReleaseWatch
from tests.helpers.raw_worker import PATIENCE_S

MIB = 1 << 20
SLEEP = "import time; time.sleep(3600)"
SAY = "import os; say = lambda text: os.write(1, (text + chr(10)).encode())\n"
START = (
    SAY + "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session={session})\n"
    "say(str(child.pid))\n"
    + SLEEP
)  # fmt: skip

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


class Program:
    """A worker process that runs a few lines of Python in place of a worker."""

    def __init__(self, code: str, snapshots: int | None = None) -> None:
        self.process = WorkerProcess([sys.executable, "-c", code], dict(os.environ), snapshots)
        self._output = b""

    def line(self) -> str:
        """Return the next line that it prints."""
        while b"\n" not in self._output:
            assert select.select([self.process.output], [], [], PATIENCE_S)[0], "it says nothing"
            data = os.read(self.process.output, 4096)
            assert data, f"it ended: {self._output!r}"
            self._output += data
        line, _, self._output = self._output.partition(b"\n")
        return line.decode()

    def wait_for_exit(self) -> None:
        """Wait until its exit can be seen."""
        pidfd = os.pidfd_open(self.process.pid)
        try:
            assert select.select([pidfd], [], [], PATIENCE_S)[0], "it doesn't end"
        finally:
            os.close(pidfd)

    def full(self) -> Sample:
        """Look closely."""
        seen = self.process.sample(time.monotonic_ns(), full=True)
        assert seen is not None
        return seen

    def end(self) -> None:
        """Kill, wait and collect, as a supervisor does."""
        self.process.kill_group()
        self.wait_for_exit()
        self.process.kill_group()
        self.process.collect()


@contextmanager
def program(code: str, snapshots: int | None = None) -> Iterator[Program]:
    made = Program(code, snapshots)
    try:
        yield made
    finally:
        if made.process.status is None:
            made.end()


def wait_for_end(pid: int) -> None:
    """Wait until a process that isn't our child holds nothing any more."""
    try:
        psutil.Process(pid).wait(PATIENCE_S)
    except psutil.NoSuchProcess:
        pass


# --- looking -----------------------------------------------------------------------------------------


def test_an_exact_look_says_what_is_its_own_and_a_cheap_one_does_not() -> None:
    with program(f"{SAY}keep = bytearray(50_000_000)\nsay('there')\n{SLEEP}") as made:
        made.line()
        cheap = made.process.sample(1)
        assert cheap is not None
        assert (cheap.pss_bytes, cheap.uss_bytes) == (None, None)
        assert cheap.used_bytes == cheap.rss_bytes
        assert made.process.last_full is None
        full = made.full()
        assert full.pss_bytes is not None
        assert full.uss_bytes is not None
        assert 50_000_000 < full.uss_bytes <= full.pss_bytes <= full.rss_bytes
        assert full.used_bytes == full.pss_bytes
        assert full.cost_ns > 0
        assert made.process.last_full == full


def test_a_mapped_file_is_shared_and_counts_half_in_each(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "model")
    with open(path, "wb") as file:
        file.write(os.urandom(40 * MIB))
    code = (
        f"{SAY}import mmap\nfile = open({path!r}, 'rb')\n"
        "mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        f"sum(mapped[::4096])\nsay('there')\n{SLEEP}"
    )
    with program(code) as one:
        one.line()
        alone = one.full()
        with program(code) as other:
            other.line()
            together = one.full()
    assert alone.pss_bytes is not None
    assert together.pss_bytes is not None
    assert alone.pss_bytes - together.pss_bytes > 15 * MIB
    assert together.rss_bytes > 40 * MIB


def test_the_parents_shared_memory_is_not_the_workers() -> None:
    fd = os.memfd_create("snapshots")
    os.ftruncate(fd, 64 * MIB)
    code = (
        f"{SAY}import mmap, sys\nfd = int(sys.argv[sys.argv.index('--snapshots') + 1])\n"
        f"shared = mmap.mmap(fd, 0)\nshared[:] = b'x' * len(shared)\nsay('there')\n{SLEEP}"
    )
    try:
        with program(code, fd) as made:
            made.line()
            full = made.full()
            assert full.rss_bytes > 64 * MIB
            assert full.pss_bytes is not None
            assert full.uss_bytes is not None
            assert full.uss_bytes <= full.pss_bytes < 64 * MIB
            made.end()
            assert made.process.left_over() == ()
    finally:
        os.close(fd)


def test_where_the_kernel_sums_nothing_up_psutil_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_text: str) -> None:
        raise ValueError("no rollup here")

    monkeypatch.setattr(process_module, "parse_rollup", broken)
    with program(f"{SAY}say('there')\n{SLEEP}") as made:
        made.line()
        full = made.full()
        assert full.pss_bytes is not None
        assert full.uss_bytes is not None
        assert 0 < full.uss_bytes <= full.pss_bytes <= full.rss_bytes


def test_of_a_dead_one_the_last_look_stays() -> None:
    with program(f"{SAY}say('there')\n{SLEEP}") as made:
        made.line()
        full = made.full()
        made.process.kill_group()
        made.wait_for_exit()
        made.process.sample(time.monotonic_ns(), full=True)
        assert made.process.last_full == full
        made.process.collect()
        assert made.process.sample(time.monotonic_ns(), full=True) is None
        assert made.process.last_full == full


# --- what is left ------------------------------------------------------------------------------------


def test_a_clean_end_leaves_nothing() -> None:
    with program(f"{SAY}say('there')\n{SLEEP}") as made:
        made.line()
        assert made.process.group_members() == ()
        assert made.process.open_descriptors >= 4
        full = made.full()
        began_ns = time.monotonic_ns()
        watch = ReleaseWatch(began_ns, pss_bytes=full.pss_bytes, uss_bytes=full.uss_bytes)
        made.end()
        release = watch.look(time.monotonic_ns(), made.process.left_over(), made.process.open_descriptors)
    assert release.is_complete
    assert release.pss_bytes == full.pss_bytes
    assert 0 < release.seconds < 10


def test_a_grandchild_in_the_group_is_seen_and_dies_with_it() -> None:
    with program(START.format(child=SLEEP, session=False)) as made:
        grandchild = int(made.line())
        assert made.process.group_members() == (grandchild,)
        assert made.process.left_over() == (grandchild,)
        made.end()
        wait_for_end(grandchild)
        assert made.process.left_over() == ()


def test_what_lives_on_in_the_group_is_told() -> None:
    # The worker alone is killed, which no supervisor does: so somebody is left.
    with program(START.format(child=SLEEP, session=False)) as made:
        grandchild = int(made.line())
        os.kill(made.process.pid, signal.SIGKILL)
        made.wait_for_exit()
        made.process.collect()
        try:
            assert made.process.group_members() == (grandchild,)
            assert made.process.left_over() == (grandchild,)
        finally:
            os.kill(grandchild, signal.SIGKILL)
        wait_for_end(grandchild)
        assert made.process.left_over() == ()


def test_a_child_that_left_the_group_is_told_if_it_was_seen_in_time() -> None:
    with program(START.format(child=SLEEP, session=True)) as made:
        stray = int(made.line())
        assert made.process.group_members() == ()
        made.full()
        made.end()
        try:
            assert made.process.left_over() == (stray,)
        finally:
            os.kill(stray, signal.SIGKILL)
        wait_for_end(stray)
        assert made.process.left_over() == ()


def test_a_grandchild_whose_parent_has_gone_is_still_known() -> None:
    between = (
        "import os, subprocess, sys; "
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True); "
        "os.write(1, f'{child.pid}\\n'.encode()); sys.stdin.readline()"
    )
    code = (
        f"{SAY}import subprocess, sys\n"
        f"between = subprocess.Popen([sys.executable, '-c', {between!r}], stdin=subprocess.PIPE)\n"
        "import signal, threading\nsignal.signal(signal.SIGUSR1, lambda *_: None)\nsay('armed')\nsignal.pause()\n"
        "between.communicate(b'go')\nsay('gone')\n"
        f"{SLEEP}"
    )  # fmt: skip
    with program(code) as made:
        said = {made.line(), made.line()}
        stray = int((said - {"armed"}).pop())
        made.full()
        os.kill(made.process.pid, signal.SIGUSR1)
        assert made.line() == "gone"
        made.full()
        made.end()
        try:
            assert made.process.left_over() == (stray,)
        finally:
            os.kill(stray, signal.SIGKILL)
        wait_for_end(stray)


def test_a_zombie_in_the_group_holds_nothing() -> None:
    with program(START.format(child="pass", session=False)) as made:
        grandchild = psutil.Process(int(made.line()))
        deadline = time.monotonic() + PATIENCE_S
        while grandchild.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            os.sched_yield()
        assert made.process.group_members() == ()


def test_a_group_whose_number_is_a_strangers_is_not_ours() -> None:
    with program(START.format(child=SLEEP, session=False)) as stranger:
        member = int(stranger.line())
        with program(SLEEP) as made:
            made.end()
            # The pid has been given away: to a process that leads a group of its own.
            made.process.pid = stranger.process.pid
            assert made.process.group_members() == ()
            made.process.pid = made.process._popen.pid
        assert stranger.process.group_members() == (member,)
        os.kill(member, signal.SIGKILL)
        stranger.end()
        wait_for_end(member)


# --- killed for memory -------------------------------------------------------------------------------

GREEDY = (
    "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    f"{SAY}say('there')\nsignal.sigwait([signal.SIGUSR1])\nkeep = bytearray(1 << 30)\nsay('alive')\n"
)
CGROUPS = os.environ.get("INFERVISOR_TEST_CGROUPS")
"""A folder of the memory controller, of either version, in which the tests may make groups."""


@pytest.mark.parametrize("killer", ["kernel", "somebody"])
@pytest.mark.skipif(
    CGROUPS is None,
    reason="set INFERVISOR_TEST_CGROUPS to a cgroup folder with a memory controller to write in",
)
def test_a_kill_by_the_kernel_for_memory_is_told_from_another(killer: str) -> None:
    assert CGROUPS is not None
    folder = os.path.join(CGROUPS, f"infervisor-test-{os.getpid()}")
    os.mkdir(folder)
    try:
        limit = "memory.max" if os.path.exists(f"{folder}/memory.max") else "memory.limit_in_bytes"
        swap = "memory.swap.max" if limit == "memory.max" else "memory.memsw.limit_in_bytes"
        for name in (limit, swap):
            if os.path.exists(f"{folder}/{name}"):
                with open(f"{folder}/{name}", "w") as file:
                    file.write(str(64 * MIB))
        with program(GREEDY) as made:
            made.line()
            with open(f"{folder}/cgroup.procs", "w") as file:
                file.write(str(made.process.pid))
            watch = OomWatch(made.process.pid)
            assert watch.group is not None
            assert str(watch.group.path) == folder
            watch.look()
            os.kill(made.process.pid, signal.SIGUSR1 if killer == "kernel" else signal.SIGKILL)
            made.wait_for_exit()
            assert made.process.collect().signal_name == "SIGKILL"
            assert watch.was_oom() is (killer == "kernel")
    finally:
        os.rmdir(folder)


def test_a_live_worker_has_been_killed_by_nobody() -> None:
    with program(f"{SAY}say('there')\n{SLEEP}") as made:
        made.line()
        watch = OomWatch(made.process.pid)
        assert not watch.was_oom()
        made.end()
        assert not watch.was_oom()
