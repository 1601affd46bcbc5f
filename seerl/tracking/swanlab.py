"""`swanlab`: SwanLab, in the cloud with a key, else offline."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import swanlab

from seerl.tracking.fanout import RunInfo
from seerl.tracking.secrets import masked_arguments
from seerl.tracking.terminal import can_ask
from seerl.tracking.text import as_text
from seerl.types import Generation

log = logging.getLogger(__name__)


class SwanlabTracker:
    """One experiment. SWANLAB_MODE chooses cloud (online), local, offline or disabled; SWANLAB_LOG_DIR or
    SWANLAB_DIR where local files go, else the run's folder."""

    def __init__(self, info: RunInfo) -> None:
        folder = os.environ.get("SWANLAB_LOG_DIR") or os.environ.get("SWANLAB_DIR")
        folder = folder or str(info.run_dir / "swanlog")
        Path(folder).mkdir(parents=True, exist_ok=True)
        settings: dict[str, Any] = {"id": info.run_id, "resume": "allow"} if info.run_id else {}
        if masked_arguments(sys.argv) != sys.argv:
            # SwanLab records the command line from /proc, where nothing can be masked.
            os.environ["SWANLAB_PROBE_RUNTIME"] = "false"
        self._run = swanlab.init(
            project=info.project,
            name=info.experiment,
            config={**info.config, "framework": "seerl"},
            log_dir=folder,
            mode=_mode(),
            **settings,
        )
        self.run_id: str | None = _run_id(self._run)

    def stage(self, name: str) -> None:
        """Not shown."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One point per figure."""
        swanlab.log(dict(metrics), step=step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Answers as text, and their images with the answer as caption."""
        swanlab.log({"val/generations": [swanlab.Text(as_text(g)) for g in generations]}, step=step)
        images = [swanlab.Image(i, caption=g.response[:500]) for g in generations for i in g.images[:1]]
        if images:
            swanlab.log({"val/images": images}, step=step)

    def finish(self, exit_code: int) -> None:
        """Ends the experiment; a non-zero code marks it as crashed."""
        if exit_code:
            swanlab.finish(state="crashed", error=f"exit code {exit_code}")
        else:
            swanlab.finish()


def _mode() -> str:
    """SWANLAB_MODE, else online where a key is known, else offline instead of a question nobody answers."""
    if mode := os.environ.get("SWANLAB_MODE"):
        return "online" if mode in ("cloud", "cloud-only") else mode  # SwanLab's names before 0.8
    stored = (Path.home() / ".swanlab" / ".netrc").exists()
    if stored or os.environ.get("SWANLAB_API_KEY") or can_ask():
        return "online"
    log.warning("swanlab: no SWANLAB_API_KEY and nobody to ask, so it is offline; upload with `swanlab sync`")
    return "offline"


def _run_id(run: Any) -> str | None:
    return getattr(run, "id", None) or getattr(getattr(run, "public", None), "run_id", None)
