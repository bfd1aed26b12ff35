"""Leaving a run in every way that Python allows, forks included: no file, thread or descriptor stays."""

import contextlib
import copy
import gc
import io
import pickle
import subprocess
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from leaks import assert_as, held
from test_engine_faults import Tiny, config, train
from torch import nn

import offload
from offload import metrics
from offload.errors import OffloadError

ROOT = Path(offload.__file__).parents[1]
pytestmark = pytest.mark.timeout(120)

COMMON = """
import gc, os, random, resource, signal, sys, threading, time, warnings
import torch
import offload
from test_engine_faults import Tiny, config, train
swap = {swap!r}

def prepared(update="step", **block):
    return offload.prepare(Tiny(), config(swap, update, **block))

def swap_left():
    return sorted(os.listdir(swap))
"""


@pytest.fixture
def run(swap_path, run_forked):
    """Runs a script that finds `prepared`, `train` and `swap_left`."""
    return lambda script: run_forked(COMMON.format(swap=str(swap_path)) + script)


WAYS_OUT = """
def child(way):
    model, optimizer = prepared()
    train(model, optimizer, 2)
    if way == "exception":
        raise KeyError("a mistake in the loop")
    if way == "sys.exit":
        sys.exit(3)
    if way == "in backward":
        model.blocks[0].weight.register_hook(lambda grad: 1 / 0)
        train(model, optimizer, 1)

for way in ("end of script", "exception", "sys.exit", "in backward"):
    pid = os.fork()
    if pid == 0:
        sys.stderr = open(os.devnull, "w")
        child(way)
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(way, status, swap_left(), flush=True)
"""


def test_ways_out(run):
    result = run(WAYS_OUT)
    assert result.stdout.splitlines() == [
        "end of script 0 []", "exception 1 []", "sys.exit 3 []", "in backward 1 []",
    ], result.stderr  # fmt: skip


SIGNALS = """
def child(number, seconds, update):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0)
    killer = os.getpid()
    threading.Timer(seconds, os.kill, (killer, number)).start()
    while True:
        model, optimizer = prepared(update)
        train(model, optimizer, 4)
        optimizer.engine.close()
        del model, optimizer

rng = random.Random(7)
kinds = [(s, u) for s in (signal.SIGTERM, signal.SIGINT) for u in ("step", "backward") * 5]
moments = [(number, rng.uniform(0.0, 0.3), update) for number, update in kinds]
for number, seconds, update in moments:
    pid = os.fork()
    if pid == 0:
        sys.stderr = open(os.devnull, "w")
        child(number, seconds, update)
    begun = time.monotonic()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seconds = time.monotonic() - begun
    print(number.name, status, swap_left(), seconds < 30, flush=True)
"""


def test_signals_at_random_moments(run):
    """Ten moments each, in prepare, in steps, in close: gone within seconds, with the signal's own status."""
    result = run(SIGNALS)
    lines = result.stdout.splitlines()
    assert lines[:10] == ["SIGTERM -15 [] True"] * 10, result.stdout + result.stderr
    assert len(lines) == 20
    for line in lines[10:]:  # the interpreter ends by SIGINT or with 130 or 1, as the moment has it
        assert line.startswith("SIGINT ") and line.endswith("[] True"), result.stdout


WORST_MOMENTS = """
import offload.construct
from offload.store.directory import SwapDirectory

def die(*_):
    os.kill(os.getpid(), signal.SIGTERM)

def child(moment):
    if moment == "prepare":
        real, calls = offload.construct.initial_value, []
        def source(param):
            calls.append(param)
            if len(calls) == 4:
                die()
            return real(param)
        offload.construct.initial_value = source
    model, optimizer = prepared()
    train(model, optimizer, 1)
    engine = optimizer.engine
    if moment == "backward":
        model.blocks[1].weight.register_hook(die)
        train(model, optimizer, 1)
    if moment == "close":
        engine.weights.close = die
        engine.close()
    if moment == "a close that raises":
        engine.weights.close = lambda: 1 / 0
        other_model, other_optimizer = prepared()
        die()

for moment in ("prepare", "backward", "close", "a close that raises"):
    pid = os.fork()
    if pid == 0:
        sys.stderr = open(os.devnull, "w")
        child(moment)
        os._exit(77)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(moment, status, swap_left(), flush=True)
"""


def test_sigterm_at_the_worst_moments(run):
    """Where weights are on their way home, in backward, in close, and where closing another engine fails."""
    result = run(WORST_MOMENTS)
    assert result.stdout.splitlines() == [
        "prepare -15 []", "backward -15 []", "close -15 []", "a close that raises -15 []",
    ], result.stderr  # fmt: skip


KILLED = """
pid = os.fork()
if pid == 0:
    model, optimizer = prepared()
    train(model, optimizer, 2)
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(pid, 0)
left = swap_left()
print(len(left), flush=True)
model, optimizer = prepared()
print(len(swap_left()), left[0] in swap_left(), flush=True)
train(model, optimizer, 1)
"""


