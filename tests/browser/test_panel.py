"""The panel in ComfyUI's sidebar: it shows what is in memory; its buttons and the frontend's own do what they say."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

import pytest

from devtools.server import Server
from scripts.examples import Box, graph
from tests.browser.conftest import TAB
from tests.browser.test_saved_workflows import LOAD, ROOT
from tests.host.driver import Driver

MODEL, CLIP = "Flux", "SD3ClipModel_"
ENTRIES = {"Unload Models": False, "Unload Models and Execution Cache": True}
"""The entries of the frontend's menu that unload models, and whether cached outputs are to be dropped, too."""
SEEDS = itertools.count(1)
"""With another seed, the sampler runs again."""
SHOWN = """() => Object.fromEntries([...document.querySelectorAll(".multigpu-device")].map(device => [
    device.dataset.device,
    Object.fromEntries([...device.querySelectorAll(".multigpu-segment")].map(
        segment => [segment.dataset.model, Number(segment.dataset.bytes)],
    )),
]))"""
"""The bytes of each model on each device, as the map has them."""
LISTED = """ids => JSON.stringify(ids) === JSON.stringify(
    [...document.querySelectorAll(".multigpu-model")].map(row => row.dataset.model),
)"""


def workflow(seed: int) -> dict[str, Any]:
    """Flux over two of the GPUs and RAM, as the frontend saves it."""
    model = Box("UNETLoader", 0, 0, ["toy_flux.safetensors", "default"], {}, ("MODEL",))
    widgets = ["cuda:0", "expert", 4.0, "cpu", "cuda:0,40%;cuda:1,30%;cpu,*", "default"]
    placed = Box("MultiGPUPlaceModel", 1, 0, widgets, {"model": ("MODEL", model[0])}, ("MODEL",), 200)
    clip = Box("CLIPLoader", 0, 6, ["toy_clip_l.safetensors", "sd3", "default"], {}, ("CLIP",))
    vae = Box("VAELoader", 0, 12, ["toy_taef1.safetensors"], {}, ("VAE",))
    text = Box("CLIPTextEncode", 2, 0, ["a house by the sea"], {"clip": ("CLIP", clip[0])}, ("CONDITIONING",), 160)
    latent = Box("EmptySD3LatentImage", 2, 6, [64, 64, 1], {}, ("LATENT",))
    wires = {"model": ("MODEL", placed[0]), "positive": ("CONDITIONING", text[0]),
             "negative": ("CONDITIONING", text[0]), "latent_image": ("LATENT", latent[0])}  # fmt: skip
    sampler = Box("KSampler", 3, 0, [seed, "fixed", 2, 1.0, "euler", "simple", 1.0], wires, ("LATENT",), 260)
    decode = Box("VAEDecode", 3, 9, [], {"samples": ("LATENT", sampler[0]), "vae": ("VAE", vae[0])}, ("IMAGE",))
    save = Box("SaveImage", 4, 0, ["panel"], {"images": ("IMAGE", decode[0])}, (), 300)
    return graph([model, placed, clip, vae, text, latent, sampler, decode, save], "Flux over several devices.")


@pytest.fixture
def driver(server: Server) -> Driver:
    return Driver(server)


@pytest.fixture
def panel(page: Any, driver: Driver) -> Any:
    """The open tab after the workflow has run; what an earlier test has chosen for models is taken back."""
    page.evaluate(LOAD, workflow(next(SEEDS)))
    page.evaluate("() => window.app.queuePrompt(0)")
    driver.wait_idle(120)
    for model in models(driver).values():
        driver.client.post("/multigpu/unpin", {"model": model["id"]})
    if not page.locator(".multigpu-panel").count():
        page.locator(TAB).click()
    page.wait_for_function(LISTED, arg=[model["id"] for model in models(driver).values()], timeout=30_000)
    return page.locator(".multigpu-panel")


def models(driver: Driver) -> dict[str, dict[str, Any]]:
    """The models of the server's snapshot, by class."""
    return {model["name"]: model for model in driver.client.get("/multigpu/snapshot")["models"]}


def choose(page: Any, entry: str) -> None:
    """An entry of the frontend's own menu Edit, which opens when the pointer comes to it.

    While the menu itself is still opening, it may not notice; then the pointer goes away and comes again.
    """
    page.locator("svg.comfyui-logo").click()
    edit = page.get_by_role("menuitem", name="Edit", exact=True).first
    wanted = page.get_by_role("menuitem", name=entry, exact=True).last
    for patience in (500, 1_000, 2_000, 4_000, 8_000):
        edit.hover()
        page.wait_for_timeout(patience)
        if wanted.is_visible():
            break
        page.mouse.move(0, 0)
    wanted.click()


