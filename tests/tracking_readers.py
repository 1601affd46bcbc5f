"""What the tracking libraries wrote, read back."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def wandb_records(folder: Path) -> list[Any]:
    """The records of every .wandb file below a folder, in order. The files are LevelDB logs: a header of 7
    bytes, then blocks of 32 KiB that hold pieces of records, each piece with its checksum, length and type."""
    from wandb.proto import wandb_internal_pb2

    records = []
    for path in sorted(folder.rglob("run-*.wandb")):
        for data in _leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            records.append(record)
    return records


def _leveldb_records(data: bytes, block: int = 32768) -> Iterator[bytes]:
    whole = b""
    place = 7
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if kind == 0:  # the rest of the block is padding
            place += block - place % block
            continue
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield whole
            whole = b""


def wandb_history(folder: Path) -> list[dict[str, str]]:
    """The logged rows: names to JSON values."""
    rows = [r.history.item for r in wandb_records(folder) if r.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): item.value_json for item in row} for row in rows]


def swanlab_records(folder: Path) -> list[Any]:
    """The records of every run's file below a folder."""
    from swanlab.sdk.internal.core_python.store import DataStoreReader
    from swanlab.sdk.internal.core_python.sync import Record

    records = []
    for path in sorted(folder.rglob("run-*.swanlab")):
        reader = DataStoreReader()
        reader.open(path)
        while (data := reader.scan()) is not None:
            record = Record()
            record.ParseFromString(data)
            records.append(record)
    return records
