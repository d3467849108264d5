"""kvtide.plugin has all that an engine needs, and imports no engine: an invented one uses it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kvtide.plugin
from kvtide.plugin.ranks import Ranks
from kvtide.plugin.refusals import RankFailed, StateAhead

PLUGIN = Path(kvtide.plugin.__file__).parent
NEUTRAL = sorted(PLUGIN.glob("*.py"))
ENGINES = ("sglang", "vllm")

WANTED = {
    "description": ("Description", "Part"),
    "refusals": ("DeviceFailed", "RankFailed", "Refused", "StateAhead", "REASONS", "reason_of"),
    "keeper": ("Backup", "Keeper", "Requests"),
    "counters": ("Counters",),
    "ranks": ("Ranks",),
    "host_memory": ("HostMemory",),
    "below": ("open_store",),
    "environment": (
        *("BELOW", "Below", "CONFIG", "HOST_MEMORY", "below_of", "choice", "host_memory_bytes"),
        *("read_values", "unknown_variables"),
    ),
    "metrics": ("Metrics",),
    "status": ("coverage", "without_draft", "without_room"),
    "reader": ("Reader", "Table"),
    "package": ("EnginePackage",),
    "source": ("Source", "SourceClass", "gone"),
    "versions": ("installed_version", "package_of", "refuse_if_gone", "tables_in"),
    "weights": ("WeightsUnknown", "digest_of", "folder_of"),
    "engine_reads": ("EngineReads",),
    "census": ("PoolClass", "PoolKinds", "census"),
}
"""The names that a plugin for another engine, such as plugin/vllm/, imports."""


@pytest.mark.parametrize("name", WANTED)
def test_names_for_another_engines_plugin_exist(name: str) -> None:
    """Every name of the list is in kvtide.plugin itself."""
    module = importlib.import_module(f"kvtide.plugin.{name}")
    missing = [wanted for wanted in WANTED[name] if not hasattr(module, wanted)]
    assert [] == missing


def test_the_list_has_all_files_for_every_engine() -> None:
    """A new file is either for every engine, or belongs in the folder of one engine."""
    assert sorted(WANTED) == [path.stem for path in NEUTRAL if path.stem != "__init__"]


def engines_imported(text: str) -> list[str]:
    """Returns the imports of a file that lead to an engine or to kvtide's folder for one."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found += [name for name in names if set(name.split(".")) & set(ENGINES)]
    return found


@pytest.mark.parametrize("path", NEUTRAL, ids=lambda path: path.stem)
def test_no_file_for_every_engine_imports_an_engine(path: Path) -> None:
    """The files import neither an engine nor kvtide's plugin for one."""
    assert [] == engines_imported(path.read_text("utf-8"))


@pytest.mark.parametrize(
    "line",
    [
        "from kvtide.plugin.sglang.package import SGLANG",
        "from kvtide.plugin import sglang",
        "def f():\n    from sglang.srt import managers",
        "import vllm.v1",
    ],
)
def test_an_import_of_an_engine_is_found(line: str) -> None:
    """An import within a function is found, too."""
    assert 1 == len(engines_imported(line))


