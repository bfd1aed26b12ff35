"""Ctrl-C anywhere in the engine, caught by the loop: the run goes on as if the batch had not been, or says no."""

import collections
import contextlib
import functools
import random
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from test_engine_faults import Tiny, config

import offload
from offload.errors import OffloadError, TransferError

pytestmark = pytest.mark.timeout(120)
PACKAGE = str(Path(offload.__file__).parent)
FILES = {
    f"{PACKAGE}/{name}.py"
    for name in (
        "blocks",
        "engine",
        "gradients",
        "landing",
        "lift",
        "mover",
        "pipeline",
        "schedule",
        "weights",
    )
}
STEPS = 3
PARTS = 4


Place = tuple[str, int]
"""A line of the engine: its file and number."""


class CtrlC:
    """Raises KeyboardInterrupt at the n-th time that a line of the engine is about to run; else counts all lines."""

    def __init__(self, at=None, times=1):
        self.at = at
        self.left = times
        self.counts = collections.Counter()
        self._files = FILES if at is None else {f"{PACKAGE}/{at[0]}"}

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _call(self, frame, event, _arg):
        if frame.f_code.co_filename not in self._files:
            return None
        return self._count if self.at is None else self._interrupt

    def _count(self, frame, event, _arg):
        if event == "line":
            self.counts[Path(frame.f_code.co_filename).name, frame.f_lineno] += 1
        return self._count

    def _interrupt(self, frame, event, _arg):
        if event == "line" and frame.f_lineno == self.at[1]:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt("{}:{}".format(*self.at))
        return self._interrupt


def batch(step):
    return torch.full((2, 48), 0.1 * (step + 1))


def run(swap_path, update, at=None, times=1, order=range(STEPS)):
    """Trains; a batch that is interrupted is taken again.

    Returns:
        The weights, or what the engine said where it stopped; the batch that was interrupted; how often each
        line ran.
    """
    model, optimizer = offload.prepare(Tiny(), config(swap_path, update, "fp32"))
    interrupted = place = None
    with contextlib.closing(optimizer.engine) as engine:
        with CtrlC(at, times) as keyboard:
            for step in order:
                for _ in range(2):
                    try:
                        model(batch(step)).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        break
                    except KeyboardInterrupt as error:
                        interrupted, place = step, str(error)
                        optimizer.zero_grad()
                    except OffloadError as error:
                        assert interrupted is not None
                        with pytest.raises(OffloadError, match="the engine stopped in step"):
                            model(batch(0))
                        return f"{error}, interrupted at {place}", interrupted, keyboard.counts
        engine.settle()
        state = model.state_dict()
        assert not any(copy.leases for copy in engine.weights.mover.residency.copies)
        return state, interrupted, keyboard.counts


@functools.cache
def without(update, order=tuple(range(STEPS))):
    with tempfile.TemporaryDirectory() as folder:
        return run(folder, update, order=order)


@pytest.fixture(autouse=True, scope="module")
def _warm():
    """torch starts its own threads at the first backward: they are not ours to count."""
    without("step")


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("update", ["step", "backward"])
def test_ctrl_c_at_any_line(update, part, swap_path, nothing_left_behind):
    order = tuple(range(STEPS))
    counts = without(update, order)[2]
    rng = random.Random(part)
    for at in sorted(counts)[part::PARTS]:
        times = rng.randint(1, counts[at])
        outcome, interrupted, _ = run(swap_path, update, at, times)
        assert list(swap_path.iterdir()) == []
        if isinstance(outcome, str):
            reasons = (
                r"the engine stopped in step \d: \w+.py:\d+",
                "broke off",
                "allows one backward per step",
            )
            assert any(re.search(reason, outcome) for reason in reasons), outcome
            continue
        # After the last update the step is whole, as with torch: the batch then counts twice.
        twice = (*range(interrupted + 1), *range(interrupted, STEPS)) if interrupted is not None else order
        references = [without(update, each)[0] for each in (order, twice)]
        assert any(all(torch.equal(outcome[n], ref[n]) for n in ref) for ref in references), (
            f"interrupted at {at}, the {times}th time, in batch {interrupted}"
        )


@pytest.mark.parametrize("update", ["step", "backward"])
def test_ctrl_c_while_weights_are_waited_for_in_forward(update, swap_path, monkeypatch):
    """The read goes on into the slot that is its own; nothing is half-done, and nothing stops."""
    model, optimizer = offload.prepare(Tiny(8), config(swap_path, update, "fp32"))
    reference = Tiny(8)
    with contextlib.closing(optimizer.engine) as engine:
        real, left = offload.aio.Ticket.wait, [0]

        def wait(ticket, timeout=None):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return real(ticket, timeout)

        with torch.no_grad():
            monkeypatch.setattr("offload.aio.Ticket.wait", wait)
            for at in range(1, 12):
                left[0] = at
                with contextlib.suppress(KeyboardInterrupt):
                    model(batch(0))
                left[0] = 0
                torch.testing.assert_close(model(batch(0)), reference(batch(0)))
        assert not any(copy.leases for copy in engine.weights.mover.residency.copies)
        engine.settle()


