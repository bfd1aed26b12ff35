"""Kernels and containers that refuse an interface: the next one is used, and one line in the log says why."""

from __future__ import annotations

import errno
import json

import pytest

# In a fresh process: seccomp filters that answer system calls with an errno, as container profiles do.
FILTER = """
import ctypes, json, logging, sys

class Rule(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)
    ]

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("rules", ctypes.POINTER(Rule))]

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN, ERRNO, ALLOW = 0x20, 0x15, 0x35, 0x06, 0x00050000, 0x7FFF0000
CALL, FIRST_ARGUMENT = 0, 16  # where struct seccomp_data holds them
libc = ctypes.CDLL(None, use_errno=True)

def refuse(call, code, at_least=0):
    rules = (Rule * 6)(
        Rule(LOAD, 0, 0, CALL), Rule(JUMP_EQUAL, 0, 3, call),
        Rule(LOAD, 0, 0, FIRST_ARGUMENT), Rule(JUMP_AT_LEAST, 0, 1, at_least),
        Rule(RETURN, 0, 0, ERRNO | code), Rule(RETURN, 0, 0, ALLOW),
    )
    return libc.prctl(22, 2, ctypes.byref(Program(6, rules)), 0, 0)

if libc.prctl(38, 1, 0, 0, 0) or any(refuse(*rule) for rule in json.loads(sys.argv[2])):
    print("skip")
    sys.exit()

"""
EACH_BACKEND = """
logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")
from offload import aio
from offload.errors import OffloadError

print("works:", *aio.backends())
for name, reason in aio.probe().items():
    print("probe:", name, reason)
for turn in range(2):
    with aio.Queue(sys.argv[1]) as queue:
        print("used:", queue.backend)
        queue.write(b"abc", 0).wait()
        buffer = bytearray(3)
        queue.read(buffer, 0).wait()
        queue.sync().wait()
        assert buffer == b"abc"
for name in aio.probe():
    try:
        aio.Queue(sys.argv[1], backend=name).close()
    except OffloadError as error:
        print("refused:", error)
"""
CALLS = {
    "io_setup": 206,
    "io_getevents": 208,
    "io_submit": 209,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
}


def run_filtered(run_python, script: str, path: str, *rules: tuple[int, ...]) -> list[str]:
    """The lines that a script prints while calls are refused by ``(number, errno)`` or ``(number, errno, from
    which first argument)``."""
    result = run_python(FILTER + script, path, json.dumps(rules))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    if result.stdout == "skip\n":
        pytest.skip("no seccomp")
    return result.stdout.splitlines()


def run_refused(run_python, path: str, **refused: int) -> list[str]:
    return run_filtered(
        run_python, EACH_BACKEND, path, *((CALLS[call], code) for call, code in refused.items())
    )


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
@pytest.mark.parametrize("call", ["io_uring_setup", "io_uring_enter", "io_uring_register"])
def test_io_uring_refused(path, run_python, call, code):
    """Whichever of its calls is refused: libaio instead, and the queue never finds out in the middle."""
    lines = run_refused(run_python, path, **{call: code})
    name = errno.errorcode[code]
    assert lines[0] == "works: libaio threads python"
    assert lines.count("used: libaio") == 2
    (logged,) = [line for line in lines if line.startswith("offload.aio: ")]
    assert logged.startswith(f"offload.aio: I/O backend io_uring is refused: {call}: {name} (")
    assert logged.endswith("); using libaio")
    assert any(line.startswith(f"probe: io_uring {call}: {name}") for line in lines)
    (refused,) = [line for line in lines if line.startswith("refused: ")]
    assert refused.startswith(f"refused: I/O backend 'io_uring' cannot be used: {call}: {name}")


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("call", ["io_setup", "io_submit", "io_getevents"])
def test_both_kernel_interfaces_refused(path, run_python, call, code):
    """threads needs neither; each refusal has its line."""
    lines = run_refused(run_python, path, io_uring_setup=errno.EPERM, **{call: code})
    name = errno.errorcode[code]
    assert lines[0] == "works: threads python"
    assert lines.count("used: threads") == 2
    uring, libaio = [line for line in lines if line.startswith("offload.aio: ")]
    assert "io_uring is refused: io_uring_setup: EPERM (a seccomp profile" in uring
    assert uring.endswith("; using libaio")
    assert f"libaio is refused: {call}: {name} (" in libaio
    assert libaio.endswith("; using threads")
    assert "io_uring" not in libaio


DEEP_QUEUE = """
logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")
from offload import aio
print("probe:", aio.probe()["libaio"])
aio.queue.candidates = lambda backend: ["libaio", "threads"]
for depth in (4096, 32):
    with aio.Queue(sys.argv[1], queue_depth=depth) as queue:
        queue.write(b"x", 0).wait()
        print("used:", queue.backend)
"""


def test_aio_requests_of_the_machine_used_up(path, run_python):
    """Other programs may hold most of fs.aio-max-nr: the line says so, with the numbers and the knob.

    A filter plays the other programs: what a test took would be missing in those that run beside it.
    """
    probe, logged, deep, shallow = run_filtered(
        run_python, DEEP_QUEUE, path, (CALLS["io_setup"], errno.EAGAIN, 1024)
    )
    assert probe == "probe: None"
    assert "I/O backend libaio is refused: io_setup: EAGAIN (fs.aio-max-nr is used up (" in logged
    assert logged.endswith("; raise it with `sysctl`); using threads")
    assert (deep, shallow) == ("used: threads", "used: libaio")


NO_LOCKED_MEMORY = """
import logging, mmap, os, resource, sys
logging.basicConfig(stream=sys.stdout, format="%(name)s: %(message)s")
from offload import aio
os.chdir(os.path.dirname(sys.argv[1]))
os.chmod(".", 0o777)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[2]), int(sys.argv[2])))
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)  # without CAP_IPC_LOCK
queues = [aio.Queue("swap") for _ in range(2)]
print(queues[0].backend)
memory = mmap.mmap(-1, 1 << 20)
for queue in queues:
    print(queue.register(memory))
    memory[:4] = b"abcd"
    queue.write(memory, 0).wait()
    memory[:4] = b"...."
    queue.read(memory, 0).wait()
    assert memory[:4] == b"abcd"
    queue.close()
memory.close()
"""


def lines_with_locked_memory(run_python, path: str, limit: int) -> list[str]:
    result = run_python(NO_LOCKED_MEMORY, path, str(limit))
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_no_locked_memory(path, run_python):
    """Some kernels count rings as locked memory: then it is libaio, and elsewhere nothing is registered."""
    lines = lines_with_locked_memory(run_python, path, 0)
    (logged,) = [line for line in lines if line.startswith("offload.aio: ")]
    assert "ENOMEM" in logged
    assert "the locked-memory limit is 0 B; raise `ulimit -l`" in logged
    assert lines.count("False") == 2
    assert lines.count("libaio") == ("io_uring is refused: io_uring_setup" in logged)


def test_too_little_locked_memory_to_register(path, run_python):
    """All works without; that nothing is registered is said once, with the limit."""
    lines = lines_with_locked_memory(run_python, path, 512 * 1024)
    if "libaio" in lines:
        pytest.skip("no io_uring with so little locked memory")
    (logged,) = [line for line in lines if line.startswith("offload.aio: ")]
    assert "memory is not registered with io_uring: ENOMEM for 1.00 MiB" in logged
    assert "the locked-memory limit is 512 KiB; raise `ulimit -l`" in logged
    assert lines.count("False") == 2
