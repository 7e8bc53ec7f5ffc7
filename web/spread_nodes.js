// The nodes that spread weights: only the widgets in use are shown, with what the devices are, and below them the planned
// split or what is wrong. Nothing of this is saved: a workflow keeps the values of all widgets in their order.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { describeDevices, devices } from "./devices.js";
import { make } from "./elements.js";
import { ask } from "./server.js";
import { planned, wrong } from "./split_bar.js";
import { filesFor } from "./upstream.js";
import { say } from "./words.js";

const SPREAD = ["virtual_vram_gb", "donor_device", "use_other_vram", "expert_mode_allocations"];
const EXPERT = "expert_mode_allocations";
const USED = { "auto": [], "virtual VRAM": ["virtual_vram_gb", "donor_device"], "expert": [EXPERT] };
const TYPING = 250; // milliseconds without a change after which the plan is asked for
const WATCHING = 1000; // milliseconds between looks for a change elsewhere, such as another file in the loader

const AGAIN = 1000; // milliseconds after news of the queue until what a prompt has changed is known
const RETRY = 10_000; // milliseconds until a server is asked again that has not answered

const PADDING = 8; // pixels above and below, as in the style sheet

const watched = new Set();

// Has all splits asked for again: something has changed that is not on the nodes.
export function askAgain() {
    for (const node of watched) node.asked = "";
}

class SpreadNode {
    constructor(node, prefixes) {
        this.node = node;
        this.prefixes = prefixes;
        this.asked = "";
        this.timer = null;
        this.box = make("div", { class: "multigpu-split", role: "group", "aria-label": say("planned_split") });
        this.bar = node.addDOMWidget("multigpu_split", "multigpu_split", this.box, {
            serialize: false,
            margin: 0,
            getMinHeight: () => this.height(),
            getMaxHeight: () => this.height(),
            getValue: () => "",
            setValue: () => {},
        });
        this.bar.serialize = false;
        for (const widget of this.own()) this.listen(widget);
        this.hook("onConfigure", () => this.changed());
        this.hook("onConnectionsChange", () => this.changed());
        this.hook("onRemoved", () => watched.delete(this));
        watched.add(this);
        this.show();
    }

    own() {
        return this.node.widgets.filter((widget) => widget !== this.bar);
    }

    widget(name) {
        return this.node.widgets.find((widget) => widget.name === name);
    }

    linked(name) {
        const slot = this.node.inputs?.findIndex((input) => input.widget?.name === name) ?? -1;
        return slot >= 0 && this.node.isInputConnected(slot);
    }

    hook(name, then) {
        const before = this.node[name];
        this.node[name] = function () {
            const result = before?.apply(this, arguments);
            then();
            return result;
        };
    }

    listen(widget) {
        const before = widget.callback;
        widget.callback = (...given) => {
            const result = before?.apply(widget, given);
            this.changed();
            return result;
        };
    }

