"""The sandbox: hostile programs, their limits and traces, its processes, its refusal."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from envs.sandbox import Result, Sandbox

ROOT = Path(__file__).parent.parent
LIMIT = 0.5  # seconds of a call
CLEAN = Result("1 []\n", "", "ok")
CHECK = "import os; print(1, os.listdir('.'))"

# (program, how it may end, what the last line on standard error contains)
HOSTILE = {
    "loop": ("while True: pass", "timeout", ""),
    "sleep": ("import time; time.sleep(60)", "timeout", ""),
    "fork bomb": ("import os\nwhile True: os.fork()", "error timeout", ""),
    "stubborn fork bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "timeout",
        "",
    ),
    "threads": ("import threading as t\nfor _ in range(99): t.Thread(target=t.Event().wait).start()", "timeout", ""),
    "10 GB": ("bytearray(10 << 30)", "error", "MemoryError"),
    "1 GB of output": ("for _ in range(1024): print('x' * (1 << 20))", "error", "File too large"),
    "endless output": ("while True: print('x' * 999)", "error", "File too large"),
    "endless file": ("f = open('f', 'wb')\nwhile True: f.write(bytes(65536))", "error", "File too large"),
    "endless files": ("for i in range(99): open(str(i), 'wb').write(bytes(1 << 18))", "error", "No space left"),
    "network": ("import socket; socket.create_connection(('1.1.1.1', 53), 9)", "error", "Network is unreachable"),
    "passwd": ("open('/etc/passwd')", "error", "No such file"),
    "project": (f"open({str(ROOT / 'README.md')!r})", "error", "No such file"),
    "proc": ("open('/proc/self/environ')", "error", "No such file"),
    "sys.exit": ("import sys; sys.exit('gone')", "error", "gone"),
    "sys.exit(0)": ("import sys; sys.exit(0)", "ok", ""),
    "os._exit": ("import os; print('x', flush=True); os._exit(7)", "error", ""),
    "input": ("input()", "error", "EOFError"),
    "grandchild": (
        "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(60)",
        "ok",
        "",
    ),
    "ignored signals": (
        "import signal\nfor s in {*signal.Signals} - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "timeout",
        "",
    ),
    "deep recursion": ("def f(): f()\nf()", "error", "RecursionError"),
    "deeper": (
        "import sys; sys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())",
        "killed",
        "",
    ),
    "crash": ("import ctypes; ctypes.string_at(0)", "killed", ""),
    "parent": ("import os; os.kill(0, 9); os.kill(os.getppid(), 9); print('x'); os.kill(-1, 9)", "error", "No such"),
    "poison": ("import math, os, builtins; math.pi = os.listdir = builtins.print = 3; open('f', 'w')", "ok", ""),
    "standard error": ("import sys; sys.stderr = sys.stdout = None; 1 / 0", "error", ""),
    "hook": ("import sys; sys.excepthook = None; 1 / 0", "error", ""),
    "not Python": ("def", "error", "SyntaxError"),
    "surrogates": ("print('\ud800')", "ok", ""),
    "null": ("\0", "error", ""),
}
KERNEL = """import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print([libc.unshare(0x10000000), libc.unshare(0x20000), libc.unshare(0x40000000), libc.chroot(b"/"),
       libc.mount(b"tmpfs", os.getcwd().encode(), b"tmpfs", 0, None), libc.sethostname(b"x", 1)])
