"""The commands and their options. See ``offload --help``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import __version__
from .commits import SAVE_EVERY
from .failures import Failures
from .options import (
    ConfigArgument,
    DataOption,
    ExportOption,
    FieldOption,
    HeldArgument,
    JsonOption,
    ModelOption,
    OutOption,
    PreviousOption,
    QuietFinetuneOption,
    QuietOption,
    RestartOption,
    ResumeOption,
    SaveEveryOption,
    SeedOption,
    SeqOption,
    StepsOption,
    TokenizerOption,
    TracebackOption,
)

app = typer.Typer(
    name="offload",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train and fine-tune PyTorch models that fit neither the accelerator nor RAM.\n\n"
    "Parameters and optimizer state stream between host memory and NVMe, as a JSON configuration says"
    " (DeepSpeed's, with a few additions). Begin with `plan`, which computes what a run needs in a moment and"
    " changes nothing; then run the same line with `finetune`.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offload {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def finetune(
    config: ConfigArgument,
    model: ModelOption,
    data: DataOption,
    steps: StepsOption = 100,
    seq: SeqOption = 256,
    out: OutOption = None,
    export: ExportOption = None,
    field: FieldOption = "text",
    tokenizer: TokenizerOption = None,
    seed: SeedOption = 0,
    save_every: SaveEveryOption = SAVE_EVERY,
    resume: ResumeOption = False,
    restart: RestartOption = False,
    previous: PreviousOption = False,
    quiet: QuietFinetuneOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Train a model on text. What it needs is checked, and printed as a plan, before anything starts.

    Ends with a report of what moved, what waited and how much memory was used, and the same as report.json.
    Ctrl-C stops at once; what was committed stays in the swap directory, for --resume, until the model is exported.
    """
    with Failures(traceback):
        from .finetune import Request, run

        run(
            Request(
                config_path=config,
                model=model,
                data=data,
                steps=steps,
                seq=seq,
                out=out,
                export=export,
                field=field,
                tokenizer=tokenizer,
                seed=seed,
                quiet=quiet,
                save_every=save_every,
                resume=resume,
                restart=restart,
                previous=previous,
            )
        )


@app.command()
def plan(
    config: ConfigArgument,
    model: ModelOption,
    steps: StepsOption = 100,
    seq: SeqOption = 256,
    gb_per_second: Annotated[
        float | None,
        typer.Option(
            "--gb-per-second",
            metavar="X",
            help="Bandwidth of the drive in GB/s, to predict the seconds of I/O in a step.",
            show_default=False,
        ),
    ] = None,
    traceback: TracebackOption = False,
) -> None:
    """Show what a run would need: memory by purpose, bytes per step, the drive's life. Changes nothing.

    Exit status 2, with the sum and the setting that fits, where a budget is too small.
    """
    with Failures(traceback):
        from .plan import show_plan

        show_plan(config, model, steps=steps, seq=seq, gb_per_second=gb_per_second)


@app.command()
def tune(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH",
            help="Directories on the drives to tune. Default: those that the configuration names.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the settings into this configuration, whose comments stay. Default: into the profile of"
            " this machine, which runs use where `aio` says auto.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw what was measured (.png, .svg, .pdf).", show_default=False),
    ] = None,
    max_write: Annotated[
        str, typer.Option("--max-write", metavar="SIZE", help="Most that is written to each drive.")
    ] = "16GiB",
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Time for each path. Default: 25, and less where there are several.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything that was measured as JSON, and nothing else.")
    ] = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Find the fastest way to read and write the swap files on a drive, in under 30 seconds.

    Tries backends, request sizes, queue depths and threads with the loads of a training step, past the page cache.
    The test file vanishes whatever happens. With several paths it also measures the weights they should have.
    """
    with Failures(traceback):
        from .tune import Request, run

        run(
            Request(
                paths=tuple(paths or ()),
                config=config,
                plot=plot,
                max_write=max_write,
                seconds=seconds,
                quiet=quiet,
                json=as_json,
            )
        )


@app.command()
def doctor(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH", help="Swap paths to look at as well.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as JSON.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Show what this machine and its swap paths offer, why something is off, and what would mend it.

    Changes nothing, and needs neither root nor an accelerator. Exit status 1 where the engine cannot work.
    """
    with Failures(traceback):
        from .doctor import run

        run(paths or [], as_json=as_json)


