"""SGLang's retraction through kvtide: the entry point that SGLang calls in each of its processes.

    pip install kvtide        # into SGLang's environment; KVTIDE_SGLANG=0 turns it off

hooks              wraps the functions in which SGLang saves, restores and forgets a request
attachment         kvtide at a scheduler: what the hooks call
open_keeper        makes a keeper over the scheduler's pools; requests: what it asks of a request
unseen_results     a step whose result SGLang hasn't looked at: its requests' state is ahead

pools              what a pool of SGLang's consists of, by family; rules: row rules of SGLang alone
ordinary           servers without disaggregation
hicache            a storage of pages for SGLang's hierarchical cache
cases              small pools of every family, for round trips

settings           what an operator sets; status_line: what the log says of kvtide at the start
scheduler_metrics  kvtide's counters among SGLang's own
package            SGLang's package, and where it defines the classes that kvtide knows
reads              whether the installed SGLang still has what kvtide reads
"""

from __future__ import annotations


def register() -> None:
    """SGLang calls this once in each process, before it serves anything."""
    from kvtide.plugin.sglang.hicache.hooks import register_storage_hooks
    from kvtide.plugin.sglang.hooks import register_hooks

    register_storage_hooks()
    register_hooks()
