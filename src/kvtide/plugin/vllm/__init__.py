"""vLLM's offloaded KV through kvtide: sealed, bounded, verified, and on a disk after a restart.

    vllm serve MODEL --kv-transfer-config "$(kvtide vllm --host-memory 8GiB --disk-dir D)"

connector     what vLLM makes in its scheduler and in each worker; loads may fail there
spec          vLLM's questions to the scheduler's books, and its moves to a worker's store
books         which blocks are in host memory, and which come back to it
block_store   a rank's blocks: saves, loads, fetches; moves: those under way
writer        writes blocks to a tier; reader: brings them back
groups        the blocks of a group of layers, as vLLM hands them over, as a pool
open_store    opens a rank's store: pools and arena; tiers_below: what an operator set below these
timely        calls of a tier that may hang, each with a deadline
lookups       what a tier over a network has, asked without holding up the scheduler
identity      what decides the bytes of KV beside its tokens; options: which of vLLM's options do
orphan        ends an engine whose server is gone
adapters      which weights a LoRA adapter has; resumes: how much of a preempted request came back
messages      what the scheduler tells the workers, and what they answer
settings      what an operator sets
secondary     a tier below vLLM's own host memory; chunks: its moves; stack: several tiers as one
cases         small caches of each form, for the doctor's round trips
package       vLLM's package; reads: whether the installed vLLM still has what kvtide reads
"""

from __future__ import annotations

import logging
import time

from kvtide.errors import first_line
from kvtide.plugin.reader import Table

logger = logging.getLogger(__name__)

STARTED_S = time.time()
"""When vLLM loaded its plugins, and before it read any weights; seconds since 1970."""

READS: Table = {
    "KVConnectorFactory": ("_registry", "register_connector"),
    "OffloadingSpecFactory": ("_registry", "register_spec"),
    "SecondaryTierFactory": ("_registry", "register_tier"),
}
"""What is read and called of vLLM's factories."""


def register() -> None:
    """vLLM calls this in each of its processes, maybe more than once.

    It raises nothing: vLLM would end, also for those who don't ask it for kvtide.
    """
    # vLLM's log shows what its own loggers say, and those below them.
    logging.getLogger("kvtide").parent = logging.getLogger("vllm")
    try:
        _register_all()
    except Exception as error:  # whatever a moved module raises
        logger.warning(
            "kvtide isn't registered, and this vLLM runs without it: %s; `kvtide doctor "
            "--vllm` tells more",
            first_line(error),
        )


def _register_all() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from kvtide.plugin.vllm.settings import CONNECTOR, SPEC, TIER, TIER_CONNECTOR

    homes = {CONNECTOR: "connector", TIER_CONNECTOR: "secondary"}
    for name, module in homes.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, f"{__name__}.{module}", name)
    if SPEC not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(SPEC, f"{__name__}.spec", SPEC)
    if TIER not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(TIER, f"{__name__}.secondary", "KvtideTier")
