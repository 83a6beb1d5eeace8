"""Posts into the loop's thread."""

from __future__ import annotations

import os
import threading

import anyio
import pytest

from infervisor.protocol.errors import UsageError
from infervisor.supervisor.mailbox import Mailbox

pytestmark = pytest.mark.anyio


async def test_posts_of_many_threads_run_here_each_thread_in_order() -> None:
    mailbox = Mailbox()
    ran: list[tuple[int, int]] = []
    places: set[int] = set()
    all_ran = anyio.Event()

    def record(thread: int, number: int) -> None:
        places.add(threading.get_ident())
        ran.append((thread, number))
        if len(ran) == 800:
            all_ran.set()

    def post_all(thread: int) -> None:
        for number in range(200):
            mailbox.post(lambda number=number: record(thread, number))  # type: ignore[misc]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mailbox.run)
        threads = [threading.Thread(target=post_all, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        with anyio.fail_after(20):
            await all_ran.wait()
        tasks.cancel_scope.cancel()
    for thread in threads:
        thread.join()
    mailbox.close()
    assert places == {threading.get_ident()}
    for number in range(4):
        assert [n for thread, n in ran if thread == number] == list(range(200))


async def test_more_posts_than_the_pipe_holds_all_run() -> None:
    mailbox = Mailbox()
    ran = 0
    done = anyio.Event()

    def count() -> None:
        nonlocal ran
        ran += 1
        if ran == 100_000:
            done.set()

    for _ in range(100_000):
        mailbox.post(count)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mailbox.run)
        with anyio.fail_after(20):
            await done.wait()
        tasks.cancel_scope.cancel()
    mailbox.close()


async def test_after_the_close_a_post_is_nothing_and_nothing_is_left_open() -> None:
    before = set(os.listdir("/dev/fd"))
    mailbox = Mailbox()
    mailbox.close()
    mailbox.close()
    mailbox.post(lambda: pytest.fail("it ran"))
    assert set(os.listdir("/dev/fd")) == before


async def test_only_the_owning_thread_is_here() -> None:
    mailbox = Mailbox()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(mailbox.is_here()))
    thread.start()
    thread.join()
    assert mailbox.is_here()
    assert found == [False]
    mailbox.close()


async def test_a_forked_child_is_refused_and_its_posts_reach_nobody() -> None:
    mailbox = Mailbox()
    child = os.fork()
    if child == 0:
        mailbox.post(lambda: None)
        try:
            mailbox.is_here()
        except UsageError:
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)  # noqa: ASYNC222 - a child that exits at once
    assert os.waitstatus_to_exitcode(status) == 0
    with pytest.raises(BlockingIOError):
        os.read(mailbox._read, 1)
    mailbox.close()
