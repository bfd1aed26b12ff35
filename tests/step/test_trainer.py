"""transformers' Trainer, as it is and with streamed checkpoints. Oracle: the same Trainer with torch's AdamW."""

import functools
import gc
import json
import signal
import textwrap

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from safetensors import safe_open  # noqa: E402
from trainer_runs import BACKWARD, NONE, NVME, Rows, WithBuffers, llama, lora, outcome_of, train, trainer_over  # noqa: E402

from offload.errors import CheckpointError, ConfigError  # noqa: E402
from offload.integrations.transformers import EngineCheckpoints  # noqa: E402
from offload.integrations.transformers import Trainer as StreamingTrainer  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*use_reentrant:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect():
    """accelerate collects garbage at the beginning of each training, and transformers alone is a million objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class LossOfOurOwn(transformers.Trainer):
    """What users write, with a loss that is a mean over the micro-batch."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + 0.01 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class TooLittleMemory(transformers.Trainer):
    """Two sequences do not fit, as it turns out in the midst of a forward."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with model.lm_head.register_forward_pre_hook(self._refuse_two):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _refuse_two(self, module, inputs):
        if self.model.training and len(inputs[0]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")


EPOCHS = {
    "max_steps": -1,
    "num_train_epochs": 2,
    "gradient_accumulation_steps": 2,
}  # 9 rows: a remainder in each
CASES = {
    "clipped": {"max_grad_norm": 0.05, "lr_scheduler_type": "cosine"},
    "not clipped": {"max_grad_norm": 0.0, "lr_scheduler_type": "constant"},
    "epochs": {**EPOCHS, "eval_strategy": "epoch", "eval_accumulation_steps": 1},
    "smoothing": {"label_smoothing_factor": 0.1, "train_sampling_strategy": "group_by_length"},
    "checkpointing": {"gradient_checkpointing": True, "dataloader_num_workers": 1},
    "bf16 autocast": {"bf16": True, **EPOCHS},
    "tied": {"model": functools.partial(llama, tied=True), "neftune_noise_alpha": 5.0},
    "own loss": {"kind": LossOfOurOwn, **EPOCHS},
    "too little memory": {"kind": TooLittleMemory, "auto_find_batch_size": True},
}


@pytest.mark.parametrize("case", CASES)
def test_trainer_equals_plain(case, swap_path, tmp_path):
    plain = train(None, tmp_path / "plain", swap_path, **CASES[case])
    assert len(plain.history) >= 4
    for placement in (NONE, NVME):
        train(placement, tmp_path / str(placement), swap_path, **CASES[case]).assert_equal(plain)


def test_bf16_has_the_same_bits_everywhere(swap_path, tmp_path):
    """Autocast over bf16 weights has nothing to cast: the flag may be given, or left out."""
    config = {"gradient_accumulation_steps": 2}
    runs = [
        train(placement, tmp_path / "out", swap_path, precision="bf16", config=config, bf16=flag, **EPOCHS)
        for placement, flag in ((NONE, False), (NVME, False), (NVME, True))
    ]
    runs[1].assert_equal(runs[0])
    runs[2].assert_equal(runs[0])
    plain = train(None, tmp_path / "plain", swap_path, **EPOCHS)
    for ours, theirs in zip(runs[0].history, plain.history, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.02)


# -- checkpoints --------------------------------------------------------------------------------------------

SAVING = {**EPOCHS, "save_strategy": "steps", "save_steps": 2}
KILLED = """
import os, signal
from pathlib import Path
import transformers
from offload.integrations.transformers import Trainer as StreamingTrainer
import trainer_runs

class Kill(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **more):
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

class KilledWhileSaving({kind}):
    def _save_rng_state(self, folder):
        if self.state.global_step == {saving}:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(folder)

placement, settings = trainer_runs.{placement}, {settings}
trainer_runs.train(
    placement, Path({out!r}), Path({swap!r}), kind=KilledWhileSaving, callbacks=[Kill()], **settings)
