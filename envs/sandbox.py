"""Model-written Python, run fast and locked in; Linux 5.12 and up. This is the owner's side.

    owner ---- worker (imports numpy, sympy; forks lanes) ---- lane (one a core, in namespaces) ---- a call's process

The owner hands a lane three open files: the source, and two to print to; the lane answers with a word when the call
has ended (`envs/sandbox_worker.py`). Who sees its socket close ends: nothing outlives the owner, however that ends.

Inside are Python and its packages, read-only, and an empty folder: no other file, no /proc, no network, no root, no
capability and no way to one. Not limited is the memory of a call's processes together; trusted is the kernel.
"""

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from tempfile import TemporaryFile

from envs import sandbox_worker
from envs.sandbox_worker import ADVICE, SCRATCH

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": SCRATCH, "TMPDIR": SCRATCH, "TZ": "UTC"}
ENVIRONMENT |= {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
ENVIRONMENT |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [end.close() for end in [*_sockets]])  # else an owner's end goes unseen


@dataclass(frozen=True)
class Result:
    """What a call printed, and how it ended: ok, error (an exception, or an exit code), timeout (of wall or CPU time),
    killed (by a signal: it crashed, or the machine ran out of memory)."""

    stdout: str
    stderr: str
    status: str


class Sandbox(AbstractContextManager):
    """Runs Python sources, as many at once as there are cores; `run` may be called from any thread.

    isolation: auto, or unsafe: a warm worker and limits alone, with files, network and other processes in reach.
    Limits: seconds of a call, its processes and threads; memory_mib of a process, beside what is loaded; file_mib of a
    file, of an output (more is an OSError), of a call's folder. `prepare` is the owner's source, which the worker runs
    once: what it imports, calls find loaded. RuntimeError without isolation, or where that source fails.
    """

    def __init__(
        self,
        isolation: str = "auto",
        *,
        seconds: float = 10.0,
        memory_mib: int = 512,
        processes: int = 16,
        file_mib: int = 16,
        prepare: str = "import numpy, sympy",
    ):
        if isolation not in ("auto", "unsafe"):
            raise ValueError(f"isolation {isolation!r}: allowed are auto, unsafe")
        if min(seconds, memory_mib, processes, file_mib) <= 0:
            raise ValueError("seconds, memory_mib, processes, file_mib: allowed is more than 0")
        limits = {"AS": memory_mib << 20, "FSIZE": file_mib << 20, "NOFILE": 64, "CORE": 0, "processes": processes}
        self._settings = json.dumps({"isolated": isolation == "auto", "prepare": prepare, **limits})
        self.seconds, self._lock, self._worker, self._control = seconds, threading.Lock(), None, None
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self._closed, self._idle = False, queue.LifoQueue()
        self._idle.queue += [None] * self._cores  # each a lane to be opened, when those on top are busy
        try:
            if self.run("import os; os.stat(os.__file__)", 60) != Result("", "", "ok"):
                raise RuntimeError(f"the sandbox does not work on this machine: {ADVICE}")
        except BaseException:
            self.close()
            raise

    def run(self, code: str, seconds: float | None = None) -> Result:
        """Run a source as __main__; waiting for a core does not count. RuntimeError if closed, or if workers die."""
        lane = self._idle.get()
        try:
            for _ in range(3):  # the lane may have died, and its worker too; in a fork, both belong to the owner
                try:
                    lane = lane or self._open_lane()
                    return self._call(lane, code, seconds or self.seconds)
                except OSError as error:
                    lane, reason = _end(lane), error
                    time.sleep(0.1)
            raise RuntimeError(f"three workers of the sandbox failed under a call: {reason}")
        except BaseException:  # in the middle of a call, a lane is of no further use
            lane = _end(lane)
            raise
        finally:
            self._idle.put(lane)

    def close(self) -> None:
        """End all processes when running calls are over, and wait until they are gone."""
        self._closed = True
        for lane in [self._idle.get() for _ in range(self._cores)]:
            self._idle.put(_end(lane))
        _end(self._control)
        if self._worker:
            self._worker.kill()  # it may hang in an import
            self._worker.wait()

    def __exit__(self, *exception):
        self.close()

    def _open_lane(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise RuntimeError("the sandbox is closed")
            if not self._control or self._worker.poll() is not None:
                self._control = _end(self._control) or self._connect(self._spawn)
            return self._connect(lambda theirs: socket.send_fds(self._control, [b"+"], [theirs.fileno()]))

    def _connect(self, hand_over) -> socket.socket:
        """A socket whose other end is handed over, when that is ready; RuntimeError with the reason if it is not."""
        ours, theirs = socket.socketpair()
        ours.settimeout(120)
        _sockets.add(ours)
        with theirs:
            hand_over(theirs)
        answer = ours.recv(4096).decode()
        if answer != "ready":
            _end(ours)
            raise RuntimeError(answer) if answer else ConnectionError("a worker died")
        return ours

    def _spawn(self, theirs: socket.socket) -> None:
        argv = [sys.executable, "-sPB", os.path.abspath(sandbox_worker.__file__), self._settings, str(theirs.fileno())]
        environment = ENVIRONMENT | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        options = {"stdin": subprocess.DEVNULL, "cwd": "/", "start_new_session": True}
        self._worker = subprocess.Popen(argv, env=environment, pass_fds=[theirs.fileno()], **options)

    def _call(self, lane: socket.socket, code: str, seconds: float) -> Result:
        """A source run in a lane; ConnectionError or TimeoutError if that is gone, or hangs."""
        with TemporaryFile() as source, TemporaryFile() as stdout, TemporaryFile() as stderr:
            source.write(code.encode(errors="replace"))
            source.seek(0)
            socket.send_fds(lane, [str(seconds).encode()], [file.fileno() for file in (source, stdout, stderr)])
            lane.settimeout(seconds + 10)
            status = lane.recv(64).decode()
            if not status:
                raise ConnectionError("the lane is gone")
            stdout.seek(0)
            stderr.seek(0)
            return Result(*(file.read().decode(errors="replace") for file in (stdout, stderr)), status)


def _end(end: socket.socket | None) -> None:
    """Close our side of a socket, if there is one, when the process behind it has gone."""
    if end:
        with suppress(OSError), end:
            end.shutdown(socket.SHUT_WR)
            while end.recv(4096):
                pass
