"""The HTTP routes of the panel in the real host: what they tell is so, and what they do happens."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from devtools.client import RequestFailed
from tests.host.lifecycle import BOTH, CLASSES, FILES, Keeper, flux, short


def snapshot(keeper: Keeper) -> dict[str, Any]:
    told: dict[str, Any] = keeper.client.get("/multigpu/snapshot")
    return told


def models(keeper: Keeper) -> dict[str, dict[str, Any]]:
    """By class."""
    return {model["name"]: model for model in snapshot(keeper)["models"]}


def choose(keeper: Keeper, route: str, part: str) -> Any:
    return keeper.client.post(f"/multigpu/{route}", {"model": models(keeper)[CLASSES[part]]["id"]})


def test_a_snapshot_has_what_is_in_the_storages(keeper: Keeper) -> None:
    keeper.run(flux(201, model="keep", clip="eject"))
    told, counted = models(keeper), {row["model_class"]: row for row in keeper.models()}
    assert told.keys() == counted.keys() == {*CLASSES.values()}
    for name, row in counted.items():
        assert told[name]["homes"] == row["storages"], name
        assert told[name]["loaded"] and told[name]["compute"] == row["load_device"]
        assert told[name]["dynamic"] is row["dynamic"]
    for part, standing in (("model", "keep"), ("clip", "eject"), ("vae", "default")):
        assert told[CLASSES[part]]["standing"] == standing
        assert told[CLASSES[part]]["file"] == FILES[part].partition("/")[2]
    whole = snapshot(keeper)
    assert whole["version"] == 2 and whole["held"] == 1
    (ram,) = whole["devices"]
    assert ram["id"] == "cpu" and ram["ours"] == sum(row["storages"]["cpu"] for row in counted.values())
    assert ram["used"] == ram["ours"] + ram["others"] < ram["total"]


def test_a_snapshot_says_when_models_were_last_used(keeper: Keeper) -> None:
    """Models that are placed, and models that are not."""

    def used() -> dict[str, float]:
        return {name: model["used"] for name, model in models(keeper).items()}

    began = snapshot(keeper)["time"]
    keeper.run(flux(213, model="default"))
    first = used()
    assert first.keys() == {*CLASSES.values()} and all(began < when for when in first.values())
    keeper.run(flux(214, model="default"))
    again = used()
    assert again["SD3ClipModel_"] == first["SD3ClipModel_"], "its output was cached"
    assert all(again[CLASSES[part]] > first[CLASSES[part]] for part in ("model", "vae"))


def test_ids_are_those_of_the_models(keeper: Keeper) -> None:
    keeper.run(flux(202, vae="keep"))
    before = {name: model["id"] for name, model in models(keeper).items()}
    keeper.run(flux(203, vae="keep"))
    assert {name: model["id"] for name, model in models(keeper).items()} == before
    keeper.free(**BOTH)
    assert {name: model["id"] for name, model in models(keeper).items()} == {"TAESD": before["TAESD"]}
    keeper.run(flux(203, vae="keep"))
    after = {name: model["id"] for name, model in models(keeper).items()}
    assert after["TAESD"] == before["TAESD"] and after["Flux"] != before["Flux"]


@pytest.mark.parametrize("both", [False, True], ids=["models", "models and cache"])
def test_what_is_pinned_stays_and_what_is_ejected_leaves(keeper: Keeper, both: bool) -> None:
    """Without any node of ours: the choices are the panel's."""
    keeper.run(flux(204))
    assert choose(keeper, "pin", "vae") == {"standing": "keep"}
    assert models(keeper)["TAESD"]["standing"] == "keep"
    kept = keeper.objects()["TAESD"]
    keeper.free(unload_models=True, free_memory=both)
    assert keeper.objects() == {"TAESD": kept}, "as a node that chooses keep"
    frees = keeper.client.get("/multigpu/history")["frees"]
    assert frees[0]["free_memory"] is both
    assert frees[0]["retained"] == [{"name": "TAESD", "reason": "set to keep"}]
    assert {its["name"] for its in frees[0]["ejected"]} == {"Flux", "SD3ClipModel_"}
    assert frees[0]["returned"].keys() == {"cpu"}
    assert choose(keeper, "eject", "vae") == {"standing": "eject"}
    keeper.wait_idle()
    assert keeper.models() == [] and "TAESD" not in {model["name"] for model in snapshot(keeper)["models"]}
    frees = keeper.client.get("/multigpu/history")["frees"]
    assert frees[0]["ejected"] == [{"name": "TAESD", "reason": "set to eject"}]


def test_what_is_unpinned_leaves_with_the_next_free(keeper: Keeper) -> None:
    keeper.run(short(205, vae="keep"))
    assert choose(keeper, "unpin", "vae") == {"standing": "default"}
    keeper.free(**BOTH)
    assert keeper.models() == [] and keeper.held() == []