def words(language: str) -> dict[str, str]:
    """Our texts, by key."""
    texts: dict[str, dict[str, str]] = json.loads((ROOT / "locales" / language / "main.json").read_text("utf-8"))
    return texts["multigpu"]


def frees(driver: Driver) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = driver.client.get("/multigpu/history")["frees"]
    return found


def test_the_map_shows_where_the_bytes_are(page: Any, panel: Any, driver: Driver) -> None:
    snapshot = driver.client.get("/multigpu/snapshot")
    shown = page.evaluate(SHOWN)
    assert [*shown] == [device["id"] for device in snapshot["devices"]] == ["cuda:0", "cuda:1", "cuda:2", "cpu"]
    told = models(driver)
    stored = {row["model_class"]: Counter(row["storages"]) for row in driver.models()}
    for name, model in told.items():
        block = max((bytes_ for _, bytes_, _, _ in model["blocks"]), default=0)
        for device, seen in shown.items():
            copies = model["ring"] + model["retained"] if device == model["compute"] else 0
            assert abs(seen.get(model["id"], 0) - copies - stored[name][device]) <= block, (name, device)
    flux = told[MODEL]
    assert {*flux["homes"]} == {"cuda:0", "cuda:1", "cpu"}
    row = panel.locator(f".multigpu-model[data-model='{flux['id']}']")
    assert "toy_flux.safetensors" in row.inner_text()
    strip = row.locator(".multigpu-strip")
    assert strip.get_attribute("aria-valuemax") == str(len(flux["blocks"]))


def test_the_keyboard_tells_each_block(page: Any, panel: Any, driver: Driver) -> None:
    name, size, home, _ = models(driver)[MODEL]["blocks"][1]
    strip = panel.locator(".multigpu-model .multigpu-strip").first
    strip.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    tip = panel.locator(".multigpu-tip")
    assert tip.is_visible() and name in tip.inner_text() and home in tip.inner_text()
    assert strip.get_attribute("aria-valuetext").startswith(f"{name}, ")
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_the_pointer_tells_a_block_with_its_bytes_and_the_reason(page: Any, panel: Any, driver: Driver) -> None:
    blocks = models(driver)[MODEL]["blocks"]
    whole, wanted = sum(size for _, size, *_ in blocks), max(range(len(blocks)), key=lambda index: blocks[index][1])
    name, size, home, reason = blocks[wanted]
    before = sum(size for _, size, *_ in blocks[:wanted])
    strip = panel.locator(".multigpu-model .multigpu-strip").first
    box = strip.bounding_box()
    page.mouse.move(box["x"] + (before + size / 2) / whole * box["width"], box["y"] + box["height"] / 2)
    tip = panel.locator(".multigpu-tip")
    tip.wait_for(timeout=30_000)
    lines = tip.inner_text().split("\n")
    assert lines[0] == name and lines[1].startswith(f"{size / 1024**2:.1f} MiB · {home} · block {wanted + 1} of ")
    assert lines[2] == words("en")[f"reason_{reason}"]
    page.mouse.move(0, 0)
    tip.wait_for(state="hidden")


@pytest.mark.manager
@pytest.mark.parametrize("entry", ENTRIES)
def test_the_frontends_own_entries_eject_all_but_the_pinned_models(
    page: Any, panel: Any, driver: Driver, entry: str
) -> None:
    told = models(driver)
    rows = {name: panel.locator(f".multigpu-model[data-model='{told[name]['id']}']") for name in (MODEL, CLIP)}
    panel.get_by_role("button", name=f"Pin {CLIP}", exact=True).click()
    panel.locator(f"[data-model='{told[CLIP]['id']}'][data-standing='keep']").wait_for()
    before = frees(driver)
    with page.expect_response(lambda answer: urlsplit(answer.url).path == "/api/free", timeout=30_000) as asked:
        choose(page, entry)
    assert (asked.value.request.method, asked.value.status) == ("POST", 200)
    driver.wait_idle()
    free = frees(driver)[0]
    assert free not in before
    assert free["free_memory"] is ENTRIES[entry], "it reached POST /free and our flow"
    assert MODEL in {gone["name"] for gone in free["ejected"]}
    assert [kept["name"] for kept in free["retained"]] == [CLIP]
    rows[MODEL].wait_for(state="detached", timeout=30_000)
    assert MODEL not in models(driver) and models(driver)[CLIP]["standing"] == "keep"
    assert rows[CLIP].is_visible()
    panel.locator(".multigpu-free-flow", has_text=CLIP).first.wait_for(timeout=30_000)


