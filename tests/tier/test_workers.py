from __future__ import annotations

import subprocess
import sys
import threading
import time
from functools import partial

from kvtide.tier.workers import ThreadWorkers


def test_thread_that_hangs_is_replaced() -> None:
    """Work goes on while as many calls hang as there are threads; then no thread is added."""
    gate = threading.Event()
    workers = ThreadWorkers(2, patience_s=60)
    try:
        hung = [workers.start(gate.wait) for _ in range(2)]
        waiting = [workers.start(partial(int, number)) for number in range(3)]
        while not all(job.begun for job in hung):
            time.sleep(0.001)
        for job in (*waiting, *hung, *hung):
            workers.settle(job, 0.0)
        assert [0, 1, 2] == [job.wait() for job in waiting]
        assert 4 == len(workers._threads._threads)
    finally:
        gate.set()
        workers.close(60)
    assert all(job.done() for job in hung)


def test_end_of_a_process_does_not_wait_for_what_hangs() -> None:
    """A call that never returns keeps neither `close` nor the end of the process."""
    script = (
        "import sys, threading\n"
        "from kvtide.tier.workers import ThreadWorkers\n"
        "workers = ThreadWorkers(2, patience_s=0.2 if sys.argv[1] != 'close' else 600)\n"
        "workers.start(threading.Event().wait)\n"
        "done = workers.start(lambda: print('done', flush=True))\n"
        "done.wait()\n"
        "if sys.argv[1] == 'close':\n"
        "    workers.close(0.2)\n"
        "    workers.close(0.2)\n"
        "print('end', flush=True)\n"
    )
    for how in ("close", "forget"):
        ended = subprocess.run(
            [sys.executable, "-c", script, how],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert (0, "done\nend\n", "") == (ended.returncode, ended.stdout, ended.stderr)
