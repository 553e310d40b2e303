"""What runs inside the sandbox: a worker, the lanes that it forks, and the calls that those fork.

A lane serves one call after the other, in namespaces and a root of its own: it mounts an empty folder, forks a process
that is the first of a pid namespace (when it ends, all that it started is killed), waits, and says how it ended. It
looks into no file, so that no call finds another's in its memory, and hears nothing from a call but its exit status.
"""

import atexit
import ctypes
import gc
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from shutil import rmtree
from tempfile import mkdtemp

ROOT, SCRATCH = "/proc", "/scratch"  # where the new root is built: a folder of every machine; in it, a call's folder
NOBODY, SHOWN = 65534, ("bin", "lib", "lib64", "pyvenv.cfg")  # a user; parts of /, /usr, and the prefixes of Python
FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/dev/null", "/dev/zero", "/dev/urandom")
ADVICE = "allow user namespaces (a sysctl, or the container's seccomp and AppArmor), or choose --sandbox unsafe"
# Numbers of the kernel's interface; the last two differ by machine.
NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 1 << 17, *(1 << bit for bit in range(25, 31))
RDONLY, NOSUID, NODEV, BIND, REC, PRIVATE, DETACH = 1, 2, 4, 1 << 12, 1 << 14, 1 << 18, 2
SET_DUMPABLE, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS = 4, 36, 38
MOUNT_SETATTR, AT_RECURSIVE, JOIN_SESSION_KEYRING, CAPABILITY_VERSION = 442, 0x8000, 1, 0x20080522
PIVOT_ROOT, KEYCTL = {"x86_64": (155, 250), "aarch64": (41, 219)}.get(os.uname().machine, (-1, -1))
HUGE, COLLAPSE = 1 << 21, 25
LIBC = ctypes.CDLL(None, use_errno=True)


def _libc(name: str, *arguments) -> int:
    """What a function of the C library returns, called with numbers, strings and None; OSError if it fails."""
    value = getattr(LIBC, name)(*(os.fsencode(value) if isinstance(value, str) else value for value in arguments))
    if value == -1:
        raise OSError(ctypes.get_errno(), f"{name} {arguments}: {os.strerror(ctypes.get_errno())}")
    return value


def _worker(settings: dict, control: socket.socket) -> None:
    """Do what prepares calls, then fork a lane for each socket that comes; ends when the owner's side closes."""
    try:
        exec(settings["prepare"], {})
    except BaseException as error:
        return control.sendall(f"the sandbox cannot be prepared: {type(error).__name__}: {error}"[:4000].encode())
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)  # every call draws the same
    if sys.platform == "linux":
        settings["AS"] += int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if the machine runs out of memory, rather a call than the training
        _libc("prctl", SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # of lanes, see the fork in _isolate
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()  # else a collection in a call copies every page that calls share
    _join_pages()
    control.sendall(b"ready")
    while fds := socket.recv_fds(control, 1, 1)[1]:
        if os.fork() == 0:
            control.close()
            return _lane(socket.socket(fileno=fds[0]), settings)
        os.close(fds[0])


def _join_pages() -> None:
    """Make large pages of this process's memory, where the kernel can: a fork has fewer of them to copy."""
    with suppress(OSError), open("/proc/self/maps") as maps:
        for fields in map(str.split, maps):
            start, end = (int(number, 16) for number in fields[0].split("-"))
            start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
            if fields[1] == "rw-p" and fields[4] == "0" and start < end:
                LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), COLLAPSE)


def _lane(owner: socket.socket, settings: dict) -> None:
    """Serve the calls of one socket, one after the other, until it closes."""
    try:
        home = _isolate() if settings["isolated"] else None
    except (OSError, AttributeError) as error:  # not Linux: no os.O_PATH
        return owner.sendall(f"no isolation on this machine ({error}): {ADVICE}"[:4000].encode())
    for name in ("CORE", "FSIZE", "NOFILE", *(["AS"] if sys.platform == "linux" else [])):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (settings[name], settings[name]))
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    owner.sendall(b"ready")
    while fds := (message := socket.recv_fds(owner, 64, 3))[1]:
        seconds, folder = float(message[0]), SCRATCH if home else mkdtemp()
        if home:
            _libc("mount", "tmpfs", folder, "tmpfs", NOSUID | NODEV, f"size={settings['FSIZE']},nr_inodes=1024")
            _libc("unshare", NEWPID | NEWIPC)  # the pid namespace is for the next fork
        pid = os.fork() or _child(fds, folder, seconds, settings)
        for fd in fds:
            os.close(fd)
        status = _supervise(pid, seconds, owner, woken)
        if home:
            _libc("setns", home, NEWPID)
        _libc("umount2", folder, DETACH) if home else rmtree(folder, ignore_errors=True)
        with suppress(ConnectionError):
            owner.sendall(status.encode())


