"""Round trips of the NPU's pools on a simulated NPU. Run as a script: it is one for good.

`python simulated_npu.py SCHEDULE`, such as `lazy` or `random:1`, prints a line of JSON for each
case: its name, what SGLang alone made of it, what kvtide made of it, and what was wrong then.
"""

from __future__ import annotations

import json
import sys

# SGLang first: a torch that has an NPU would have it look for an NPU's kernels.
from kvtide.cli.simulated import simulate
from kvtide.plugin.sglang.checkup import cases_npu
from kvtide.plugin.sglang.checkup.trips import KvtideWay, Way, round_trip


def run(schedule: str) -> None:
    """All cases, under a schedule as `kvtide --schedule` takes it."""
    simulate("npu", schedule)
    for case in cases_npu.cases("npu"):
        alone, through = round_trip(case, Way()), round_trip(case, KvtideWay())
        line = json.dumps([case.name, alone.verdict, through.verdict, through.detail])
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    run(sys.argv[1])
