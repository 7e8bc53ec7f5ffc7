"""Write `nodes.json` anew from a running host: `python -m tests.golden.freeze`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from devtools.hosts import NEWEST
from devtools.server import Server
from tests.host import schemas
from tests.host.driver import Driver, spec_for

TARGET = Path(__file__).parent / "nodes.json"


def main() -> None:
    with tempfile.TemporaryDirectory() as base, Server(spec_for(NEWEST, Path(base), Path(sys.executable))) as server:
        frozen = {node_id: schemas.schema(info) for node_id, info in schemas.ours(Driver(server)).items()}
    TARGET.write_text(json.dumps(dict(sorted(frozen.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