def _supervise(pid: int, seconds: float, owner: socket.socket, woken: socket.socket) -> str:
    """Wait for a call, at most until its time is up or its owner gone; how it ended."""
    until, ended, late = time.monotonic() + seconds, 0, False
    while not ended:
        ready, _, _ = select.select([owner, woken], [], [], max(0.0, until - time.monotonic()))
        if woken in ready:
            woken.recv(4096)
        late = not ready
        if late or owner in ready:
            os.kill(pid, signal.SIGKILL)
        ended, status, usage = os.wait4(pid, 0 if late or owner in ready else os.WNOHANG)
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)  # what it left behind, where no pid namespace ends with it
    code = os.waitstatus_to_exitcode(status)
    if late or code == -signal.SIGKILL and usage.ru_utime + usage.ru_stime > int(seconds):
        return "timeout"
    return "error" if code > 0 else "killed" if code else "ok"


def _isolate() -> int:
    """Go on in namespaces and a root of our own, not as root; the pid namespace. OSError where that is forbidden."""
    proc, built = os.open("/proc", os.O_PATH), False
    if os.geteuid() == 0:  # of use to show a Python that lies where only root may look
        with suppress(PermissionError):  # a container's root may do no more than others
            _libc("unshare", NEWNS)
            _build_root()
            built = True
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        _libc("prctl", SET_DUMPABLE, 1, 0, 0, 0)  # else our files in /proc are root's
    user, group = os.geteuid(), os.getegid()
    _libc("unshare", NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP)
    for name, text in ("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1"):
        with open(os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc), "w") as file:
            file.write(text)
    if not built:
        _build_root()
    if os.fork():
        os._exit(0)  # a pid namespace begins with the next process
    os.chroot("/box")  # who is in a chroot cannot make a user namespace, and in it get capabilities
    os.chdir("/")
    _libc("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc("syscall", KEYCTL, JOIN_SESSION_KEYRING, None)  # not the keys of who started us
    return os.open("self/ns/pid", os.O_RDONLY, dir_fd=proc)


def _build_root() -> None:
    """Make /box in a new root, with what is SHOWN and FILES, all read-only, and drop the old root."""
    _libc("mount", None, "/", None, REC | PRIVATE, None)
    _libc("mount", "tmpfs", ROOT, "tmpfs", NOSUID | NODEV, "size=1m,mode=755")
    os.makedirs(f"{ROOT}/box{SCRATCH}")
    prefixes, paths = dict.fromkeys(("", "/usr", sys.base_prefix, sys.prefix)), (*sys.path, *FILES)
    shown = [f"{prefix}/{part}" for prefix in prefixes for part in SHOWN]
    for source in (*shown, *(path for path in paths if path in FILES or path.endswith("-packages"))):
        target = f"{ROOT}/box{source}"
        if not os.path.exists(source):
            continue
        os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
        if not os.path.isdir(source):
            open(target, "x").close()
        _libc("mount", source, target, None, BIND | REC, None)
    for name in ("/tmp", "/dev/shm"):
        with suppress(FileExistsError):  # where Python lies in /tmp
            os.symlink(SCRATCH, f"{ROOT}/box{name}")
    os.chdir(ROOT)
    _libc("syscall", PIVOT_ROOT, ".", ".")  # the old root lies over the new one
    _libc("umount2", ".", DETACH)
    attributes = struct.pack("4Q", RDONLY | NOSUID, 0, 0, 0)
    _libc("syscall", MOUNT_SETATTR, -1, "/", AT_RECURSIVE, attributes, len(attributes))


def _child(fds: list[int], folder: str, seconds: float, settings: dict) -> None:
    """The process of a call: take the limits on, then run the source as Python runs a script; does not return."""
    code = 1
    try:
        os.setsid()  # out of the lane's process group, which kill(0) would reach
        signal.set_wakeup_fd(-1)
        source = b"".join(iter(lambda: os.read(fds[0], 1 << 20), b"")).decode()
        os.dup2(fds[1], 1)
        os.dup2(fds[2], 2)
        os.closerange(3, 1024)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 1))
        if settings["isolated"]:
            most = settings["processes"] + 1  # the lane is one
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
            _libc("capset", struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24))
        random.seed(0)
        sys.argv, sys.modules["__main__"] = ["main.py"], type(sys)("__main__")
        try:
            exec(compile(source, "main.py", "exec"), sys.modules["__main__"].__dict__)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else error.code is not None
            if code is True:
                print(error.code, file=sys.stderr)
        except BaseException as error:
            sys.excepthook(type(error), error.with_traceback(error.__traceback__.tb_next), error.__traceback__)
        threading._shutdown()
        atexit._run_exitfuncs()
    finally:
        os._exit(code & 255)


if __name__ == "__main__":
    _worker(json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
    os._exit(0)