def test_eject_removes_a_pinned_model(page: Any, panel: Any, driver: Driver) -> None:
    clip = models(driver)[CLIP]["id"]
    row = panel.locator(f".multigpu-model[data-model='{clip}']")
    panel.get_by_role("button", name=f"Pin {CLIP}", exact=True).click()
    panel.locator(f"[data-model='{clip}'][data-standing='keep']").wait_for()
    panel.get_by_role("button", name=f"Eject {CLIP}", exact=True).click()
    row.wait_for(state="detached", timeout=30_000)
    driver.wait_idle()
    assert CLIP not in models(driver)
    assert clip not in {model for there in page.evaluate(SHOWN).values() for model in there}


def test_the_buttons_free_memory(page: Any, panel: Any, driver: Driver) -> None:
    """Free models leaves what is pinned, and what is not pinned any more is freed by the next one."""
    model = models(driver)[MODEL]["id"]
    for wanted, standing in (("Pin", "keep"), ("Unpin", "default"), ("Pin", "keep")):
        panel.get_by_role("button", name=f"{wanted} {MODEL}", exact=True).click()
        panel.locator(f"[data-model='{model}'][data-standing='{standing}']").wait_for()
        assert models(driver)[MODEL]["standing"] == standing
    panel.get_by_role("button", name="Free models", exact=True).click()
    page.wait_for_function("() => document.querySelectorAll('.multigpu-model').length === 1", timeout=30_000)
    driver.wait_idle()
    assert models(driver).keys() == {MODEL} and frees(driver)[0]["free_memory"] is False
    driver.client.post("/multigpu/unpin", {"model": model})
    panel.get_by_role("button", name="Free models and caches", exact=True).click()
    panel.get_by_text("No model is loaded. Run a workflow.").wait_for(timeout=30_000)
    driver.wait_idle()
    assert models(driver) == {} and frees(driver)[0]["free_memory"] is True


def test_a_free_that_has_to_wait_for_a_prompt_says_so(page: Any, panel: Any, driver: Driver) -> None:
    waits = panel.get_by_text("Done when the running prompt is over.")
    panel.get_by_role("button", name="Free models", exact=True).click()
    driver.wait_idle()
    assert not waits.is_visible(), "nothing ran"
    long = workflow(next(SEEDS))
    (sampler,) = [node for node in long["nodes"] if node["type"] == "KSampler"]
    sampler["widgets_values"][2] = 400
    page.evaluate(LOAD, long)
    page.evaluate("() => window.app.queuePrompt(0)")
    driver.until(lambda: bool(driver.client.get("/queue")["queue_running"]))
    panel.get_by_role("button", name="Free models", exact=True).click()
    waits.wait_for(timeout=30_000)
    driver.client.raw("/interrupt", {})
    driver.wait_idle()
    waits.wait_for(state="hidden", timeout=30_000)


def test_only_what_came_back_is_named(page: Any, panel: Any, driver: Driver) -> None:
    panel.get_by_role("button", name="Free models and caches", exact=True).click()
    panel.get_by_text("No model is loaded. Run a workflow.").wait_for(timeout=30_000)
    driver.wait_idle()
    returned = frees(driver)[0]["returned"]
    assert returned["cuda:0"] > 0 == returned["cuda:2"]
    told = panel.locator(".multigpu-free-flow").first.locator("dd").last
    page.wait_for_function("told => told.innerText.includes('cuda:0 ')", arg=told.element_handle(), timeout=30_000)
    assert "cuda:2" not in told.inner_text()


TOLD = """figures => {
    window.app.api.dispatchEvent(new CustomEvent("multigpu.figures", { detail: figures }));
    return [...document.querySelectorAll(".multigpu-device .multigpu-figure")].map(use => use.innerText);
}"""