print(libc.syscall({"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x10000000 | 17, 0, 0, 0, 0))
"""
OWNER = """import sys, threading, time
sys.path.insert(0, {root!r})
from envs.sandbox import Sandbox
box = Sandbox({isolation!r}, prepare="")
threading.Thread(target=box.run, args=("import os, time; os.fork(); time.sleep(60)", 60), daemon=True).start()
time.sleep(0.5)
print(box._worker.pid, flush=True)
{then}
"""


def tree(pid):
    """The processes below a process, and itself."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {pid} & parents.keys()
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return found


def status(pid):
    return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)


def alive(pids):
    """Those of the processes that are there, and are no zombies."""
    found = set()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            if not status(pid)["State"].startswith("Z"):
                found.add(pid)
    return found


def gone(pids):
    """Whether the processes end within two seconds."""
    until = time.monotonic() + 2
    while alive(pids) and time.monotonic() < until:
        time.sleep(0.01)
    return not alive(pids)


def isolated(**options):
    """A sandbox; skips the test on a machine that lets nobody make a user namespace and mount in it."""
    try:
        return Sandbox(**{"seconds": LIMIT, "prepare": "", "file_mib": 4, **options})
    except RuntimeError as error:
        probe = "libc = __import__('ctypes').CDLL(None)\n"
        probe += "exit(libc.unshare(0x10020000) or libc.mount(None, b'/', None, 1 << 18 | 1 << 14, None))"
        if "no isolation" in str(error) and subprocess.run([sys.executable, "-c", probe]).returncode:
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def box():
    with isolated() as sandbox:
        sandbox._cores = 1  # one lane, so that a next call follows in the same place
        sandbox._idle.queue[:] = sandbox._idle.queue[-1:]
        yield sandbox


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_ends_in_time_and_leaves_nothing(box, name, tmp_path, monkeypatch):
    """Case B57 and others; the next call, in the same place, finds nothing changed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program, ends, last = HOSTILE[name]
    assert box.run(CHECK) == CLEAN
    before, fds = tree(box._worker.pid), len(os.listdir("/proc/self/fd"))
    start = time.monotonic()
    result = box.run(program)
    assert time.monotonic() - start < LIMIT + 0.5
    assert tree(box._worker.pid) == before
    assert len(os.listdir("/proc/self/fd")) == fds and not os.listdir(tmp_path)
    assert result.status in ends.split()
    assert last in (result.stderr.splitlines() or [""])[-1]
    assert len(result.stdout) <= 4 << 20
    assert box.run(CHECK + "; import math; print(math.pi)") == Result("1 []\n3.141592653589793\n", "", "ok")
    assert tree(box._worker.pid) == before


def test_a_program_runs_as_a_script_does(box):
    program = "import sys, threading, atexit\natexit.register(print, 'last')\nprint(__name__, sys.argv, 'é')\n"
    program += "threading.Timer(0.1, print, ['thread']).start()\nprint('err', file=sys.stderr)"
    assert box.run(program) == Result("__main__ ['main.py'] é\nthread\nlast\n", "err\n", "ok")
    result = box.run("def f():\n    return 1 / 0\nf()")
    assert result.stderr.splitlines()[1:] == [
        '  File "main.py", line 3, in <module>',
        '  File "main.py", line 2, in f',
        "ZeroDivisionError: division by zero",
    ]
    long = box.run("print('head'); print('x' * 10**6); print('tail'); 1 / 0")
    assert long.stdout.startswith("head\n") and long.stdout.endswith("\ntail\n") and "ZeroDivision" in long.stderr
    assert box.run("import time\nprint('early')\ntime.sleep(9)", 0.2) == Result("early\n", "", "timeout")
    assert box.run("import sys; sys.exit(256 + 3)").status == "error"


def test_inside_there_is_nothing_of_the_outside(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    (tmp_path / "file").write_text("x")
    with isolated() as sandbox:
        seen = sandbox.run("import os; print(dict(os.environ))").stdout
        assert "SECRET" not in seen and "hunter2" not in seen and os.environ["PATH"] not in seen
        hidden = [tmp_path, ROOT, "/proc/1", "/sys/kernel", "/var", "/home", "/etc/hosts", "/usr/share", "/dev/mem"]
        exist = f"import os; print([p for p in {[*map(str, hidden)]} if os.path.exists(p)])"
        assert sandbox.run(exist).stdout == "[]\n"
        top = {"bin", "dev", "etc", "lib", "lib64", "scratch", "tmp", "usr"}
        top |= {Path(prefix).parts[1] for prefix in (sys.prefix, sys.base_prefix)}
        assert {*sandbox.run("import os; print(*os.listdir('/'))").stdout.split()} <= top
        paths = f"(os.__file__, {sys.executable!r}, '/', '/dev', '/bin/sh')"
        flags = f"import os; print({{os.statvfs(path).f_flag & 3 for path in {paths}}})"
        assert sandbox.run(flags).stdout == "{3}\n"  # read-only, no setuid
        fds = "import os\nfor fd in range(4096):\n    try: os.fstat(fd); print(fd)\n    except OSError: pass"
        assert sandbox.run(fds).stdout.split() == ["0", "1", "2"]
        assert sandbox.run("import os; print(os.getpid(), os.getppid())").stdout == "1 0\n"


def test_a_call_cannot_read_what_its_owner_reads():
    read, write = os.pipe()
    os.write(write, b"hunter2\n")
    saved = os.dup(0)
    os.dup2(read, 0)
    try:
        with isolated() as sandbox:
            assert sandbox.run("print(input())").stderr.endswith("EOFError: EOF when reading a line\n")
    finally:
        os.dup2(saved, 0)
        for fd in (read, write, saved):
            os.close(fd)


def test_a_call_is_not_root_and_cannot_become_anything(box):
    before = tree(box._worker.pid)
    inside = "import os, time; print(0 in os.getresuid() + os.getresgid()); time.sleep(0.4)"
    with ThreadPoolExecutor() as pool:
        running = pool.submit(box.run, inside)
        time.sleep(0.2)
        (pid,) = tree(box._worker.pid) - before
        seen = status(pid)
        assert running.result() == Result("False\n", "", "ok")
    assert "0" not in seen["Uid"].split() + seen["Gid"].split()
    assert {seen[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Amb")} == {"0" * 16}
    assert seen["NoNewPrivs"] == "1"
    assert box.run(KERNEL) == Result("[-1, -1, -1, -1, -1, -1]\n-1\n", "", "ok")


def test_a_call_has_the_limits_and_the_folder_that_were_asked_for():
    ask = "import os, resource as r; s = os.statvfs('.'); print(s.f_blocks * s.f_frsize >> 20, "
    ask += "[r.getrlimit(k) for k in (r.RLIMIT_CPU, r.RLIMIT_FSIZE, r.RLIMIT_NPROC, r.RLIMIT_CORE)])"
    with isolated(processes=5, file_mib=3) as sandbox:
        seen = sandbox.run(ask, 2.5).stdout
        assert seen == f"3 {[(3, 3), (3 << 20, 3 << 20), (6, 6), (0, 0)]}\n"
        count = "import os, time\nn = 0\ntry:\n    while os.fork(): n += 1\n    time.sleep(9)\n"
        count += "except OSError: print(n)"
        assert sandbox.run(count).stdout == "4\n"  # beside the first
        assert sandbox.run("len(bytearray(400 << 20))", 5).status == "ok"
        assert sandbox.run("len(bytearray(600 << 20))", 5).stderr.endswith("MemoryError\n")


def test_calls_share_no_memory_of_the_kernel(box):
    make = "import ctypes; print(ctypes.CDLL(None).shmget(77, 4096, {}) >= 0)"
    assert box.run(make.format("0o1666")).stdout == "True\n"
    assert box.run(make.format("0o666")).stdout == "False\n"


def test_the_same_program_prints_the_same():
    pytest.importorskip("numpy")
    program = "import random, numpy\nprint(hash('a'), {*'abcdef'}, random.random(), numpy.random.rand())"
    seen = set()
    for _ in range(2):
        with isolated(prepare="import numpy") as sandbox:
            seen |= {sandbox.run(program) for _ in range(2)}
    (result,) = seen
    assert result.status == "ok" and result.stdout


def test_calls_queue_for_the_cores_and_do_not_time_out_there():
    with isolated() as sandbox:
        program = "import time; s = time.monotonic(); time.sleep(0.05); print(s, time.monotonic())"
        rounds = 64 / len(os.sched_getaffinity(0))
        limit = max(0.3, 0.05 * rounds / 2)  # less than the last call waits
        with ThreadPoolExecutor(64) as pool:
            results = [*pool.map(lambda _: sandbox.run(program, limit), range(64))]
        assert {result.status for result in results} == {"ok"}
        times = [tuple(map(float, result.stdout.split())) for result in results]
        most = max(sum(start <= at < end for start, end in times) for at, _ in times)
        assert 1 < most + (sandbox._cores == 1) <= sandbox._cores + (sandbox._cores == 1)


@pytest.mark.parametrize("isolation", ["auto", "unsafe"])
def test_workers_that_die_are_replaced(isolation):
    isolated().close()
    with Sandbox(isolation, prepare="") as sandbox:
        seen = set()
        for who in ("lane", "worker", "all"):
            worker, pids = {sandbox._worker.pid}, tree(sandbox._worker.pid)
            seen |= pids
            for pid in alive({"lane": pids - worker, "worker": worker, "all": seen}[who]):
                os.kill(pid, signal.SIGKILL)
            assert sandbox.run("print(1)") == Result("1\n", "", "ok")
        with ThreadPoolExecutor() as pool:  # under a call
            lanes = tree(sandbox._worker.pid) - {sandbox._worker.pid}
            running = pool.submit(sandbox.run, "import time; time.sleep(0.6); print(2)")
            time.sleep(0.3)
            for pid in lanes:
                os.kill(pid, signal.SIGKILL)
            assert running.result() == Result("2\n", "", "ok")
    assert gone(seen)


@pytest.mark.parametrize("isolation", ["auto", "unsafe"])
@pytest.mark.parametrize("then", ["time.sleep(60)", "sys.exit()"])
def test_an_owner_that_ends_leaves_nothing(isolation, then):
    isolated().close()
    program = OWNER.format(root=str(ROOT), isolation=isolation, then=then)
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with owner:
        worker = int(owner.stdout.readline())
        pids = tree(worker)
        assert len(pids) >= 4 or then == "sys.exit()"  # worker, lane, the call's two
        owner.send_signal(signal.SIGKILL if "sleep" in then else 0)
    assert gone(pids)


def test_a_closed_sandbox_is_closed_and_a_fork_of_its_owner_has_its_own():
    sandbox = isolated()
    pids = tree(sandbox._worker.pid)
    pid = os.fork()
    if pid == 0:
        fine = sandbox.run("print(1)") == Result("1\n", "", "ok") and not tree(sandbox._worker.pid) & pids
        os._exit(0 if fine else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert sandbox.run("print(1)").status == "ok" and tree(sandbox._worker.pid) == pids
    with ThreadPoolExecutor() as pool:
        running = pool.submit(sandbox.run, "import time; time.sleep(0.3); print(1)")
        time.sleep(0.1)
        sandbox.close()
        assert running.result().status == "ok"
    assert gone(pids)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            sandbox.run("print(1)")
    sandbox.close()


def test_it_refuses_what_it_cannot_do():
    with pytest.raises(RuntimeError, match="cannot be prepared: ModuleNotFoundError: .*no_such_package"):
        Sandbox("unsafe", prepare="import no_such_package")
    for bad in ({"isolation": "none"}, {"seconds": 0}, {"memory_mib": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}.*allowed"):
            Sandbox(**bad)


def test_without_namespaces_it_refuses_in_one_line_and_names_the_way_out():
    """For real: in a user namespace in which no other may be made."""
    program = f"""import os, sys
libc = __import__("ctypes").CDLL(None)
user, group = os.getuid(), os.getgid()
if libc.unshare(0x10000000):
    sys.exit("no user namespace")
for name, text in ("setgroups", "deny"), ("uid_map", f"1000 {{user}} 1"), ("gid_map", f"1000 {{group}} 1"):
    open(f"/proc/self/{{name}}", "w").write(text)
open("/proc/sys/user/max_user_namespaces", "w").write("0")
sys.path.insert(0, {str(ROOT)!r})
from envs.sandbox import Sandbox
with Sandbox("unsafe", prepare="") as sandbox:
    print(sandbox.run("print(1)").stdout)
Sandbox(prepare="")"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    if "no user namespace" in done.stderr or "Permission" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.stdout == "1\n\n"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: no isolation on this machine (") and last.endswith("--sandbox unsafe")


@pytest.mark.parametrize("name", ["loop", "10 GB", "1 GB of output", "endless file", "sys.exit", "input", "poison"])
def test_unsafe_has_limits_too(name):
    program, ends, last = HOSTILE[name]
    with Sandbox("unsafe", seconds=LIMIT, prepare="", file_mib=4) as sandbox:
        start = time.monotonic()
        result = sandbox.run(program)
        assert time.monotonic() - start < LIMIT + 0.5
        assert result.status in ends and last in result.stderr
        assert sandbox.run(CHECK) == CLEAN


def test_unsafe_ends_a_process_group_and_removes_its_folder():
    with Sandbox("unsafe", prepare="") as sandbox:
        before = tree(sandbox._worker.pid)
        program = "import os, time; print(os.getcwd(), flush=True)\nopen('f', 'w')\nif os.fork() == 0: time.sleep(60)"
        folder = sandbox.run(program).stdout.strip()
        assert gone(tree(sandbox._worker.pid) - before)
        assert folder and not Path(folder).exists()


def test_sympy_and_numpy_are_there():
    pytest.importorskip("sympy")
    with isolated(prepare="import numpy, sympy", seconds=10) as sandbox:
        program = "import numpy, sympy; x = sympy.Symbol('x')\n"
        program += "print(sympy.integrate(x**2), numpy.linalg.det(numpy.eye(3)))"
        assert sandbox.run(program) == Result("x**3/3 1.0\n", "", "ok")


@pytest.mark.slow
def test_a_thousand_calls_leak_nothing():
    def use(sandbox):
        lanes = tree(sandbox._worker.pid)
        memory = sum(int(status(pid)["VmRSS"].split()[0]) for pid in lanes | {os.getpid()})
        inside = [len(os.listdir(f"/proc/{pid}/fd")) for pid in sorted(lanes)]
        mounts = [len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines()) for pid in sorted(lanes)]
        return (lanes, len(os.listdir("/proc/self/fd")), inside, mounts, threading.active_count()), memory

    with isolated() as sandbox, ThreadPoolExecutor(8) as pool:
        programs = ["print(1)", "1 / 0", "open('f', 'w').write('x' * 9999)", "import os; os.fork(); print(1)"] * 25
        [*pool.map(sandbox.run, programs)]
        before, memory = use(sandbox)
        for _ in range(10):
            assert all(result.status in ("ok", "error") for result in pool.map(sandbox.run, programs))
        after, more = use(sandbox)
        assert before == after
        assert more < memory + 4096  # KiB
