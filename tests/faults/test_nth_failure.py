"""The N-th transfer fails, for N = 1, 2, 3, ... until the run passes: on every backend, with every errno.

Whatever N is, the outcome is one of two: the values of a run without faults, bit for bit, or an error that names
operation, path, offset and bytes, after which the engine claims no step that was not made and gives no value
away. `make soak` runs the whole product, `make test` each backend and each errno.
"""

import contextlib
import errno
import functools
import itertools
import os
from pathlib import Path

import pytest
import torch
from leaks import assert_as, held
from test_engine_faults import Tiny, config

import offload
from offload import aio
from offload.errors import OffloadError, TransferError

pytestmark = pytest.mark.timeout(300)

UPDATES = ("step", "backward")
REASONS = aio.probe()
FATAL = (errno.EIO, errno.ENOSPC)
PASSING = (errno.EINTR, errno.EAGAIN, errno.EINVAL)
"""One of these is survived: tried again or, EINVAL, through the page cache."""
STEPS = 3


def cases(codes, quick):
    """Every (code, update, backend); all but those of `quick` run in `make soak` only."""
    params = []
    for code, update, backend in itertools.product(codes, UPDATES, REASONS):
        marks = [pytest.mark.skipif(REASONS[backend] is not None, reason=str(REASONS[backend]))]
        if (code, update, backend) not in quick:
            marks.append(pytest.mark.soak)
        params.append(
            pytest.param(code, update, backend, marks=marks, id=f"{errno.errorcode[code]}-{update}-{backend}")
        )
    return params


def loop(model, optimizer):
    """Counts the steps whose end was told to the loop."""
    for step in range(STEPS):
        model(torch.full((2, 48), 0.1 * (step + 1), dtype=torch.bfloat16)).backward()
        optimizer.step()
        yield step + 1
        optimizer.zero_grad()


def values(model, optimizer):
    """Every plane of the state: weights, masters, moments."""
    state = optimizer.state_dict()["state"]
    planes = {f"{index}.{name}": plane for index in state for name, plane in state[index].items()}
    return {**model.state_dict(), **planes}


@functools.cache
def undisturbed(update):
    settings = config("/unused", update)
    for home in ("offload_param", "offload_optimizer"):
        settings["zero_optimization"][home]["device"] = "cpu"
    model, optimizer = offload.prepare(Tiny(), settings)
    with contextlib.closing(optimizer.engine):
        for _ in loop(model, optimizer):
            pass
        return values(model, optimizer)


class Outcome:
    """What became of one run: `error` or `values`, and at which stage."""

    def __init__(self, swap_path, update, settings, **block):
        self.error, self.values, self.prepared = None, None, False
        model, before = Tiny(), Tiny()
        try:
            model, optimizer = offload.prepare(model, config(swap_path, update, aio=settings, **block))
        except OffloadError as error:
            self.error = error
            if not isinstance(error, TransferError):  # the way back is gone, too: it says so
                assert "cannot be read back" in str(error) and "build the model anew" in str(error)
                self.error = error.__cause__
            else:
                for name, value in before.state_dict().items():
                    assert torch.equal(model.state_dict()[name], value), "the model is as it was given"
            assert list(swap_path.iterdir()) == []
            return
        self.prepared, engine, told = True, optimizer.engine, 0
        with contextlib.closing(engine):
            try:
                for told in loop(model, optimizer):  # noqa: B007
                    pass
                self.values = values(model, optimizer)
            except OffloadError as error:
                self.error = error if isinstance(error, TransferError) else error.__cause__
                assert isinstance(self.error, TransferError), error
                assert engine.ledger.steps == told
                refuses_everything(model, optimizer, told)
        assert list(swap_path.iterdir()) == []


def refuses_everything(model, optimizer, steps):
    """No value of a state that is that of no step gets out."""
    engine = optimizer.engine
    for use in (
        lambda: model(torch.ones(2, 48, dtype=torch.bfloat16)),
        lambda: optimizer.step(),
        lambda: engine.settle(),
        lambda: model.state_dict(),
        lambda: optimizer.state_dict(),
        lambda: offload.read_master(engine, engine.partition.trainable[0]),
    ):
        with pytest.raises(OffloadError, match=rf"the engine stopped in step {steps + 1}: "):
            use()
    assert engine.report().steps == steps


def assert_names_the_place(error, code, swap_path):
    assert error.errno == code and error.operation in ("read", "write")
    assert Path(error.filename).name == "planes.swap" and Path(error.filename).is_relative_to(swap_path)
    place = f"{error.done} of {error.size} bytes at offset {error.offset}"
    assert f"{error.operation} failed: {os.strerror(code)}; {place}" in str(error)
    assert 0 <= error.done < error.size
    assert ("free on its file system" in str(error)) == (code == errno.ENOSPC)


