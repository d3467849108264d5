"""SGLang's retraction through kvtide: the entry point that SGLang calls in each of its processes.

    pip install kvtide        # into SGLang's environment; KVTIDE_SGLANG=0 turns it off

`describe` makes a layout of a pool, `keeper` moves what a request owns of it, `hooks` stands where
SGLang saves, restores and forgets a retracted request.
"""

from __future__ import annotations


def register() -> None:
    """SGLang's plugin interface: called once in each process, before anything is served."""
    from kvtide.plugin.sglang.hooks import register_hooks

    register_hooks()
