"""Makes the table of faults in docs/vllm.md from real engines: vLLM's own offloading and kvtide.

    cd engines/vllm && KVTIDE_SMOLLM2=FOLDER OMP_NUM_THREADS=1 PYTHONPATH=tests \\
        ../../.venv-vllm/bin/python faults_table.py [--check]

Both get the same faults in what they keep of the same blocks, and are asked the same. The engines
of a column follow each other in a process; if that ends early, another goes on with the next
engine. It takes four minutes on an idle machine, and rewrites the lines between the markers there;
with --check it rewrites nothing, and the exit code is 1 if a row would change.

vLLM's offloading refuses CPUs, so a plain copy stands in for its kernels: all else is vLLM's. An
answer depends a little on how many tokens are computed at once, so it is right if vLLM without any
offloading gives it, with as many blocks in its own cache, or with none.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"
BEGIN, END = (
    "<!-- made by engines/vllm/faults_table.py -->",
    "<!-- end of what faults_table.py made -->",
)
VLLM, KVTIDE, ALONE = "vLLM alone", "with kvtide", "no offloading"
BLOCKS, DAMAGED, BLOCK_TOKENS = 5, 2, 128
FAULTS = {
    "nothing": "",
    "a bit flipped in the file of block 3": "flip",
    "the file of block 3 filled with zeros": "zero",
    "the file of block 3 cut in half": "cut",
    "the file of block 3 lost": "lose",
    "the file of block 4 in place of block 3's": "swap",
    "a folder in place of the file of block 3": "folder",
}
STAGES = (
    ("weights", ("compute", "host", "flip", "flipped last")),
    ("weights", ("restarted", "again")),
    ("other", ("other last",)),
    ("weights", ("hang", "hung last")),
)
"""The weights of each engine, one after the other, and what it is asked."""
LIMIT_S = 60.0
HIGH_BIT = 0x40
"""In the last byte of a float32 it turns a small number into a huge one."""
VALUES = 128 * 64 * 4
"""Where the values of a block's first head begin, behind its keys: a huge key may be idle."""
Answers = list[dict[str, Any]]
Right = dict[int, list[int]]
"""The tokens of the right answer, by how many blocks weren't computed."""


def prompts(model: str) -> list[list[int]]:
    """A text of the same length for each fault, no two of which begin alike."""
    from transformers import AutoTokenizer

    words = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8").split()
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = []
    for number in range(len(FAULTS)):
        text = " ".join(Random(number).sample(words, len(words)))
        found.append(tokenizer.encode(text)[: BLOCKS * BLOCK_TOKENS + 30])
    return found


# ---- in a process of its own -------------------------------------------------------------


@contextmanager
def engine_of(name: str, model: str, folder: Path) -> Iterator[Any]:
    """An engine with one of the two, and its files in the folder."""
    from plain_copy import plain_config
    from vllm.config import KVTransferConfig
    from vllm_engine import opened, opened_with_kvtide

    options: dict[str, Any] = {"max_model_len": 1024}
    if name == KVTIDE:
        settings = {"host_memory": "512MiB", "disk_dir": str(folder), "disk_memory": "2GiB"}
        with opened_with_kvtide(model, settings=settings, **options) as engine:
            yield engine
        return
    transfer = plain_config(512 << 20, {"type": "fs", "root_dir": str(folder)})
    with opened(model, kv_transfer_config=KVTransferConfig(**transfer), **options) as engine:
        yield engine


def path_of(name: str, engine: Any, folder: Path, key: bytes) -> Path:
    """Where a block's file is, or will be."""
    if name == KVTIDE:
        from kvtide.tier.names import name_of

        file = name_of(engine.store._name_of(key))
        return next(folder.glob("vllm/*")) / file[:2] / f"{file}.safetensors"
    tier = manager_of(engine).secondary_tiers[0]
    return Path(tier.file_mapper.get_file_name(key))


def manager_of(engine: Any) -> Any:
    """The books of the engine's scheduler."""
    return engine.core.scheduler.connector.connector_scheduler.manager


def flip_in_host_memory(name: str, engine: Any, keys: Sequence[bytes]) -> None:
    """Flips a bit of a block in host memory."""
    if name == KVTIDE:
        block = engine.store._held[keys[DAMAGED]].lease.blocks[0]
        make_huge(block.bytes_view(2 * VALUES), VALUES)
        return
    primary = manager_of(engine).primary_tier
    row = primary.prepare_read([keys[DAMAGED]], None).chunk_ids[0]
    primary.complete_read([keys[DAMAGED]], None)
    view = primary.get_kv_memoryview()
    make_huge(view.cast("B"), int(row) * view.strides[0] + VALUES)


def make_huge(content: memoryview | bytearray, first: int) -> None:
    """Flips a bit in the first float32 from there on that is small."""
    place = next(at for at in range(first + 3, len(content), 4) if not content[at] & HIGH_BIT)
    content[place] ^= HIGH_BIT


