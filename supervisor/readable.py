"""Call a function whenever a descriptor can be read.

On every back end `anyio.wait_readable` does that, but on asyncio it registers and forgets the descriptor each time
and needs one more turn of the loop. For a token every few milliseconds, on a processor whose caches the model has
just emptied, that is a third of what the parent costs; so there the descriptor stays registered.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable

import anyio


async def whenever_readable(fd: int, read: Callable[[], bool]) -> None:
    """Call `read` whenever `fd` can be read, until it returns False. Raises what it raises."""
    if _is_asyncio():
        return await _on_asyncio(fd, read)
    while True:
        await anyio.wait_readable(fd)
        if not read():
            return


def _is_asyncio() -> bool:
    # Trio can run as a guest of an asyncio loop; then that runs, but no task of it does.
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False


async def _on_asyncio(fd: int, read: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        if done.done():
            return
        try:
            goes_on = read()
        except BaseException as error:
            done.set_exception(error)
        else:
            if not goes_on:
                done.set_result(None)

    _context_of_callbacks().run(loop.add_reader, fd, readable)
    try:
        await done
    finally:
        loop.remove_reader(fd)


def _context_of_callbacks() -> contextvars.Context:
    """Return the context in which the loop is to call back: one in which anyio knows that this is asyncio."""
    context = contextvars.copy_context()
    # Where sniffio is installed anyio asks it, and it tells asyncio by the running task. A callback has none.
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None:
        context.run(sniffio.current_async_library_cvar.set, "asyncio")
    return context