@pytest.mark.parametrize("update", ["step", "backward"])
def test_an_update_that_is_broken_off_stops_the_engine(update, swap_path, monkeypatch):
    model, optimizer = offload.prepare(Tiny(), config(swap_path, update))
    with contextlib.closing(optimizer.engine) as engine:
        x = batch(0).bfloat16()
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

        def interrupted(*_args):
            raise KeyboardInterrupt

        monkeypatch.setattr(engine.optimizer, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(x).backward()
            optimizer.step()
        monkeypatch.undo()
        for use in (lambda: model(x), optimizer.step, engine.settle, model.state_dict):
            with pytest.raises(OffloadError, match="the engine stopped in step 2: KeyboardInterrupt"):
                use()
        assert engine.report().steps == 1


def test_a_backward_that_breaks_off_before_any_update_changes_nothing(swap_path):
    """Its partial gradients are not applied by the next forward."""
    results = []
    for breaks in (False, True):
        model, optimizer = offload.prepare(Tiny(), config(swap_path, "backward", "fp32"))
        with contextlib.closing(optimizer.engine):
            if breaks:
                handle = model.blocks[2].weight.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model(batch(0)).backward()
                handle.remove()
                optimizer.zero_grad()
            for step in range(2):
                model(batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(model.state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name])


def test_a_backward_that_breaks_off_among_updates_stops_the_engine(swap_path):
    model, optimizer = offload.prepare(Tiny(), config(swap_path, "backward", "fp32"))
    with contextlib.closing(optimizer.engine):
        model.blocks[0].weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(batch(0)).backward()
        with pytest.raises(OffloadError, match=r"broke off after [12] of 3 units had been updated.*restart"):
            model(batch(0))
        with pytest.raises(OffloadError, match="the engine stopped in step 1"):
            model.state_dict()


def test_a_failed_transfer_is_no_less_a_stop(swap_path, monkeypatch):
    model, optimizer = offload.prepare(Tiny(), config(swap_path))
    with contextlib.closing(optimizer.engine) as engine:
        error = TransferError(5, "write", "planes.swap", offset=0, size=1, done=0)

        def fails(*_args):
            raise error

        monkeypatch.setattr(engine._store, "write_weight", fails)
        model(batch(0).bfloat16()).backward()
        with pytest.raises(TransferError):
            optimizer.step()
        with pytest.raises(OffloadError, match=r"the engine stopped in step 1: .*write failed"):
            optimizer.step()


class Slow(Tiny):
    """A forward in which Ctrl-C comes, in user code, two modules deep."""

    def forward(self, x):
        if self.training:
            return super().forward(x)
        self.blocks[0].register_forward_hook(lambda *_: self.interrupt())
        return super().forward(x)

    def interrupt(self):
        self.blocks[0]._forward_hooks.popitem()
        raise KeyboardInterrupt


@pytest.mark.parametrize("then", ["forward", "attribute", "state_dict"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_ctrl_c_in_a_forward_leaves_nothing_open(update, then, swap_path):
    """torch does not call hooks after a forward that Ctrl-C has ended: neither leases nor saved-tensor hooks stay."""
    model, optimizer = offload.prepare(Slow(6), config(swap_path, update, "fp32"))
    reference = Tiny(6)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.0)
    packed = []
    with contextlib.closing(optimizer.engine) as engine:
        for step in range(4):
            with contextlib.suppress(KeyboardInterrupt):
                model.eval()(batch(step))
            if then == "attribute":
                assert torch.equal(model.blocks[4].weight, engine_value(engine, "blocks.4.weight"))
            if then == "state_dict":
                model.state_dict()
            # Hooks of the user, active while ours are taken off from below them.
            with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda packed: packed):
                (torch.ones(1, requires_grad=True) ** 2).sum()
                with torch.no_grad():
                    model.train()(batch(step))
                before = len(packed)
                (torch.ones(1, requires_grad=True) ** 2).sum()
                assert len(packed) == before + 1, "the user's hooks are still active"
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, "and ours are not"
            for each, of in ((model, optimizer), (reference, expected)):
                each(batch(step)).backward()
                of.step()
                of.zero_grad()
            torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()))
        assert not any(copy.leases for copy in engine.weights.mover.residency.copies)


def engine_value(engine, name):
    stored = next(stored for stored in engine.partition.trainable if stored.name == name)
    return offload.read_master(engine, stored)
