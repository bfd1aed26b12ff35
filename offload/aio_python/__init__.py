"""The I/O core in Python, for machines without a compiler: the face of ``offload._aio``, over PyPI's ``libaio``.

Written apart from the compiled core and held to the same tests, so that each is a check on the other. It takes
twice the CPU time per byte. Use it as ``offload.aio.Queue(..., backend="python")``.
"""

from .engines import BackendError, libaio_refusal
from .queue import Queue, Ticket

__all__ = ["BackendError", "Queue", "Ticket", "libaio_refusal"]
