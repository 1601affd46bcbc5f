"""`swanlab`: SwanLab, in the cloud with a key, else offline."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import swanlab

from seerl.secrets import carries_secret
from seerl.tracking.text import accepted, as_text, rgb_images, somebody_to_ask
from seerl.tracking.tracker import RunInfo
from seerl.types import Generation

log = logging.getLogger(__name__)

REFUSED_IN_PROJECT = re.compile(r"[^0-9a-zA-Z_\-+.]")
REFUSED_IN_METRIC = re.compile(r"[\x00-\x1f\x7f]|^[./]+|[./]+$")


class SwanlabTracker:
    """One experiment. SWANLAB_MODE chooses cloud, cloud-only, local, offline or disabled; SWANLAB_LOG_DIR or
    SWANLAB_DIR where its files go, else the run's folder."""

    def __init__(self, info: RunInfo) -> None:
        folder = os.environ.get("SWANLAB_LOG_DIR") or os.environ.get("SWANLAB_DIR")
        folder = folder or str(info.run_dir / "swanlog")
        Path(folder).mkdir(parents=True, exist_ok=True)
        mode, cloud_only = _mode()
        with _our_own_interrupt():
            self._run = swanlab.init(
                project=accepted(info.project, REFUSED_IN_PROJECT, longest=100, tracker="swanlab"),
                name=info.experiment[:512],
                config={**info.config, "framework": "seerl"},
                log_dir=folder,
                mode=mode,
                id=info.run_id,
                resume="allow" if info.run_id else None,
                settings=swanlab.Settings(
                    core=swanlab.Settings.Core(skip_store=cloud_only),
                    probe=swanlab.Settings.Probe(runtime=not carries_secret(sys.argv)),
                    terminal=swanlab.Settings.Terminal(proxy_type="none"),  # or it records the live display
                ),
            )
        self.run_id: str | None = self._run.id

    def stage(self, name: str) -> None:
        """Not shown."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One point per figure."""
        self._run.log({REFUSED_IN_METRIC.sub("_", k): v for k, v in metrics.items()}, step=step)

    def log_generations(self, generations: Sequence[Generation], step: int) -> None:
        """Answers as text, and their images with the answer as caption."""
        self._run.log({"val/generations": [swanlab.Text(as_text(g)) for g in generations]}, step=step)
        images = [
            swanlab.Image(image, caption=f"{g.row_id}: {g.response[:500]}")
            for g in generations
            for image in rgb_images(g)
        ]
        if images:
            self._run.log({"val/images": images}, step=step)

    def finish(self, exit_code: int) -> None:
        """Ends the experiment; a non-zero code marks it as crashed, a signal's as aborted."""
        if exit_code:
            state = "aborted" if exit_code > 128 else "crashed"
            self._run.finish(state=state, error=f"exit code {exit_code}")
        else:
            self._run.finish()


def _mode() -> tuple[str, bool]:
    """SwanLab's mode, and whether it keeps no files here; offline where it would have to ask for a key and
    nobody is there."""
    asked = os.environ.get("SWANLAB_MODE", "")
    if asked == "local" and find_spec("swanboard") is None:
        log.warning(
            "swanlab: SWANLAB_MODE=local needs the dashboard (pip install 'swanlab[dashboard]'), so it "
            "tracks offline; `swanlab sync` uploads the run"
        )
        return "offline", False
    if asked in ("local", "offline", "disabled"):
        return asked, False
    if asked in ("cloud", "cloud-only"):  # names of SwanLab before 0.8, which reads the variable itself
        os.environ["SWANLAB_MODE"] = "online"
    if swanlab.Settings().api_key or somebody_to_ask():
        return "online", asked == "cloud-only"
    log.warning(
        "swanlab: no key (SWANLAB_API_KEY or `swanlab login`) and nobody to ask, so it tracks offline; "
        "`swanlab sync` uploads the run"
    )
    return "offline", False


@contextmanager
def _our_own_interrupt() -> Iterator[None]:
    """Ctrl-C stays the trainer's, which saves first; SwanLab would end its run and pass the signal on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