def test_figures_that_change_are_shown(page: Any, panel: Any) -> None:
    """In whatever the panel was told last."""
    *shown, _ = page.evaluate(TOLD, {"devices": [[3 * 1024**3, 0], [2**30, 2**20], [None, 0], [5 * 1024**3, 0]]})
    assert shown == ["3.00 GiB of 6.00 GiB", "1.00 GiB of 6.00 GiB", "not reported"]
    assert page.evaluate(TOLD, {"devices": [[0, 0]]})[:2] == shown[:2], "of other devices than those that are known"


LEGENDS = """() => Object.fromEntries([...document.querySelectorAll(".multigpu-device")].map(device => [
    device.querySelector(".multigpu-title").innerText,
    [...device.querySelectorAll(".multigpu-legend .multigpu-item")].map(item => item.innerText.replace(/\\s+/g, " "))
        .filter(text => /^\\d/.test(text)),
]))"""
NUMBERS = """() => [...document.querySelectorAll(".multigpu-model")].map(
    row => [row.querySelector(".multigpu-number").innerText, row.querySelector("strong").innerText],
)"""


def test_models_on_one_device_are_told_apart_and_the_ram_is_called_so(page: Any, panel: Any, driver: Driver) -> None:
    told, legends = [*models(driver)], page.evaluate(LEGENDS)
    assert page.evaluate(NUMBERS) == [[str(number), name] for number, name in enumerate(told, 1)]
    assert [*legends] == ["cuda:0", "cuda:1", "cuda:2", "RAM"]
    number = told.index(MODEL) + 1
    assert legends["cuda:2"] == []
    (one,) = legends["cuda:1"]
    assert one.startswith(f"{number} {MODEL} ") and one.endswith(" MiB")
    assert [text.split()[:2] for text in legends["cuda:0"]] == [[str(n), name] for n, name in enumerate(told, 1)]
    labels = panel.locator("[data-device='cuda:0'] .multigpu-segment .multigpu-number").all_text_contents()
    assert labels == [str(n) for n in range(1, len(told) + 1)]


REORDER = """async () => {
    const { make, Parts } = await import("/extensions/multigpu/elements.js");
    const place = make("div");
    document.body.append(place);
    const parts = new Parts(place, key => ({ element: make("button", { text: key }), update() {} }));
    const update = keys => parts.update([...keys].map(key => [key, null]));
    update("abc");
    const seen = [...place.children].map(button => {
        button.focus();
        update("cab");
        update("bca");
        update("abc");
        return document.activeElement === button;
    });
    place.firstChild.focus();
    update("bc");
    seen.push(document.activeElement === document.body);
    place.remove();
    return seen;
}"""


def test_what_has_the_focus_keeps_it_when_rows_change_places(page: Any) -> None:
    assert page.evaluate(REORDER) == [True] * 4


SMALL = """() => {
    const panel = document.querySelector(".multigpu-panel");
    panel.style.width = "200px";
    const right = panel.getBoundingClientRect().right;
    const wide = [...panel.querySelectorAll("*")].filter(
        element => element.checkVisibility() && element.getBoundingClientRect().right > right + 1,
    );
    panel.style.width = "";
    return wide.map(element => element.className + ": " + element.innerText);
}"""


def test_everything_is_seen_in_a_narrow_panel(page: Any, panel: Any) -> None:
    assert page.evaluate(SMALL) == []


def test_links_are_shown_and_what_goes_wrong_is_said(page: Any, panel: Any, driver: Driver) -> None:
    links = driver.client.get("/multigpu/snapshot")["links"]
    measured = {(link["from"], link["to"]): link["speed"] for link in links}
    assert measured.keys() >= {("cpu", "cuda:0"), ("cuda:1", "cuda:0")}, "those that the plan uses"
    assert all(speed == pytest.approx(25e9, rel=0.1) for speed in measured.values())
    rows = panel.get_by_role("region", name="Links").locator("dt").all_inner_texts()
    assert rows == [f"{link['from']} → {link['to']}" for link in links]
    speeds = panel.get_by_role("region", name="Links").locator("dd").all_inner_texts()
    assert all(re.fullmatch(r"[\d.]+ (GiB|MiB|TiB)/s", speed) for speed in speeds)
    said = {"error": {"message": "on purpose", "field": None, "column": None}}
    page.route("**/multigpu/pin", lambda asked: asked.fulfill(json=said))
    panel.get_by_role("button", name=f"Pin {MODEL}", exact=True).click()
    alert = panel.get_by_role("alert")
    alert.wait_for(timeout=30_000)
    assert alert.inner_text() == "on purpose"
    page.unroute("**/multigpu/pin")
    panel.get_by_role("button", name=f"Pin {MODEL}", exact=True).click()
    alert.wait_for(state="hidden", timeout=30_000)


