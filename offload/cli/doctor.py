"""``offload doctor``: what this machine and its swap paths offer, and why something is off. Changes nothing."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from . import host as machine_facts
from . import swap_facts
from .facts import Fact, State
from .failures import STATUS_FAILED
from .host import Host

WIDTH_MAX = 100
_NAME_WIDTH = 18
_MARKS: dict[State, str] = {"ok": " ", "slow": "!", "bad": "X", "unknown": "?"}
_COLOURS: dict[State, str | None] = {"ok": None, "slow": "yellow", "bad": "red", "unknown": "bright_black"}

Section = tuple[str, list[Fact]]


def run(paths: Sequence[Path], *, as_json: bool) -> None:
    """Carries out the command. Exit status 1 where the engine cannot work."""
    sections = examine(paths, Host())
    if as_json:
        typer.echo(to_json(sections))
    else:
        for line in page(sections, width=min(shutil.get_terminal_size((WIDTH_MAX, 24)).columns, WIDTH_MAX)):
            typer.echo(line)
    if not is_usable(sections):
        sys.stdout.flush()
        raise typer.Exit(STATUS_FAILED)


def examine(paths: Sequence[Path], host: Host) -> list[Section]:
    """The facts about the machine, and about each path."""
    sections: list[Section] = [("machine", list(machine_facts.facts(host)))]
    return [*sections, *((str(path), list(swap_facts.facts(path, host))) for path in paths)]


def is_usable(sections: Sequence[Section]) -> bool:
    """Whether nothing keeps the engine from working."""
    return all(fact.state != "bad" for _, facts in sections for fact in facts)


def page(sections: Sequence[Section], *, width: int) -> Iterator[str]:
    """The lines for people. A hint stands below what it is about."""
    for name, facts in sections:
        yield typer.style(name, bold=True)
        for fact in facts:
            yield from _lines(fact, width)
        yield ""
    everything = [fact for _, facts in sections for fact in facts]
    slow, bad = (sum(fact.state == state for fact in everything) for state in ("slow", "bad"))
    if len(sections) == 1:
        yield "give a swap path to look at its drive: offload doctor /mnt/nvme"
    yield "; ".join(
        [
            f"{_count(bad, 'thing')} (X) must be mended first" if bad else "the engine works here",
            f"{_count(slow, 'thing')} (!) could be better" if slow else "nothing costs speed",
        ]
    )


def _lines(fact: Fact, width: int) -> Iterator[str]:
    indent = " " * (_NAME_WIDTH + 4)
    first, *rest = textwrap.wrap(fact.value, width - len(indent)) or [""]
    head = f"{_MARKS[fact.state]} {fact.name:{_NAME_WIDTH}}  "
    colour = _COLOURS[fact.state]
    yield typer.style(head + first, fg=colour) if colour else head + first
    yield from (indent + line for line in rest)
    if fact.hint:
        for line in _wrapped_hint(fact.hint, width - len(indent)):
            yield indent + line


def _wrapped_hint(hint: str, width: int) -> Iterator[str]:
    """Lines of a hint; a command is not broken, so that it can be copied."""
    line = "-> "
    for number, part in enumerate(hint.split("`")):
        words = [f"`{part}`"] if number % 2 else part.split(" ")
        for index, word in enumerate(words):
            glue = "" if index == 0 else " "
            if len(line) + len(glue) + len(word) > width and line.strip() not in ("", "->"):
                yield line.rstrip()
                line, glue = "   ", ""
            line += glue + word
    yield line.rstrip()


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def to_json(sections: Sequence[Section]) -> str:
    """The same for programs."""
    data = {
        "version": 1,
        "usable": is_usable(sections),
        "sections": [{"name": name, "facts": [asdict(fact) for fact in facts]} for name, facts in sections],
    }
    return json.dumps(data, indent=2)
