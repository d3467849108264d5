"""Rules that keep the code readable: imports, lengths, docstrings and words.

Each check is a function from a parsed file to the problems in it, so that the tests at the end can
give it a bad snippet and see that it objects.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONGEST_FUNCTION = 70
LONGEST_MODULE = 400

# The way of a request's KV, downwards, and then what stands on it: a part imports only parts that
# stand in an earlier line.
ORDER = (
    ("errors",),
    ("integers", "atomic"),
    ("sizes", "machine"),
    ("layout",),
    ("form",),
    ("seal",),
    ("device",),
    ("pool",),
    ("transfer",),
    ("arena",),
    ("ticket",),
    ("snapshot",),
    ("tier",),
    ("tide",),
    ("models", "conformance"),
    ("npu", "plugin", "serve"),
    ("prompts",),
    ("measure",),
    ("doctor",),
    ("server",),
    ("cli",),
    ("__main__",),
)
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}
TOP_RANK = RANK["tide"]

CORE_NEEDS = {"torch", "numpy", "xxhash", "kvtide"}
EXTRAS = {"tier/mooncake_connect.py": {"mooncake"}}
"""Packages of an extra, and the file that imports them when somebody uses it."""
PURE = (
    "integers.py",
    "layout/",
    "form.py",
    "seal.py",
    "models/",
    "pool/slots.py",
    "transfer/plan.py",
)
INPUT_OUTPUT = {"asyncio", "io", "mmap", "os", "pathlib", "shutil", "socket", "subprocess"}
TRANSFORMERS_USERS = {"serve/adapter.py", "serve/adapter_files.py"}
DEVICE_MODULES = {"cuda", "npu", "xpu", "mps"}
UNPICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
# Names that say nothing about a value, and texts that docstrings, comments and errors don't use.
EMPTY_NAMES = {"one", "own", "of", "at"}
UNWANTED_TEXTS = {"can't be meant": "say `invalid`", "``": "a name stands in single backticks"}
# A docstring that begins with such a word goes on from something that its reader hasn't read.
HEADLESS_WORDS = {
    *("Also", "And", "As", "But", "Else", "Nor", "Of", "Or", "Rather"),
    *("Than", "That", "Those", "Though", "Whoever"),
}
DOCUMENTED_FOLDERS = ("tests", "engines", "simnpu/src", "simnpu/tests", "benchmarks")


@functools.cache
def parse(text: str) -> ast.Module:
    """Parses a file once for all checks, none of which changes the tree."""
    return ast.parse(text)


@dataclass(frozen=True)
class Source:
    """A parsed file; `path` is relative to the package, with slashes."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        """The file's syntax tree."""
        return parse(self.text)

    @property
    def part(self) -> str:
        """The first step of the path: `pool` for pool/slots.py, `tide` for tide.py."""
        return self.path.removesuffix(".py").split("/")[0]


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Yields every import of the file, also lazy ones and those for types: line and full name."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields every function in a tree, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def check_order(source: Source) -> list[str]:
    """Imports run downwards only, and each part knows its rank."""
    if source.part == "__init__":
        rank = TOP_RANK + 1
    elif source.part in RANK:
        rank = RANK[source.part]
    else:
        return [f"{source.path}: {source.part} has no place in ORDER"]
    problems = []
    for line, name in imports(source):
        steps = name.split(".")
        if name.startswith("."):
            problems.append(f"{source.path}:{line}: {name}: imports are written in full")
        elif steps[0] == "kvtide" and steps[1] in RANK and steps[1] != source.part:
            if RANK[steps[1]] >= rank:
                problems.append(f"{source.path}:{line}: {source.part} stands below {steps[1]}")
        elif steps[0] == "kvtide" and steps[1] not in RANK and steps[1] != "__version__":
            problems.append(f"{source.path}:{line}: {name}: import it from where it is defined")
    return problems