def test_i07_the_next_run_removes_what_kill_9_left(run):
    result = run(KILLED)
    assert result.stdout.splitlines() == ["1", "1 False"], result.stderr
    assert "removing the swap directory of a run that has ended" in result.stderr


WORKERS = """
from torch.utils.data import DataLoader
warnings.simplefilter("ignore")

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.full((48,), 0.1 * index, dtype=torch.bfloat16)

early = iter(DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork"))
next(early)
model, optimizer = prepared()
for epoch in range(3):
    for batch in DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context="fork"):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(swap_left()) == 1, "a worker has removed its parent's files"
sum(1 for _ in early)
pid = os.fork()  # in the middle of transfers
if pid == 0:
    sys.exit(0)
model(batch).backward()
optimizer.step()
print(os.waitpid(pid, 0)[1], optimizer.engine.report().steps, len(swap_left()))
"""


def test_i15_workers_forked_before_and_after_touch_nothing(run):
    result = run(WORKERS)
    assert result.stdout.split() == ["0", "13", "1"], result.stdout + result.stderr


CHILDREN = """
def refuses(use):
    try:
        use()
    except (ValueError, offload.OffloadError) as error:
        return "belongs to process" in str(error)

def child(way):
    if way == "exception":
        raise KeyError("a mistake in a worker")
    if way == "sys.exit":
        sys.exit(3)
    if way == "abort":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
    if way in ("SIGKILL", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, way))
    if way == "close":
        engine.close()
    if way == "use":
        assert refuses(lambda: model(x)) and refuses(lambda: model(x))
    if way == "end":
        globals().pop("model"), globals().pop("optimizer"), globals().pop("engine")
        gc.collect()
    sys.exit(0)

def losses(ways):
    global model, optimizer, engine, x
    model, optimizer = offload.prepare(Tiny(8), config(swap))
    engine, x = optimizer.engine, torch.full((2, 48), 0.1, dtype=torch.bfloat16)
    seen = []
    for way in ways:
        loss = model(x)  # reads ahead are in flight
        if way:
            pid = os.fork()
            if pid == 0:
                sys.stderr = open(os.devnull, "w")
                child(way)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            print(way, status, len(swap_left()), flush=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    engine.close()
    return seen

ways = ["exception", "sys.exit", "abort", "SIGKILL", "SIGTERM", "close", "use", "end"]
forked = losses(ways)
print(forked == losses([None] * len(ways)), swap_left())
"""


def test_i15_a_child_that_crashes_or_closes_hurts_nothing(run):
    result = run(CHILDREN)
    assert result.stdout.splitlines() == [
        "exception 1 1", "sys.exit 3 1", "abort -6 1", "SIGKILL -9 1", "SIGTERM -15 1", "close 0 1", "use 0 1",
        "end 0 1", "True []",
    ], result.stdout + result.stderr  # fmt: skip


FILE_LIMIT = """
def limit():
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))

if not later:
    limit()
try:
    model, optimizer = prepared()
    if later:
        train(model, optimizer, 1)
        optimizer.engine.settle()
        limit()
    train(model, optimizer, 3)
except offload.TransferError as error:
    print(error)
    if later:
        optimizer.engine.close()
print(swap_left())
"""


@pytest.mark.parametrize("later", [False, True])
def test_i02_file_size_limit(later, run):
    """Before prepare, and lowered in the middle of the run."""
    result = run(f"later = {later}\n{FILE_LIMIT}")
    message, left = result.stdout.splitlines()
    assert "File too large" in message and "RLIMIT_FSIZE is 8.00 KiB" in message and "planes.swap" in message
    assert left == "[]", result.stderr


def test_i02_small_file_system(tmp_path, nothing_left_behind):
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    try:
        with pytest.raises(OffloadError, match=r"swap file needs .* KiB and .* KiB are free on .*\(tmpfs\)"):
            offload.prepare(Tiny(), config(folder))
        assert list(folder.iterdir()) == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_m05_ten_engines_one_after_another(update, swap_path):
    def once():
        model, optimizer = offload.prepare(Tiny(), config(swap_path, update))
        train(model, optimizer, 2)
        optimizer.engine.close()
        optimizer.engine.close()

    once()
    gc.collect()
    before, rss = held(), metrics.rss_bytes()
    for _ in range(10):
        once()
        assert list(swap_path.iterdir()) == []
    gc.collect()
    assert_as(before)
    assert metrics.rss_bytes() - rss < 50 << 20


def test_i08_s14_two_engines_of_equal_shapes_do_not_mix(swap_path):
    """Interleaved steps give what each gives alone."""

    def build(seed):
        model = Tiny()
        torch.manual_seed(seed)
        for param in model.parameters():
            torch.nn.init.normal_(param, std=0.1)
        return offload.prepare(model, config(swap_path))

    alone = []
    for seed in (1, 2):
        model, optimizer = build(seed)
        with contextlib.closing(optimizer.engine):
            train(model, optimizer, 4)
            alone.append(model.state_dict())
    first, second = build(1), build(2)
    for _ in range(1):
        x = [torch.full((2, 48), 0.1 * (step + 1), dtype=torch.bfloat16) for step in range(4)]
        for batch in x:
            for model, _ in (first, second):
                model(batch).backward()
            for _, optimizer in (second, first):
                optimizer.step()
                optimizer.zero_grad()
    for (model, optimizer), reference in zip((first, second), alone, strict=True):
        with contextlib.closing(optimizer.engine):
            for name, value in model.state_dict().items():
                assert torch.equal(value, reference[name])


