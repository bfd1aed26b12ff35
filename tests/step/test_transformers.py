"""Models of transformers and peft, built small. Oracle: the same model in plain PyTorch, or transformers."""

import contextlib
import functools

import pytest
import torch
from against_plain import assert_equal_to_plain, engine_config, train_offloaded, train_plain
from models import Placement

import offload

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH, STEPS = 131, 12, 4
NVME = Placement("nvme", "nvme", chunk=4096)
NVME_BACKWARD = Placement("nvme", "nvme", "backward", chunk=4096)
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    **TOKENS, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def llama(*, tied=False):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=tied))


def qwen2():
    config = transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config)


def gpt2():
    """Conv1D layers, whose weights are transposed, and an output layer tied to the embedding."""
    config = transformers.GPT2Config(
        **TOKENS, n_positions=64, n_embd=32, n_layer=3, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=56, max_position_embeddings=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5():
    """Two lists of blocks, one embedding for both, and a position bias that the first layer owns."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=56, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


BUILDERS = {
    "llama": llama,
    "llama-tied": functools.partial(llama, tied=True),
    "qwen2": qwen2,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
}
ZERO_GRADIENT = ("key.bias", "k_proj.bias", "c_attn.bias")
"""Softmax does not change when every key is moved by the same vector, with rotary positions hardly.

A third of GPT-2's c_attn are keys.
"""

# What users still write; transformers 5.x says that 6 will want another name.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]


def build(name, seed=0):
    torch.manual_seed(seed)
    return BUILDERS[name]().train()


def batches(steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator) for _ in range(steps)]
    return [{"input_ids": x, "labels": x.flip(1) if step % 2 else x} for step, x in enumerate(ids)]


def loss_of(model, batch):
    return model(**batch).loss


@pytest.mark.parametrize("placement", [NVME, NVME_BACKWARD], ids=str)
@pytest.mark.parametrize("name", BUILDERS)
def test_training_equals_plain(name, placement, swap_path):
    plain = train_plain(build(name), loss_of, batches())
    outcome = train_offloaded(build(name), loss_of, batches(), placement, swap_path)
    assert_equal_to_plain(outcome, plain, without_gradient=ZERO_GRADIENT)


@pytest.mark.parametrize("name", BUILDERS)
def test_bf16_has_the_same_bits_everywhere(name, swap_path):
    reference = train_offloaded(
        build(name), loss_of, batches(), Placement(chunk=4096), swap_path, precision="bf16"
    )
    for placement in (NVME, NVME_BACKWARD):
        outcome = train_offloaded(build(name), loss_of, batches(), placement, swap_path, precision="bf16")
        outcome.assert_same_bits(reference)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("placement", [NVME, NVME_BACKWARD], ids=str)
def test_gradient_checkpointing(placement, use_reentrant, swap_path):
    def checkpointed():
        model = build("llama")
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if use_reentrant:
            model.enable_input_require_grads()
        return model

    plain = train_plain(build("llama"), loss_of, batches())
    outcome = train_offloaded(checkpointed(), loss_of, batches(), placement, swap_path)
    assert_equal_to_plain(outcome, plain)


@pytest.mark.parametrize("placement", [NVME, NVME_BACKWARD], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_generate_between_steps(name, placement, swap_path):
    texts = {}

    def generate(whose, model):
        prompt = torch.tensor([[5, 9, 17, 33]])
        model.eval()
        text = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False
        )
        model.train()
        texts.setdefault(whose, []).append(text)

    alone = train_plain(build(name), loss_of, batches())
    plain = train_plain(build(name), loss_of, batches(), look=functools.partial(generate, "plain"))
    assert plain.losses == alone.losses
    outcome = train_offloaded(
        build(name), loss_of, batches(), placement, swap_path, look=functools.partial(generate, "engine")
    )
    assert_equal_to_plain(outcome, plain, without_gradient=ZERO_GRADIENT)
    assert len(texts["plain"]) == STEPS
    assert all(map(torch.equal, texts["engine"], texts["plain"]))


@contextlib.contextmanager
def prepared(model, placement, swap_path, precision="fp32"):
    model, optimizer = offload.prepare(model, engine_config(placement, swap_path, precision=precision))
    with contextlib.closing(optimizer.engine) as engine:
        yield model, optimizer, engine


def train(model, optimizer, steps=STEPS):
    for batch in batches(steps):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_from_pretrained_streams_shards(name, swap_path, tmp_path):
    build(name).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    plain = train_plain(build(name), loss_of, batches())
    model = offload.from_pretrained(tmp_path / "model", engine_config(NVME, swap_path)).train()
    outcome = train_offloaded(model, loss_of, batches(), NVME, swap_path)
    assert_equal_to_plain(outcome, plain)


@pytest.mark.parametrize("placement", [Placement(), NVME], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "qwen2"])
def test_export_opens_in_transformers(name, precision, placement, swap_path, tmp_path):
    out, prompt = tmp_path / "out", torch.arange(3, 11)[None]
    with prepared(build(name), placement, swap_path, precision) as (model, optimizer, engine):
        train(model, optimizer)
        offload.export(engine, out, config=model.config.to_dict())
        model.eval()
        with torch.no_grad():
            logits = model(prompt).logits
        state = model.state_dict()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    opened = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
    for key, value in opened.state_dict().items():
        assert torch.equal(value, state[key]), key
    if precision == "bf16" and not offload.matmul.bf16_is_native():
        offload.matmul.WideLinears(opened)
    with torch.no_grad():
        assert torch.equal(opened(prompt).logits, logits)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_export_of_bf16_training_as_fp32_is_the_master(name, swap_path, tmp_path):
    with prepared(build(name), NVME, swap_path, "bf16") as (model, optimizer, engine):
        train(model, optimizer)
        offload.export(engine, tmp_path / "out", config=model.config.to_dict(), dtype=torch.float32)
        masters = {stored.name: offload.read_master(engine, stored) for stored in engine.partition.trainable}
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    opened = dict(opened.named_parameters())
    assert opened.keys() == masters.keys()
    assert all(torch.equal(value, masters[key]) for key, value in opened.items())


@pytest.mark.parametrize("placement", [Placement(), NVME], ids=str)
@pytest.mark.parametrize("name", BUILDERS)
def test_save_pretrained_is_full(name, placement, swap_path, tmp_path):
    """The call that users know, on the prepared model in training: true values, never markers."""
    with prepared(build(name), placement, swap_path) as (model, optimizer, engine):
        train(model, optimizer, 2)
        model.save_pretrained(tmp_path / "out")
        masters = {s.name: offload.read_master(engine, s) for unit in engine.partition.units for s in unit}
        train(model, optimizer, 1)
    opened = dict(type(model).from_pretrained(tmp_path / "out").named_parameters())
    assert opened.keys() == masters.keys()
    for key, value in opened.items():
        assert not value.isnan().any(), key
        assert torch.equal(value, masters[key]), key


def lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    return peft.get_peft_model(build("llama"), config).train()


@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("placement", [NVME, NVME_BACKWARD], ids=str)
def test_lora_over_a_frozen_base(placement, checkpointing, swap_path):
    def adapted():
        model = lora()
        if checkpointing != "none":
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
            model.enable_input_require_grads()
        return model

    base = {name: p.detach().clone() for name, p in lora().named_parameters() if not p.requires_grad}
    plain = train_plain(lora(), loss_of, batches(5))
    counts = {}

    def look(model):
        adapter, whole = model.get_nb_trainable_parameters()
        counts["adapter"], counts["whole"] = adapter, whole
        assert all(torch.equal(model.state_dict()[name], value) for name, value in base.items())

    outcome = train_offloaded(adapted(), loss_of, batches(5), placement, swap_path, look=look)
    assert len(plain.masters) == 3 * 3 * 2
    assert_equal_to_plain(outcome, plain)
    assert counts["adapter"] == sum(value.numel() for value in plain.masters.values())
    assert counts["whole"] == counts["adapter"] + sum(value.numel() for value in base.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lora_has_state_for_the_adapter_only(precision, swap_path, tmp_path):
    peft = pytest.importorskip("peft")
    with prepared(lora(), NVME, swap_path, precision) as (model, optimizer, engine):
        adapter = {name: p for name, p in model.named_parameters() if p.requires_grad}
        numel = sum(param.numel() for param in adapter.values())
        assert engine.plan.inventory.trainable_parameters == numel
        assert engine.plan.inventory.parameters == sum(p.numel() for p in model.parameters())
        train(model, optimizer)
        assert set(optimizer.state_dict()["state"]) == set(range(len(adapter)))
        model.save_pretrained(tmp_path / "adapter")
        state = {name: value for name, value in model.state_dict().items() if name in adapter}
        model.eval()
        with torch.no_grad():
            logits = model(torch.arange(3, 11)[None]).logits
    again = peft.PeftModel.from_pretrained(build("llama"), tmp_path / "adapter").eval()
    saved = dict(again.named_parameters())
    for name, value in state.items():
        assert value.abs().sum() > 0
        assert torch.equal(saved[name].to(value.dtype), value), name
    if precision == "fp32":
        with torch.no_grad():
            torch.testing.assert_close(again(torch.arange(3, 11)[None]).logits, logits, rtol=1e-5, atol=1e-7)