def sweep(swap_path, update, settings, faulty, numbers=range(1, 400), **faults):
    """Outcomes for N = 1, 2, 3, ..., each of which has left nothing behind."""
    expected, before = undisturbed(update), held()
    for n in numbers:
        faulty(fail_at=n, **faults)
        outcome = Outcome(swap_path, update, settings)
        assert_as(before)
        if outcome.error is None:
            assert outcome.values.keys() == expected.keys()
            for name, value in outcome.values.items():
                assert torch.equal(value, expected[name]), name
        yield outcome


@pytest.mark.parametrize(
    ("code", "update", "backend"),
    cases(
        FATAL,
        {(errno.EIO, UPDATES[number % 2], name) for number, name in enumerate(REASONS)}
        | {(errno.EIO, "step", "io_uring"), (errno.ENOSPC, "step", "threads")},
    ),
)
def test_a_failure_is_an_error_and_no_step(code, update, backend, swap_path, faulty):
    stages = {False: 0, True: 0}
    for outcome in sweep(swap_path, update, {"backend": backend}, faulty, fail_errno=code):
        if outcome.error is None:
            break
        assert_names_the_place(outcome.error, code, swap_path)
        stages[outcome.prepared] += 1
    else:
        pytest.fail("never succeeded")
    assert stages[False] > 5 and stages[True] > 40, "prepare, steps and the reading of values were all hit"


@pytest.mark.parametrize(
    ("code", "update", "backend"),
    cases(
        PASSING,
        {(errno.EINTR, "step", "io_uring"), (errno.EAGAIN, "backward", "threads")}
        | {(errno.EINVAL, "step", "python"), (errno.EINVAL, "backward", "io_uring")},
    ),
)
def test_what_passes_is_survived(code, update, backend, swap_path, faulty):
    """Refused for the moment at any transfer: the same bits."""
    for outcome in sweep(swap_path, update, {"backend": backend}, faulty, range(1, 60), fail_errno=code):
        assert outcome.error is None, outcome.error


@pytest.mark.parametrize(
    ("code", "update", "backend"),
    cases(
        PASSING,
        {(errno.EINTR, "backward", "libaio"), (errno.EINVAL, "step", "threads")},
    ),
)
def test_what_does_not_pass_is_an_error(code, update, backend, swap_path, faulty):
    """Refused for good from the N-th transfer on, page cache forbidden: retries have a limit."""
    settings = {"backend": backend, "direct_io": "required"}
    numbers = (1, 40)
    for outcome in sweep(swap_path, update, settings, faulty, numbers, fail_errno=code, fail_count=1 << 40):
        assert_names_the_place(outcome.error, code, swap_path)


@pytest.mark.parametrize("backend", [name for name in REASONS if REASONS[name] is None])
def test_a_write_that_is_torn_in_silence_is_found(backend, swap_path, faulty):
    """The drive says yes and stores a part. With checksums: the right values, or an error, whatever N is."""
    update = UPDATES[len(backend) % 2]
    expected, found = undisturbed(update), 0
    for n in range(1, 60, 3 if backend == "io_uring" else 6):
        faulty(tear_silently_at=n, seed=n)
        outcome = Outcome(swap_path, update, {"backend": backend}, durability={"verify": "always"})
        if outcome.error is not None:
            assert outcome.error.errno == errno.EBADMSG and "crc32c" in str(outcome.error)
            found += 1
        else:
            for name, value in outcome.values.items():
                assert torch.equal(value, expected[name]), name
    assert found > (3 if backend == "io_uring" else 1)


LOST = """
import contextlib, functools, os, time
os.environ["OFFLOAD_IO_TIMEOUT_SECONDS"] = "0.4"
import offload
from offload import aio
from test_engine_faults import Tiny, config, train
swap, backend = {swap!r}, {backend!r}
for n in (3, 30):
    begun = time.monotonic()
    offload.store.drives.Queue = functools.partial(aio.Queue, faults={{"lose_at": n}})
    try:
        model, optimizer = offload.prepare(Tiny(), config(swap, aio={{"backend": backend}}))
        with contextlib.closing(optimizer.engine):
            train(model, optimizer, 3)
            model.state_dict()
    except offload.OffloadError as error:
        print("ETIMEDOUT" if "has not been answered for 0.4 s" in str(error) else error, os.listdir(swap))
    print(time.monotonic() - begun < 20, flush=True)
"""


@pytest.mark.parametrize("backend", [name for name in REASONS if REASONS[name] is None])
def test_an_answer_that_never_comes_is_an_error(backend, swap_path, run_forked):
    """In prepare, and in a step: nothing hangs, closing works, the files are gone, and so is the process."""
    result = run_forked("import offload.store.drives\n" + LOST.format(swap=str(swap_path), backend=backend))
    assert result.stdout.splitlines() == ["ETIMEDOUT []", "True"] * 2, result.stdout + result.stderr
    assert result.returncode == 0
