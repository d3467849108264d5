"""The line of the server's log that says what kvtide does here, or why it does nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvtide.plugin.keeper import Keeper
from kvtide.plugin.sglang.attachment import Attachment
from kvtide.plugin.sglang.package import SGLANG
from kvtide.plugin.status import coverage, without_draft, without_room
from kvtide.plugin.versions import installed_version

logger = logging.getLogger(__name__)


def report(attachment: Attachment | None, loose: Sequence[str]) -> str:
    """Logs the line. Returns what is wrong, such as why a pool is left to SGLang, or an empty text.

    `loose` has the functions of SGLang that are called without their hook. Of the ranks that
    schedule in step only the first logs the line, but each rank logs what is wrong with it.
    """
    from sglang.srt.runtime_context import get_disagg, get_parallel

    level = logging.INFO if get_parallel().attn_tp_rank == 0 else logging.DEBUG
    versions = f"kvtide {installed_version('kvtide')} with SGLang {SGLANG.version}"
    # SGLang chooses a backend in every server, but an ordinary server never uses it.
    is_ordinary = get_disagg().disaggregation_mode == "null"
    backend = None if is_ordinary else get_disagg().disaggregation_decode_retraction_backup
    named = f", backend {backend}" if backend else ""
    if loose:
        wrong = f"hooks aren't in place, SGLang calls {', '.join(loose)} without them"
        logger.warning("%s: %s", versions, wrong)
        return wrong
    if attachment is None:
        logger.log(level, "%s: nothing to do, %s", versions, _why_not(is_ordinary))
        return ""
    if attachment.keeper is None:
        wrong = f"left to SGLang: {attachment.refusal}"
        logger.warning("%s%s: %s", versions, named, wrong)
        return wrong
    if backend == "none":
        why = "retracted requests are aborted (backend none)"
        logger.log(level, "%s: nothing to do, %s", versions, why)
        return ""
    covered = f"{coverage(attachment.keeper)}{named}"
    wrong = _shortcoming(attachment, attachment.keeper, is_ordinary)
    if wrong:
        logger.warning("%s: %s; %s", versions, covered, wrong)
        return wrong
    logger.log(level, "%s: %s", versions, covered)
    return ""


def warn_of(unknown: Sequence[str]) -> None:
    """Logs a warning that names the variables; of the ranks that schedule in step the first does.

    See Settings.unknown.
    """
    from sglang.srt.runtime_context import get_parallel

    if unknown and get_parallel().attn_tp_rank == 0:
        logger.warning("kvtide knows no variable %s", ", ".join(unknown))


def _shortcoming(attachment: Attachment, keeper: Keeper, is_ordinary: bool) -> str:
    lack = without_room(keeper)
    if lack:
        return (
            f"{lack}, so {_unsaved(attachment, is_ordinary)}; raise KVTIDE_HOST_MEMORY, or turn "
            "kvtide off with KVTIDE_SGLANG=0"
        )
    return without_draft(keeper)


def _unsaved(attachment: Attachment, is_ordinary: bool) -> str:
    """What happens to retracted requests if none can be saved."""
    if is_ordinary:
        return "this server computes every retracted request again"
    if attachment.prefill_computes_again():
        return "every retracted request goes back to the prefill server"
    return "every retracted request is aborted"


def _why_not(is_ordinary: bool) -> str:
    if not is_ordinary:
        return "a prefill server retracts no requests"
    return "this server computes retracted requests again (KVTIDE_SGLANG_COLOCATED=1 saves them)"
