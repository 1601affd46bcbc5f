"""Small data sets for the tests of the data room."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from seerl.config.schema import DataConfig, ModelConfig


def png(size: tuple[int, int] = (64, 48), color: Any = (200, 30, 30), mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, color).save(buffer, "PNG")
    return buffer.getvalue()


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_images_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Columns prompt, images (a list of stored pictures), answer: the layout of geometry3k."""
    import datasets

    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
            "answer": datasets.Value("string"),
        }
    )
    datasets.Dataset.from_list(list(rows), features=features).to_parquet(str(path))
    return str(path)


def stored(content: bytes) -> dict[str, Any]:
    return {"bytes": content, "path": None}


def config(**changes: Any) -> DataConfig:
    """Pictures as they are, short batches."""
    defaults: dict[str, Any] = {"rollout_batch_size": 4, "min_pixels": None, "max_pixels": None}
    return DataConfig(**{**defaults, **changes})


def model(folder: Path) -> ModelConfig:
    return ModelConfig(model_path=str(folder))
