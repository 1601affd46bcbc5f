"""docs/configuration.md, made from the schema: `python -m seerl.config.reference > docs/configuration.md`."""

from __future__ import annotations

from seerl.config.explain import children
from seerl.config.keys import allowed, default_text, is_section, known_keys, meaning


def markdown() -> str:
    """The text of docs/configuration.md: every key, a table per section."""
    keys = known_keys()
    out = [
        "# Configuration",
        "",
        "Made from the schema with `python -m seerl.config.reference > docs/configuration.md`;",
        "`seerl explain KEY` prints one key. A command line is `config=FILE key.path=value ...`: the file",
        "first, then the overrides, later ones over earlier ones. Values are YAML.",
    ]
    for section, field in keys.items():
        inside = [key for key in children(section) if not is_section(keys[key])]
        if not inside:
            continue
        out += ["", f"## {section}", "", meaning(field), "", "| key | allowed | default | meaning |"]
        out.append("|---|---|---|---|")
        for key in inside:
            cells = (allowed(keys[key]), f"`{default_text(keys[key])}`", meaning(keys[key]))
            row = " | ".join(cell.replace("|", "\\|") for cell in cells)
            out.append(f"| `{key.rpartition('.')[2]}` | {row} |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
