"""Is every model that the self-check accepts exact? Tries forty small models of different shapes.

Each model is random and gets the same requests in three engines: all at once in a pool that holds
everything, one request at a time, and in a pool so small that requests are retracted. The logits of
every token must have the same bits. A model for which the self-check finds no safe rows is no
exception: it is refused, and listed as such.

  python benchmarks/exact/bench.py [--models 40] [--dtype float32 ...] [--threads 1 2] [--json]

The exit code is 1 if an accepted model isn't exact. Environment variables can make the libraries
choose kernels as on another processor, if they are set before the start: MKL_CBWR,
ONEDNN_MAX_CPU_ISA, ATEN_CPU_CAPABILITY. With --mkl-as-it-likes MKL isn't told to repeat its
results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import kvtide
from kvtide.device import open_device
from kvtide.machine import machine_facts
from kvtide.serve.adapter import random_llama
from kvtide.serve.engine import Engine, EngineOptions, check_exact
from kvtide.serve.models import OpenModel, open_model
from kvtide.serve.repeatable import MKL_MODE, is_mkl_repeatable
from kvtide.serve.request import Request, SamplingParams
from kvtide.serve.selfcheck import RowCheck
from kvtide.serve.supported import geometry_of

_SETTINGS = ("MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "OMP_WAIT_POLICY")
# (heads, key heads, head_dim, layers, width of the feed-forward). Some of these shapes were once
# accepted wrongly, and some widths are divided by no vector length.
SHAPES = [
    (5, 1, 64, 2, 856),
    (9, 3, 64, 2, 512),
    (3, 3, 64, 2, 512),
    (9, 3, 128, 1, 1000),
    (9, 3, 64, 4, 1536),
    (4, 2, 16, 4, 128),
    (4, 4, 32, 2, 344),
    (8, 2, 64, 2, 1408),
    (7, 7, 20, 2, 379),
    (3, 1, 20, 4, 163),
    (6, 3, 24, 2, 385),
    (5, 5, 40, 1, 531),
    (12, 4, 80, 1, 1013),
    (2, 1, 96, 3, 511),
    (2, 2, 112, 2, 607),
    (1, 1, 64, 4, 172),
]


@dataclass(frozen=True)
class Finding:
    """The result for a model."""

    shape: tuple[int, ...]
    dtype: str
    threads: int
    exact_rows: str | None
    """The rows that the self-check found, or None if it refused the model."""
    detail: str
    selfcheck_seconds: float
    compared: int
    """How many tokens' logits were compared."""
    differing: int
    retractions: int


def main() -> int:
    """Reads the options, tries each model, and prints; 1 if an accepted model isn't exact."""
    options = _options()
    if options.mkl_as_it_likes:
        os.environ.pop(MKL_MODE, None)  # MKL reads it at its first product, which comes later
    numbers = random.Random(options.seed)
    findings = []
    for shape in _shapes(options.models, numbers):
        seed = numbers.randrange(1 << 30)
        for dtype, threads in itertools.product(options.dtype, options.threads):
            torch.set_num_threads(threads)
            finding = try_shape(shape, dtype, seed, options.requests)
            findings.append(finding)
            if not options.json:
                print(_line(finding), flush=True)
    wrong = sum(finding.differing > 0 for finding in findings)
    refused = sum(finding.exact_rows is None for finding in findings)
    if options.json:
        report = {"machine": _machine(), "options": vars(options), "accepted_wrongly": wrong}
        print(json.dumps(report | {"models": [asdict(finding) for finding in findings]}, indent=1))
    else:
        print(f"{len(findings)} models, {refused} refused, {wrong} accepted wrongly")
    return int(wrong > 0)


