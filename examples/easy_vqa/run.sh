#!/usr/bin/env bash
# easy-VQA from nothing to a table: installs, prepares the data, warms a small model up, trains it by GRPO.
# Arguments go to `seerl train`, e.g. examples/easy_vqa/run.sh trainer.max_steps=100
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c 'import seerl, torch, transformers' 2>/dev/null; then
    make install
fi
.venv/bin/python -c 'import easy_vqa' 2>/dev/null || .venv/bin/python -m pip install --quiet easy-vqa==1.0
exec .venv/bin/python -m examples.easy_vqa.run "$@"
