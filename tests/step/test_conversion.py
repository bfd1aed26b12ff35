"""Checkpoints whose tensors are not those of the model. Oracle: transformers' own from_pretrained."""

import json

import pytest
import torch
import transformers
from families import DECODER, build
from safetensors.torch import load_file, save_file

import offload
from offload.errors import CheckpointError, ConfigError

IN_MEMORY = {"zero_optimization": {"stage": 0}, "bf16": {"enabled": False}}
DEEPSEEK = {
    **DECODER, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip


def values(folder):
    """All parameters and buffers of the model that offload opens, read as `prepare` reads them."""
    model = offload.from_pretrained(folder, IN_MEMORY)
    found = dict(model.named_buffers())
    found.update((name, offload.construct.initial_value(param)) for name, param in model.named_parameters())
    return type(model), found


def assert_opened_as_by_transformers(folder, kind):
    opened, found = values(folder)
    assert opened is kind
    theirs = kind.from_pretrained(folder, dtype=torch.float32)
    expected = {**dict(theirs.named_buffers()), **dict(theirs.named_parameters())}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", ["qwen3-moe", "bert", "t5", "whisper", "vit", "gemma3"])
def test_every_class_and_format(name, tmp_path):
    model = build(name)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert_opened_as_by_transformers(tmp_path, type(model))


def test_experts_are_merged_in_the_order_of_their_numbers(tmp_path):
    """Eleven of them: 10 comes after 2. Saved one by one, in memory one parameter."""
    config = transformers.Qwen3MoeConfig(**DECODER, moe_intermediate_size=8, num_experts=11)
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.10.up_proj.weight" in names
    assert_opened_as_by_transformers(tmp_path, transformers.Qwen3MoeForCausalLM)


def test_buffers_that_are_saved_are_read(tmp_path):
    """DeepSeek's router adds a bias that is no parameter; zeros would send tokens to other experts."""
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**DEEPSEEK))
    bias = dict(model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
    torch.nn.init.normal_(bias)
    model.save_pretrained(tmp_path)
    assert_opened_as_by_transformers(tmp_path, type(model))


def test_a_base_model_without_the_prefix_of_its_head(tmp_path):
    model = build("gpt2")
    model.transformer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    assert_opened_as_by_transformers(tmp_path, type(model))


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_what_does_not_fit_is_refused_when_it_is_opened(tmp_path):
    for folder in ("lacks", "other"):
        build("t5").save_pretrained(tmp_path / folder)
    change(tmp_path / "lacks", lambda tensors: tensors.pop("encoder.final_layer_norm.weight"))
    with pytest.raises(CheckpointError, match=r"no tensor 'encoder\.final_layer_norm\.weight'"):
        offload.from_pretrained(tmp_path / "lacks", IN_MEMORY)
    name = "encoder.final_layer_norm.weight"  # one element would be copied to all
    change(tmp_path / "other", lambda tensors: tensors.update({name: torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"has shape \(1,\) and the model of config.json \(32,\)"):
        offload.from_pretrained(tmp_path / "other", IN_MEMORY)


@pytest.mark.parametrize("edit", ["lacks one", "one of another shape"])
def test_experts_that_do_not_fit_are_refused_by_name(edit, tmp_path):
    build("qwen3-moe").save_pretrained(tmp_path)
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    wrong = {
        "lacks one": lambda t: t.pop(name),
        "one of another shape": lambda t: t.update({name: torch.ones(1)}),
    }
    change(tmp_path, wrong[edit])
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.down_proj .*load the model with"):
        offload.prepare(offload.from_pretrained(tmp_path, IN_MEMORY), IN_MEMORY)


def test_quantised_checkpoints_are_refused(tmp_path):
    build("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(ConfigError, match="quantised weights; load the model with transformers"):
        offload.from_pretrained(tmp_path, IN_MEMORY)


def test_a_class_that_is_not_one_of_transformers_models_is_not_taken(tmp_path):
    """The name comes from a file."""
    build("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["pipeline", "Trainer"]}))
    assert_opened_as_by_transformers(tmp_path, transformers.LlamaForCausalLM)
