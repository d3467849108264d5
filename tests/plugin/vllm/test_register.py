"""kvtide's entry in vLLM: its classes are registered, and no server ends that doesn't want them."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.plugin import vllm as plugin
from kvtide.plugin.vllm import register

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.factory"
SPECS = "vllm.v1.kv_offload.factory"
TIERS = "vllm.v1.kv_offload.tiering.factory"


class FakeFactory:
    """A factory of vLLM's: it takes each name once."""

    def __init__(self) -> None:
        self._registry: dict[str, tuple[str, str]] = {}

    def register(self, name: str, module: str, kind: str) -> None:
        """Raises ValueError for a name that it has."""
        if name in self._registry:
            raise ValueError(f"{name} is already registered")
        self._registry[name] = (module, kind)

    register_connector = register_spec = register_tier = register


@pytest.fixture
def factories(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeFactory]:
    """vLLM's three factories, by their modules."""
    names = {
        CONNECTORS: "KVConnectorFactory",
        SPECS: "OffloadingSpecFactory",
        TIERS: "SecondaryTierFactory",
    }
    made = {module: FakeFactory() for module in names}
    for module, name in names.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: made[module]}))
    monkeypatch.setattr(logging.getLogger("kvtide"), "parent", logging.getLogger())
    return made


def test_kvtide_is_registered_once(factories: dict[str, FakeFactory]) -> None:
    """vLLM may load a plugin several times."""
    register()
    register()
    names = {name for factory in factories.values() for name in factory._registry}
    assert {"KvtideConnector", "KvtideTierConnector", "KvtideSpec", "kvtide"} == names


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings."""
    lines: list[str] = []
    monkeypatch.setattr(plugin.logger, "warning", lambda text, *args: lines.append(text % args))
    return lines


@pytest.mark.parametrize("module", [CONNECTORS, SPECS, TIERS])
@pytest.mark.parametrize("moved", [None, SimpleNamespace()], ids=["module", "class"])
def test_a_vllm_that_lacks_a_factory_starts_without_kvtide(
    factories: dict[str, FakeFactory],
    module: str,
    moved: Any,
    monkeypatch: pytest.MonkeyPatch,
    said: list[str],
) -> None:
    """vLLM catches nothing there, and most of its servers don't ask for kvtide."""
    monkeypatch.setitem(sys.modules, module, moved)
    register()
    (line,) = said
    assert "isn't registered" in line
    assert "kvtide doctor --vllm" in line


@pytest.mark.parametrize("module", [CONNECTORS, SPECS, TIERS])
def test_a_factory_without_its_registry_is_no_end_either(
    factories: dict[str, FakeFactory], module: str, said: list[str]
) -> None:
    """The log says what is missing."""
    del factories[module]._registry
    register()
    (line,) = said
    assert "_registry" in line
