// One row for each loaded model: what it is, where its blocks rest in order of execution, and buttons to pin and eject it.

import { BlockStrip } from "./block_strip.js";
import { make, Parts } from "./elements.js";
import { homesBar, legend } from "./split_bar.js";
import { ago, bytes, say, seconds } from "./words.js";

const EXPLAINED = ["streamed", "retained", "step"]; // facts with a tooltip

export class ModelRows {
    // `act(route, body)` asks a route and shows what comes of it.
    constructor(tip, act) {
        this.none = make("p", { class: "multigpu-quiet" });
        this.list = make("ul", { class: "multigpu-models" });
        this.element = make("div", {}, this.none, this.list);
        this.rows = new Parts(this.list, () => new ModelRow(tip, act));
    }

    update(models) {
        this.none.textContent = say("no_models");
        this.none.hidden = models.length > 0;
        this.rows.update(models.map((model, index) => [model.id, { ...model, number: index + 1 }]));
    }
}

class ModelRow {
    constructor(tip, act) {
        this.number = make("b", { class: "multigpu-number" }); // as in the bars
        this.name = make("strong", { class: "multigpu-cut" });
        this.standing = make("span", { class: "multigpu-standing" });
        this.file = make("div", { class: "multigpu-quiet multigpu-cut" });
        this.strip = new BlockStrip(tip, 60);
        this.split = make("div");
        this.facts = make("dl", { class: "multigpu-facts" });
        this.pin = make("button", {
            type: "button", class: "multigpu-button",
            click: () => act(this.pinned ? "unpin" : "pin", { model: this.model.id }),
        });
        this.eject = make("button", {
            type: "button", class: "multigpu-button", click: () => act("eject", { model: this.model.id }),
        });
        const heading = make("div", { class: "multigpu-heading" }, this.number, this.name, this.standing);
        const buttons = make("div", { class: "multigpu-buttons" }, this.pin, this.eject);
        this.element = make("li", { class: "multigpu-model" },
            heading, this.file, this.split, this.facts, buttons);
    }

    update(model) {
        this.model = model;
        this.pinned = model.standing === "keep";
        this.element.dataset.model = model.id;
        this.element.dataset.standing = model.standing;
        this.number.textContent = model.number;
        this.name.textContent = model.name;
        this.standing.title = say(`standing_${model.standing}_tip`);
        this.standing.textContent = [say(`standing_${model.standing}`), ...(model.loaded ? [] : [say("held")])].join(", ");
        this.file.textContent = this.file.title = model.file ?? "";
        this.bar(model);
        const facts = Object.entries(factsOf(model)).map(([key, text]) => [
            make("dt", { text: say(key), title: EXPLAINED.includes(key) && say(`${key}_tip`) }), make("dd", { text }),
        ]);
        this.facts.replaceChildren(...facts.flat());
        label(this.pin, this.pinned ? "unpin" : "pin", model);
        label(this.eject, "eject", model);
    }

    // The blocks where they are known, else only how many bytes are where.
    bar(model) {
        const name = say("blocks_of", { model: model.name });
        if (model.blocks.length) this.strip.update({ blocks: model.blocks, label: name });
        const top = model.blocks.length ? this.strip.element : homesBar(model.homes, model.name);
        const homes = legend(model.homes);
        if (this.split.firstElementChild === top) this.split.lastElementChild.replaceWith(homes);
        else this.split.replaceChildren(top, homes);
    }
}

function label(button, action, model) {
    button.textContent = say(action);
    button.title = say(`${action}_tip`);
    button.setAttribute("aria-label", say(`${action}_model`, { model: model.name }));
}

function factsOf(model) {
    const facts = { computes_on: model.compute + (model.dynamic ? ` · ${say("dynamic")}` : "") };
    if (model.streamed) facts.streamed = bytes(model.streamed);
    if (model.retained) facts.retained = bytes(model.retained);
    if (model.step) {
        const { forecast, measured } = model.step;
        facts.step = measured === null
            ? say("step_expected", { time: seconds(forecast) })
            : say("step_measured", { time: seconds(measured), forecast: seconds(forecast) });
    }
    if (model.used) facts.last_used = ago(model.used);
    return facts;
}
