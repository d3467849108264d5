"""Tells whether kvtide is active in this environment's vLLM, and exact for its kinds of blocks.

vllm_checks imports vLLM when a report is made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, final

from kvtide.arena.budget import default_host_bytes
from kvtide.doctor.below import why_no_disk, why_no_store
from kvtide.doctor.finding import Finding, count_failed
from kvtide.doctor.report import Page
from kvtide.errors import UsageError, first_line
from kvtide.plugin.refusals import Refused
from kvtide.plugin.vllm.settings import CONNECTOR, SPEC, OffloadSettings, read_settings
from kvtide.sizes import counted, format_size
from kvtide.tier.store import default_disk_bytes

if TYPE_CHECKING:
    from kvtide.models.cache import ModelCache

_CONSEQUENCE = "vLLM doesn't start with kvtide's settings"
_LARGEST_JSON = 1 << 16


@final
class VllmReport:
    """See Report."""

    def __init__(self, transfer: str | None, cache: ModelCache | None = None) -> None:
        """`transfer` is what `--kv-transfer-config` takes; None means kvtide's defaults.

        `cache` is what a model keeps, to tell how much of it fits. Raises UsageError if vLLM isn't
        installed or can't be imported, and for settings that vLLM's server would refuse.
        """
        from kvtide.doctor.vllm_checks import import_vllm, versions

        self.settings = _settings_of(transfer)
        # vLLM prints to standard output, which belongs to the report and its JSON.
        with redirect_stdout(sys.stderr):
            import_vllm()
            self.versions = versions()
        self.cache = cache
        given = self.settings.host_memory_bytes
        self.host_bytes = default_host_bytes(0) if given is None else given
        """The limit of the arenas of all ranks together."""
        self.findings: list[Finding] = []
        self._trips: list[Finding] = []

    def examine(self, page: Page) -> None:
        """See Report."""
        with redirect_stdout(sys.stderr):
            page.facts(self._facts())
            self._check_below(page)
            self._look_for_reads(page)
            self._check_plugin(page)
            self._try_trips(page)
        page.repeat_failed("What failed", self.findings)
        exact = sum(trip.ok for trip in self._trips)
        good = f"ok, {exact} of {counted(len(self._trips), 'round trip')} exact"
        page.verdict(f"vLLM {self.versions['vllm']}", self.findings, good=good)

    def to_json(self) -> dict[str, object]:
        """See Report."""
        settings, failed = self.settings, count_failed(self.findings)
        disk_dir = settings.disk_dir
        return {
            **self.versions,
            "settings": {
                "host_memory_bytes": settings.host_memory_bytes,
                "disk_dir": None if disk_dir is None else str(disk_dir),
                "disk_memory_bytes": settings.disk_memory_bytes,
                "mooncake": None if settings.mooncake is None else settings.mooncake.master,
                "weights": settings.weights or None,
            },
            "arena_limit_bytes": self.host_bytes,
            "disk_limit_bytes": self._disk_bytes,
            "token_bytes": None if self.cache is None else self.cache.geometry.token_bytes,
            "checks": [finding.to_json() for finding in self.findings],
            "failed": failed,
            "ok": not failed,
        }

    # ---- checks --------------------------------------------------------------------------

    def _find(
        self, page: Page, name: str, reason: str | None, *, good: str = "ok", so: str = _CONSEQUENCE
    ) -> Finding:
        finding = Finding(name, reason, so if reason else "")
        self.findings.append(finding)
        page.finding(finding, good=good)
        return finding

    def _check_below(self, page: Page) -> None:
        if self.settings.disk_dir is not None:
            self._find(page, "the disk below host memory", why_no_disk(self.settings.disk_dir))
        if self.settings.mooncake is not None:
            reason = why_no_store(self.settings.mooncake)
            self._find(page, "the Mooncake store below host memory", reason)

    def _look_for_reads(self, page: Page) -> None:
        from kvtide.doctor.vllm_checks import is_tested
        from kvtide.plugin.vllm.reads import VLLM_READS

        page.heading("Whether kvtide can read this vLLM")
        try:
            gone = VLLM_READS.what_is_gone()
            reason = f"gone: {', '.join(gone)}" if gone else None
        except Exception as error:  # whatever source that can't be read raises
            reason = f"can't be looked up: {first_line(error)}"
        so = "what uses these names fails" if is_tested() else _CONSEQUENCE
        self._find(page, "names that kvtide reads of vLLM", reason, good="all there", so=so)

    def _check_plugin(self, page: Page) -> None:
        from kvtide.doctor.vllm_checks import why_not_loaded, why_not_registered

        page.heading("Whether vLLM finds kvtide")
        if self._find(page, "vLLM loads kvtide's plugin", why_not_loaded()).ok:
            self._find(page, f"{CONNECTOR} and {SPEC} are registered", why_not_registered())

    def _try_trips(self, page: Page) -> None:
        page.heading("Round trips of small caches on the CPU, as vLLM hands them over")
        try:
            from kvtide.plugin.vllm.cases import make_trips

            for name, reason in make_trips():
                found = self._find(page, name, reason, good="exact", so="don't use kvtide here")
                self._trips.append(found)
        except Exception as error:  # whatever classes of another vLLM raise
            reason = f"this vLLM lacks what the cases are made of: {first_line(error)}"
            self._find(page, "round trips", reason, so="nothing is known about its blocks")

    # ---- facts ---------------------------------------------------------------------------

    @property
    def _disk_bytes(self) -> int | None:
        settings = self.settings
        if settings.disk_dir is None or settings.disk_memory_bytes is not None:
            return settings.disk_memory_bytes
        return default_disk_bytes(settings.disk_dir)

    def _facts(self) -> list[tuple[str, str]]:
        settings, disk_bytes = self.settings, self._disk_bytes
        memory = f"{self._room(self.host_bytes)} for all ranks on this host"
        if settings.host_memory_bytes is None:
            memory = f"not set: a quarter of the memory that is free, now {memory}"
        disk = "not set: no disk below host memory"
        if disk_bytes is not None:
            disk = f"{settings.disk_dir}, {self._room(disk_bytes)} for all ranks"
            if settings.disk_memory_bytes is None:
                disk += ": a quarter of what is free there, or used by kvtide"
        facts = [
            ("versions", ", ".join(f"{name} {text}" for name, text in self.versions.items())),
            ("host_memory", memory),
            ("disk_dir", disk),
        ]
        if settings.mooncake is not None:
            facts.append(("mooncake", f"the store of {settings.mooncake.master}"))
        if settings.disk_dir is not None or settings.mooncake is not None:
            named = settings.weights or "not set: a digest of the model's files, made at each start"
            facts.append(("weights", named))
        return facts

    def _room(self, size_bytes: int) -> str:
        """A size, and how many of the model's tokens fit there."""
        token_bytes = 0 if self.cache is None else self.cache.geometry.token_bytes
        fit = f", about {size_bytes // token_bytes:,} tokens," if token_bytes else ""
        return f"{format_size(size_bytes)}{fit}"


def _settings_of(transfer: str | None) -> OffloadSettings:
    """The settings in the JSON. Raises UsageError, which names what is wrong."""
    if transfer is None:
        return read_settings({})
    try:
        found: Any = json.loads(transfer[:_LARGEST_JSON])
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"--kv-transfer-config isn't JSON: {first_line(error)}; `kvtide vllm` prints it"
        ) from error
    extra = found.get("kv_connector_extra_config", {}) if isinstance(found, dict) else None
    if not isinstance(extra, Mapping) or found.get("kv_connector") != CONNECTOR:
        raise UsageError(
            f'--kv-transfer-config: "kv_connector" must be "{CONNECTOR}", and '
            '"kv_connector_extra_config" an object; `kvtide vllm` prints both'
        )
    try:
        return read_settings(extra)
    except Refused as error:
        raise UsageError(str(error)) from error