TOY_PLUGIN = '''
"""toy: an engine whose pool is a list of tensors [page, token, width], and the plugin for it."""

import torch

from kvtide.device import open_device
from kvtide.plugin.description import Description, Part
from kvtide.plugin.host_memory import HostMemory
from kvtide.plugin.keeper import Keeper, Requests
from kvtide.plugin.ranks import Ranks
from kvtide.plugin.refusals import Refused
from kvtide.tide import Tide


class ToyPool:
    """The engine's: four layers, eight pages of four tokens."""

    def __init__(self):
        self.layers = [torch.randn(8, 4, 6) for _ in range(4)]


class ToyRequest:
    """The engine's: its pages, in order, and how many tokens it has."""

    def __init__(self, name, pages, token_count):
        self.name, self.pages, self.token_count = name, pages, token_count


def describe(pool):
    if type(pool) is not ToyPool:
        raise Refused(f"pool class {type(pool).__name__} isn't known to kvtide")
    rows = [layer.flatten(0, 1) for layer in pool.layers]
    return Description("toy", (Part("kv", rows),), page_size=4, slot_count=32, padding_slots=0)


class ToyRequests(Requests):
    def id_of(self, request):
        return request.name

    def slots_of(self, request):
        pages = torch.tensor(request.pages)
        slots = (pages[:, None] * 4 + torch.arange(4)).flatten()
        return slots[: request.token_count]


def open_keeper(pool, limit_bytes):
    ranks = Ranks()
    memory = HostMemory(limit_bytes, 1, ranks)
    device = open_device("cpu")
    try:
        with memory.refusing_together():
            description = describe(pool)
            adopted = description.adopt(device)
        tide = Tide(adopted, memory.arena_for(adopted))
    except BaseException:
        device.close()
        raise
    return Keeper(description, tide, ToyRequests(), ranks)
'''


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[ModuleType]:
    """A plugin for an engine that doesn't exist, in one new file."""
    path = tmp_path / "kvtide_toy.py"
    path.write_text(TOY_PLUGIN, "utf-8")
    spec = importlib.util.spec_from_file_location("kvtide_toy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = set(sys.modules)
    yield module
    assert not any(name.split(".")[0] in ENGINES for name in set(sys.modules) - before)


def test_one_file_is_enough_for_another_engine(toy: ModuleType) -> None:
    """A request leaves its pages, which others overwrite, and comes back into other pages."""
    pool = toy.ToyPool()
    request = toy.ToyRequest("r1", [0, 5, 2], token_count=10)
    expected = [layer[[0, 5, 2]].flatten(0, 1)[:10] for layer in pool.layers]
    keeper = toy.open_keeper(pool, 1 << 20)
    backup = keeper.save(request)
    assert (10, "r1") == (backup.token_count, backup.request_id)
    for layer in pool.layers:
        layer.fill_(777.0)
    request.pages = [7, 1, 6]
    keeper.restore(request, backup)
    for layer, rows in zip(pool.layers, expected, strict=True):
        assert rows.equal(layer[[7, 1, 6]].flatten(0, 1)[:10])
        others = layer[[0, 2, 3, 4, 5]]
        assert others.equal(torch.full_like(others, 777.0))
    assert (1, 1, 0) == (keeper.counters.saves, keeper.counters.restores, keeper.arena.used_bytes)
    moved_bytes = 10 * 4 * 6 * 4
    assert (moved_bytes, moved_bytes) == (
        keeper.counters.saved_bytes,
        keeper.counters.restored_bytes,
    )
    keeper.close()


class Disagreeing(Ranks):
    """Another rank fails, whatever this rank does."""

    def least(self, value: int) -> int:
        """See Ranks."""
        return min(0, value)


def test_a_state_that_is_a_step_ahead_is_not_saved(toy: ModuleType) -> None:
    """The engine says that the request's state is a step ahead, and the keeper doesn't save it."""
    toy.ToyRequests.is_ahead = lambda self, request: True
    keeper = toy.open_keeper(toy.ToyPool(), 1 << 20)
    with pytest.raises(StateAhead):
        keeper.save(toy.ToyRequest("r1", [0, 5, 2], token_count=10))
    assert (0, 1, 0) == (
        keeper.counters.saves,
        keeper.counters.retractions,
        keeper.arena.used_bytes,
    )
    keeper.close()


def test_no_rank_keeps_what_another_rank_could_not_move(toy: ModuleType) -> None:
    """Save and restore both fail, and the arena's memory is free again."""
    keeper = toy.open_keeper(toy.ToyPool(), 1 << 20)
    request = toy.ToyRequest("r1", [0, 5, 2], token_count=10)
    backup, keeper._ranks = keeper.save(request), Disagreeing()
    held_bytes = keeper.arena.used_bytes
    with pytest.raises(RankFailed, match="r1: another rank couldn't save"):
        keeper.save(request)
    assert held_bytes == keeper.arena.used_bytes > 0
    with pytest.raises(RankFailed, match="r1: another rank couldn't restore"):
        keeper.restore(request, backup)
    counters = keeper.counters
    assert (1, 2, 0) == (counters.saves, counters.retractions, keeper.arena.used_bytes)
    assert (0, 0, 1) == (
        counters.restores,
        counters.restored_bytes,
        counters.failed_restores.total(),
    )
    keeper.close()


def test_a_pool_that_its_plugin_refuses_is_refused(toy: ModuleType) -> None:
    """The error names the pool's class, and is the one that all plugins use."""
    from kvtide.plugin.refusals import Refused

    with pytest.raises(Refused, match="pool class object isn't known"):
        toy.open_keeper(object(), 1 << 20)
