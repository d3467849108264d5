"""The one line of the server's log that says what kvtide does here, or why it does nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from kvtide.plugin.sglang.attach import Attachment
from kvtide.plugin.sglang.keeper import Keeper
from kvtide.plugin.sglang.settings import Settings
from kvtide.sizes import format_size

logger = logging.getLogger(__name__)


def report(attachment: Attachment | None, settings: Settings, loose: Sequence[str]) -> str:
    """Logs the line, and gives what is wrong: nothing, or why a pool is left to SGLang.

    `loose` are the functions of SGLang's that are called without their hook. Of ranks that
    schedule in step one speaks for all, but for what is wrong, which each says of itself.
    """
    from sglang.srt.runtime_context import get_disagg, get_parallel

    level = logging.INFO if get_parallel().attn_tp_rank == 0 else logging.DEBUG
    versions = f"kvtide {_version_of('kvtide')} with SGLang {sglang_version()}"
    backend = get_disagg().disaggregation_decode_retraction_backup
    if loose:
        wrong = f"hooks aren't in place, SGLang calls {', '.join(loose)} without them"
        logger.warning("%s: %s", versions, wrong)
        return wrong
    if attachment is None:
        logger.log(level, "%s: nothing to do, %s", versions, _why_not(settings))
        return ""
    if attachment.keeper is None:
        wrong = f"left to SGLang: {attachment.refusal}"
        logger.warning("%s, backend %s: %s", versions, backend, wrong)
        return wrong
    if backend == "none":
        logger.log(
            level, "%s: nothing to do, retracted requests are aborted (backend none)", versions
        )
        return ""
    covered, wrong = _covered(attachment.keeper), _shortcoming(attachment.keeper)
    if wrong:
        logger.warning("%s: %s, backend %s; %s", versions, covered, backend, wrong)
        return wrong
    logger.log(level, "%s: %s, backend %s", versions, covered, backend)
    return ""


def _covered(keeper: Keeper) -> str:
    names = [part.name for part in keeper.description.parts]
    return (
        f"covers {keeper.description.name} ({', '.join(names)}), {keeper.token_bytes} bytes a "
        f"token, arena up to {format_size(keeper.arena.limit_bytes)} on this rank, for "
        f"{keeper.arena.limit_bytes // max(1, keeper.token_bytes)} tokens"
    )


def _shortcoming(keeper: Keeper) -> str:
    arena = keeper.arena
    if arena.limit_bytes < arena.block_bytes:
        return (
            f"that holds not even one block of {arena.block_bytes} bytes, so every retracted "
            "request is lost; raise KVTIDE_HOST_MEMORY, or turn kvtide off with KVTIDE_SGLANG=0"
        )
    if keeper.draft_refusal:
        return f"the draft model's KV isn't kept: {keeper.draft_refusal}"
    return ""


def _why_not(settings: Settings) -> str:
    if settings.is_colocated:
        return "a prefill server retracts no requests"
    return "this server computes retracted requests anew (KVTIDE_SGLANG_COLOCATED=1 saves them)"


def sglang_version() -> str:
    """Of the SGLang in this environment, as its package says."""
    return _version_of("sglang")


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"
