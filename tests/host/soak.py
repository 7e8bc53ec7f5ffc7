"""Cycles of load, sample and free with changing flags: nothing may grow.

    python -m tests.host.soak --cycles 5000 [--host 0.30.0]

runs as many as asked and says every hundredth how much memory is left when nothing is loaded.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from devtools.hosts import HOSTS, NEWEST
from devtools.server import Server
from tests.host.driver import spec_for
from tests.host.lifecycle import PACKS, Keeper, own_models, short

WARM = 20
"""Cycles until caches and pools have the size they keep."""

SAID = ("default", "keep", "eject", True, False)
FREES = ({"unload_models": True}, {"free_memory": True}, {"unload_models": True, "free_memory": True}, {})


@dataclass(frozen=True)
class Footprint:
    """What is left when nothing is loaded."""

    resident: int
    threads: tuple[str, ...]
    lists: dict[str, int]


def cycle(keeper: Keeper, number: int) -> None:
    """Load, sample and free, by chance but the same for every run; checks the table for the model each time."""
    chance = random.Random(number)
    model, vae = chance.choice(SAID), chance.choice(SAID)
    assert keeper.run(short(number, model=model, vae=vae)).images
    asked = chance.choice(FREES)
    keeper.free(**asked)
    names = keeper.names()
    if asked:
        pinned = [name for name, said in (("Flux", model), ("TAESD", vae)) if said in ("keep", True)]
        ejected = [name for name, said in (("Flux", model), ("TAESD", vae)) if said in ("eject", False)]
        assert set(pinned) <= set(names) and not set(ejected) & set(names), (number, model, vae, asked, names)
    assert len(names) == len(set(names)), f"two copies in cycle {number}: {names}"


def footprint(keeper: Keeper) -> Footprint:
    """Eject everything, and look."""
    keeper.run(short(0, model="eject", vae="eject"))
    keeper.free(unload_models=True, free_memory=True)
    assert keeper.models() == []
    facts = keeper.memory()
    held = keeper.client.get("/lifecycle/held")
    threads = tuple(name for name in facts["threads"] if not name.startswith("asyncio_"))  # a pool that fills up
    return Footprint(facts["rss"], threads, {key: count for key, count in held.items() if isinstance(count, int)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--host", default=NEWEST.version, choices=[host.version for host in HOSTS])
    chosen = parser.parse_args()
    (host,) = [host for host in HOSTS if host.version == chosen.host]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        spec = spec_for(host, base, Path(sys.executable), packs=PACKS, models=own_models(base))
        with Server(spec) as server:
            keeper = Keeper(server)
            for number in range(1, chosen.cycles + 1):
                cycle(keeper, number)
                if number == WARM or number % 100 == 0 or number == chosen.cycles:
                    left = footprint(keeper)
                    size = f"{left.resident / 2**20:.1f} MiB resident"
                    sys.stdout.write(f"cycle {number}: {size}, {len(left.threads)} threads, {left.lists}\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
