"""Lion, Adagrad and SGD are committed and gone on from like Adam; without moments there is only the master."""

import pytest
import torch
from interrupted import remove
from torch import nn

import offload

OPTIMIZERS = {
    "sgd": {"type": "SGD", "params": {"lr": 0.1}},
    "momentum": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "dampening": -0.5, "nesterov": False}},
    "lion": {"type": "Lion", "params": {"lr": 1e-3}},
    "adagrad": {"type": "Adagrad", "params": {"lr": 1e-2, "initial_accumulator_value": 0.5}},
}


def train(model, optimizer, first, last):
    for step in range(first, last):
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        model(inputs.to(next(model.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("homes", [("nvme", "nvme"), ("cpu", "cpu")], ids="-".join)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_goes_on_bit_for_bit(name, precision, homes, swap_path, tmp_path):
    param_home, state_home = homes
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": OPTIMIZERS[name],
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": param_home, "nvme_path": str(swap_path)},
            "offload_optimizer": {"device": state_home, "nvme_path": str(swap_path)},
        },
        "durability": {"generations": 2},
        "memory": {"host_bytes": "256MiB"},
    }

    def prepare(**more):
        torch.manual_seed(0)
        return offload.prepare(
            nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)), config, **more
        )

    model, optimizer = prepare()
    expected = train(model, optimizer, 0, 6)
    optimizer.engine.close()
    remove(swap_path)

    model, optimizer = prepare()
    train(model, optimizer, 0, 3)
    optimizer.engine.save_checkpoint()
    optimizer.engine.save_checkpoint(tmp_path / "out", tag="three")
    train(model, optimizer, 3, 5)  # which nobody will hear of
    optimizer.engine.close()
    other = {**config, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    with pytest.raises(offload.CheckpointError, match=r"optimizer state is|was trained with"):
        offload.prepare(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)), other, resume=True)
    model, optimizer = prepare(resume=True)
    found = train(model, optimizer, 3, 6)
    optimizer.engine.close()
    remove(swap_path)
    model, optimizer = prepare()
    optimizer.engine.load_checkpoint(tmp_path / "out")
    elsewhere = train(model, optimizer, 3, 6)
    optimizer.engine.close()
    remove(swap_path)
    for key, value in expected.items():
        assert torch.equal(found[key], value) and torch.equal(elsewhere[key], value), key