    // The user or a workflow has changed something.
    changed() {
        this.show();
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.plan(), TYPING);
    }

    // Whether a widget of SPREAD has a meaning now. A value that comes over a link is not known here.
    used(prefix, name) {
        const mode = this.widget("mode");
        if (mode) return this.linked("mode") || !USED[mode.value] || USED[mode.value].includes(name);
        return name === EXPERT || this.linked(prefix + EXPERT) || !String(this.widget(prefix + EXPERT).value).trim();
    }

    show() {
        let differs = false;
        for (const prefix of this.prefixes)
            for (const name of SPREAD) {
                const widget = this.widget(prefix + name);
                if (!widget) continue;
                const hidden = !this.used(prefix, name) && !this.linked(prefix + name);
                differs ||= Boolean(widget.hidden) !== hidden;
                widget.hidden = hidden;
                widget.options.hidden = hidden;
                // What ComfyUI 0.30 shows in Nodes 2.0; it may be left over from an earlier node with the same id.
                if (widget._state?.options) widget._state.options.hidden = hidden;
            }
        if (!differs) return;
        this.node.widgets.push(this.node.widgets.pop()); // Nodes 2.0 look at the options again when the list changes
        this.fit();
    }

    // As high as what is shown needs; the width is the user's.
    fit() {
        const [width, height] = this.node.computeSize();
        this.node.setSize([Math.max(width, this.node.size[0]), height]);
        this.node.setDirtyCanvas(true, true);
    }

    height() {
        return (this.box.firstElementChild?.scrollHeight ?? 0) + 2 * PADDING;
    }

    request() {
        this.found = filesFor(this.node);
        const inputs = Object.fromEntries(this.own().map((widget) => [widget.name, widget.value]));
        const { files, folder, missing } = this.found ?? {};
        return { node: this.node.comfyClass, inputs, ...(files && !missing ? { files, folder } : {}) };
    }

    unknown() {
        return this.own().some((widget) => this.linked(widget.name));
    }

    // Asks for the plan of what the widgets say now, if it is not the one that is shown.
    async plan() {
        if (!this.node.graph) return;
        this.settle();
        const request = this.request();
        const asked = JSON.stringify([request, this.found, this.unknown()]);
        if (asked === this.asked) return;
        this.asked = asked;
        const content = make("div", { class: "multigpu-content" }, ...await this.content(request));
        if (asked !== this.asked) return; // changed in the meantime
        if (content.isEqualNode(this.box.firstElementChild)) return;
        this.box.replaceChildren(content);
        this.grow();
    }

    // Nodes 2.0 of ComfyUI 0.24 keep the element of an earlier node with the same id, for example after undo.
    settle() {
        if (this.box.isConnected) return;
        document.querySelector(`[data-node-id="${this.node.id}"] .multigpu-split`)?.replaceWith(this.box);
    }

    // What is to be shown: for each part with its name, if there are several and not the same is true of all.
    async content(request) {
        if (this.unknown()) return [note("plan_linked")];
        const answers = await Promise.all(this.prefixes.map((part) => this.answer({ ...request, part })));
        const [first, ...others] = answers;
        if (others.every((other) => !first[1] && other[0].isEqualNode(first[0]))) return first;
        return answers.flatMap((answer, index) => [note(`part_${this.prefixes[index]}`), ...answer]);
    }

    async answer(request) {
        try {
            const { plan, elsewhere, unreadable } = await ask("plan", request);
            if (plan) return planned(plan);
            if (elsewhere) return [note("plan_elsewhere", { machine: elsewhere })];
            if (unreadable) return [note("plan_unreadable", { file: request.files.join(", ") }, unreadable)];
            if (this.found?.missing) return [note("plan_missing", { file: this.found.missing })];
            return [note(this.found ? "plan_unknown" : "plan_no_file")];
        } catch (problem) {
            if (problem.lost) setTimeout(() => { this.asked = ""; }, RETRY);
            return [wrong(problem, String(request.inputs[problem.field] ?? ""))];
        }
    }

    // Room for what is shown, without taking away what the user gave.
    grow() {
        const [width, height] = this.node.computeSize();
        if (height > this.node.size[1]) this.node.setSize([Math.max(width, this.node.size[0]), height]);
        this.node.setDirtyCanvas(true, true);
    }
}

function note(key, values, why) {
    return make("div", { class: "multigpu-note", title: why, text: say(key, values) });
}

setInterval(() => {
    if (document.hidden) return;
    for (const node of watched) node.plan();
}, WATCHING);

app.registerExtension({
    name: "MultiGPU.SpreadNodes",
    setup() {
        devices();
        let later = null;
        api.addEventListener("reconnected", askAgain);
        api.addEventListener("status", () => {
            clearTimeout(later);
            later = setTimeout(askAgain, AGAIN); // a prompt may have ended: other memory is free, and steps were timed
        });
    },
    nodeCreated(node) {
        if (!/^MultiGPUPlace|MultiGPU$/.test(node.comfyClass ?? "")) return;
        const names = (node.widgets ?? []).map((widget) => widget.name);
        describeDevices(node);
        const prefixes = names.filter((name) => name.endsWith(EXPERT)).map((name) => name.slice(0, -EXPERT.length));
        if (prefixes.length) new SpreadNode(node, prefixes);
    },
});
