"""The models of tests/step are used here too; and processes of their own, cheaply."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "step"))

FORKER = """
import gc, json, os, sys
import torch, torch._dynamo
import offload.cli.finetune, offload.cli.training
torch.set_num_threads(1)
gc.freeze()  # or every child would copy all of it when it ends
for line in sys.stdin:
    code, folder, log = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{log}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(folder)
        exec(code, {"__name__": "__main__"})
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def run_forked(tmp_path_factory):
    """Runs code in a process of its own, which begins with torch there: to import it is most of the work.

    Such a process ends as any other, with a status, handlers and the interpreter's end.
    """
    log = tmp_path_factory.mktemp("forked")
    folders = [TESTS.parent, *(TESTS / name for name in ("faults", "step"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", FORKER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as forker:

        def run(code, folder=log):
            forker.stdin.write(json.dumps([code, str(folder), str(log)]) + "\n")
            forker.stdin.flush()
            status = int(forker.stdout.readline())
            output, errors = ((log / name).read_text() for name in ("out", "err"))
            return subprocess.CompletedProcess(code, status, output, errors)

        yield run
        os.killpg(forker.pid, signal.SIGKILL)  # whatever a test that failed has left running, too
