"""SGLang's retraction through kvtide: the entry point that SGLang calls in each of its processes.

    pip install kvtide        # into SGLang's environment; KVTIDE_SGLANG=0 turns it off

`describe` describes a pool, `keeper` moves a request's rows, `hooks` wraps the functions in which
SGLang saves, restores and forgets a retracted request.
"""

from __future__ import annotations


def register() -> None:
    """SGLang calls this once in each process, before it serves anything."""
    from kvtide.plugin.sglang.hooks import register_hooks

    register_hooks()