"""


@pytest.fixture(scope="module")
def without_a_break(tmp_path_factory):
    """A plain run to the end, saved on the way."""
    return train(None, tmp_path_factory.mktemp("plain"), None, **EPOCHS)


@pytest.mark.parametrize(
    ("kind", "placement", "saving"),
    [
        ("transformers.Trainer", "NONE", None),
        ("transformers.Trainer", "NVME", None),
        ("StreamingTrainer", "NVME", None),
        ("StreamingTrainer", "NVME", 4),  # transformers' own would take the newest directory, whole or not
    ],
)
def test_a_killed_run_goes_on_as_if_nothing_had_been(
    kind, placement, saving, without_a_break, swap_path, tmp_path, run_forked
):
    out = tmp_path / "out"
    config = {"gradient_accumulation_steps": 2}
    code = KILLED.format(
        saving=saving, kind=kind, placement=placement, out=str(out),
        swap=str(swap_path), settings={**SAVING, "config": config},
    )  # fmt: skip
    killed = run_forked(textwrap.dedent(code), tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint-2", "checkpoint-4"]
    kinds = {"transformers.Trainer": transformers.Trainer, "StreamingTrainer": StreamingTrainer}
    resumed = train(
        {"NONE": NONE, "NVME": NVME}[placement], out, swap_path, kind=kinds[kind], resume=True, config=config, **SAVING
    )  # fmt: skip
    resumed.assert_equal(without_a_break)


class NothingWhole(EngineCheckpoints, transformers.Trainer):
    """Fails where a checkpoint takes a dictionary of all weights, or of all state."""

    def _save_checkpoint(self, model, trial):
        with pytest.MonkeyPatch.context() as patch:
            for owner in (self.model, self.optimizer, self.optimizer.optimizer):
                patch.setattr(owner, "state_dict", None)
            super()._save_checkpoint(model, trial)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_streamed_checkpoints_hold_each_byte_once(precision, swap_path, tmp_path):
    config = {"gradient_accumulation_steps": 2}
    common = {"precision": precision, "config": config, **SAVING}
    with trainer_over(NVME, tmp_path, swap_path, kind=NothingWhole, **common) as trainer:
        trainer.train()
        whole, numel = outcome_of(trainer), trainer.engine.plan.inventory.parameters
    folder = tmp_path / "checkpoint-2"
    names = {path.name for path in folder.iterdir()}
    assert not names & {"optimizer.pt", "model.safetensors"}
    assert names >= {"model.safetensors.index.json", "checkpoint.json", "scheduler.pt", "trainer_state.json"}
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 12 * numel <= size <= 12 * numel + 16384  # weight, residual and two moments, and headers
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-6", dtype="auto")
    assert all(torch.equal(value, whole.weights[name]) for name, value in opened.state_dict().items())
    for placement in (NONE, NVME):
        resumed = train(placement, tmp_path, swap_path, kind=StreamingTrainer, resume=str(folder), **common)
        resumed.assert_equal(whole)


def test_a_plain_checkpoint_is_gone_on_from_with_streamed_ones(without_a_break, swap_path, tmp_path, caplog):
    config = {"gradient_accumulation_steps": 2}
    train(NVME, tmp_path, swap_path, config=config, **SAVING).assert_equal(without_a_break)
    assert (tmp_path / "checkpoint-2" / "optimizer.pt").is_file()
    first = str(tmp_path / "checkpoint-2")
    for resume in (first, str(tmp_path / "checkpoint-4")):  # which is a streamed one by then
        resumed = train(
            NVME, tmp_path, swap_path, kind=StreamingTrainer, resume=resume, config=config, **SAVING
        )
        resumed.assert_equal(without_a_break)
    assert [record.message for record in caplog.records if record.name == "offload"] == []


def test_buffers_are_in_streamed_checkpoints(swap_path, tmp_path):
    common = {"model": WithBuffers, "rows": 8, "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    plain = train(None, tmp_path / "plain", swap_path, **common)
    ours = train(NVME, tmp_path / "ours", swap_path, kind=StreamingTrainer, **common)
    ours.assert_equal(plain)
    first = tmp_path / "ours" / "checkpoint-2"
    train(NVME, first.parent, swap_path, kind=StreamingTrainer, resume=str(first), **common).assert_equal(
        plain
    )
    weight_map = json.loads((first.parent / "checkpoint-6" / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    for name, file in weight_map.items():
        with safe_open(first.parent / "checkpoint-6" / file, "pt") as tensors:
            assert torch.equal(tensors.get_tensor(name), plain.weights[name]), name
    assert weight_map.keys() == plain.weights.keys()


BEST = {
    "max_steps": 8, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
    "load_best_model_at_end": True, "save_total_limit": 1,
}  # fmt: skip


def best(placement, kind, folder, swap_path):
    """A run that stops early, and what it says and saves of its best model."""
    stop = transformers.EarlyStoppingCallback(1)
    learning = {"config": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}}}
    with trainer_over(
        placement, folder, swap_path, kind=kind, callbacks=[stop], **learning, **BEST
    ) as trainer:
        trainer.train()
        assert [path.name for path in folder.glob("checkpoint-*")] == [
            f"checkpoint-{trainer.state.best_global_step}"
        ]
        trained = outcome_of(trainer)
        metrics = {name: trainer.evaluate()[name] for name in ("eval_loss", "epoch")}
        predicted = trainer.predict(Rows(3, 7))
        trainer.save_model()
    opened = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert all(torch.equal(value, trained.weights[name]) for name, value in opened.state_dict().items())
    return trained, metrics, predicted


def test_the_best_model_at_the_end(swap_path, tmp_path):
    plain, metrics, predicted = best(None, transformers.Trainer, tmp_path / "plain", swap_path)
    for kind in (transformers.Trainer, StreamingTrainer):
        ours = best(NVME, kind, tmp_path / kind.__module__, swap_path)
        ours[0].assert_equal(plain)
        assert ours[1] == metrics
        assert (ours[2].predictions == predicted.predictions).all()


def test_adapters(swap_path, tmp_path):
    common = {"model": lora, **BEST}
    plain = train(None, tmp_path / "plain", swap_path, **common)
    for placement, kind in ((NONE, transformers.Trainer), (NVME, transformers.Trainer), (NVME, NothingWhole)):
        folder = tmp_path / f"{placement}{kind.__name__}"
        train(placement, folder, swap_path, kind=kind, **common).assert_equal(plain)
        (checkpoint,) = folder.glob("checkpoint-*")
        assert (checkpoint / "adapter_model.safetensors").is_file()
        assert (
            sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")) < 80_000
        )  # the base: 100 000
        resumed = train(placement, folder, swap_path, kind=kind, resume=str(checkpoint), **common)
        assert resumed.history[-1] == plain.history[-1]


def test_update_in_backward_with_the_norm_that_a_step_had(swap_path, tmp_path):
    """Weights as with update in step, and the norm that the engine has summed up itself."""
    common = {"max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 2}
    plain = train(None, tmp_path / "plain", swap_path, **common)
    ours = train(BACKWARD, tmp_path / "ours", swap_path, kind=StreamingTrainer, **common)
    for entry, expected in zip(ours.history, plain.history, strict=True):
        assert entry.pop("grad_norm") == pytest.approx(expected.pop("grad_norm"), rel=1e-5)
    ours.assert_equal(plain)
    first = str(tmp_path / "ours" / "checkpoint-2")
    resumed = train(BACKWARD, tmp_path / "ours", swap_path, kind=StreamingTrainer, resume=first, **common)
    assert all(torch.equal(resumed.weights[name], value) for name, value in plain.weights.items())


# -- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "settings", "message"),
    [
        (NVME, {"fp16": True}, "fp16 training is not built"),
        (BACKWARD, {}, "max_grad_norm 1.0 needs all gradients"),
        (
            NVME,
            {"gradient_accumulation_steps": 3},
            r"gradient_accumulation_steps is 3 here and 1 in the engine's",
        ),
        (None, {}, "give this Trainer the optimizer of offload.prepare"),
    ],
)
def test_what_contradicts_the_engine_is_refused_before_the_first_step(
    placement, settings, message, swap_path, tmp_path
):
    with trainer_over(placement, tmp_path, swap_path, kind=StreamingTrainer, **settings) as trainer:
        before = outcome_of(trainer)
        with pytest.raises(ConfigError, match=message):
            trainer.train()
        outcome_of(trainer).assert_equal(before)


def test_checkpoints_in_the_swap_path_are_refused(swap_path):
    with trainer_over(
        NVME, swap_path / "out", swap_path, kind=StreamingTrainer, save_strategy="steps"
    ) as trainer:
        with pytest.raises(ConfigError, match="lies in the swap path, where saving is committing"):
            trainer.train()
        (swap_path / "out").rmdir()  # which the Trainer has made


def test_a_damaged_checkpoint_is_refused(swap_path, tmp_path):
    common = {"kind": StreamingTrainer, "save_strategy": "steps", "save_steps": 2}
    train(NVME, tmp_path, swap_path, **common)
    (state,) = (tmp_path / "checkpoint-4").glob("state-*.safetensors")
    data = bytearray(state.read_bytes())
    data[-7] ^= 1
    state.write_bytes(data)
    with pytest.raises((CheckpointError, OSError), match=r"checkpoint-4"):
        train(NVME, tmp_path, swap_path, resume=True, **common)
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    state.write_text(state.read_text()[:-9])
    resumed = train(NVME, tmp_path, swap_path, resume=True, **common)
    assert json.loads(state.read_text())["global_step"] == len(resumed.history) == 4


EAGER = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 2}
"""The compiler traces, and what it has found runs as it is."""


@pytest.mark.parametrize("placement", [NONE, NVME], ids=str)
def test_a_compiled_model_trains_as_a_plain_compiled_one(placement, swap_path, tmp_path, the_cpu_computes):
    """Whose last bits are not those of one that is not compiled."""
    torch._dynamo.reset()
    outcome = train(placement, tmp_path, swap_path, **EAGER)
    torch._dynamo.reset()
    outcome.assert_equal(train(None, tmp_path, swap_path, **EAGER))


def test_compiled_blocks_are_right_where_weights_stay(swap_path, tmp_path, the_cpu_computes):
    def compiled():
        model = llama()
        for block in model.model.layers:
            block.compile(backend="eager")
        return model

    torch._dynamo.reset()
    outcome = train(NONE, tmp_path, swap_path, model=compiled, max_steps=2)
    outcome.assert_equal(train(None, tmp_path, swap_path, max_steps=2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