def try_shape(shape: tuple[int, ...], dtype: str, seed: int, requests: int) -> Finding:
    """Builds the model of this shape, and compares its answers in three engines."""
    source = small_model(shape, dtype, seed)
    try:
        check = check_exact(source, open_device("cpu"))
    except kvtide.UsageError as error:
        return Finding(shape, dtype, torch.get_num_threads(), None, str(error), 0.0, 0, 0, 0)
    roomy, _ = _answers(
        source, EngineOptions(keep_logits=True), check, make_requests(seed, requests)
    )
    alone, _ = _answers(
        source,
        EngineOptions(keep_logits=True, max_running=1),
        check,
        make_requests(seed, requests),
    )
    asked = make_requests(seed, requests)
    tight, retractions = _answers(source, _tight(source, asked), check, asked)
    pairs = [*zip(roomy, alone, strict=True), *zip(roomy, tight, strict=True)]
    return Finding(
        shape,
        dtype,
        torch.get_num_threads(),
        check.exact_rows,
        check.detail,
        round(check.seconds, 3),
        len(pairs),
        sum(ours != theirs for ours, theirs in pairs),
        retractions,
    )


def _answers(
    source: OpenModel, options: EngineOptions, check: RowCheck, asked: list[Request]
) -> tuple[list[int], int]:
    """Returns digests of the logits of all tokens, and how often a request was retracted."""
    engine = Engine.build(source, options, asked, check=check)
    for request in asked:
        engine.add(request)
    while engine.has_work:
        engine.step()
    retractions = engine.stats.retractions
    engine.close()
    lengths = [request.params.max_new_tokens for request in asked]
    assert lengths == [len(request.logit_digests) for request in asked]
    return [digest for request in asked for digest in request.logit_digests], retractions


def small_model(shape: tuple[int, ...], dtype: str, seed: int) -> OpenModel:
    """Makes a random Llama of this shape, with numbers so large that rounding shows everywhere."""
    heads, key_heads, head_dim, layers, width = shape
    tiny = open_model("tiny-random", dtype=dtype)
    model = random_llama(
        tiny.tokenizer,
        tiny.model.dtype,
        hidden_size=heads * head_dim,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                scale = 1.5 * weight.shape[-1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    model.requires_grad_(False).eval()
    return OpenModel(model, tiny.tokenizer, f"random {shape}", frozenset())


def make_requests(seed: int, count: int) -> list[Request]:
    """Makes prompts of 1 to 150 tokens with answers of 1 to 24."""
    numbers = random.Random(seed)
    return [
        Request(
            str(number),
            [numbers.randrange(260) for _ in range(numbers.randint(1, 150))],
            SamplingParams(max_new_tokens=numbers.randint(1, 24)),
        )
        for number in range(count)
    ]


def _tight(source: OpenModel, asked: list[Request]) -> EngineOptions:
    """Makes options for a pool of one and a half times the longest request."""
    options = EngineOptions(keep_logits=True)
    geometry = geometry_of(source.model.config, source.model.dtype, options.page_size)
    longest = max(request.longest for request in asked)
    pages = 2 + longest * 3 // 2 // options.page_size
    return replace(options, kv_memory_bytes=pages * geometry.page_bytes)


def _shapes(count: int, numbers: random.Random) -> list[tuple[int, ...]]:
    """Returns the listed shapes, and random ones up to `count`."""
    found = SHAPES[:count]
    while len(found) < count:
        key_heads = numbers.choice((1, 2, 3, 4))
        heads = key_heads * numbers.choice((1, 2, 3, 5))
        head_dim = 4 * numbers.randint(4, 32)
        found.append((heads, key_heads, head_dim, numbers.randint(1, 4), numbers.randint(64, 1600)))
    return found


def _line(finding: Finding) -> str:
    verdict = (
        f"{finding.differing} of {finding.compared} differ"
        if finding.exact_rows is not None
        else "refused"
    )
    return (
        f"{finding.shape!s:24} {finding.dtype:8} threads: {finding.threads} {verdict:>20}, "
        f"{finding.retractions:2} retractions, self-check {finding.selfcheck_seconds:5.2f} s, "
        f"rows: {finding.exact_rows}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=40)
    dtypes = ["float32", "bfloat16"]
    parser.add_argument("--dtype", nargs="+", default=dtypes, choices=dtypes)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--mkl-as-it-likes", action="store_true", help="not to repeat its results")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _machine() -> dict[str, Any]:
    return {
        **machine_facts(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkl_repeatable": is_mkl_repeatable(),
        "environment": {name: os.environ.get(name) for name in _SETTINGS},
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    sys.exit(main())
