"""Names are unambiguous: no two classes share a name, and members named in prose exist."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "kvtide"
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
MEMBER = re.compile(r"\b([A-Z]\w*)\.([a-z]\w*)")


def classes_in(tree: ast.AST) -> list[ast.ClassDef]:
    """Returns all classes of a file, nested ones too."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def members_of(node: ast.ClassDef) -> Iterator[str]:
    """Yields what a class defines: methods, fields, and attributes that its methods set."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner.name
        elif isinstance(inner, ast.Name | ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.id if isinstance(inner, ast.Name) else inner.attr


def known_members(texts: list[str]) -> dict[str, set[str]]:
    """Returns the members of each class by its name, with those of its bases in these files."""
    nodes = [node for text in texts for node in classes_in(ast.parse(text))]
    members = {node.name: set(members_of(node)) for node in nodes}
    bases = {
        node.name: [ast.unparse(base).partition("[")[0] for base in node.bases] for node in nodes
    }

    def whole(name: str) -> set[str]:
        inherited = [whole(base) for base in bases[name] if base in members]
        return members[name].union(*inherited)

    return {name: whole(name) for name in members}


def prose_of(text: str) -> Iterator[str]:
    """Yields the docstrings and the comments of a file."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def missing_members(text: str, known: dict[str, set[str]]) -> list[str]:
    """Lists each `Class.member` of the prose whose class is known and lacks the member."""
    named = {pair for prose in prose_of(text) for pair in MEMBER.findall(prose)}
    return sorted(
        f"{owner}.{name}" for owner, name in named if owner in known and name not in known[owner]
    )


def test_no_two_classes_share_a_name() -> None:
    """A reader who meets `Span` needn't ask which class is meant."""
    homes: dict[str, list[str]] = {}
    for name, path in FILES.items():
        for node in classes_in(ast.parse(path.read_text("utf-8"))):
            homes.setdefault(node.name, []).append(name)
    assert len(homes) > 150
    assert {} == {kind: files for kind, files in homes.items() if len(files) > 1}


def test_prose_names_existing_members() -> None:
    """A docstring that names a renamed method leads nowhere."""
    texts = {name: path.read_text("utf-8") for name, path in FILES.items()}
    known = known_members([*texts.values()])
    found = {name: missing_members(text, known) for name, text in texts.items()}
    assert {} == {name: missing for name, missing in found.items() if missing}


@pytest.mark.parametrize(
    "folder",
    ["plugin", "plugin/sglang", "plugin/sglang/pools", "plugin/sglang/ordinary", "plugin/vllm"],
)
def test_folder_of_plugins_says_what_each_file_has(folder: str) -> None:
    """The folders have many files, and a reader begins with the list of them in `__init__.py`."""
    path = PACKAGE / folder
    text = ast.get_docstring(ast.parse((path / "__init__.py").read_text("utf-8"))) or ""
    listed = re.findall(r"(?:^|; )(\w+)(?: {2,}|: )", text, re.MULTILINE)
    files = [file.stem for file in path.glob("*.py")]
    folders = [file.parent.name for file in path.glob("*/__init__.py")]
    wanted = {*files, *folders} - {"__init__"}
    assert wanted - {"sglang", "vllm"} <= {*listed}
    assert {*listed} <= wanted


@pytest.mark.parametrize(
    ("prose", "expected"),
    [
        ('"""See `Bird.fly`."""', ["Bird.fly"]),
        ("x = 1  # as Bird.fly does", ["Bird.fly"]),
        ('def f():\n    """See Bird.fly."""', ["Bird.fly"]),
        ('x = 1\n"""See Bird.fly."""', ["Bird.fly"]),
        ('"""See Bird.sing, Bird.name, Bird.wings, and Fish.fly."""', []),
        ('"""See Crow.sing, and Crow.name."""', []),
        ("x = Bird.fly", []),
    ],
)
def test_an_unknown_member_is_found(prose: str, expected: list[str]) -> None:
    """Docstrings and comments are searched, but only known classes are checked."""
    bird = "class Bird:\n    name: str\n    def sing(self):\n        self.wings = 2"
    known = known_members([bird, "class Crow(Bird):\n    pass"])
    assert expected == missing_members(prose, known)
