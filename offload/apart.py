"""The engine's own work inside user code: apart from whatever watches, traces or transforms what users compute.

Hooks run in the middle of a forward, where torch.compile may be tracing, a checkpoint be recording what it sees, or
torch.func be differentiating. None of that is meant for the engine's tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame  # in C: `torch._dynamo` itself takes seconds to import
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Hook = TypeVar("Hook", bound=Callable[..., Any])


def left_alone(hook: Hook) -> Hook:
    """torch.compile does not look into the hook, nor into what it calls: it compiles what is before and after it."""
    _skip(hook.__code__)
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    hook._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "offload moves weights here; compile without fullgraph=True, or compile the parts between"
    )
    return hook


def _skip(code: CodeType) -> None:
    if hasattr(eval_frame, "skip_code"):  # torch < 2.7
        eval_frame.skip_code(code)
        return
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))


class Apart:
    """While open: no compiler, no mode, no transform and no tensor subclass sees what torch is asked to do.

    But for dispatch modes that say they are the engine's own (``sees_engine``), where there is no other.
    """

    __slots__ = ("_guards", "_tracing")

    @left_alone
    def __enter__(self) -> None:
        self._tracing = eval_frame.set_eval_frame(None)
        self._guards = [torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch()]
        if not _only_ours():
            self._guards.append(torch._C._DisableTorchDispatch())
        for guard in self._guards:
            guard.__enter__()

    @left_alone
    def __exit__(self, *error: object) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)
        eval_frame.set_eval_frame(self._tracing)


def _only_ours() -> bool:
    """Whether every dispatch mode that is active belongs to the engine."""
    if not torch._C._len_torch_dispatch_stack():
        return True
    return all(getattr(mode, "sees_engine", False) for mode in _get_current_dispatch_mode_stack())
