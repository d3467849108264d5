"""Which models does kvtide serve, and does each answer as it does by itself?

Every causal architecture of the installed transformers is made small, with random weights. It
answers three prompts by its own `generate`, one by one, and through kvtide's engine, all at once,
in exact mode and in fast mode. All tokens must be equal. Most other models are refused, each with
its reason; those that can't be made small are listed as not tried. A type that is refused for its
windows is tried once more without them, and one that isn't a decoder is tried as one.

  python benchmarks/models/sweep.py [--json FILE] [--against RESULT] [MODEL_TYPE ...]

The exit code is 1 if a served model answered otherwise, or if a verdict differs from that of an
earlier result. It takes about three minutes on one core; each model gets at most two.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import platform
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from small import MODEL_TYPES, VOCABULARY, NotSmallError, small_model, without_windows

from kvtide.errors import UsageError
from kvtide.serve.engine import Engine, EngineOptions
from kvtide.serve.models import OpenModel, open_model
from kvtide.serve.request import Request, SamplingParams

SERVED, REFUSED, OTHER, NOT_TRIED = "served", "refused", "other answers", "not tried"
LIMIT_SECONDS = 120
PROMPT_TOKENS = (5, 23, 70)
NEW_TOKENS = 12


def main() -> int:
    """Reads the options, tries each type in its own process, prints, and writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    found: dict[str, dict[str, str]] = {}
    for model_type in options.model_types or MODEL_TYPES:
        found[model_type] = _in_a_process(model_type)
        print(model_type, *found[model_type].values(), sep=": ", flush=True)
    counts = {
        verdict: sum(row["verdict"] == verdict for row in found.values())
        for verdict in (SERVED, REFUSED, OTHER, NOT_TRIED)
    }
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if options.json:
        options.json.write_text(json.dumps(_report(counts, found), indent=1) + "\n", "utf-8")
    changed = _changed(found, options.against) if options.against else []
    for line in changed:
        print(line)
    return 1 if counts[OTHER] or changed else 0


def _changed(found: dict[str, dict[str, str]], against: Path) -> list[str]:
    earlier = json.loads(against.read_bytes())["models"]
    return [
        f"{name}: was {earlier.get(name, {}).get('verdict')}, is {row['verdict']}"
        for name, row in found.items()
        if earlier.get(name, {}).get("verdict") != row["verdict"]
    ]


def _report(counts: dict[str, int], found: dict[str, dict[str, str]]) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": "float32",
        "counts": counts,
        "models": found,
    }


def _in_a_process(model_type: str) -> dict[str, str]:
    """Tries a type in a new process: a type that hangs or crashes spoils no other result."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        child = os.fork()
        if child == 0:
            signal.alarm(LIMIT_SECONDS)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(sys.stdout):
                row = _try_all(model_type)
            json.dump(row, file)
            file.flush()
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        file.seek(0)
        return json.load(file) if status == 0 else _row(NOT_TRIED, f"it ended with {status}")


def _row(verdict: str, why: str = "") -> dict[str, str]:
    return {"verdict": verdict, "why": " ".join(why.split())}


def _try_all(model_type: str) -> dict[str, str]:
    """Tries the type unchanged, and if that is refused, in a form that may be served."""
    row = _try(model_type, {})
    ways = [
        ("sliding window", "without windows", without_windows(model_type)),
        ("is_decoder is false", "as a decoder", {"is_decoder": True}),
    ]
    for reason, way, changes in ways:
        if row["verdict"] == REFUSED and reason in row["why"]:
            other = _try(model_type, changes)
            if other["verdict"] in (SERVED, OTHER):
                return {**other, "why": way}
            if other["verdict"] == REFUSED:
                return _row(REFUSED, f"{row['why']}; {way}: {other['why']}")
    return row


def _try(model_type: str, changes: dict[str, Any]) -> dict[str, str]:
    try:
        model = small_model(model_type, **changes)
        model.generation_config.eos_token_id = None
        expected = [_generated(model, prompt) for prompt in _prompts()]
    except NotSmallError as error:
        return _row(NOT_TRIED, str(error))
    # Each of two hundred architectures may fail in another way if sizes don't suit it.
    except Exception as error:
        return _row(NOT_TRIED, f"by itself it ends with {type(error).__name__}: {str(error)[:120]}")
    tokenizer = open_model("tiny-random", dtype="float32").tokenizer
    for exact in (True, False):
        try:
            source = OpenModel(model, tokenizer, model_type, frozenset())
            answers = _answers(source, exact=exact)
        except UsageError as error:
            return _row(REFUSED, str(error))
        # No user should see any other error.
        except Exception as error:
            return _row(OTHER, f"it ends with {type(error).__name__}: {str(error)[:120]}")
        if answers != expected:
            return _row(OTHER, "in exact mode" if exact else "in fast mode")
    return _row(SERVED)


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()
        for count in PROMPT_TOKENS
    ]


def _generated(model: Any, prompt: list[int]) -> list[int]:
    tokens = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    return tokens[0].tolist()[len(prompt) :]


def _answers(source: OpenModel, *, exact: bool) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    requests = [Request(str(n), prompt, params) for n, prompt in enumerate(_prompts())]
    options = EngineOptions(exact=exact, chunk_tokens=32, host_memory_bytes=1 << 24)
    engine = Engine.build(source, options, requests)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    engine.close()
    return [request.output_ids for request in requests]


if __name__ == "__main__":
    sys.exit(main())