def saved(model):
    torch.save(model, io.BytesIO())


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps, saved, torch.optim.swa_utils.AveragedModel])
def test_a_prepared_model_on_nvme_is_not_copied(copying, swap_path):
    """A copy would be the whole model in memory: refused with the way out, and nothing is hurt."""
    model, optimizer = offload.prepare(Tiny(), config(swap_path))
    with contextlib.closing(optimizer.engine) as engine:
        train(model, optimizer, 1)
        with pytest.raises(OffloadError, match=r"cannot be copied or pickled.*state_dict"):
            copying(model)
        with pytest.raises(OffloadError, match="engine cannot be copied or pickled"):
            copying(engine)
        train(model, optimizer, 1)
        fresh = Tiny().to(torch.bfloat16)
        fresh.load_state_dict(copy.deepcopy(model.state_dict()))
    copying(fresh)


def loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def in_host_memory(swap_path, state="cpu"):
    settings = config(swap_path)
    settings["zero_optimization"]["offload_param"]["device"] = "cpu"
    settings["zero_optimization"]["offload_optimizer"]["device"] = state
    return settings


@pytest.mark.parametrize("copying", [copy.deepcopy, loaded])
@pytest.mark.parametrize("state", ["cpu", "nvme"])
def test_a_prepared_model_in_host_memory_is_copied_as_an_ordinary_one(copying, state, swap_path):
    x = torch.full((2, 48), 0.1, dtype=torch.bfloat16)
    model, optimizer = offload.prepare(Tiny(), in_host_memory(swap_path, state))
    model.blocks[0].register_forward_hook(times_two)
    with contextlib.closing(optimizer.engine) as engine:
        train(model, optimizer, 1)
        copied, expected = copying(model), model(x)
        again = copying(copied)
        for module in (*copied.modules(), *again.modules()):
            names = set(vars(module)) - set(vars(Tiny())) - set(vars(nn.Linear(1, 1)))
            assert not names, "an ordinary module"
            hooks = [len(v) for v in vars(module).values() if isinstance(v, OrderedDict) and v]
            assert hooks in ([], [1]), "the user's hook, and none of ours"
        for param in copied.parameters():
            assert param.untyped_storage().nbytes() == param.nbytes and not vars(param)
        assert torch.equal(copied(x), expected) or torch.allclose(copied(x), expected, rtol=1e-2)
        before = {name: value.clone() for name, value in copied.state_dict().items()}
        steps = engine.report().steps
        train(model, optimizer, 1)
        for name, value in copied.state_dict().items():
            assert torch.equal(value, before[name]), "independent of the engine's weights"
        train(copied, torch.optim.SGD(copied.parameters(), 0.1), 1)
        assert engine.report().steps == steps + 1, "the engine does not see it"
    for module in model.modules():
        assert "__getstate__" not in vars(module) and "forward" not in vars(module)
    assert not any(vars(param) for param in model.parameters())


def times_two(_module, _args, output):
    return output * 2


def test_averaged_weights_of_a_model_in_host_memory(swap_path):
    """torch's own averaging, over the engine and over the same weights kept by hand."""
    model, optimizer = offload.prepare(Tiny(), in_host_memory(swap_path))
    with contextlib.closing(optimizer.engine):
        decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)
        expected = None
        for _ in range(3):
            train(model, optimizer, 1)
            averaged.update_parameters(model)
            now = {name: value.float() for name, value in model.state_dict().items()}
            expected = now if expected is None else {n: 0.5 * expected[n] + 0.5 * now[n] for n in now}
        for name, value in averaged.module.state_dict().items():
            torch.testing.assert_close(value.float(), expected[name], rtol=1e-2, atol=1e-3)
        averaged(torch.full((2, 48), 0.1, dtype=torch.bfloat16))


def uses(storage):
    return torch._C._storage_Use_Count(storage._cdata)


def test_a_dropped_graph_frees_its_activations_at_once(swap_path):
    """No reference cycle goes through a hook or a saved tensor: memory does not wait for the collector."""
    model, optimizer = offload.prepare(Tiny(), config(swap_path))
    with contextlib.closing(optimizer.engine):
        train(model, optimizer, 1)
        gc.collect()
        gc.disable()
        try:
            x = torch.full((2, 48), 0.1, dtype=torch.bfloat16)
            storage = x.untyped_storage()
            loss = model(x)
            del x
            assert uses(storage) > 1, "the first block's gradient needs it"
            del loss
            assert uses(storage) == 1
        finally:
            gc.enable()
