"""The run itself: data, model, engine, loop, report, export. It cleans up on every way out."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from .. import metrics
from ..api import prepare
from ..checkpoint import export
from ..integrations.schedulers import build_scheduler, check_schedule
from ..models.pretrained import persistent_buffers
from ..models.text import TextDataset, load_tokenizer
from ..optimizer import OffloadOptimizer
from ..placement import swap_paths_of
from ..plan import MemoryPlan
from ..saving import SavedEngine
from ..store.directory import SwapDirectory
from .building import build, fill_later, hf_config, shapes_of
from .commits import Commits, give_up
from .failures import Stopped, StopSignals, describe
from .memory import give_back, keep_compiler_out
from .progress import Display, Meter
from .report import Account, build_report, table
from .sources import PresetSource, inventory_of, plan_notes

if TYPE_CHECKING:
    from .finetune import Job


def finetune(job: Job, display: Display, signals: StopSignals, *, rss_start_bytes: int) -> None:
    """Trains as the job says and leaves report.json, and the exported model.

    Raises:
        OffloadError, Stopped: the run ended early. Before its first step nothing is left; after it, the
            report.
    """
    request = job.request
    try:
        dataset = _open_data(job, display)
        model, optimizer = _prepare(job, display)
    except Stopped as stopped:
        job.out.undo()
        _say_stopped(display, stopped, "before the first step; nothing is left behind")
        raise
    except BaseException:
        job.out.undo()
        raise
    engine = optimizer.engine
    account = Account(request.steps, job.tokens_per_step, rss_start_bytes, [])
    account.first_step = engine.global_steps + engine.skipped_steps
    commits = Commits(engine, every=request.save_every, last=request.steps)
    try:
        _train(job, display, signals, model, optimizer, dataset, account, commits)
        engine.report()
        _write_report(job, display, optimizer, account)
        if request.export is not None:
            with display.task(f"exporting to {request.export}"):
                _export(job, model, optimizer)
            display.say(f"the model is in {request.export}")
            engine.discard()
            job.record.remove()
        elif commits.step is not None:
            display.say(_kept(job, engine, commits))
    except (Stopped, Exception) as error:
        engine.close()  # first: whatever else fails, no swap file stays but of a commit
        account.stopped_by = error.name if isinstance(error, Stopped) else describe(error)
        with contextlib.suppress(OSError):  # the report of a failed run must not hide why it failed
            _write_report(job, display, optimizer, account)
        done = account.first_step + engine.ledger.steps
        after = f"after {done} of {request.steps} steps; {_kept(job, engine, commits)}"
        if isinstance(error, Stopped):
            _say_stopped(display, error, f"{after}; {job.out.path}/report.json is kept")
        elif commits.step is not None:
            display.say(f"the run has ended {after}")
        raise
    finally:
        engine.close()


def _kept(job: Job, engine: SavedEngine, commits: Commits) -> str:
    """What is left of a run that has not been exported."""
    if commits.step is None:
        return "the trained weights are lost, as nothing was committed; swap files are removed"
    return (
        f"{engine.commits_to} keeps the state after step {commits.step}: the same command goes on from there with"
        " --resume, and --restart gives it up"
    )


def _say_stopped(display: Display, stopped: Stopped, what: str) -> None:
    display.say(f"stopped by {stopped.name} {what}")


def _open_data(job: Job, display: Display) -> TextDataset:
    """Tokenises the data into the out directory, or finds it there."""
    request = job.request
    check_schedule(job.config, total_steps=request.steps)
    if job.going_on is None:
        if request.restart:
            give_up(job.out.path)
        _check_swap_path(job)
    tokenizer = load_tokenizer(job.tokenizer)
    if isinstance(job.source, PresetSource):
        keep_compiler_out()  # transformers, which the other source needs, loads it in any case
    job.out.make()
    with display.task(f"tokenising {request.data}") as advance:
        dataset = TextDataset(
            request.data,
            tokenizer,
            seq=request.seq,
            cache_dir=job.out.cache,
            micro_batch=job.batch.micro,
            seed=request.seed,
            field=request.field,
            model_vocab_size=job.source.vocab_size,
            progress=advance,
        )
    display.say(
        f"data: {dataset.num_tokens:,} tokens, {dataset.num_sequences:,} sequences of {request.seq};"
        f" the run reads {request.steps * job.batch.train:,}"
    )
    return dataset


def _check_swap_path(job: Job) -> None:
    """Finds out now whether the swap files can be made, rather than after the data has been tokenised."""
    paths = swap_paths_of(job.config)
    if paths is None:
        return
    plan = MemoryPlan.build(
        job.placement, inventory_of(job.config, job.source, job.source.shapes(), job.request.seq)
    )
    need = plan.bytes_total("nvme")
    with contextlib.ExitStack() as opened:
        directories = []
        for path in paths.all:
            directories.append(SwapDirectory(path.path))
            opened.callback(directories[-1].close)
        if len(directories) == 1:  # what several have together is known when their shares are
            directories[0].check_space(need)


def _prepare(job: Job, display: Display) -> tuple[nn.Module, OffloadOptimizer]:
    """Builds the model, shows the plan, and moves every value to its home."""
    request = job.request
    model, read = build(job.source, seed=request.seed)
    inventory = inventory_of(job.config, job.source, shapes_of(model), request.seq)
    if not request.quiet and job.going_on is None:
        display.say(f"plan of {job.source.name}")
        display.say(MemoryPlan.build(job.placement, inventory).report())
        for note in plan_notes(inventory):
            display.say(note)
    give_back()
    with display.task("moving the model to its home") as advance:
        fill_later(model, read, advance)
        model, optimizer = prepare(
            model,
            job.config,
            activation_bytes=inventory.activation_bytes,
            library_bytes=inventory.library_bytes,
            resume=job.going_on or False,
            previous=request.previous,
        )
    engine = optimizer.engine
    if job.going_on is not None:
        display.say(f"going on after step {engine.global_steps}, from {engine.commits_to}")
        if not request.quiet:
            display.say(engine.plan.report())
    if engine.commits_to is not None and request.save_every:
        job.record.write(engine.commits_to)
    give_back()
    return model, optimizer


def _train(
    job: Job,
    display: Display,
    signals: StopSignals,
    model: nn.Module,
    optimizer: OffloadOptimizer,
    dataset: TextDataset,
    account: Account,
    commits: Commits,
) -> None:
    engine, steps, first = optimizer.engine, job.request.steps, account.first_step
    ledger, device = engine.ledger, engine.device
    scheduler = build_scheduler(job.config, optimizer, total_steps=steps)
    engine.attach(data=dataset, **({} if scheduler is None else {"scheduler": scheduler}))
    read_before, written_before = metrics.storage_bytes()
    meter = Meter(ledger, steps=steps, tokens_per_step=job.tokens_per_step, first=first)
    with display.training(steps) as show:
        for step in range(first + 1, steps + 1):
            refused = ledger.skipped_steps
            losses = [
                _micro_step(model, dataset.next_batch(), job.batch.accumulation, device)
                for _ in range(job.batch.accumulation)
            ]
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None and ledger.skipped_steps == refused:
                scheduler.step()
            account.losses.append(sum(float(loss) for loss in losses) / len(losses))
            account.seconds = meter.seconds
            read, written = metrics.storage_bytes()
            account.storage_bytes = (read - read_before, written - written_before)
            signals.check()
            commits.after(step)
            if display.wants(step, steps):
                show(meter.figures(step, account.losses[-1]))


def _micro_step(
    model: nn.Module, batch: dict[str, torch.Tensor], accumulation: int, device: torch.device
) -> torch.Tensor:
    """Forward and backward; nothing of either outlives it but the gradients and the loss, on the device."""
    output = model(**{name: tensor.to(device) for name, tensor in batch.items()})
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    del output  # and with it the logits
    (loss / accumulation).backward()
    return loss.detach()


def _write_report(job: Job, display: Display, optimizer: OffloadOptimizer, account: Account) -> None:
    engine, request = optimizer.engine, job.request
    about = {
        "model": job.source.name,
        "data": str(request.data),
        "seq": request.seq,
        "micro_batch": job.batch.micro,
        "accumulation": job.batch.accumulation,
        "seed": request.seed,
        "config_path": str(request.config_path),
        "config_digest": job.config_digest,
        "config": job.config.to_dict(),
    }
    report = build_report(account, engine.plan, engine.report(), about)
    path = job.out.write_report(report)
    for line in table(report):
        display.say(line)
    display.say(f"report: {path}")


def _export(job: Job, model: nn.Module, optimizer: OffloadOptimizer) -> None:
    request = job.request
    if request.export is None:
        raise AssertionError("nothing to export to")
    tokenizer = job.tokenizer
    export(
        optimizer.engine,
        request.export,
        config=hf_config(job.source, job.config.precision, load_tokenizer(tokenizer).eos_id),
        buffers=persistent_buffers(model),
        tokenizer_files=tokenizer.parent if tokenizer is not None and tokenizer.is_file() else tokenizer,
    )
