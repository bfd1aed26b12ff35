"""Public configuration files: what each of them means here, or why it is refused."""

from __future__ import annotations

from typing import Any

import pytest
from census_embedded import EMBEDDED
from census_threads import THREADS
from census_whole import WHOLE_FILES, Tree

from offload.config import OffloadConfig
from offload.errors import ConfigError

CENSUS = {**WHOLE_FILES, **EMBEDDED, **THREADS}


def test_the_census_is_complete():
    assert len(CENSUS) == 68


@pytest.mark.parametrize("name", [name for name, case in CENSUS.items() if not case.refused])
def test_census_accepted(name: str):
    case = CENSUS[name]
    config = OffloadConfig.from_any(case.source)
    written = config.to_dict()
    for path, wanted in case.values.items():
        assert at(written, path) == wanted, path
    for part in case.notes:
        assert any(part in note for note in config.notes), (part, config.notes)
    assert OffloadConfig.from_dict(written) == config


@pytest.mark.parametrize("name", [name for name, case in CENSUS.items() if case.refused])
def test_census_refused(name: str):
    case = CENSUS[name]
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_any(case.source)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(case.refused), lines
    for line, beginning in zip(lines, case.refused, strict=True):
        assert line.startswith(beginning), line


def at(tree: Tree, path: str) -> Any:
    """The value at a path of a written configuration; None where nothing is set."""
    node: Any = tree
    for key in path.split("."):
        node = node.get(key) if isinstance(node, dict) else None
    return node
