"""docs/configuration.md, made from the schema: `python -m seerl.config.reference > docs/configuration.md`."""

from __future__ import annotations

from seerl.config.deprecated import DROPPED, RENAMED
from seerl.config.explain import children, constraints, not_yet
from seerl.config.keys import allowed, default_text, is_section, known_keys, meaning

HEAD = """# Configuration

Made from the schema with `python -m seerl.config.reference > docs/configuration.md`; `seerl explain KEY`
prints one key. A command line is `config=FILE key.path=value ...`: the file first, then the overrides, later
ones over earlier ones. Values are YAML.

## The batch sizes, in one picture

```
rollout_batch_size prompts
  x worker.rollout.n responses               = the samples of one step
      |
      |  cut into rollout_batch_size / global_batch_size parts
      v
global_batch_size prompts x n responses      = one optimizer step
      |
      |  split over the devices
      v
a device's share                             cut into micro-batches that fit in its memory:
      |                                        dynamic_batching true:  by tokens (max_tokens_per_device, or
      |                                          micro_batch_size_per_device_for_update x the longest sample)
      v                                        dynamic_batching false: by samples
gradients are added up                       the result depends neither on the micro-batches nor on the
                                             number of devices
```

With `rollout_batch_size: 512`, `n: 5`, `global_batch_size: 128`: 2560 samples a step, 4 optimizer steps of
640 samples. `ppo_epochs: 2` makes that 8. Under `online_filtering`, `mini_rollout_batch_size` prompts are
generated at a time until `rollout_batch_size` groups have passed the filter. `seerl check` does this
arithmetic for a configuration."""


def markdown() -> str:
    """The text of docs/configuration.md: the batch sizes, every key (a table per section), the checks."""
    keys = known_keys()
    out = [HEAD]
    for section, field in keys.items():
        inside = [key for key in children(section) if not is_section(keys[key])]
        if not inside:
            continue
        out += ["", f"## {section}", "", meaning(field), "", "| key | allowed | default | meaning |"]
        out.append("|---|---|---|---|")
        for key in inside:
            later = not_yet(key)
            text = meaning(keys[key]) + (f" Not in this version: {later}." if later else "")
            cells = (allowed(keys[key]), f"`{default_text(keys[key])}`", text)
            row = " | ".join(cell.replace("|", "\\|") for cell in cells)
            out.append(f"| `{key.rpartition('.')[2]}` | {row} |")
    out += ["", "## What is checked before anything is loaded", "", *(f"- {line}" for line in constraints())]
    out += ["", "## Keys of earlier EasyR1 releases", "", "They are read with a note.", "", "| key | now |"]
    out += [
        "|---|---|",
        *(f"| `{old}` | {', '.join(f'`{new}`' for new in now)} |" for old, now in RENAMED.items()),
    ]
    out += [f"| `{old}` | not needed: {why} |" for old, why in DROPPED.items()]
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
