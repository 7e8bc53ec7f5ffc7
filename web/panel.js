// The tab "MultiGPU" in the sidebar: what is in memory, and buttons to pin, eject and free. The server sends snapshots
// over ComfyUI's websocket as long as the tab is open and asks for them, and nothing otherwise.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { Tip } from "./block_strip.js";
import { make } from "./elements.js";
import { MemoryMap } from "./memory_map.js";
import { ModelRows } from "./model_rows.js";
import { ask } from "./server.js";
import { bytes, clock, say } from "./words.js";

const RENEW = 120_000; // milliseconds between the messages that say that the tab is still open
const SOON = 1000; // milliseconds after which the prompt worker, if it is idle, has done what it was asked

class Panel {
    constructor(place) {
        this.tip = new Tip();
        this.map = new MemoryMap(this.tip);
        this.rows = new ModelRows(this.tip, (route, body) => this.act(route, body));
        this.blocks = new Map(); // of each model, as last told
        this.problem = make("div", { class: "multigpu-problem", role: "alert", hidden: "" });
        this.waits = make("span", { class: "multigpu-quiet", role: "status", hidden: "" });
        this.frees = make("div");
        this.links = make("div");
        this.linksSection = section("links", this.links);
        this.receive = (event) => this.update(event.detail);
        this.figures = (event) => this.updateFigures(event.detail);
        this.idle = (event) => {
            if (event.detail?.exec_info?.queue_remaining === 0) this.waits.hidden = true;
        };
        this.look = () => this.listen(!document.hidden);
        this.element = make(
            "div", { class: "multigpu-panel" },
            make("header", { class: "multigpu-header" }, make("h2", { text: "MultiGPU" })),
            this.problem,
            section("memory", this.buttons(), this.map.element),
            section("models", this.rows.element),
            section("last_free", this.frees),
            this.linksSection,
            this.tip.element,
        );
        place.replaceChildren(this.element);
    }

    buttons() {
        const button = (key, body) => make("button", {
            type: "button", class: "multigpu-button", text: say(key), title: say(`${key}_tip`), "data-action": key,
            click: () => this.act("free", body, ({ waits }) => {
                this.waits.textContent = say("free_waits");
                this.waits.hidden = !waits;
            }),
        });
        return make(
            "div", { class: "multigpu-buttons" },
            button("free_models", { unload_models: true, free_memory: false }),
            button("free_all", { unload_models: true, free_memory: true }),
            this.waits,
        );
    }

    open() {
        for (const [name, heard] of this.events()) api.addEventListener(name, heard);
        document.addEventListener("visibilitychange", this.look);
        this.timer = setInterval(() => document.hidden || this.look(), RENEW);
        this.listen(true);
        this.refresh();
    }

    close() {
        for (const [name, heard] of this.events()) api.removeEventListener(name, heard);
        document.removeEventListener("visibilitychange", this.look);
        clearInterval(this.timer);
        this.listen(false);
    }

    events() {
        return [
            ["multigpu.snapshot", this.receive],
            ["multigpu.figures", this.figures],
            ["status", this.idle],
            ["reconnected", this.look], // ComfyUI has forgotten who listened
        ];
    }

    listen(on) {
        return this.tell(() => ask("listen", { client: api.clientId, on }));
    }

    refresh() {
        return this.tell(async () => this.update(await ask("snapshot")));
    }

    // Asks a route, then shows what it `answers` and what has changed.
    async act(route, body, answers = () => {}) {
        if (!await this.tell(async () => answers(await ask(route, body)))) return;
        await this.refresh();
        setTimeout(() => this.refresh(), SOON);
    }

    // Runs something. If it fails, says why at the top of the panel until the next success, and returns false.
    async tell(run) {
        try {
            await run();
            this.problem.hidden = true;
        } catch (problem) {
            this.problem.textContent = problem.message;
            this.problem.hidden = false;
        }
        return this.problem.hidden;
    }

    // Over the websocket, blocks come only when one of the models has another plan.
    update(snapshot) {
        for (const model of snapshot.models) model.blocks ??= this.blocks.get(model.id) ?? [];
        this.blocks = new Map(snapshot.models.map((model) => [model.id, model.blocks]));
        this.snapshot = snapshot;
        this.map.update(snapshot);
        this.rows.update(snapshot.models);
        this.showLinks(snapshot.links);
        if (this.known !== snapshot.frees) this.tell(() => this.history(snapshot.frees));
    }

    // Only the memory of the devices has changed.
    updateFigures({ devices }) {
        const known = [...this.snapshot?.devices ?? [], ...this.snapshot?.elsewhere ?? []];
        if (known.length !== devices.length) return; // a snapshot is on its way
        devices.forEach(([used, cached], index) => Object.assign(known[index], { used, cached }));
        this.map.update(this.snapshot);
    }

    async history(known) {
        this.known = known;
        const { frees } = await ask("history").catch((problem) => {
            this.known = undefined;
            throw problem;
        });
        if (!frees.length) return this.frees.replaceChildren(make("p", { class: "multigpu-quiet", text: say("no_free") }));
        const [last, ...older] = frees.map(freeOf);
        const opened = this.frees.querySelector("details")?.open;
        const earlier = older.length
            ? make("details", opened ? { open: "" } : {}, make("summary", { text: say("earlier", { count: older.length }) }), ...older)
            : null;
        this.frees.replaceChildren(...[last, earlier].filter(Boolean));
    }

    showLinks(links) {
        this.linksSection.hidden = !links.length;
        this.links.replaceChildren(make("dl", { class: "multigpu-facts" }, ...links.flatMap((link) => [
            make("dt", { text: `${link.from} → ${link.to}` }),
            make("dd", { text: say("speed", { size: bytes(link.speed) }) }),
        ])));
    }
}

function section(key, ...content) {
    return make("section", { class: "multigpu-section", "aria-label": say(key) }, make("h3", { text: say(key) }), ...content);
}

// One free in words: when, which models were ejected and retained and why, and what came back.
function freeOf(free) {
    const what = say(free.free_memory ? "free_all" : "free_models");
    const line = (key, models) => (models.length ? [make("dt", { text: say(key) }), make(
        "dd", {}, ...models.map(({ name, reason }) => make("div", {}, name, make("span", { class: "multigpu-quiet", text: ` · ${because(reason)}` }))),
    )] : []);
    const returned = Object.entries(free.returned).filter(([, count]) => count > 0)
        .map(([device, count]) => `${device} ${bytes(count)}`).join(", ");
    return make(
        "div", { class: "multigpu-free-flow" },
        make("div", { class: "multigpu-quiet", text: `${clock(free.time)} · ${what}` }),
        make(
            "dl", { class: "multigpu-facts" },
            ...line("ejected", free.ejected), ...line("retained_models", free.retained),
            make("dt", { text: say("returned") }), make("dd", { text: returned || say("nothing") }),
        ),
    );
}

function because(reason) {
    const key = `freed_${reason.replace(/\W+/g, "_")}`;
    const text = say(key);
    return text === key ? reason : text;
}

let open = null;

app.registerExtension({
    name: "MultiGPU.Panel",
    setup() {
        app.extensionManager.registerSidebarTab({
            id: "multigpu",
            icon: "pi pi-microchip",
            title: "MultiGPU",
            tooltip: say("panel_tip"),
            type: "custom",
            render(place) {
                open?.close();
                open = new Panel(place);
                open.open();
            },
            destroy() {
                open?.close();
                open = null;
            },
        });
    },
});
