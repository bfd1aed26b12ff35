"""Every family of transformers, tiny, with everything on nvme. Oracle: the same model in plain PyTorch.

In the least memory: two slots for weights, so that most are absent at any time.
"""

import contextlib
import functools

import pytest
import torch
from against_plain import assert_equal_to_plain, engine_config, train_offloaded, train_plain
from families import DECODER, FAMILIES, VOCABULARY, ZERO_GRADIENT, batches, build, inputs, loss_of
from models import Placement
from tight import tight

import offload
from offload.errors import OffloadError

transformers = pytest.importorskip("transformers")

# What users still write; transformers 5.x says that 6 will want another name.
pytestmark = [pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")]

NVME = Placement("nvme", "nvme", chunk=4096)
NVME_BACKWARD = Placement("nvme", "nvme", "backward", chunk=4096)
STEPS = 10
TIED_IN_THE_MIDDLE = ("bert", "whisper")
"""Their tied matrix holds a gradient slot until backward ends, and others need one meanwhile."""


@functools.cache
def plain_run(name, steps=STEPS):
    return train_plain(build(name), loss_of, batches(name, steps))


@pytest.mark.parametrize("placement", [NVME, NVME_BACKWARD], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_ten_steps_equal_plain(name, placement, swap_path):
    is_tight = placement is NVME or name not in TIED_IN_THE_MIDDLE
    outcome = train_offloaded(
        build(name), loss_of, batches(name, STEPS), placement, swap_path, is_tight=is_tight
    )
    assert_equal_to_plain(outcome, plain_run(name), without_gradient=ZERO_GRADIENT)


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_has_the_same_bits_everywhere(name, swap_path):
    train = functools.partial(train_offloaded, precision="bf16")
    data = batches(name, STEPS)
    reference = train(build(name), loss_of, data, Placement(chunk=4096), swap_path)
    for placement in (NVME, NVME_BACKWARD):
        is_tight = placement is NVME or name not in TIED_IN_THE_MIDDLE
        outcome = train(build(name), loss_of, data, placement, swap_path, is_tight=is_tight)
        outcome.assert_same_bits(reference)


@pytest.mark.parametrize("name", TIED_IN_THE_MIDDLE)
def test_too_few_gradient_slots_are_told_in_one_line(name, swap_path):
    """Before anything has been updated, with both ways out."""
    message = r"all 1 gradient slots wait .*update to 'step', or give memory\.host_bytes more$"
    with pytest.raises(OffloadError, match=message):
        train_offloaded(build(name), loss_of, batches(name, 1), NVME_BACKWARD, swap_path, is_tight=True)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_attention_implementations(name, implementation, swap_path):
    def chosen():
        model = build(name)
        model.set_attn_implementation(implementation)
        return model

    plain = train_plain(chosen(), loss_of, batches(name, 3))
    outcome = train_offloaded(chosen(), loss_of, batches(name, 3), NVME, swap_path, is_tight=True)
    assert_equal_to_plain(outcome, plain)


CHECKPOINTED = [
    ("llama", False, NVME), ("llama", False, NVME_BACKWARD), ("llama", True, NVME),
    ("llama", True, NVME_BACKWARD), ("qwen3-moe", False, NVME_BACKWARD), ("t5", False, NVME),
]  # fmt: skip


@pytest.mark.parametrize(("name", "use_reentrant", "placement"), CHECKPOINTED)
def test_gradient_checkpointing(placement, name, use_reentrant, swap_path):
    def checkpointed():
        model = build(name)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if use_reentrant:
            model.enable_input_require_grads()
        return model

    is_tight = name != "t5"  # each of its tiny blocks is three units, all needed at once to differentiate it
    plain = train_plain(checkpointed(), loss_of, batches(name, STEPS))
    outcome = train_offloaded(
        checkpointed(), loss_of, batches(name, STEPS), placement, swap_path, is_tight=is_tight
    )
    assert_equal_to_plain(outcome, plain)


@contextlib.contextmanager
def prepared(model, placement, swap_path):
    model, optimizer = offload.prepare(model, tight(model, engine_config(placement, swap_path)))
    with contextlib.closing(optimizer.engine):
        yield model, optimizer


def loss_of_all_outputs(model, name):
    """A loss over every hidden state, of tuples: what comes out first is used last."""
    without_cache = {} if name == "bert" else {"use_cache": False}
    outputs = model(**inputs(name), **without_cache, output_hidden_states=True, return_dict=False)
    leaves = torch.utils._pytree.tree_leaves(outputs)
    return sum((index + 1) * leaf.square().mean() for index, leaf in enumerate(leaves))


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_tuples_and_hidden_states(name, swap_path):
    plain = build(name)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    with prepared(build(name), NVME, swap_path) as (model, optimizer):
        for _ in range(3):
            losses = []
            for each, its in ((plain, reference), (model, optimizer)):
                loss = loss_of_all_outputs(each, name)
                loss.backward()
                its.step()
                its.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1]


@pytest.mark.parametrize("placement", [Placement(), NVME], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_embeddings_are_resized_before_prepare_and_refused_after(name, placement, swap_path):
    def resized():
        model = build(name)
        torch.manual_seed(4)
        model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
        return model

    data = batches(name, 2)
    data[0]["input_ids"][0, 0] = VOCABULARY + 3
    plain = train_plain(resized(), loss_of, data)
    outcome = train_offloaded(resized(), loss_of, data, placement, swap_path, is_tight=True)
    assert_equal_to_plain(outcome, plain, without_gradient=ZERO_GRADIENT)
    with prepared(build(name), placement, swap_path) as (model, optimizer):
        loss_of(model, batches(name, 1)[0]).backward()
        optimizer.step()
        with pytest.raises(
            OffloadError, match=r"resize(, replace or add)? parameters before offload\.prepare"
        ):
            model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
            loss_of(model, batches(name, 1)[0])


@pytest.mark.parametrize("name", ["llama-tied", "qwen3-moe", "bert", "t5", "whisper", "vit"])
def test_from_pretrained_streams_shards(name, swap_path, tmp_path):
    """Of every class, experts merged on the way."""
    build(name).save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    model = offload.from_pretrained(tmp_path / "model", engine_config(NVME, swap_path)).train()
    outcome = train_offloaded(model, loss_of, batches(name, STEPS), NVME, swap_path, is_tight=True)
    assert_equal_to_plain(outcome, plain_run(name), without_gradient=ZERO_GRADIENT)


def test_experts_that_no_token_visits_get_no_gradient(swap_path):
    """Of eight experts two run a step of four tokens; what a step leaves out is as in plain PyTorch."""

    def model():
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(
            **DECODER, moe_intermediate_size=8, num_experts=8, num_experts_per_tok=1, decoder_sparse_step=1
        )
        return transformers.Qwen3MoeForCausalLM(config)

    data = [{key: value[:1, :2] for key, value in batch.items()} for batch in batches("llama", STEPS)]
    plain = train_plain(model(), loss_of, data)
    for placement in (NVME, NVME_BACKWARD):
        outcome = train_offloaded(model(), loss_of, data, placement, swap_path, is_tight=True)
        assert_equal_to_plain(outcome, plain)