def hang_reads(name: str) -> None:
    """Makes each read of the disk wait for ever."""
    from threading import Event

    def hang(*arguments: Any) -> None:
        Event().wait()

    module, reads = {
        KVTIDE: ("kvtide.tier.disk", "read_chunks"),
        VLLM: ("vllm.v1.kv_offload.tiering.fs.manager", "batch_load_block"),
    }[name]
    setattr(importlib.import_module(module), reads, hang)


def run_stages(name: str, root: Path, numbers: Sequence[str]) -> None:
    """Opens an engine for each stage, and writes the results of each step at once."""
    out = root / "results.json"
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for number in map(int, numbers):
        weights, steps = STAGES[number]
        place(root, weights)
        if "restarted" in steps:
            damage_all(results["files"])
        set_alarm(len(FAULTS))  # for the start
        with engine_of(name, str(root / "model"), root / "kv") as engine:
            for result in results_of(name, engine, root, steps):
                results |= result
                out.write_text(json.dumps(results))
        set_alarm(1)  # for the end


def results_of(
    name: str, engine: Any, root: Path, steps: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Takes the steps, and yields the results of each."""
    asked, keys = prompts(str(root / "model")), note_keys(engine)
    for step in steps:
        chosen = asked[-1:] if step.endswith("last") else asked
        set_alarm(len(chosen))
        if step == "compute":
            answers, files = [], []
            for prompt in asked:
                keys.clear()
                answers.append(answer_of(engine, prompt))
                files.append(
                    [str(path_of(name, engine, root / "kv", key)) for key in keys[:BLOCKS]]
                )
            wait_for(files)
            yield {"compute": answers, "files": files}
        elif step == "flip":
            flip_in_host_memory(name, engine, keys)
        elif step == "hang":
            hang_reads(name)
        else:
            engine.forget_local()
            yield {step: [answer_of(engine, prompt) for prompt in chosen]}


def note_keys(engine: Any) -> list[bytes]:
    """A list that gets the keys of all blocks that are saved from now on."""
    manager = manager_of(engine)
    keys: list[bytes] = []
    prepare = manager.prepare_store

    def noted(offered: Any, context: Any) -> Any:
        output = prepare(offered, context)
        keys.extend(output.keys_to_store if output is not None else ())
        return output

    manager.prepare_store = noted
    return keys


def set_alarm(answer_count: int) -> None:
    """Ends this process, unless so many answers come in time."""
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S * answer_count)


def answer_of(engine: Any, prompt: list[int]) -> dict[str, Any]:
    """The tokens of an answer, and how many tokens of the prompt weren't computed."""
    found = engine.answer(prompt, 16)
    return {"tokens": found.tokens, "cached": found.cached_tokens}


def wait_for(paths: Sequence[Sequence[str]]) -> None:
    """Waits until all files are there."""
    ends_at = time.monotonic() + LIMIT_S
    while not all(Path(path).is_file() for group in paths for path in group):
        assert time.monotonic() < ends_at, "the blocks don't reach the disk"
        time.sleep(0.05)


def damage(how: str, files: Sequence[str]) -> None:
    """Damages the file of a block."""
    path = Path(files[DAMAGED])
    content = bytearray(path.read_bytes())
    if how == "flip":
        make_huge(content, len(content) // 4 * 2 + VALUES)  # of a layer in the middle
    elif how == "zero":
        content[:] = bytes(len(content))
    elif how == "cut":
        del content[len(content) // 2 :]
    elif how == "swap":
        content[:] = Path(files[DAMAGED + 1]).read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how != "lose":
        path.write_bytes(content)


def damage_all(files: Sequence[Sequence[str]]) -> None:
    """Damages a file of each prompt, each in its own way."""
    for how, paths in zip(FAULTS.values(), files, strict=True):
        if how:
            damage(how, paths)


def place(root: Path, weights: str) -> None:
    """Puts a model's files at the path from which engines read them."""
    folder = root / "model"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for path in (root / weights).resolve().iterdir():
        (folder / path.name).symlink_to(path)


# ---- the table ---------------------------------------------------------------------------


def verdict(found: Answers | None, right: Sequence[Right], number: int) -> str:
    """Describes an answer beside those that are right."""
    if found is None or not found:
        return "**no answer**"
    answer = found[-1] if len(found) == 1 else found[number]
    blocks = answer["cached"] // BLOCK_TOKENS
    told = f"{blocks} of {BLOCKS} blocks" if blocks else "computed"
    is_right = answer["tokens"] in (right[number][0], right[number].get(blocks))
    return f"{told}, right" if is_right else f"{told}, **wrong answer**"


def results_in(name: str, root: Path) -> dict[str, Any]:
    """The results of a column's engines; steps to which they didn't come are missing."""
    waiting = [str(number) for number in range(len(STAGES))]
    while waiting:
        command = [sys.executable, __file__, name, str(root), *waiting]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1000)
        if not done.returncode:
            break
        sys.stderr.write(f"{name}: a process ended with {done.returncode}\n{done.stderr[-2000:]}")
        found = json.loads((root / "results.json").read_text())
        begun = [number for number in waiting if set(STAGES[int(number)][1]) & set(found)]
        waiting = waiting[len(begun) or 1 :]
    return dict(json.loads((root / "results.json").read_text()))


def rows_of(
    found: dict[str, Any], right: Sequence[Right], of_other: Sequence[Right]
) -> Iterator[tuple[str, str]]:
    """Yields for each fault what became of the answer."""
    last = len(FAULTS) - 1
    yield "nothing: from host memory", verdict(found.get("host"), right, 0)
    yield "a bit flipped in host memory", verdict(found.get("flipped last"), right, last)
    for number, (fault, how) in enumerate(FAULTS.items()):
        words = verdict(found.get("restarted"), right, number)
        if how:
            words += f"; then {verdict(found.get('again'), right, number)}"
        yield f"{fault}, after a restart", words
    yield "new weights at the old path", verdict(found.get("other last"), of_other, last)
    yield "the disk hangs", verdict(found.get("hung last"), right, last)


def other_weights(model: Path, folder: Path) -> Path:
    """A model whose values in attention are another model's."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
            continue
        weights = load_file(path)
        changed = {
            name: -weight if "v_proj" in name else weight for name, weight in weights.items()
        }
        save_file(changed, folder / path.name, {"format": "pt"})
    return folder


def table(root: Path, model: Path) -> Iterator[str]:
    """Yields the lines between the markers."""
    from kvtide.plugin.vllm.package import VLLM as PACKAGE

    other = other_weights(model, root / "other")
    found = {}
    for number, name in enumerate((VLLM, KVTIDE)):
        folder = root / str(number)
        (folder / "kv").mkdir(parents=True)
        (folder / "weights").symlink_to(model)
        (folder / "other").symlink_to(other)
        found[name] = results_in(name, folder)
    right, of_other = right_answers(model), right_answers(other)
    columns = {name: dict(rows_of(results, right, of_other)) for name, results in found.items()}
    yield f"vLLM {PACKAGE.version}, SmolLM2, a prompt of {BLOCKS} blocks for each fault."
    yield ""
    yield f"| what happened | {' | '.join(columns)} |"
    yield f"|{'---|' * (1 + len(columns))}"
    for fault in columns[VLLM]:
        yield f"| {fault} | {' | '.join(column[fault] for column in columns.values())} |"


def right_answers(model: Path) -> list[Right]:
    """The answers to all prompts of an engine without any offloading, in a process of its own."""
    command = [sys.executable, __file__, ALONE, str(model)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1000)
    line = done.stdout.splitlines()[-1]
    return [{int(blocks): tokens for blocks, tokens in each.items()} for each in json.loads(line)]


def print_right_answers(model: str) -> None:
    """Prints them: with no block in vLLM's cache, with those before the damage, with all."""
    from vllm_engine import opened

    found = []
    with opened(model, max_model_len=1024) as engine:
        for prompt in prompts(model):
            right = {}
            for blocks in (0, DAMAGED, BLOCKS):
                engine.forget_local()
                if blocks:
                    engine.answer(prompt[: blocks * BLOCK_TOKENS + 1], 1)
                answer = answer_of(engine, prompt)
                right[answer["cached"] // BLOCK_TOKENS] = answer["tokens"]
            found.append(right)
    sys.stdout.write(f"\n{json.dumps(found)}\n")


def rewritten(text: str, lines: Sequence[str]) -> str:
    """The document with these lines between its markers."""
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    assert tail, f"the document lacks {BEGIN} or {END}"
    return "\n".join([head + BEGIN, *lines, END]) + tail


def columns_in(text: str) -> dict[str, dict[str, str]]:
    """What the document says: for each column what became of the answer, by fault."""
    lines = text.partition(BEGIN)[2].partition(END)[0].splitlines()
    (_, *names), *rows = (line.strip("| ").split(" | ") for line in lines if line.startswith("| "))
    return {
        name: {fault: found[number] for fault, *found in rows} for number, name in enumerate(names)
    }


def main() -> int:
    """Rewrites the document, or checks it; with a column's name, goes through its engines."""
    checks = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not checks:
        import conftest  # noqa: F401 - vLLM reads what this sets when it is imported

        name, root, *numbers = sys.argv[1:]
        if name == ALONE:
            print_right_answers(root)
        else:
            run_stages(name, Path(root), numbers)
        return 0
    with tempfile.TemporaryDirectory() as root:
        lines = list(table(Path(root), Path(os.environ["KVTIDE_SMOLLM2"])))
    sys.stdout.writelines(f"{line}\n" for line in lines)
    before = DOCS.read_text("utf-8")
    after = rewritten(before, lines)
    if checks:
        return int(columns_in(before) != columns_in(after))
    DOCS.write_text(after, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