def module_of(source: Source) -> str:
    """Returns the full name of the file's module; for `__init__.py` the package's."""
    steps = source.path.removesuffix(".py").removesuffix("__init__").rstrip("/").split("/")
    return ".".join(["kvtide", *filter(None, steps)])


def circles(sources: list[Source]) -> list[tuple[str, ...]]:
    """Finds modules that import each other, directly or not: each circle's names, in order.

    Lazy imports within functions count, and so do imports for types: a reader follows both. An
    import of a name from a package counts for the package, and one of a module for the module.
    """
    names = {module_of(source) for source in sources}
    targets: dict[str, set[str]] = {name: set() for name in names}
    for source in sources:
        for _, name in imports(source):
            target = name if name in names else name.rpartition(".")[0]
            if target in names and target != module_of(source):
                targets[module_of(source)].add(target)
    reached = {name: _reachable(name, targets) for name in names}
    found = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in names
        if name in reached[name]
    }
    return sorted(found)


def _reachable(name: str, targets: dict[str, set[str]]) -> set[str]:
    """Returns all modules that the module imports, directly or not; also itself in a circle."""
    found: set[str] = set()
    waiting = [*targets[name]]
    while waiting:
        target = waiting.pop()
        if target not in found:
            found.add(target)
            waiting += targets[target]
    return found


def check_dependencies(source: Source) -> list[str]:
    """The core needs three packages, its pure parts none, and one file sees transformers."""
    is_core = source.part not in {"serve", "server", "cli", "plugin", "conformance"}
    is_pure = source.path.startswith(PURE)
    problems = []
    for line, name in imports(source):
        package = name.split(".")[0]
        is_standard = package in sys.stdlib_module_names
        needs = CORE_NEEDS | EXTRAS.get(source.path, set())
        if is_core and not is_standard and package not in needs:
            problems.append(f"{source.path}:{line}: the core doesn't need {package}")
        if is_pure and package in {"torch", *INPUT_OUTPUT}:
            problems.append(f"{source.path}:{line}: a pure module imports {package}")
        if package == "transformers" and source.path not in TRANSFORMERS_USERS:
            problems.append(f"{source.path}:{line}: {name} is not for this file")
    return problems


def check_devices(source: Source) -> list[str]:
    """Only the device package knows the names of accelerators' modules."""
    if source.part == "device":
        return []
    names = [(line, name) for line, name in imports(source)]
    names += [
        (node.lineno, f"torch.{node.attr}")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    found = {f"torch.{module}" for module in DEVICE_MODULES} | {"torch_npu"}
    return [
        f"{source.path}:{line}: {name} belongs into device/"
        for line, name in names
        if name in found or any(name.startswith(f"{module}.") for module in found)
    ]


def check_pickles(source: Source) -> list[str]:
    """Nothing is pickled or unpickled."""
    problems = [
        f"{source.path}:{line}: {name} unpickles"
        for line, name in imports(source)
        if name.split(".")[0] in UNPICKLERS or name in {"torch.load", "torch.save"}
    ]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"torch.load", "torch.save"}:
            problems.append(f"{source.path}:{node.lineno}: {ast.unparse(node)} unpickles")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            problems.append(f"{source.path}:{node.value.lineno}: allow_pickle")
    return problems


def check_lengths(source: Source) -> list[str]:
    """Functions and modules are short enough to remember."""
    problems = [
        f"{source.path}:{node.lineno}: {node.name} has {length} lines, not {LONGEST_FUNCTION}"
        for node in functions(source.tree)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    ]
    if (count := len(source.text.splitlines())) > LONGEST_MODULE:
        problems.append(f"{source.path}: {count} lines, not {LONGEST_MODULE}")
    return problems


