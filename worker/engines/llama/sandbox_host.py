"""One sandbox process as the worker sees it: spawn it, hand it jobs, see its end, collect it.

A thread of its own spawns the process and lives as long as it: the parent-death signal follows the spawning thread.
Knows nothing of what jobs mean. Its methods may be called from any thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading

from infervisor.worker.engines.llama.sandbox_job import write_frame

MODULE = "infervisor.worker.engines.llama.sandbox_process"
_SETTINGS = {
    # One thread: a fork takes no others along. No device: there is nothing to compute.
    "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "VECLIB_MAXIMUM_THREADS": "1",
    "GGML_NO_BACKTRACE": "1", "CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1",
}  # fmt: skip


class SandboxGone(Exception):
    """This sandbox process has ended, or doesn't answer. The message says how."""


class SandboxProcess:
    """A process that is starting, serving or gone; it never comes back, a new one is made."""

    def __init__(self, setup: bytes) -> None:
        """Begin to spawn it. setup: the frame that it reads first. Returns at once."""
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._popen: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._fate: str | None = None
        self._doomed = False
        self.has_answered = False
        self._thread = threading.Thread(target=self._keep, args=(setup,), name="sandbox", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Its process id, or None before it has been spawned and after it has been collected."""
        with self._lock:
            return self._popen.pid if self._popen is not None and self._popen.returncode is None else None

    @property
    def serves(self) -> bool:
        """Whether it is of use: neither gone nor about to be."""
        return self._fate is None and not self._doomed

    def submit(self, needs: bytes, job: socket.socket, within_s: float) -> None:
        """Give it the other end of a job's socket; the caller closes `job`. Raises `SandboxGone`."""
        if not self._ready.wait(within_s):
            raise SandboxGone(f"it has not started within {within_s:g} s")
        with self._lock:
            if self._control is None or self._fate is not None:
                raise SandboxGone(self._fate or "it has ended")
            try:
                # Full for hundreds of jobs only: then it has been stopped for long.
                self._control.setblocking(False)
                socket.send_fds(self._control, [needs], [job.fileno()])
            except BlockingIOError:
                raise SandboxGone("it takes no more jobs") from None
            except OSError as error:
                raise SandboxGone(str(error)) from None

    def kill(self) -> None:
        """End it at once, and never use it again. It is collected by its thread."""
        with self._lock:
            self._doomed = True
            self._kill()

    def close(self, within_s: float) -> None:
        """Let it end its jobs and itself; after `within_s` seconds kill it. Returns when it is collected."""
        with self._lock:
            self._doomed = True
            if self._control is not None:
                with contextlib.suppress(OSError):
                    self._control.shutdown(socket.SHUT_RDWR)
        self._thread.join(within_s)
        if self._thread.is_alive():
            self.kill()
            self._thread.join()

    def _kill(self) -> None:
        # Under the lock, as collecting is: the pid can't belong to a stranger.
        if self._popen is not None and self._popen.returncode is None:
            self._popen.kill()

    def _keep(self, setup: bytes) -> None:
        try:
            control = self._spawn()
            # Race "killed meanwhile": the process is gone, and this fails.
            with contextlib.suppress(OSError):
                write_frame(control, setup)
            self._ready.set()
            self._wait()
        except OSError as error:
            with self._lock:
                self._fate = f"it can't be started with {sys.executable}: {error}"
        finally:
            self._ready.set()

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        given = ["--socket", str(theirs.fileno()), "--parent", str(os.getpid())]
        try:
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, *given],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_SETTINGS},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        with self._lock:
            self._popen, self._control = popen, ours
            if self._doomed:
                self._kill()
        return ours

    def _wait(self) -> None:
        popen, control = self._popen, self._control
        assert popen is not None
        assert control is not None
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOWAIT)
            with self._lock:
                popen.wait()
        else:
            popen.wait()
        with self._lock:
            code = popen.returncode
            self._fate = f"it ended with {'exit code' if code >= 0 else 'signal'} {abs(code)}"
            control.close()