@app.command()
def inspect(
    directory: HeldArgument,
    params: Annotated[bool, typer.Option("--params", help="List every parameter.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything that is known as JSON, and nothing else.")
    ] = False,
    traceback: TracebackOption = False,
) -> None:
    """Show what a swap store or a checkpoint holds: which model, from when, how much, and where.

    Reads what it says of itself, takes no lock and changes nothing: it may be used beside the run. `verify` reads the
    data too. Exit status 1 where a part of what is there cannot be read.
    """
    with Failures(traceback):
        from .inspect import Request, run

        run(Request(path=directory, params=params, json=as_json))


@app.command()
def verify(
    directory: HeldArgument,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the outcome as JSON, and nothing else.")
    ] = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Read everything that a swap store or a checkpoint names, and hold it against its checksums.

    Changes nothing, and may be used beside the run. Exit status 1 where something is damaged: each piece is named
    with its parameters, file and offset.
    """
    with Failures(traceback):
        from .verify import Request, run

        run(Request(path=directory, json=as_json, quiet=quiet))


@app.command()
def export(
    directory: HeldArgument,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A new directory for the model.", show_default=False)
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="fp32 (the exact weights that were trained), bf16 or fp16. Default: the type they are computed in.",
            show_default=False,
        ),
    ] = None,
    only_trained: Annotated[
        bool,
        typer.Option("--only-trained", "--exclude-frozen", help="Leave out frozen weights: adapters alone."),
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The model that it was trained from: its config.json and tokenizer are copied. Default: what the"
            " checkpoint knows.",
            show_default=False,
        ),
    ] = None,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Write the weights of a checkpoint, or of a run that has ended, as safetensors that transformers opens.

    Needs neither the model's class nor the configuration of the run, and memory for one tensor. OUT appears when it is
    complete.
    """
    with Failures(traceback):
        from .export import Request, run

        run(
            Request(
                path=directory,
                out=out,
                dtype=dtype,
                only_trained=only_trained,
                model=model,
                quiet=quiet,
            )
        )


bench = typer.Typer(help="Measure a part of the engine on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command("io")
def bench_io(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A directory on the drive.", show_default=False)
    ],
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Measurements of each, in turns.")] = 5,
    max_write: Annotated[
        str, typer.Option("--max-write", metavar="SIZE", help="Most that is written to the drive.")
    ] = "32GiB",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Measure reading, writing and the mixed load of a step, with the settings a run would have here.

    Beside fio, in turns and on the same file, where it is installed. The file vanishes whatever happens.
    """
    with Failures(traceback):
        from .bench import Request, run

        run(Request(path=path, rounds=rounds, max_write=max_write, json=as_json, quiet=quiet))


@bench.command("adam")
def bench_adam(
    millions: Annotated[float, typer.Option(min=0.001, metavar="N", help="Parameters, in millions.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Measurements of each, in turns.")] = 9,
    threads: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Threads; may be repeated. 1 and all by default.", show_default=False),
    ] = None,
    isa: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Instruction set; may be repeated. All vector sets of this machine by default.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    traceback: TracebackOption = False,
) -> None:
    """Measure the CPU optimizer kernel in every format, beside torch's fused AdamW and DeepSpeedCPUAdam.

    The latter where deepspeed is installed. All take turns, and the bytes that they move are set beside the rate of a
    copy.
    """
    with Failures(traceback):
        from .bench_adam import Request, run

        run(
            Request(
                millions=millions,
                rounds=rounds,
                threads=threads or [],
                isas=isa or [],
                json=as_json,
                quiet=quiet,
            )
        )
