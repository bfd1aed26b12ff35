"""Loops as users write them, line by line, and what they start beside them: workers, processes, Ctrl-C.

Oracle: the same loop in plain PyTorch, whose losses and weights are the same, or one line that says what to do.
Random ones are in `test_random`.
"""

import contextlib
import math
import os
import signal

import pytest
import torch
from plain_adamw import PlainAdamW
from torch import nn

import offload
from offload import OffloadError

STEP = ["none", "nvme"]
ALL = ["none", "nvme", "nvme-backward"]
GROUP = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
WIDTH = 12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index == 3 and bool(x.isnan().any()):
                raise ValueError("a bad batch")
            x = torch.tanh(layer(x)) + x / 2
        return x

    def loss(self, x):
        return self(x).square().mean()


def config(home, swap_path, **settings):
    device, _, update = home.partition("-")
    path = {"device": device, "nvme_path": str(swap_path)}
    numbers = {"lr": 1e-2, "weight_decay": 0.01}
    return {
        "optimizer": {"type": "AdamW", "params": numbers},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 2048,
            "offload_param": path,
            "offload_optimizer": {**path, "update": update or "step"},
        },
        **settings,
    }


def seeded():
    torch.manual_seed(0)
    return Net()


def plain():
    model = seeded()
    return model, PlainAdamW([{"params": list(model.parameters())}], GROUP)


def rows(seed, count=4):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def compare(swap_path):
    """Runs a loop at a home and in plain PyTorch: what it returns and all weights have the same bits."""

    def call(home, loop, **settings):
        reference, expected = plain()
        wanted = loop(reference, expected)
        model, optimizer = offload.prepare(seeded(), config(home, swap_path, **settings))
        with contextlib.closing(optimizer.engine):
            got = loop(model, optimizer)
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
            torch.testing.assert_close(dict(model.state_dict()), dict(reference.state_dict()), rtol=0, atol=0)

    return call


@pytest.mark.parametrize("home", STEP)
@pytest.mark.parametrize("declared", [1, 4])
def test_windows_of_any_length(declared, home, compare):
    """Sums by hand, whatever the configuration says of micro-batches; evaluation and generation inside a window."""

    def loop(model, optimizer):
        seen = []
        for step, pieces in enumerate((1, 4, 2, 3)):
            for piece in range(pieces):
                loss = model.loss(rows(10 * step + piece)) / pieces
                loss.backward()
                with torch.no_grad() if piece % 2 else torch.inference_mode():
                    text = rows(99)
                    for _ in range(3):
                        text = model(text)
                seen += [loss.detach(), text.clone()]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    compare(home, loop, gradient_accumulation_steps=declared)


def apply(loss, optimizer):
    """One step, of a loss; its value."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("home", ALL)
def test_a_bad_batch_is_left_out(home, compare):
    """An exception in the middle of forward; the same batch once more, and the next one."""

    def loop(model, optimizer):
        seen = []
        for step in range(4):
            x = rows(step)
            for bad in (True, False) if step % 2 else (False,):
                try:
                    loss = model.loss(x * math.nan if bad else x)
                except ValueError:
                    continue
                seen.append(apply(loss, optimizer))
        return seen

    compare(home, loop)


@pytest.mark.parametrize("home", STEP)
def test_gradients_are_looked_at_and_changed(home, compare):
    def loop(model, optimizer):
        seen = []
        for step in range(4):
            for part in range(2):  # two backwards over one graph, then another
                loss = model.loss(rows(2 * step + part))
                loss.backward(retain_graph=part == 0)
                if part == 0:
                    (loss * 0.1).backward()
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).clone())
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            for layer in model.layers:
                layer.weight.grad[0].zero_()
            model.layers[1].weight.grad = None
            model.layers[2].weight.grad = model.layers[2].weight.grad.sign() * 1e-3
            optimizer.step()
            seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return seen

    compare(home, loop)


@pytest.mark.parametrize("home", ALL)
def test_a_closure_and_numbers_set_by_hand(home, compare):
    def loop(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model.loss(rows(step))
            loss.backward()
            return loss.detach()

        seen = []
        for step in range(4):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + step)
                group["weight_decay"] = 0.1 * (step == 2)
            seen.append(optimizer.step(closure).clone())
        return seen

    compare(home, loop)


@pytest.mark.parametrize("home", ALL)
def test_ctrl_c_and_on(home, compare):
    """A true signal, in forward and between the steps, that the loop catches."""

    def interrupt(*_args):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(10**6):  # Python looks for signals between two of its instructions
            pass

    def loop(model, optimizer):
        seen = []
        for step in range(4):
            handle = model.layers[2].register_forward_hook(interrupt) if step % 2 else None
            with contextlib.suppress(KeyboardInterrupt):
                model.loss(rows(step))
                interrupt()
            if handle is not None:
                handle.remove()
            loss = model.loss(rows(step))
            seen.append(apply(loss, optimizer))
        return seen

    compare(home, loop)


COMMON = """
import gc, multiprocessing, os, sys, warnings
import torch
from torch.utils.data import DataLoader, TensorDataset
import offload
from test_loops import WIDTH, config, plain, rows, seeded
warnings.simplefilter("ignore")
swap = {swap!r}

def swap_left():
    return sorted(os.listdir(swap))

