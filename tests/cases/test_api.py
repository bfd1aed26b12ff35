"""The optimizer as torch's schedulers and loops see it.

Oracle: the same loop, written once, over a plain model with torch.optim.AdamW. Tests are named by case.
"""

from __future__ import annotations

import pytest
import torch
from loops import ALL, STEP, compare, mlp_a, rows, same_step
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, PolynomialLR


@pytest.mark.parametrize("home", ALL)
def test_a01_the_optimizer_is_one_of_torch(home, prepare):
    def loop(model, optimizer):
        assert isinstance(optimizer, torch.optim.Optimizer)
        seen = []
        schedules = [
            LambdaLR(optimizer, lambda step: 0.9**step),
            OneCycleLR(optimizer, max_lr=1e-2, total_steps=20),
            PolynomialLR(optimizer, total_iters=12, power=2.0),
        ]
        group = optimizer.param_groups[0]
        for step in range(9):
            loss = model(rows(8, seed=step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedules[step % 3].step()
            if step == 5:
                group["lr"], group["weight_decay"] = 0.05, 0.1
            seen += [loss.item(), group["lr"], *group["betas"]]
        assert [saved["params"] for saved in optimizer.state_dict()["param_groups"]] == [[*range(6)]]
        return seen

    _, optimizer, _ = compare(prepare, home, mlp_a, loop)
    assert optimizer.defaults["lr"] == 1e-3
    assert "AdamW" in repr(optimizer) or "Offload" in repr(optimizer)


@pytest.mark.parametrize("home", STEP)
def test_a01_zero_grad_with_zeros(home, prepare):
    """Gradients set to zero are gradients: decay and moments go on, as in torch."""

    def loop(model, optimizer):
        seen = []
        for step in range(4):
            if step != 2:
                loss = model(rows(8, seed=step)).square().mean()
                loss.backward()
                seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            assert all(not p.grad.any() for p in model.parameters())
        return seen

    compare(prepare, home, mlp_a, loop)


@pytest.mark.parametrize("home", ALL)
def test_a01_state_dict_is_that_of_torch(home, prepare):
    def loop(model, optimizer):
        same_step(lambda m: m(rows(8)).square().mean(), 3)(model, optimizer)
        state = optimizer.state_dict()
        assert set(state) == {"state", "param_groups"}
        return [
            values[key].float()
            for values in state["state"].values()
            for key in ("step", "exp_avg", "exp_avg_sq")
        ]

    compare(prepare, home, mlp_a, loop)


@pytest.mark.parametrize("home", STEP)
def test_a01_closure(home, prepare):
    def loop(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(rows(8)).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)]

    compare(prepare, home, mlp_a, loop)
