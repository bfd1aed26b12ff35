"""Random models in random loops on random placements give what plain PyTorch gives, bit for bit.

A seed draws a model (`random_models`), a loop (`random_loops`), a precision and two or three placements
(`random_runs`). A seed that fails is repeated by the command in its message. What such seeds have found stands,
shrunk, in `test_random_found`.

`MUTATIONS` are mistakes that an engine could have: that the seeds find them shows that what is drawn is not too tame.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from random_loops import EDITS, LOOKS, SETTINGS, TRAIN_ONCE, TRAIN_TWICE, ZEROES
from random_models import FORMS, KINDS
from random_runs import check, draw

from offload.accel import ENVIRONMENT
from offload.engine import OffloadEngine
from offload.gradients import PassingGradients
from offload.hooks import ModuleHooks
from offload.landing import CrossingLanding, LocalLanding
from offload.mover import Slot
from offload.packing import Packing
from offload.partition import Partition, StoredParam

VARIABLE = "OFFLOAD_SEEDS"
COUNT, SOAK_COUNT, BATCH = 200, 5000, 20
COUNT_SIMULATED = 40
"""Where every placement is on a simulated accelerator, which is slow: `make simulated` does that many times."""
TRIES = 30
"""Seeds in which a mutation has to be found, from the one that is named on."""


def batches(first: int, last: int, size: int) -> list[range]:
    """The seeds, or those that the environment names: "7", or "0:100"."""
    given = os.environ.get(VARIABLE)
    if given:
        begin, _, end = given.partition(":")
        return [range(int(begin), int(end or int(begin) + 1))]
    return [range(begin, min(begin + size, last)) for begin in range(first, last, size)]


def run(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        check(seed, Path(folder))
        left = [path.name for path in Path(folder).glob("*/*")]
        assert not left, f"swap files were left behind: {left}"


def run_all(seeds: range) -> None:
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:
            command = f"{VARIABLE}={seed} python -m pytest tests/step/test_random.py -k as_plain"
            raise AssertionError(f"seed {seed}: {str(error)[:2000]}\nonce more: {command}") from error


def pytest_generate_tests(metafunc):
    if "seeds" in metafunc.fixturenames:
        count = COUNT_SIMULATED if os.environ.get(ENVIRONMENT) else COUNT
        is_soak = metafunc.function is test_as_plain_pytorch_for_long
        chosen = batches(COUNT, SOAK_COUNT, 200) if is_soak else batches(0, count, BATCH)
        metafunc.parametrize("seeds", chosen, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")


def test_as_plain_pytorch(seeds):
    run_all(seeds)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_as_plain_pytorch_for_long(seeds):
    run_all(seeds)


FEATURES = [
    *KINDS, *(f"output {form}" for form in FORMS), *(f"train: {how}" for how in (*TRAIN_ONCE, *TRAIN_TWICE)),
    *(f"look: {how}" for how in LOOKS), *(f"edit: {how}" for how in EDITS), *(f"set: {how}" for how in SETTINGS),
    *(f"zero: {how}" for how in ZEROES), "closure", "stale", "break backward", "edit: poison", "clip by configuration",
    "fp32", "bf16", "state in bf16", "state in int8", *(f"micro-batches of the configuration: {n}" for n in (1, 2, 3)),
    "param none", "param cpu", "param nvme", "state none", "state cpu", "state nvme", "update step", "update backward",
    "tight True", "tight False", "chunk 2048", "chunk None", "backend auto", "backend threads", "backend python",
    "generations 1", "generations 2", "verify always", "paths 2", "accelerator simulated",
]  # fmt: skip


def test_what_is_drawn():
    """Each feature in several of the seeds."""
    drawn: Counter[str] = Counter()
    for seed in range(COUNT):
        case = draw(seed)
        drawn.update(case.features)
        drawn.update({f"{k} {v}".partition(":")[0] for place in case.places for k, v in vars(place).items()})
    assert len(FEATURES) > 100
    assert not {feature: drawn[feature] for feature in FEATURES if drawn[feature] < 3}


def nothing(*_args, **_kwargs):
    return None


def forgets_frames(self, module, args, output, _real=ModuleHooks._after_forward):
    if output is not None:  # torch gives None after an exception
        _real(self, module, args, output)


def attached_as_it_is(self, unit, plane):
    for stored in self.units[unit]:
        stored.point(stored.view(plane))


def landed_without_a_sum(self, stored, plane, grad, *, add, _real=LocalLanding.land):
    _real(self, stored, plane, grad, add=False)


def sent_without_a_sum(self, stored, plane, grad, *, add, _real=CrossingLanding.land):
    _real(self, stored, plane, grad, add=False)


def counted_twice(self, _real=StoredParam.next_span):
    self.step += len(self.names) > 1
    return _real(self)


def unpacked_at_the_front(self, packed, version, _real=Packing._unpack_weight):
    packed.offset = 0
    return _real(self, packed, version)


def begun_late(self, *, training, _real=OffloadEngine.begin_forward):
    self._in_backward = False  # a backward that broke off is not noticed
    _real(self, training=training)


MUTATIONS = {
    "a slot is taken while its bytes are looked at": (Slot, "is_looked_at", property(lambda _: False), 21),
    "a saved parameter keeps no slot": (Partition, "is_saved", lambda *_: False, 662),
    "a gradient is not taken": (OffloadEngine, "gradient_ready", nothing, 0),
    "a second gradient replaces the first one": (CrossingLanding, "land", sent_without_a_sum, 20),
    "a tied weight is updated as if twice": (StoredParam, "next_span", counted_twice, 6),
    "versions are not looked at": (OffloadEngine, "version", lambda *_: 0, 5),
    "autograd is not told of updates": (StoredParam, "outdate", nothing, 5),
    "an exception leaves a frame open": (ModuleHooks, "_after_forward", forgets_frames, 42),
    "an interrupted forward stays open": (ModuleHooks, "_close_abandoned", lambda _: False, 13),
    "views are made in inference mode": (Partition, "attach", attached_as_it_is, 15),
    "a saved weight is unpacked elsewhere": (Packing, "_unpack_weight", unpacked_at_the_front, 1),
    "reading an attribute makes nothing present": (ModuleHooks, "_on_read", nothing, 23),
    "gradients set to zero are none": (PassingGradients, "add_zeros", nothing, 28),
    "gradients that were left are not refused": (PassingGradients, "begin_step", nothing, 4),
    "a backward that broke off goes on": (OffloadEngine, "begin_forward", begun_late, 18),
}
"""Where, what takes its place, and a seed that finds it."""


@pytest.mark.usefixtures("the_cpu_computes")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_found(name, monkeypatch):
    owner, attribute, mistake, seed = MUTATIONS[name]
    monkeypatch.setattr(owner, attribute, mistake)
    try:
        for each in range(seed, seed + TRIES):
            try:
                run(each)
            except Exception:
                return
        pytest.fail(f"{TRIES} seeds from {seed} on do not find it")
    finally:
        while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # left by some mistakes
            torch._C._autograd._pop_saved_tensors_default_hooks()
