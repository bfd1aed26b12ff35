"""fio as a yardstick for ``offload bench io``: the same loads on the same file, where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Any

from ..errors import OffloadError
from ..machine import IoSettings
from .loads import Sample, ScratchFile

ENGINES = ("io_uring", "libaio")
HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""fio's buffers in huge pages, as ours are: where a drive takes few segments, that alone can double what it gives."""
_RW = {"read": "read", "write": "write", "mixed": "rw"}


class Fio:
    """An installed fio."""

    def __init__(self, program: str, version: str, engines: tuple[str, ...]) -> None:
        self._program, self.version, self.engines = program, version, engines

    @classmethod
    def find(cls) -> Fio | None:
        """None where none is installed, or it does not run."""
        program = shutil.which("fio")
        if program is None:
            return None
        try:
            version = _output([program, "--version"]).strip()
            listed = _output([program, "--enghelp"]).split()
        except (OSError, subprocess.SubprocessError):
            return None
        return cls(program, version, tuple(name for name in ENGINES if name in listed))

    def run(self, file: ScratchFile, engine: str, settings: IoSettings, load: str, size: int) -> Sample:
        """Moves ``size`` bytes, read and written together.

        Raises:
            OffloadError: fio failed.
        """
        command = [
            self._program, "--name=offload", f"--filename={file.path_for(os.getpid())}", "--allow_file_create=0",
            f"--rw={_RW[load]}", "--rwmixread=50", f"--bs={settings.block_size}", f"--iodepth={settings.queue_depth}",
            f"--ioengine={engine}", "--direct=1", f"--size={file.filled}", f"--io_size={size}", "--thread",
            "--invalidate=0", "--output-format=json",
        ]  # fmt: skip
        try:
            text = _output(command)
            job: dict[str, Any] = json.loads(text[text.index("{") :])["jobs"][0]
            return _sample(job)
        except subprocess.CalledProcessError as error:
            reason = " ".join((error.stderr or error.stdout or "").split())[:200]
            raise OffloadError(f"fio with {engine} failed: {reason}") from error
        except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
            raise OffloadError(f"fio with {engine} failed: {error}") from error


def _sample(job: dict[str, Any]) -> Sample:
    read, write = job["read"], job["write"]
    seconds = max(read["runtime"], write["runtime"]) / 1e3
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
    return Sample(int(read["io_bytes"]), int(write["io_bytes"]), seconds, cpu)


def _output(command: list[str]) -> str:
    environment = {**os.environ, "GLIBC_TUNABLES": HUGE_PAGES}
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    return result.stdout
