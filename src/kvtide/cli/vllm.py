"""`kvtide vllm`: prints what `vllm serve --kv-transfer-config` takes. Checks it first."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def vllm(
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Host memory for the KV of all ranks together, such as 24GiB.",
            show_default="a quarter of what is free",
        ),
    ] = None,
    disk_dir: Annotated[
        str | None,
        typer.Option(help="A folder for KV; a later server finds it there.", show_default="none"),
    ] = None,
    disk_memory: Annotated[
        str | None,
        typer.Option(
            help="Disk space for all ranks together, such as 200GiB.",
            show_default="a quarter of what is free",
        ),
    ] = None,
    mooncake: Annotated[
        str | None,
        typer.Option(
            help="A Mooncake store for KV that servers on several machines share: HOST:PORT of its "
            "master, or its .json file.",
            show_default="none",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="The name of the model's revision, if it is sure to change with its files.",
            show_default="a hash of the model's files",
        ),
    ] = None,
) -> None:
    """Print the settings with which vLLM keeps KV through kvtide, as JSON in one line."""
    from kvtide.plugin.vllm.settings import transfer_config

    given = {
        "host_memory": host_memory,
        "disk_dir": disk_dir,
        "disk_memory": disk_memory,
        "mooncake": mooncake,
        "weights": weights,
    }
    texts = {name: text for name, text in given.items() if text is not None}
    typer.echo(json.dumps(transfer_config(texts)))
