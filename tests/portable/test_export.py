"""``offload export``: weights of dead runs and of checkpoints, as transformers reads them."""

import functools
import json

import pytest
import torch
from leftovers import TRAINING, committed_run, saved, values_of
from models import GPT, Placement, Training, prepared, steps
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import offload
from offload.cli.main import app
from offload.models.pretrained import write_checkpoint

transformers = pytest.importorskip("transformers")


def invoke(*arguments, status=0):
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert result.exit_code == status, (result.output, result.exception)
    return result.output


def tensors_in(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def aliases_in(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: kept for name, kept in opened.metadata().items() if name != "format"}
    return found


@pytest.mark.parametrize("kind", [("bf16", "fp32"), ("bf16", "int8"), ("fp32", "bf16")], ids=str)
def test_k04_the_store_of_a_dead_run_gives_exact_weights_tied_ones_once(
    kind, swap_path, tmp_path, monkeypatch
):
    training = Training(*kind, steps=2, tied=True, frozen="blocks.0 blocks.2.norm")
    with committed_run(training, swap_path, commits=1) as run:
        assert "in use" in invoke(run.path, tmp_path / "early", status=2)
        assert not (tmp_path / "early").exists()
        run.engine.close()
        for options in (["--dtype", "fp32"], []):
            out = tmp_path / f"out-{len(options)}"
            text = invoke(swap_path, out, *options)
            assert "without a config.json" in text and not (out / "config.json").exists()
            found = tensors_in(out)
            masters = {name: run.masters[name] for name in found}
            weights = {name: run.values["weight", name] for name in found}
            expected = masters if options else weights
            assert {("weight", name) for name in found} | {("weight", "head.weight")} == {
                key for key in run.values if key[0] == "weight"
            }
            for name, value in expected.items():
                assert value.dtype is found[name].dtype and torch.equal(found[name], value), name
            assert aliases_in(out) == {"head.weight": "tokens.weight"}
            tied, untied = GPT(tied=True), GPT(tied=False)
            whole = {**found, **{alias: found[name] for alias, name in aliases_in(out).items()}}
            for model in (tied, untied):
                model.load_state_dict(whole, strict=True)
                assert torch.equal(model.head.weight, expected["tokens.weight"].float())
            assert tied.head.weight is tied.tokens.weight


def test_checkpoints_and_adapters_alone(swap_path, tmp_path):
    with prepared(TRAINING, Placement("cpu", "nvme"), swap_path) as (model, optimizer):
        for tag, count in (("one", 1), ("two", 2)):
            steps(model, optimizer, TRAINING.batches()[:count])
            saved(optimizer, tmp_path / "saved", tag)
        values = values_of(model, optimizer)
        saved(optimizer, tmp_path / "small", exclude_frozen=True)
    invoke(tmp_path / "saved", tmp_path / "whole", "--dtype", "fp32")  # the latest of them
    for name, value in tensors_in(tmp_path / "whole").items():
        assert torch.equal(value, values.get(("master", name), values["weight", name].float())), name
    for source in ("saved", "small"):
        for option in ("--only-trained", "--exclude-frozen"):
            out = tmp_path / f"{source}{option}"
            invoke(tmp_path / source, out, option)
            found = tensors_in(out)
            assert found.keys() == {name for plane, name in values if plane == "master"}
            assert all(torch.equal(value, values["weight", name]) for name, value in found.items())
    *_, line = invoke(tmp_path / "small", tmp_path / "none", status=2).splitlines()
    assert "frozen weights were left out of it" in line
    assert not (tmp_path / "none").exists()


def test_transformers_opens_it_with_the_tie_and_computes_the_same(swap_path, tmp_path, monkeypatch):
    """Written in several files; the checkpoint knows the configuration."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (2, 16))
    training = Training("fp32")
    model = transformers.LlamaForCausalLM(config)
    with prepared(training, Placement("nvme", "nvme"), swap_path, model) as (_, optimizer):
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            expected = model(input_ids=ids).logits
        whole = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        saved(optimizer, tmp_path / "saved")
        offload.export(optimizer.engine, tmp_path / "live", config=whole)
    monkeypatch.setattr(
        "offload.portable.export.write_checkpoint", functools.partial(write_checkpoint, shard_bytes=20_000)
    )
    invoke(tmp_path / "saved", tmp_path / "out")
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    for name in ("out", "live"):
        assert aliases_in(tmp_path / name) == {"lm_head.weight": "model.embed_tokens.weight"}
        opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        assert opened.lm_head.weight is opened.model.embed_tokens.weight
        with torch.no_grad():
            assert torch.equal(opened(input_ids=ids).logits, expected)
    monkeypatch.undo()
    other = tmp_path / "base"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**whole, "note": "of the base"}))
    (other / "tokenizer.json").write_text("{}")
    invoke(tmp_path / "saved", tmp_path / "again", "--model", other, "--dtype", "bf16")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (written["note"], written["dtype"]) == ("of the base", "bfloat16")
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "{}"


def test_what_cannot_be_exported_leaves_nothing(swap_path, tmp_path):
    with committed_run(TRAINING, swap_path, commits=1) as run:
        run.engine.close()
        before = sorted(path.name for path in tmp_path.iterdir())
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").touch()
        for arguments, message in (
            ((run.path, tmp_path / "full"), "exists and is not empty"),
            ((run.path, tmp_path / "out", "--dtype", "int8"), "--dtype int8: choose fp32, bf16, fp16"),
            ((run.path, tmp_path / "out", "--model", tmp_path), "config.json is missing"),
            ((tmp_path, tmp_path / "out"), "there is no swap store and no checkpoint in it"),
        ):
            (line,) = [
                line for line in invoke(*arguments, status=2).splitlines() if line.startswith("error: ")
            ]
            assert message in line
        size = (run.path / "planes.swap").stat().st_size
        with open(run.path / "planes.swap", "r+b") as file:
            file.write(bytes(size // 2))
        lines = invoke(run.path, tmp_path / "out", status=1).splitlines()
        assert "weight of unit tokens (tokens.weight" in lines[-1]
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "full"])
