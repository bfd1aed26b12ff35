"""Adapters of peft over a frozen base on nvme. Oracle: the same in plain PyTorch with peft alone."""

import contextlib
import functools

import pytest
import torch
from against_plain import assert_equal_to_plain, engine_config, train_offloaded, train_plain
from families import batches, build, loss_of
from models import Placement
from safetensors.torch import load_file
from tight import tight

import offload
from offload.errors import OffloadError

peft = pytest.importorskip("peft")

# What peft says for all to hear, of transformers 6 and of ways to save and merge.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

NVME = Placement("nvme", "nvme", chunk=4096)
NVME_BACKWARD = Placement("nvme", "nvme", "backward", chunk=4096)
HOMES = [Placement(chunk=4096), NVME]
STEPS = 10
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "t5": ["q", "v", "wo"], "whisper": ["q_proj", "fc2"]}


def adapted(config, name="llama"):
    model = build(name)
    torch.manual_seed(5)
    return peft.get_peft_model(model, config).train()


def lora(name="llama", **settings):
    return adapted(peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[name], **settings), name)


def two_adapters(*, trained):
    """Of other ranks, in other layers; both trained, or the second frozen as peft leaves it."""
    model = lora()
    torch.manual_seed(6)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    for name, param in model.named_parameters():
        if ".second." in name:
            param.requires_grad_(trained)
    return model


METHODS = {
    "lora-t5": lambda: lora("t5"),
    "lora-whisper": lambda: lora("whisper"),
    "lora-experts": lambda: adapted(
        peft.LoraConfig(
            r=2,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
        "qwen3-moe",
    ),
    "lora-embedding-tied": lambda: adapted(
        peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]), "llama-tied"
    ),
    "lora-biases": lambda: adapted(peft.LoraConfig(r=2, target_modules=["c_attn"], bias="all"), "gpt2"),
    "modules-to-save": lambda: lora(modules_to_save=["lm_head"]),
    "dora": lambda: lora(use_dora=True),
    "ia3": lambda: adapted(
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    ),
    "prompt": lambda: adapted(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
}


def family(method):
    return {"lora-t5": "t5", "lora-whisper": "whisper"}.get(method, "llama")


@pytest.mark.parametrize("method", METHODS)
def test_ten_steps_equal_plain(method, swap_path):
    """One method after the other updates in step and in backward; every method has been tried in both."""
    placement = [NVME, NVME_BACKWARD][list(METHODS).index(method) % 2]
    data = batches(family(method), STEPS)
    plain = train_plain(METHODS[method](), loss_of, data)
    outcome = train_offloaded(METHODS[method](), loss_of, data, placement, swap_path, is_tight=True)
    assert_equal_to_plain(outcome, plain)


@contextlib.contextmanager
def prepared(model, placement, swap_path, precision="fp32"):
    config = tight(model, engine_config(placement, swap_path, precision=precision))
    model, optimizer = offload.prepare(model, config)
    with contextlib.closing(optimizer.engine):
        yield model, optimizer


def plain_optimizer(model):
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01, fused=True)


def train(model, optimizer, steps=2, name="llama"):
    losses = []
    for batch in batches(name, steps):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits(model, **inputs):
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = model(torch.arange(4, 12)[None], **inputs).logits
    model.train(was_training)
    return found


# -- the base ---------------------------------------------------------------------------------------------


