"""Frozen weights: no state for them, and what may be frozen and unfrozen in training.

Oracle: the same loop, written once, over a plain model with torch.optim.AdamW. Tests are named by case.
"""

from __future__ import annotations

import pytest
from loops import ALL, Adapted, compare, rows, same_step, seeded

from offload import OffloadError


@pytest.mark.parametrize("home", ALL)
def test_m11_no_state_for_frozen_weights(home, prepare):
    model, optimizer, _ = compare(prepare, home, Adapted, same_step(lambda m: m(rows(6, 24))))
    engine = optimizer.engine
    trained = [p for p in model.parameters() if p.requires_grad]
    assert engine.plan.inventory.trainable_parameters == sum(p.numel() for p in trained)
    assert set(optimizer.state_dict()["state"]) == set(range(len(trained)))
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.parametrize("home", ALL)
def test_m11_freezing_and_unfreezing_what_is_trained(home, prepare):
    """Frozen from step 5 to step 10: untouched, then trained again, as in torch."""

    def loop(model, optimizer):
        seen = []
        for step in range(14):
            if step in (5, 10):
                model.layers[1].down.requires_grad_(step == 10)
            loss = model(rows(6, 24))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    compare(prepare, home, Adapted, loop)


@pytest.mark.parametrize("home", ALL)
def test_m11_unfreezing_what_was_frozen_raises(home, prepare):
    """It has no state and no place in a gradient plane; to go on without a word would train nothing."""
    model, optimizer = prepare(seeded(Adapted), home)
    same_step(lambda m: m(rows(6, 24)), 2)(model, optimizer)
    model.layers[1].base.requires_grad_(True)
    with pytest.raises(OffloadError, match=r"layers\.1\.base\.weight.*frozen"):
        model(rows(6, 24))
    model.layers[1].base.requires_grad_(False)
    same_step(lambda m: m(rows(6, 24)), 2)(model, optimizer)
