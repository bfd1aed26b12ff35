"""The options of the commands, with what `--help` says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="JSON configuration: where parameters and optimizer state live, the memory they may take, the"
        " optimizer. `swap_configs/` has one per scenario.",
        show_default=False,
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        metavar="DIR|preset:NAME",
        help="A model directory saved by transformers, or a decoder with random weights: preset:demo, 10m,"
        " 25m, 50m, 125m, 350m, 1b, 3b, 7b, 8b, 13b, 30b, 70b.",
        show_default=False,
    ),
]
HeldArgument = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="A swap directory of a run (offload-*), a checkpoint, or a directory that holds some of them.",
        show_default=False,
    ),
]
StepsOption = Annotated[int, typer.Option(min=1, metavar="N", help="Optimizer steps.")]
SeqOption = Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of one sequence.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Only plain lines.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
TracebackOption = Annotated[
    bool,
    typer.Option(
        "--traceback", envvar="OFFLOAD_TRACEBACK", help="Show where an error was raised.", show_default=False
    ),
]

# -- of finetune --------------------------------------------------------------------------------------------

DataOption = Annotated[
    Path,
    typer.Option(
        metavar="PATH",
        help="Text to train on: a file (plain, or .jsonl), or a folder of .txt .md .rst .py .jsonl files.",
        show_default=False,
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where report.json and the tokenised text go. Default: runs/ and the name of CONFIG.",
        show_default=False,
    ),
]
ExportOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write the trained model there at the end, as safetensors that transformers opens.",
        show_default=False,
    ),
]
FieldOption = Annotated[str, typer.Option(metavar="NAME", help="Where a .jsonl record has its text.")]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="A tokenizer saved by transformers, or a tokenizer.json. Default: the model's own; a preset"
        " reads bytes.",
        show_default=False,
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(min=0, metavar="N", help="Of a preset's first weights and of the order of the data."),
]
SaveEveryOption = Annotated[
    int,
    typer.Option(
        "--save-every",
        min=0,
        metavar="N",
        help="Commit after every N steps, and the last, where the swap files keep two generations"
        " (durability.generations); 0: never.",
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on from the last commit of the run in --out.")
]
RestartOption = Annotated[
    bool, typer.Option("--restart", help="Give up what a run in --out has committed, and begin anew.")
]
PreviousOption = Annotated[
    bool,
    typer.Option("--previous", help="With --resume: go on from the commit before the last one, for good."),
]
QuietFinetuneOption = Annotated[
    bool, typer.Option("--quiet", help="Only plain lines of progress and the result.")
]