def train(model, optimizer, x):
    loss = model.loss(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
"""

LOADERS = """
data = TensorDataset(torch.stack([rows(seed, 1)[0] for seed in range(8)]))

def loader(how):
    return DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=how, persistent_workers=True)

def losses(model, optimizer, loaders):
    seen = []
    for of in loaders:
        for (x,) in of:
            seen.append(train(model, optimizer, x))
        if home != "plain":
            assert len(swap_left()) == (home != "none"), "a worker has removed its parent's files"
    return seen

for home in ("plain", "none", "nvme", "nvme-backward"):
    early = loader("fork")
    next(iter(early))
    model, optimizer = plain() if home == "plain" else offload.prepare(seeded(), config(home, swap, accelerator="cpu"))
    loaders = [early, loader("fork"), loader("spawn" if home == "nvme" else "fork"), early]
    got = losses(model, optimizer, loaders)
    if home == "plain":
        expected = got
        continue
    optimizer.engine.close()
    del early, loaders
    gc.collect()
    print(home, got == expected, swap_left(), multiprocessing.active_children())
"""


@pytest.fixture
def run(swap_path, run_forked):
    return lambda script: run_forked(COMMON.format(swap=str(swap_path)) + script)


def test_workers_that_load_data(run):
    """Forked before and after `prepare`, spawned, and kept for several epochs."""
    result = run(LOADERS)
    assert result.stdout.splitlines() == [
        "none True [] []", "nvme True [] []", "nvme-backward True [] []",
    ], result.stdout + result.stderr  # fmt: skip


PROCESSES = """
def refuses(use):
    try:
        use()
    except (ValueError, offload.OffloadError) as error:
        return "belongs to process" in str(error) and "\\n" not in str(error)

def child(way):
    sys.stderr = open(os.devnull, "w")
    if way == "sys.exit":
        sys.exit(3)
    if way == "exception":
        raise KeyError("a mistake in a process")
    if way == "os._exit":
        os._exit(4)
    if way == "collect":
        globals().pop("model"), globals().pop("optimizer")
        gc.collect()
    if way == "close":
        optimizer.engine.close()
    if way == "train":  # a copy of what is in memory; of what is on nvme nothing
        if home == "none":
            train(model, optimizer, rows(50))
        else:
            assert refuses(lambda: [train(model, optimizer, rows(50)) for _ in range(3)])
    if way in ("save", "discard"):
        try:
            optimizer.engine.save_checkpoint() if way == "save" else optimizer.engine.discard()
        except Exception as error:
            assert "belongs to process" in str(error), error

def forked(way):
    pid = os.fork()
    if pid == 0:
        child(way)
        sys.exit(0)  # runs what is registered for the end of the interpreter
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def started(way):
    process = multiprocessing.get_context("fork").Process(target=child, args=(way,))
    process.start()
    process.join(60)
    return process.exitcode

def files():
    return {
        (folder, name, os.stat(f"{folder}/{name}").st_mtime_ns if name.endswith("json") else 0)
        for folder, _, names in os.walk(swap) for name in names
    }

ways = [(forked, way) for way in ("os._exit", "collect", "close", "train", "save", "discard")]
ways += [(started, "sys.exit"), (started, "exception"), (forked, "sys.exit")]
for home in ("plain", "none", "nvme"):
    model, optimizer = plain()
    if home != "plain":
        settings = {"durability": {"generations": 2}, "accelerator": "cpu"}  # nothing of a device outlives a fork
        model, optimizer = offload.prepare(seeded(), config(home, swap, **settings))
    got, statuses = [], []
    for step, (begin, way) in enumerate(ways):
        loss = model.loss(rows(step))  # reads ahead are in flight
        if home == "nvme" or (home == "none" and way in ("train", "sys.exit")):
            if way in ("save", "discard"):
                del loss
                optimizer.engine.save_checkpoint()
            before = files()
            statuses.append(begin(way))
            assert files() == before, way
            loss = model.loss(rows(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        got.append(loss.item())
    if home == "plain":
        expected = got
        continue
    optimizer.engine.discard()
    print(home, got == expected, statuses, swap_left(), flush=True)
"""


def test_processes_that_end_in_any_way(run):
    """``os.fork`` and ``multiprocessing``: they neither hang nor change a file nor remove the directory."""
    result = run(PROCESSES)
    assert result.stdout.splitlines() == [
        "none True [0, 3, 3] []", "nvme True [4, 0, 0, 0, 0, 0, 3, 1, 3] []",
    ], result.stdout + result.stderr  # fmt: skip


@pytest.mark.parametrize("home", ALL)
def test_a_second_window_before_the_step_is_added_or_refused(home, swap_path):
    """Two backwards and one step: their sum, or a line, where the update runs in backward."""
    model, optimizer = offload.prepare(seeded(), config(home, swap_path))
    with contextlib.closing(optimizer.engine):
        model.loss(rows(0)).backward()
        if home == "nvme-backward":
            with pytest.raises(OffloadError, match="to 'step'") as raised:
                model.loss(rows(1)).backward()
            assert "\n" not in str(raised.value)
            return
        model.loss(rows(1)).backward()
        reference, _ = plain()
        (reference.loss(rows(0)) + reference.loss(rows(1))).backward()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