def test_nothing_is_sent_when_the_tab_is_closed(page: Any, panel: Any, driver: Driver) -> None:
    page.evaluate("""() => {
        window.received = 0;
        window.app.api.addEventListener("multigpu.snapshot", () => window.received++);
    }""")
    panel.get_by_role("button", name=f"Eject {MODEL}", exact=True).click()
    page.wait_for_function("() => window.received > 0", timeout=30_000)
    assert driver.client.get("/debug/listening") is True
    page.locator(TAB).click()
    panel.wait_for(state="detached")
    driver.until(lambda: driver.client.get("/debug/listening") is False)
    received = page.evaluate("() => window.received")
    for model in models(driver).values():
        driver.client.post("/multigpu/eject", {"model": model["id"]})
    driver.wait_idle()
    assert models(driver) == {}
    assert page.evaluate("() => window.received") == received
    assert driver.client.get("/debug/listening") is False


LOOKS = """async () => {
    const { know, look } = await import("/extensions/multigpu/homes.js?by_itself");
    const there = number => ["cuda:0", "cuda:1", "xpu:0", "cpu"].map(name => `ray://node-${number}/${name}`);
    const here = ["cuda:0", "cuda:1", "cuda:2", "npu:0", "xpu:0", "mps", "cpu", "disk"];
    const all = [...here, ...there("b"), ...there("c")];
    know(all.slice(4).map(id => ({ id })));
    return Object.fromEntries(all.map(id => [id, look(id)]));
}"""
PAINTED = """() => [...document.querySelectorAll(".multigpu-device .multigpu-heading .multigpu-swatch")].map(swatch => {
    const style = getComputedStyle(swatch);
    return style.backgroundColor + style.backgroundImage;
})"""


def test_no_two_devices_look_the_same(page: Any, panel: Any) -> None:
    """On this machine and on others; the frontend really paints them so."""
    looks = page.evaluate(LOOKS)
    assert len({tuple(look) for look in looks.values()}) == len(looks) == 16
    assert {look[1] for name, look in looks.items() if name.endswith("cpu")} == {"hatched"}
    painted = page.evaluate(PAINTED)
    assert len({*painted}) == len(painted) == 4


CONTRASTS = """() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const rgba = colour => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = colour => rgba(colour).slice(0, 3).map(part => part / 255).map(
        part => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4),
    ).reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
    const ground = element => {
        while (element && rgba(getComputedStyle(element).backgroundColor)[3] < 128) element = element.parentElement;
        return element ? getComputedStyle(element).backgroundColor : "white";
    };
    const texts = [...document.querySelectorAll(".multigpu-panel *")].filter(
        element => element.checkVisibility() && [...element.childNodes].some(it => it.nodeType === 3 && it.data.trim()),
    );
    return texts.map(element => {
        const [one, other] = [getComputedStyle(element).color, ground(element)].map(light).sort((a, b) => b - a);
        return [(one + 0.05) / (other + 0.05), element.className, element.innerText];
    });
}"""
"""The contrast of every text of the panel with what is behind it, as WCAG computes it."""
SET = "([name, value]) => window.app.extensionManager.setting.set(name, value)"
HEADINGS = ("memory", "models", "last_free", "links")


def test_every_text_can_be_read_in_both_palettes_and_in_two_languages(page: Any, panel: Any) -> None:
    try:
        for palette in ("light", "dark"):
            page.evaluate(SET, ["Comfy.ColorPalette", palette])
            contrasts = page.evaluate(CONTRASTS)
            assert len(contrasts) > 30
            assert [text for text in contrasts if text[0] < 4.5] == [], palette
        for language in ("zh", "en"):
            page.evaluate(SET, ["Comfy.Locale", language])
            page.locator(TAB).click()
            panel.wait_for(state="detached")
            page.locator(TAB).click()
            panel.locator(".multigpu-model").first.wait_for(timeout=30_000)
            assert panel.locator("h3").all_inner_texts() == [words(language)[key] for key in HEADINGS]
    finally:
        page.evaluate(SET, ["Comfy.ColorPalette", "dark"])
        page.evaluate(SET, ["Comfy.Locale", "en"])