def base_bytes(engine):
    """The bytes in the swap files at the places of frozen weights, by unit."""
    found = []
    itemsize = engine.plan.inventory.weight_itemsize
    for unit, layout in enumerate(engine.plan.inventory.units):
        plane = torch.zeros(-(-layout.weight_bytes // 4096) * 4096, dtype=torch.uint8)
        engine._store.read_weight(unit, plane).wait()
        found.append(plane[layout.elements * itemsize : layout.weight_bytes].clone())
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", [NVME, NVME_BACKWARD], ids=str)
def test_the_base_is_never_written_after_the_set_up(placement, precision, swap_path):
    """By the ledger not a byte of it, and on disk it is what it was; it has no state either."""
    with prepared(lora(), placement, swap_path, precision) as (model, optimizer):
        engine = optimizer.engine
        inventory, before = engine.plan.inventory, base_bytes(engine)
        assert sum(map(len, before)) > 10 * sum(unit.elements for unit in inventory.units), "mostly base"
        read_before = engine.ledger.moved["nvme_write", "weight"]
        train(model, optimizer, STEPS)
        moved = engine.report().moved
        trained_bytes = inventory.elements * inventory.weight_itemsize
        assert moved["nvme_write", "weight"] - read_before == STEPS * trained_bytes
        assert moved["nvme_read", "weight"] > STEPS * inventory.weight_bytes, "the base is streamed"
        state_bytes = sum(engine.plan.chunk_bytes(chunk) for chunk in engine.plan.chunks)
        written = sum(size for (link, plane), size in moved.items() if link == "nvme_write")
        assert written == STEPS * (trained_bytes + state_bytes)
        assert all(map(torch.equal, base_bytes(engine), before))


# -- several adapters -------------------------------------------------------------------------------------


def trained_in_turns(model, optimizer):
    """Two steps with the first adapter, two with the second, one with the first again."""
    losses = []
    for adapter, steps in (("default", 2), ("second", 2), ("default", 1)):
        model.set_adapter(adapter)
        losses += train(model, optimizer, steps)
    model.set_adapter("second")
    second = logits(model)
    both = logits(model, adapter_names=["default"])
    return losses, second, both


@pytest.mark.parametrize("placement", [*HOMES, NVME_BACKWARD], ids=str)
def test_several_adapters_prepared_together_are_trained_in_turns(placement, swap_path):
    plain = two_adapters(trained=True)
    losses, second, both = trained_in_turns(plain, plain_optimizer(plain))
    with prepared(two_adapters(trained=True), placement, swap_path) as (model, optimizer):
        found = trained_in_turns(model, optimizer)
        assert found[0] == losses
        assert torch.equal(found[1], second) and torch.equal(found[2], both)
        with model.disable_adapter():
            assert torch.equal(logits(model), logits(build("llama")))
        state, expected = model.state_dict(), plain.state_dict()
        assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("placement", HOMES, ids=str)
def test_an_adapter_that_came_too_late_is_refused_by_name_and_may_be_used(placement, swap_path):
    plain = lora()
    train(plain, plain_optimizer(plain))
    with prepared(lora(), placement, swap_path) as (model, optimizer):
        train(model, optimizer)
        for each in (plain, model):
            torch.manual_seed(6)
            late = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
            each.add_adapter("late", late)
            each.set_adapter("late")
        assert torch.equal(logits(model), logits(plain))
        with pytest.raises(OffloadError, match=r"late\.weight has come into the model after it was prepared"):
            train(model, optimizer)
        model.delete_adapter("late")
        model.set_adapter("default")
        train(model, optimizer, 1)
    with prepared(two_adapters(trained=False), placement, swap_path) as (model, optimizer):
        train(model, optimizer)
        model.set_adapter("second")
        with pytest.raises(OffloadError, match=r"second\.weight was frozen when the model was prepared"):
            train(model, optimizer)


# -- merging ----------------------------------------------------------------------------------------------


def merged(model):
    model.merge_adapter()
    found = logits(model)
    model.unmerge_adapter()
    return found, logits(model)


MERGES = {
    "merge_adapter": merged,
    "merge_and_unload": lambda model: (logits(model.merge_and_unload(safe_merge=True)),),
    "unload": lambda model: (logits(model.unload()),),
}


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("placement", HOMES, ids=str)
def test_merging_writes_to_the_base_where_it_is(placement, merge, kind, swap_path):
    make = functools.partial(lora, use_dora=kind == "dora")
    plain = make()
    train(plain, plain_optimizer(plain))
    expected = MERGES[merge](plain)
    with prepared(make(), placement, swap_path) as (model, optimizer):
        train(model, optimizer)
        found = MERGES[merge](model)
        assert all(map(torch.equal, found, expected))
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("placement", HOMES, ids=str)
def test_training_goes_on_after_merging_and_taking_it_back(placement, swap_path):
    plain = lora()
    optimizer = plain_optimizer(plain)
    losses = train(plain, optimizer)
    merged(plain)
    losses += train(plain, optimizer)
    with prepared(lora(), placement, swap_path) as (model, optimizer):
        found = train(model, optimizer)
        merged(model)
        assert found + train(model, optimizer) == losses


# -- saving -----------------------------------------------------------------------------------------------


def reloaded(folder, name="llama"):
    return peft.PeftModel.from_pretrained(build(name), folder)


@pytest.mark.parametrize("placement", HOMES, ids=str)
@pytest.mark.parametrize(
    "make", [lora, METHODS["dora"], METHODS["modules-to-save"], METHODS["prompt"]], ids=lambda make: "model"
)
def test_adapters_are_saved_in_pefts_own_format(make, placement, swap_path, tmp_path):
    """While weights are absent, in the middle of training: what plain peft writes, and opens."""
    plain = make()
    train(plain, plain_optimizer(plain))
    plain.save_pretrained(tmp_path / "plain")
    with prepared(make(), placement, swap_path) as (model, optimizer):
        train(model, optimizer)
        model.save_pretrained(tmp_path / "ours")
        expected = logits(model)
        train(model, optimizer, 1)
    ours, theirs = (load_file(tmp_path / kind / "adapter_model.safetensors") for kind in ("ours", "plain"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert torch.equal(logits(reloaded(tmp_path / "ours")), expected)


@pytest.mark.parametrize("selected", [None, ["second"]])
def test_saving_adapters_does_not_read_the_base_into_memory(selected, swap_path, tmp_path, monkeypatch):
    with prepared(two_adapters(trained=False), NVME, swap_path) as (model, optimizer):
        train(model, optimizer)
        state, read = model.state_dict(), []
        one = offload.adapters.read_weight
        monkeypatch.setattr("offload.adapters.read_weight", lambda e, s: read.append(s.name) or one(e, s))
        monkeypatch.setattr(offload.checkpoint, "read_weight", None)
        model.save_pretrained(tmp_path, selected_adapters=selected)
    assert read and all(".lora_" in name for name in read)
    folders = {"second": tmp_path / "second", "default": tmp_path}
    for adapter in selected or folders:
        saved = load_file(folders[adapter] / "adapter_model.safetensors")
        assert len(saved) == {"second": 8, "default": 12}[adapter]
        for name, value in saved.items():
            assert torch.equal(value, state[name.replace(".weight", f".{adapter}.weight")]), name


@pytest.mark.parametrize("placement", HOMES, ids=str)
def test_a_bf16_adapter_is_saved_as_it_is_computed_with(placement, swap_path, tmp_path):
    with prepared(lora(), placement, swap_path, "bf16") as (model, optimizer):
        train(model, optimizer)
        model.save_pretrained(tmp_path)
        state = model.state_dict()
    for name, value in load_file(tmp_path / "adapter_model.safetensors").items():
        assert value.dtype is torch.bfloat16
        assert torch.equal(value, state[name.replace(".weight", ".default.weight")]), name
