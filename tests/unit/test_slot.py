"""Who looks at a slot: tensors that share its memory, besides the parameters that the engine has pointed at it.

Oracle: the tensors that the test holds.
"""

import pytest
import torch

from offload.mover import Shown, Slot


@pytest.fixture
def slot():
    return Slot(torch.zeros(64, dtype=torch.uint8))


def pointed(slot, parameters, count):
    """What points that many parameters at the slot, which share its memory until they are pointed elsewhere."""

    def point():
        parameters[:] = [slot.tensor[8 * index :] for index in range(count)]
        return count

    return point


def test_parameters_do_not_look_and_a_view_does(slot):
    parameters = []
    assert not slot.is_looked_at
    slot.repoint(pointed(slot, parameters, 3), Shown.ALL)
    assert not slot.is_looked_at
    view = parameters[0][:2]
    assert slot.is_looked_at
    slot.repoint(pointed(slot, parameters, 0), Shown.NOTHING)
    assert slot.is_looked_at
    del view
    assert not slot.is_looked_at


@pytest.mark.parametrize("before", [Shown.NOTHING, Shown.ALL])
def test_a_look_that_ends_while_parameters_are_pointed(before, slot):
    parameters, looks = [], []
    if before is Shown.ALL:
        slot.repoint(pointed(slot, parameters, 2), Shown.ALL)
    looks.append(slot.tensor[:4])

    def point():
        looks.clear()  # as where a garbage collection runs
        return pointed(slot, parameters, 2)()

    slot.repoint(point, Shown.ALL)
    assert not slot.is_looked_at


def test_a_look_that_begins_while_parameters_are_pointed(slot):
    parameters, looks = [], []

    def point():
        looks.append(slot.tensor[:4])
        return pointed(slot, parameters, 2)()

    slot.repoint(point, Shown.ALL)
    assert slot.is_looked_at


def test_ctrl_c_while_parameters_are_pointed(slot):
    """What others hold is remembered from before; pointing them again says the truth."""
    parameters = []
    view = slot.tensor[:4]

    def interrupted():
        pointed(slot, parameters, 2)()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        slot.repoint(interrupted, Shown.ALL)
    assert slot.shown is Shown.UNKNOWN
    assert slot.is_looked_at
    slot.repoint(pointed(slot, parameters, 3), Shown.ALL)
    assert slot.is_looked_at
    del view
    assert not slot.is_looked_at
