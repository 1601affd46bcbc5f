"""`make quickstart`: draws the data, trains the shipped base model by GRPO, and shows what it has learned.

    python -m examples.quickstart.run [key=value ...]

Further arguments go to `seerl train`. Everything lands in runs/quickstart.
"""

from __future__ import annotations

import os
import sys

from examples.quickstart.training import ROOT, console, show, show_answers, show_paths, train
from examples.quickstart.warm_up import read_rows
from seerl.data.synthetic import GUESS_RATES, KINDS, kind_of, write_data

NEXT = """What to try next (any key can be set on the command line)
  .venv/bin/seerl train config=examples/quickstart/config.yaml \\
      worker.rollout.n=4 trainer.max_steps=400 \\
      trainer.save_checkpoint_path=runs/longer
  .venv/bin/seerl explain worker.rollout.n          what a key means
  examples/easy_vqa/run.sh                          the same on a public data set
  examples/config.yaml                              a real model on a GPU"""


def main() -> None:
    os.chdir(ROOT)
    folder = (ROOT / "runs" / "quickstart").relative_to(ROOT)
    data = folder / "data"
    if not (data / "train.parquet").exists():
        console.print("Drawing pictures and questions ...")
        write_data(data)
    kinds = [kind_of(row["problem"]) for row in read_rows(data / "validation.parquet")]
    console.print("Now reinforcement learning: seerl train config=examples/quickstart/config.yaml")
    config = ROOT / "examples" / "quickstart" / "config.yaml"
    summary = train(folder, config.relative_to(ROOT), sys.argv[1:], kinds)
    guesses = {**GUESS_RATES, "all": sum(GUESS_RATES.values()) / len(KINDS)}
    show("Held-out pictures: right answers, sampled at temperature 1", summary, guesses)
    show_answers(folder, summary)
    show_paths(summary)
    console.print(NEXT, highlight=False)


if __name__ == "__main__":
    main()
