"""Python imports this file when it starts, also in the processes that SGLang spawns."""

from __future__ import annotations

import os

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    import stand_ins

    stand_ins.install()
