"""`generate` between steps, with most weights absent. Oracle: plain PyTorch, token by token and score by score."""

import functools

import pytest
import torch
from against_plain import assert_equal_to_plain, train_offloaded, train_plain
from families import GENERATING, ZERO_GRADIENT, batches, build, inputs, loss_of
from models import Placement

pytest.importorskip("transformers")

NVME = Placement("nvme", "nvme", chunk=4096)
NVME_BACKWARD = Placement("nvme", "nvme", "backward", chunk=4096)
WAYS = {
    "greedy": {"do_sample": False},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"do_sample": False, "num_beams": 3},
}


def generate(model, name, way):
    given = inputs(name)
    given.pop("decoder_input_ids", None)
    if "input_ids" in given:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    if name == "qwen3-moe":
        given["output_router_logits"] = (
            False  # transformers' own loss of the router wants a mask without a cache
        )
    torch.manual_seed(3)
    model.eval()
    out = model.generate(
        **given,
        **WAYS[way],
        min_new_tokens=4,
        max_new_tokens=4,
        output_scores=True,
        return_dict_in_generate=True,
    )
    model.train()
    return [out.sequences, *out.scores]


@pytest.mark.parametrize("name", GENERATING)
def test_generation_between_steps(name, swap_path):
    """After each of three steps in all ways; neither the texts nor the training know of it."""
    seen = {}

    def look(whose, model):
        seen.setdefault(whose, []).extend(generate(model, name, way) for way in WAYS)

    data = batches(name, 3)
    plain = train_plain(build(name), loss_of, data, look=functools.partial(look, "plain"))
    placement = [NVME, NVME_BACKWARD][GENERATING.index(name) % 2]
    outcome = train_offloaded(
        build(name),
        loss_of,
        data,
        placement,
        swap_path,
        look=functools.partial(look, "engine"),
        is_tight=True,
    )
    assert_equal_to_plain(outcome, plain, without_gradient=ZERO_GRADIENT)
    assert len(seen["plain"]) == len(seen["engine"]) == 3 * len(WAYS)
    for ours, theirs in zip(seen["engine"], seen["plain"], strict=True):
        assert len(ours) == len(theirs) == 5 and all(map(torch.equal, ours, theirs))
