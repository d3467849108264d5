from __future__ import annotations

from pathlib import Path

import pytest

from kvtide.errors import UsageError
from kvtide.server.tenants import Tenants, read_keys


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    """Blank lines and comments are skipped, and a key that is in both is there once."""
    path = tmp_path / "keys"
    path.write_text("# of the team\nfirst-key\n\n second-key \n")
    assert ["first-key", "second-key", "other-key"] == read_keys(path, "other-key")
    assert ["first-key", "second-key"] == read_keys(path, "first-key\n")
    assert [] == read_keys(None, None)


@pytest.mark.parametrize(
    "text", ["tiny-k", "with a blank", "schlüssel", "tab\tkey-key", "# none\n"]
)
def test_a_bad_key_is_refused_without_being_told(text: str, tmp_path: Path) -> None:
    """An error goes to a log, and a key doesn't."""
    path = tmp_path / "keys"
    path.write_text(f"{text}\n")
    with pytest.raises(UsageError) as caught:
        read_keys(path, None)
    assert text not in str(caught.value)
    with pytest.raises(UsageError):
        read_keys(None, "")


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    """The error names the option."""
    with pytest.raises(UsageError, match="--api-key-file"):
        read_keys(tmp_path / "none", None)


def test_each_key_is_a_tenant_with_a_salt_of_its_own() -> None:
    """The operator's salt goes into each; without keys it is everybody's."""
    tenants = Tenants(["first-key", "second-key"])
    first, second = (tenants.find(f"Bearer {key}") for key in ("first-key", "second-key"))
    assert first is not None
    assert second is not None
    assert len({first.salt, second.salt, b""}) == 3
    assert tenants.find("bearer first-key") == first
    other = Tenants(["first-key"], b"salt").find("Bearer first-key")
    assert other is not None
    assert first.salt != other.salt
    everybody = Tenants([], b"salt").find(None)
    assert everybody is not None
    assert b"salt" == everybody.salt


def test_no_other_header_finds_a_tenant() -> None:
    """A key needs its scheme, and a beginning of a key is none."""
    tenants = Tenants(["first-key"])
    for header in (None, "", "Bearer", "Bearer first", "Basic first-key", "Bearer first-key2", "é"):
        assert tenants.find(header) is None


def test_a_salt_is_in_no_text_of_its_tenant() -> None:
    """What shows a tenant shows no secret."""
    tenant = Tenants([], b"secret").find(None)
    assert "secret" not in repr(tenant)
