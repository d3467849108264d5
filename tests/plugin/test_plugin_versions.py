"""The version of an engine's package, whatever it was installed as."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvtide.plugin.versions import installed_version, package_of


def install(folder: Path, distribution: str, package: str, version: str) -> None:
    """Puts a package into a folder as pip does."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("")
    about = folder / f"{distribution}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (about / "RECORD").write_text(f"{package}/__init__.py,,\n")


class TestInstalledVersion:
    def test_is_that_of_the_distribution_of_that_name(self) -> None:
        assert installed_version("torch").split("+")[0].count(".") == 2

    def test_is_that_of_a_distribution_with_another_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(tmp_path, "an_engine_cpu", "an_engine", "0.7.1")
        monkeypatch.syspath_prepend(str(tmp_path))
        assert "0.7.1" == installed_version("an_engine")

    def test_is_what_a_package_says_that_is_no_distribution(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "of unknown version" == installed_version("an_engine")
        loaded = ModuleType("an_engine")
        loaded.__version__ = "0.7.2"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "an_engine", loaded)
        assert "0.7.2" == installed_version("an_engine")


def test_a_class_belongs_to_a_package() -> None:
    """The package is what is installed, and not the module."""
    assert "pathlib" == package_of(Path())
    assert "torch" == package_of(__import__("torch").zeros(1))
