"""What should stay true of the code is kept true here: layers, gates, sizes, and the pages that describe them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "offload"
CSRC = ROOT / "aio_csrc"
LINES_MAX = 500
FUNCTION_LINES_MAX = 70

FILES = sorted(PACKAGE.rglob("*.py"))
OWN_TEXT = [
    path
    for folder in ("offload", "aio_csrc", "benchmarks", "tests", "swap_configs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".pyi", ".cpp", ".h", ".md", ".json") and path != Path(__file__)
]


def module_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def layers():
    """The layer table of offload/README.md: module -> level."""
    text = (PACKAGE / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([a-z_ ]+) \|", text, flags=re.MULTILINE)
    return {module: int(level) for level, modules in rows for module in modules.split()}


def runtime_imports(path):
    """(module names relative to the package, absolute names) that a file imports when it runs."""
    own, absolute = set(), set()
    tree = ast.parse(path.read_text())
    typing_only = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            own |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            absolute.add(node.module)
        elif isinstance(node, ast.Import):
            absolute |= {alias.name for alias in node.names}
    return own, absolute


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    level, mine = layers(), module_of(path)
    if mine in ("__init__", "__main__"):
        return
    own, absolute = runtime_imports(path)
    assert not any(name.split(".")[0] == "offload" for name in absolute), "import relatively"
    for other in own - {mine, "_aio", "_adam"}:
        if other == "__version__":
            continue
        assert level[other] < level[mine], f"{path}: may not import {other}"


def test_every_module_has_a_layer():
    modules = {module_of(path) for path in FILES} - {"__init__", "__main__"}
    assert modules == set(layers())


@pytest.mark.parametrize(("extension", "keeper"), [("_aio", "aio"), ("_adam", "optim")])
def test_gates(extension, keeper):
    users = {module_of(path) for path in FILES if re.search(rf"import {extension}\b", path.read_text())}
    assert users == {keeper}


def test_pure_modules_import_no_torch():
    modules = ["errors", "bytesize", "inventory", "plan", "schedule", "blocks", "config", "models.presets"]
    code = "import sys\n" + "".join(f"import offload.{name}\n" for name in modules)
    code += "assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", ["crc", "durable", "generations", "layout", "manifest", "reader"])
def test_the_rules_of_the_store_know_no_torch(name):
    own, absolute = runtime_imports(PACKAGE / "store" / f"{name}.py")
    assert not {"torch", "numpy"} & {each.split(".")[0] for each in absolute}
    assert own <= {"bytesize", "errors", "inventory", "plan", "untrusted"}


@pytest.mark.parametrize(
    "path", [p for p in OWN_TEXT if p.suffix in (".py", ".cpp", ".h") and "tests" not in p.parts], ids=str
)
def test_files_can_be_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= LINES_MAX


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_functions_and_docstrings(path):
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} does not say what it is"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            documentation = (ast.get_docstring(node, clean=False) or "").count("\n")
            lines = node.end_lineno - node.lineno + 1 - documentation
            assert lines <= FUNCTION_LINES_MAX, f"{path}:{node.lineno} {node.name} has {lines} lines"
            if not node.name.startswith("_") and node.col_offset == 0:
                assert ast.get_docstring(node), f"{path}:{node.lineno} {node.name} has no docstring"


def test_nothing_is_left_to_do():
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError\b|\bstub\b")
    allowed = {"offload/README.md"}
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in OWN_TEXT
        if str(path.relative_to(ROOT)) not in allowed and path.suffix != ".md"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert not found


def test_the_library_never_prints():
    for path in FILES:
        if module_of(path) in ("cli", "__main__"):
            continue
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        printing = [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
        if path.name == "schema_json.py":
            continue  # a script whose output is the file
        assert not printing, f"{path}:{printing}"


def test_bindings_are_the_only_cpp_that_knows_python_and_nothing_knows_torch():
    for path in sorted(CSRC.rglob("*")):
        if path.suffix not in (".cpp", ".h"):
            continue
        text = path.read_text()
        assert "torch/" not in text and "ATen" not in text, path
        if path.parent.name != "bindings":
            assert "pybind11" not in text and "Python.h" not in text, path


def test_cpp_layers():
    """bindings -> {io, optim} -> util."""
    allowed = {
        "bindings": {"io", "optim", "util"},
        "io": {"io", "util"},
        "optim": {"optim", "util"},
        "util": {"util"},
    }
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in (".cpp", ".h"):
            folders = set(re.findall(r'#include "(\w+)/', path.read_text()))
            assert folders <= allowed[path.parent.name], path


def test_every_named_note_exists():
    """`Note [Title]` is written once as a heading and referred to by that title."""
    text = {path: path.read_text() for path in OWN_TEXT if path.suffix in (".py", ".cpp", ".h")}
    titles = {
        m
        for body in text.values()
        for m in re.findall(r"^\s*(?:// |# )?Note \[([^\]]+)\]$", body, re.MULTILINE)
    }
    for path, body in text.items():
        for title in re.findall(r"[Ss]ee (?:\w+\.\w+, )?Note \[([^\]]+)\]", body):
            assert title in titles or title.endswith("..."), f"{path}: Note [{title}] does not exist"


def test_every_cpp_file_is_on_its_page():
    page = (CSRC / "README.md").read_text()
    named = set(re.findall(r"`(\w+)(?:\.h)?`", page))
    stems = {
        path.stem
        for path in CSRC.rglob("*")
        if path.suffix in (".cpp", ".h") and path.parent.name != "bindings"
    }
    assert stems <= named


def test_readmes_point_at_files_that_exist():
    for page in (ROOT / "README.md", PACKAGE / "README.md", CSRC / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"