def documented_methods(sources: list[Source]) -> dict[str, set[str]]:
    """Maps each class's name to its documented methods, with those of its bases."""
    documented: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                documented[node.name] = {f.name for f in functions(node) if ast.get_docstring(f)}
                bases[node.name] = [ast.unparse(base).split(".")[-1] for base in node.bases]

    def inherited(name: str) -> set[str]:
        return documented.get(name, set()).union(*(inherited(base) for base in bases.get(name, [])))

    return {name: inherited(name) for name in documented}


def check_docstrings(source: Source, documented: dict[str, set[str]]) -> list[str]:
    """Every public module, class, function and method has a docstring, or inherits one."""
    tree = source.tree
    problems = [] if ast.get_docstring(tree) else [f"{source.path}: no docstring"]

    def visit(owner: ast.Module | ast.ClassDef) -> None:
        known = documented.get(owner.name, set()) if isinstance(owner, ast.ClassDef) else set()
        for node in owner.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("_"):
                continue
            if not ast.get_docstring(node) and node.name not in known:
                problems.append(f"{source.path}:{node.lineno}: {node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                visit(node)

    visit(tree)
    return problems


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of each variable, parameter, field and alias that is bound."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name


def check_words(source: Source) -> list[str]:
    """Names say what a value is, and the text uses the project's words."""
    problems = [
        f"{source.path}:{line}: {name!r} doesn't say what the value is"
        for line, name in bound_names(source.tree)
        if name in EMPTY_NAMES
    ]
    words = " ".join(source.text.replace("#", " ").split())  # a text may go on in the next line
    problems += [
        f"{source.path}: {text}: {remedy}"
        for text, remedy in UNWANTED_TEXTS.items()
        for _ in range(words.count(text))
    ]
    return problems


def check_beginnings(source: Source) -> list[str]:
    """A docstring is a sentence that can be read alone, so it has a subject or a verb first."""
    return [
        f"{source.path}:{line}: a docstring begins with {text.split()[0]!r}"
        for line, text in docstrings(source.tree)
        if text.split() and text.split()[0].strip(",:;") in HEADLESS_WORDS
    ]


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring, those of attributes and constants too."""
    values = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value


@functools.cache
def read_package() -> list[Source]:
    """Reads all files of the package."""
    package = ROOT / "src" / "kvtide"
    return [
        Source(path.relative_to(package).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    ]


@functools.cache
def documented_in_package() -> dict[str, set[str]]:
    """Maps the package's classes to their documented methods."""
    return documented_methods(read_package())


Check = Callable[[Source], list[str]]
CHECKS: list[Check] = [
    check_order,
    check_dependencies,
    check_devices,
    check_pickles,
    check_lengths,
    lambda source: check_docstrings(source, documented_in_package()),
    check_words,
    check_beginnings,
]
NAMES = ["order", "dependencies", "devices", "pickles", "lengths", "docstrings", "words"]
NAMES += ["beginnings"]


@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_package_is_tidy(check: Check) -> None:
    """No file of the package breaks the rule."""
    assert [] == [problem for source in read_package() for problem in check(source)]


def test_each_part_has_one_place() -> None:
    """If a part had two places, only the later one would count."""
    assert len(RANK) == sum(len(parts) for parts in ORDER)


def test_no_modules_import_each_other() -> None:
    """Files of one folder must not import each other either."""
    assert [] == circles(read_package())


CIRCLES = {
    "two modules": {"pool/a": "import kvtide.pool.b", "pool/b": "from kvtide.pool.a import x"},
    "by names of modules": {
        "pool/a": "from kvtide.pool import b", "pool/b": "from kvtide.pool import a",
    },
    "a lazy import": {
        "pool/a": "import kvtide.pool.b", "pool/b": "def f():\n    import kvtide.pool.a",
    },
    "an import for types": {
        "pool/a": "import kvtide.pool.b", "pool/b": "if TYPE_CHECKING:\n    import kvtide.pool.a",
    },
    "three modules": {
        "pool/a": "import kvtide.pool.b",
        "pool/b": "import kvtide.pool.c",
        "pool/c": "import kvtide.pool.a",
    },
    "a module and its package": {
        "pool/__init__": "from kvtide.pool.a import x", "pool/a": "from kvtide.pool import x",
    },
}  # fmt: skip


def sources_of(texts: dict[str, str]) -> list[Source]:
    """Makes files of a package from their texts, by their paths without the ending."""
    return [Source(f"{path}.py", text) for path, text in texts.items()]


@pytest.mark.parametrize("name", CIRCLES)
def test_a_circle_is_found(name: str) -> None:
    """Every kind of import makes a circle, which is found once."""
    (circle,) = circles(sources_of(CIRCLES[name]))
    assert len(CIRCLES[name]) == len(circle)


def test_modules_in_a_row_are_no_circle() -> None:
    """A package may import from its modules, if these don't import it."""
    row = {
        "pool/__init__": "from kvtide.pool.a import x",
        "pool/a": "from kvtide.pool import b\nfrom kvtide.pool.c import y",
        "pool/b": "from kvtide.pool.c import y",
        "pool/c": "import torch",
    }
    assert [] == circles(sources_of(row))


@functools.cache
def read_tests() -> list[Source]:
    """Reads all files of the tests."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return [Source(path.name, path.read_text(encoding="utf-8")) for path in paths]


def test_files_of_tests_have_unique_names() -> None:
    """pytest imports them by the file's name, so a second one would be an error."""
    counts = Counter(source.path for source in read_tests())
    assert [] == [name for name, count in counts.items() if count > 1]


def test_tests_have_short_functions() -> None:
    """Tests are read more often than any other code."""
    problems = [problem for source in read_tests() for problem in check_lengths(source)]
    assert [] == [problem for problem in problems if " has " in problem]


def test_tests_name_their_values() -> None:
    """A reader of a test must know what each value is, too."""
    assert [] == [
        f"{source.path}:{line}: {name}"
        for source in read_tests()
        for line, name in bound_names(source.tree)
        if name in EMPTY_NAMES
    ]


def test_all_docstrings_can_be_read_alone() -> None:
    """The rule for beginnings holds in the folders beside the package, too."""
    sources = [
        Source(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for folder in DOCUMENTED_FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert [] == [problem for source in sources for problem in check_beginnings(source)]


BAD = [
    ("order", "pool/pool.py", "from kvtide.transfer import Mover"),
    ("order", "tide.py", "def f():\n    import kvtide.serve.engine"),
    ("order", "serve/engine.py", "from kvtide.cli.run import run"),
    ("order", "layout/spec.py", "from .gqa import GQA"),
    ("order", "__init__.py", "from kvtide.serve.engine import Engine"),
    ("order", "pool/__init__.py", "from kvtide.npu import NPUMHATokenToKVPool"),
    ("order", "npu/base.py", "from kvtide.serve.engine import Engine"),
    ("order", "doctor/report.py", "from kvtide.cli.display import printable"),
    ("order", "ticket.py", "if TYPE_CHECKING:\n    from kvtide.snapshot import Snapshot"),
    ("order", "pool/pool.py", "from kvtide import Tide"),
    ("order", "helpers.py", ""),
    ("dependencies", "snapshot.py", "import rich"),
    ("order", "models/cache.py", "from kvtide.serve.models import open_model"),
    ("dependencies", "layout/spec.py", "import torch"),
    ("dependencies", "models/cache.py", "import torch"),
    ("dependencies", "transfer/plan.py", "from pathlib import Path"),
    ("dependencies", "pool/slots.py", "import torch.nn"),
    ("dependencies", "serve/engine.py", "from transformers.cache_utils import Cache"),
    ("devices", "transfer/mover.py", "import torch\ntorch.cuda.synchronize()"),
    ("devices", "arena/host.py", "from torch import npu"),
    ("devices", "arena/host.py", "import torch.cuda.nvtx"),
    ("devices", "serve/engine.py", "import torch_npu"),
    ("pickles", "snapshot.py", "import pickle"),
    ("pickles", "snapshot.py", "import torch\nx = torch.load('x')"),
    ("pickles", "snapshot.py", "from torch import save"),
    ("pickles", "snapshot.py", "import numpy\nx = numpy.load('x', allow_pickle=True)"),
    ("lengths", "tide.py", "def f():\n" + "    x = 1\n" * LONGEST_FUNCTION),
    ("lengths", "tide.py", "x = 1\n" * (LONGEST_MODULE + 1)),
    ("docstrings", "tide.py", "x = 1"),
    ("docstrings", "tide.py", '"""Doc."""\ndef f(): pass'),
    ("docstrings", "tide.py", '"""Doc."""\nclass C:\n    """Doc."""\n    def f(self): pass'),
    ("words", "tide.py", "x = [one for one in y]"),
    ("words", "tide.py", "def f(own): pass"),
    ("words", "tide.py", "class C:\n    of: int"),
    ("words", "tide.py", "self.at = 1"),
    ("words", "tide.py", "try:\n    f()\nexcept E as one:\n    pass"),
    ("words", "tide.py", "import numpy as of"),
    ("words", "tide.py", 'raise SlotError("a slot that can\'t be meant")'),
    ("words", "tide.py", "# It raises SlotError for a slot that can't\n# be meant."),
    ("words", "tide.py", "# See ``Job."),
    ("beginnings", "tide.py", '"""Of a job, the last step."""'),
    ("beginnings", "tide.py", 'def f():\n    """Also, it waits."""'),
    ("beginnings", "tide.py", 'class C:\n    x: int\n    """\n    Those of the job."""'),
]


@pytest.mark.parametrize(("name", "path", "text"), BAD)
def test_check_objects(name: str, path: str, text: str) -> None:
    """Each check finds exactly one problem in a snippet that has one."""
    assert 1 == len(CHECKS[NAMES.index(name)](Source(path, text)))


GOOD = [
    ("order", "cli/run.py", "from kvtide.serve.engine import Engine"),
    ("order", "pool/pool.py", "from kvtide.pool.slots import PageAllocator"),
    ("order", "errors.py", "import sys"),
    ("order", "npu/base.py", "from kvtide.tide import Tide"),
    ("dependencies", "snapshot.py", "import xxhash, json"),
    ("dependencies", "serve/adapter.py", "import transformers"),
    ("devices", "device/accelerator.py", "import torch\ntorch.cuda.synchronize()"),
    ("devices", "arena/host.py", "import torch\ntorch.cat"),
    ("pickles", "snapshot.py", "import json\njson.load"),
    ("lengths", "tide.py", "def f():\n" + "    x = 1\n" * (LONGEST_FUNCTION - 1)),
    ("docstrings", "tide.py", '"""Doc."""\ndef _f(): pass'),
    ("words", "tide.py", '"""See `Job`, one of them."""\nx = one.own'),
    ("beginnings", "tide.py", '"""Offsets of a job, as bytes."""\nx = "Of a job"'),
]


@pytest.mark.parametrize(("name", "path", "text"), GOOD)
def test_check_accepts(name: str, path: str, text: str) -> None:
    """A check finds no problem in a snippet that has none."""
    assert [] == CHECKS[NAMES.index(name)](Source(path, text))


def test_override_inherits_its_docstring() -> None:
    """A method that its base documents needs no second docstring."""
    base = Source(
        "a.py", '"""Doc."""\nclass A:\n    """Doc."""\n    def f(self):\n        """Doc."""'
    )
    child = Source("b.py", '"""Doc."""\nclass B(A):\n    """Doc."""\n    def f(self): pass')
    assert [] == check_docstrings(child, documented_methods([base, child]))
    assert 1 == len(check_docstrings(child, documented_methods([child])))