def test_a_choice_stands_until_a_later_run_chooses_otherwise(keeper: Keeper) -> None:
    keeper.run(short(206, vae="eject"))
    choose(keeper, "pin", "vae")
    keeper.run(short(207, vae="default"))
    assert models(keeper)["TAESD"]["standing"] == "keep", "default withdraws the choice of its node only"
    choose(keeper, "eject", "vae")
    keeper.wait_idle()
    keeper.run(short(208, vae="keep"))
    assert models(keeper)["TAESD"]["standing"] == "keep"
    choose(keeper, "eject", "vae")
    keeper.wait_idle()
    assert "TAESD" not in keeper.names(), "although a node of the newest run says keep"


def test_ejecting_leaves_the_other_models_alone_and_is_done_once(keeper: Keeper) -> None:
    keeper.run(flux(209))
    before = keeper.objects()
    choose(keeper, "eject", "model")
    keeper.wait_idle()
    assert keeper.objects() == {name: its for name, its in before.items() if name != "Flux"}
    keeper.run(flux(211))
    assert {its["standing"] for its in models(keeper).values()} == {"default"}
    keeper.free(unload_models=True)
    assert keeper.names() == [], "the next free is an ordinary one"


def test_a_model_that_is_only_held_can_be_dropped(keeper: Keeper) -> None:
    keeper.run(short(210, model="keep", vae="keep"))
    keeper.free(**BOTH)
    keeper.client.post("/lifecycle/unload", {"model": "TAESD"})
    (held,) = [model for model in snapshot(keeper)["models"] if not model["loaded"]]
    assert held["name"] == "TAESD" and held["homes"].keys() == {"cpu"}
    assert snapshot(keeper)["held"] == 2
    choose(keeper, "eject", "vae")
    keeper.collect()
    assert models(keeper).keys() == {"Flux"} and keeper.held() == ["Flux"]
    assert keeper.names() == ["Flux"], "nothing else was unloaded for it"


def test_there_are_never_two_copies_of_a_model_that_was_there_before_the_panel(keeper: Keeper) -> None:
    """Nothing was recorded when it was loaded, so it cannot be handed back: what is chosen passes to the new copy."""
    keeper.run(short(212))
    keeper.client.raw("/lifecycle/forget_records", {})
    choose(keeper, "pin", "vae")
    before = keeper.objects()["TAESD"]
    keeper.free(**BOTH)
    assert keeper.objects() == {"TAESD": before}
    keeper.run(short(212))
    keeper.collect()
    (vae,) = [row for row in keeper.models() if row["model_class"] == "TAESD"]
    assert vae["model_id"] != before[1] and models(keeper)["TAESD"]["standing"] == "keep"
    assert [name for name, *_ in keeper.client.get("/lifecycle/alive")].count("TAESD") == 1
    keeper.free(**BOTH)
    keeper.run(short(212))
    assert keeper.objects()["TAESD"] == (vae["patcher_id"], vae["model_id"]), "this one is handed back"


def test_a_free_of_models_that_are_not_ours_is_told_to_who_looks(keeper: Keeper) -> None:
    asyncio.run(_listen(keeper))
    keeper.run(short(215))
    before = keeper.client.get("/multigpu/history")["frees"]
    keeper.free(unload_models=True)
    newest, *older = keeper.client.get("/multigpu/history")["frees"]
    assert older == before[:19] and keeper.names() == []
    assert {its["name"] for its in newest["ejected"]} == {"Flux", "TAESD"} and newest["retained"] == []
    assert {its["reason"] for its in newest["ejected"]} == {"nothing is set to keep"}
    assert newest["returned"].keys() == {"cpu"}


async def _listen(keeper: Keeper) -> None:
    """As an open panel does."""
    address = keeper.client.address
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{address}/ws?clientId=looks"):
        for on in (True, False):
            async with session.post(f"{address}/multigpu/listen", json={"client": "looks", "on": on}) as answer:
                assert answer.status == 200


def test_a_free_can_be_asked_for(keeper: Keeper) -> None:
    keeper.run(short(211, model="keep"))
    keeper.client.post("/multigpu/free", {"unload_models": True, "free_memory": True})
    keeper.wait_idle()
    assert keeper.names() == ["Flux"]
    newest = keeper.client.get("/multigpu/history")["frees"][0]
    assert newest["free_memory"] and newest["retained"] == [{"name": "Flux", "reason": "set to keep"}]


def test_an_unknown_model_is_not_found(keeper: Keeper) -> None:
    for route in ("pin", "unpin", "eject"):
        with pytest.raises(RequestFailed) as failure:
            keeper.client.post(f"/multigpu/{route}", {"model": "m0"})
        assert failure.value.status == 404 and "no model 'm0' is loaded or held" in str(failure.value)
