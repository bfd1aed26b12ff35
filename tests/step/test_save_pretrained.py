"""A prepared model saved in the middle of training. Oracle: transformers opens it, and computes the same logits."""

import contextlib

import pytest
import torch
from against_plain import engine_config
from families import FAMILIES, batches, build, inputs, loss_of
from models import Placement
from safetensors import safe_open
from tight import tight

import offload
from offload.matmul import WideLinears, bf16_is_native

transformers = pytest.importorskip("transformers")

NVME = Placement("nvme", "nvme", chunk=4096)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@contextlib.contextmanager
def prepared(model, placement, swap_path, precision="fp32"):
    config = engine_config(placement, swap_path, precision=precision)
    model, optimizer = offload.prepare(model, tight(model, config))
    with contextlib.closing(optimizer.engine) as engine:
        yield model, optimizer, engine


def train(model, optimizer, name, steps=2):
    for batch in batches(name, steps):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def logits(model, name):
    dtype = next(param.dtype for param in model.parameters() if param.is_floating_point())
    given = {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs(name).items()}
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = model(**given).logits
    model.train(was_training)
    return found


def names_in(folder):
    """Name of each tensor and the file that holds it; each stands in one."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is no dict)
                assert name not in found
                found[name] = file.name
    return found


def opened(kind, folder, precision):
    """What transformers opens without a complaint."""
    model, told = kind.from_pretrained(folder, dtype=DTYPES[precision], output_loading_info=True)
    assert not any(told.values()), told
    if precision == "bf16" and not bf16_is_native():
        WideLinears(model)
    return model


SAVED = [
    *((name, NVME) for name in FAMILIES),
    ("llama-tied", Placement(chunk=4096)),
    ("t5", Placement(chunk=4096)),
]


@pytest.mark.parametrize(("name", "placement"), SAVED)
def test_save_pretrained_is_full_and_reloads(name, placement, swap_path, tmp_path):
    """True values, tied weights once, experts as they are published, in shards."""
    precision = "fp32" if list(FAMILIES).index(name) % 2 else "bf16"
    build(name).save_pretrained(tmp_path / "plain")
    with prepared(build(name), placement, swap_path, precision) as (model, optimizer, engine):
        train(model, optimizer, name)
        model.save_pretrained(tmp_path / "out", max_shard_size="20KB")
        expected, state = logits(model, name), model.state_dict()
        train(model, optimizer, name, 1)
        assert engine.report().steps == 3
    files = names_in(tmp_path / "out")
    assert files.keys() == names_in(tmp_path / "plain").keys()
    assert len(set(files.values())) > 1
    again = opened(type(model), tmp_path / "out", precision)
    for key, value in again.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert torch.equal(logits(again, name), expected)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("llama", "bf16"),
        ("llama-tied", "fp32"),
        ("qwen3-moe", "bf16"),
        ("gpt2", "bf16"),
        ("t5", "fp32"),
        ("whisper", "fp32"),
    ],
)
def test_export_opens_in_transformers(name, precision, swap_path, tmp_path):
    """One tensor in memory at a time, and the same model."""
    with prepared(build(name), NVME, swap_path, precision) as (model, optimizer, engine):
        train(model, optimizer, name)
        offload.export(engine, tmp_path / "out", config=model.config.to_dict())
        expected, state = logits(model, name), model.state_dict()
    again = opened(type(model), tmp_path / "out", precision)
    for key, value in again.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert torch.equal(logits(again, name), expected)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_export_of_bf16_training_as_fp32_is_the_master(name, swap_path, tmp_path):
    with prepared(build(name), NVME, swap_path, "bf16") as (model, optimizer, engine):
        train(model, optimizer, name)
        offload.export(engine, tmp_path / "out", config=model.config.to_dict(), dtype=torch.float32)
        masters = {stored.name: offload.read_master(engine, stored) for stored in engine.partition.trainable}
    again = dict(opened(type(model), tmp_path / "out", "fp32").named_parameters())
    assert again.keys() == masters.keys()
    assert all(torch.equal(value, masters[key]) for key, value in again.items())


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe"])
def test_a_part_of_a_model_is_saved_by_itself(name, swap_path, tmp_path):
    """The decoder without its head, as whoever wants its embeddings saves it."""
    with prepared(build(name), NVME, swap_path) as (model, optimizer, _):
        train(model, optimizer, name)
        model.base_model.save_pretrained(tmp_path / "out")
        state = model.base_model.state_dict()
    again = opened(type(model.base_model), tmp_path / "out", "fp32")
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in again.state_dict().items())
