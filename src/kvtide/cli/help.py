"""What `--help` says below the options: examples, and exit codes."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape

EXIT_CODES = {
    "0": "done",
    "1": "something failed, or a check did (doctor, inspect)",
    "2": "bad input",
    "3": "--verify found a difference",
    "4": "every request failed",
    "129, 130, 143": "ended by SIGHUP, Ctrl-C, SIGTERM",
}

CHECK_EXIT_CODES = {code: EXIT_CODES[code] for code in EXIT_CODES if code not in ("3", "4")}
"""The exit codes of a command that serves no requests."""

SERVE_EXIT_CODES = {
    "0": "ended by SIGHUP, Ctrl-C, SIGTERM",
    "1": "the engine failed, and can't go on",
    "2": "bad input",
    "129, 130, 143": "ended by these signals before it served",
}

RUN_EXAMPLES = {
    "kvtide run prompts.jsonl --out answers.jsonl": "",
    "kvtide run prompts.jsonl --out answers.jsonl --resume": "goes on after any end",
    "kvtide run -p 'Why is the sky blue?' | jq -r .text": "",
    "kvtide run prompts.txt > answers.jsonl": "a prompt a line",
    "kvtide run prompts.jsonl --config night.toml": "its table [run] has options",
}
SERVE_EXAMPLES = {
    "kvtide serve smollm2 --kv-memory 1GiB": "http://127.0.0.1:8000/v1",
    "kvtide serve model.gguf --host 0.0.0.0 --api-key-file keys": "for other machines",
    "kvtide serve smollm2 --disk-dir kv": "a restart goes on with what it finds there",
}
DOCTOR_EXAMPLES = {
    "kvtide doctor": "the accelerator here",
    "kvtide doctor --device npu --json": "",
    "kvtide doctor --sglang": "this environment's SGLang",
    "kvtide doctor --vllm --model MODEL": "this environment's vLLM, and how much fits",
}
INSPECT_EXAMPLES = {
    "kvtide inspect kv": "",
    "kvtide inspect kv --remove-damaged --json": "no process may use the folder",
}
PLAN_EXAMPLES = {
    "kvtide plan Qwen/Qwen3-8B --tp 2": "",
    "kvtide plan model.gguf --tokens 4096": "",
}
VLLM_EXAMPLES = {
    'vllm serve MODEL --kv-transfer-config "$(kvtide vllm --host-memory 8GiB)"': "",
    "kvtide vllm --host-memory 8GiB --disk-dir kv --disk-memory 50GiB": "a restart finds it",
}


def epilog(examples: Mapping[str, str], codes: Mapping[str, str] = CHECK_EXIT_CODES) -> str:
    """Examples with what they are for, then the exit codes, as typer prints them."""
    width = max(map(len, codes))
    lines = ["[bold]Examples[/]"] if examples else []
    for command, note in examples.items():
        lines.append(f"{escape(command)}" + (f"  [dim]# {escape(note)}[/]" if note else ""))
    lines += [""] if examples else []
    lines += ["[bold]Exit codes[/]"]
    lines += [f"{code:<{width}}  {meaning}" for code, meaning in codes.items()]
    return "\n".join(lines)
