"""Write what is generated from the nodes' schemas: help pages, labels in all languages, and the frozen schemas.

    python -m scripts.help_pages

It starts the newest ComfyUI of the test suite and asks it for `/object_info`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from devtools.hosts import NEWEST
from devtools.server import Server
from scripts.help_text import help_text
from scripts.labels import LANGUAGES, labels
from tests.host import schemas
from tests.host.driver import Driver, spec_for

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "nodes.json"


def generated(nodes: dict[str, dict[str, Any]]) -> dict[Path, str]:
    """Every generated file with its content, from the nodes as `/object_info` lists them."""
    files = {ROOT / "web" / "docs" / f"{node_id}.md": page(node_id, info) for node_id, info in nodes.items()}
    for language in LANGUAGES:
        files[ROOT / "locales" / language / "nodeDefs.json"] = _json(labels(language, nodes))
    files[GOLDEN] = _json({node_id: schemas.schema(info) for node_id, info in sorted(nodes.items())})
    return files


def page(node_id: str, info: dict[str, Any]) -> str:
    """The help page of one node. Inputs are a list: the frontend's panel is too narrow for a table of them."""
    text = help_text(node_id, len(info["output"]))
    lines = [f"# {info['display_name']}", "", info["description"], "", text, "", "## Inputs", ""]
    for section in ("required", "optional"):
        for name in info["input_order"].get(section, []):
            kind, *rest = info["input"][section][name]
            options = rest[0] if rest else {}
            lines.append(f"- `{name}` ({_kind(kind, name)}{_default(name, options)}){_explained(options)}")
    lines += ["", "## Outputs", ""]
    lines += [f"- `{name}` ({kind})" for kind, name in zip(info["output"], info["output_name"], strict=True)]
    return "\n".join(lines) + "\n"


def _kind(kind: Any, name: str) -> str:
    if name.endswith("device"):
        return "device"
    return "choice" if isinstance(kind, list) or kind == "COMBO" else str(kind).lower()


def _default(name: str, options: dict[str, Any]) -> str:
    """Which device is offered first depends on the machine."""
    if name.endswith("device") and "donor" not in name and options.get("default") != "default":
        return ", default: first accelerator"
    value = options.get("default", "")
    return f", default: `{json.dumps(value) if isinstance(value, bool) else value}`" if value != "" else ""


def _explained(options: dict[str, Any]) -> str:
    text = str(options.get("tooltip", "")).replace("\n", " ")
    return f": {text}" if text else ""


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as base, Server(spec_for(NEWEST, Path(base), Path(sys.executable))) as server:
        files = generated(schemas.ours(Driver(server)))
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    sys.stdout.write(f"{len(files)} files written\n")


if __name__ == "__main__":
    main()
