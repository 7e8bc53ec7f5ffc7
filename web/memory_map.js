// The memory of each device as a bar: a segment for each model with its blocks, then the allocator's cache, what else is
// used, and what is free. Models have numbers, which tell apart those on one device, in segments too narrow for a name too.

import { BlockStrip } from "./block_strip.js";
import { make, Parts } from "./elements.js";
import { know, paint } from "./homes.js";
import { bytes, say } from "./words.js";

const NOTABLE = 1024 ** 2; // bytes from which on the legend names what is used besides models
const REST = ["cached", "others", "free"];

export class MemoryMap {
    constructor(tip) {
        this.element = make("div", { class: "multigpu-map" });
        this.bars = new Parts(this.element, () => new DeviceBar(tip));
    }

    update(snapshot) {
        const devices = [...snapshot.devices, ...snapshot.elsewhere];
        know(devices);
        const models = snapshot.models.map((model, index) => ({ ...model, number: index + 1 }));
        this.bars.update(devices.map((device) => [device.id, { device, models }]));
    }
}

class DeviceBar {
    constructor(tip) {
        this.title = make("span", { class: "multigpu-title" });
        this.name = make("span", { class: "multigpu-quiet multigpu-cut" });
        this.use = make("span", { class: "multigpu-figure" });
        this.bar = make("div", { class: "multigpu-device-bar" });
        this.legend = make("div", { class: "multigpu-legend" });
        this.swatch = make("i", { class: "multigpu-swatch", "aria-hidden": "true" });
        const heading = make("div", { class: "multigpu-heading" }, this.swatch, this.title, this.name, this.use);
        this.element = make("section", { class: "multigpu-device" }, heading, this.bar, this.legend);
        this.segments = new Parts(this.bar, (key) => (REST.includes(key) ? new Rest(key, tip) : new Segment(tip)));
    }

    update({ device, models }) {
        const title = device.id.replace(/(^|\/)cpu$/, `$1${say("ram")}`);
        this.element.dataset.device = device.id;
        this.element.setAttribute("aria-label", `${title} ${device.name ?? ""}`);
        paint(this.swatch, device.id);
        this.title.textContent = title;
        this.name.textContent = device.state ? say(`machine_${device.state}`) : title === device.id ? device.name : device.id;
        this.name.title = device.name || this.name.textContent;
        this.element.classList.toggle("multigpu-lost", device.state === "lost");
        this.use.textContent = use(device);
        const here = models.map((model) => segment(model, device.id)).filter((part) => part.count > 0);
        const parts = rest(device);
        this.segments.update([...here.map((part) => [`model ${part.model.id}`, part]), ...Object.entries(parts)]);
        const shown = Object.entries(parts).filter(([, count]) => count >= NOTABLE);
        this.legend.replaceChildren(
            ...here.map(({ model, count }) => item(number(model), `${model.name} ${bytes(count)}`, model.file)),
            ...shown.map(([kind, count]) => item(
                make("i", { class: `multigpu-swatch multigpu-${kind}`, "aria-hidden": "true" }),
                `${say(`memory_${kind}`)} ${bytes(count)}`, say(`memory_${kind}_tip`),
            )),
        );
    }
}

function item(mark, text, title) {
    return make("span", { class: "multigpu-item", title }, mark, make("span", { class: "multigpu-cut", text }));
}

// The number by which a model is found in the bars and among the rows.
export function number(model) {
    return make("b", { class: "multigpu-number", text: model.number });
}

class Segment {
    constructor(tip) {
        this.strip = new BlockStrip(tip, 12);
        this.label = make("span", { class: "multigpu-segment-label" });
        this.element = make("div", { class: "multigpu-segment" }, this.strip.element, this.label);
    }

    update({ model, device, count, blocks, extra }) {
        const label = say("model_on_device", { model: model.name, device, size: bytes(count) });
        this.element.dataset.model = model.id;
        this.element.dataset.bytes = count;
        this.element.style.flexGrow = count;
        this.label.replaceChildren(number(model), make("span", { text: model.name }));
        const more = extra ? [[say("ring_and_copies"), extra, device, "ring"]] : [];
        this.strip.update({ blocks: [...blocks, ...more], label });
    }
}

class Rest {
    constructor(kind, tip) {
        this.kind = kind;
        this.element = make("div", {
            class: `multigpu-${kind}`,
            pointermove: (event) => tip.show([this.text], event.clientX + 12, event.clientY + 14),
            pointerleave: () => tip.hide(),
        });
    }

    update(count) {
        this.text = `${say(`memory_${this.kind}`)} ${bytes(count)}`;
        this.element.hidden = count <= 0;
        this.element.dataset.bytes = count;
        this.element.style.flexGrow = count;
    }
}

// What of a model is on a device: its blocks there, and on its compute device the ring and copies of streamed blocks.
function segment(model, device) {
    const home = model.homes[device] ?? 0;
    const extra = device === model.compute ? (model.ring ?? 0) + (model.retained ?? 0) : 0;
    const named = model.blocks.filter((block) => block[2] === device);
    const left = home - named.reduce((sum, block) => sum + block[1], 0);
    const blocks = left > 0 ? [...named, [say("weights"), left, device, ""]] : named;
    return { model, device, blocks, extra, count: home + extra };
}

// What is used besides models is what is being computed, caches and other programs; the allocator tells its cache.
function rest(device) {
    if (device.used === null) return {};
    const others = Math.max(0, device.used - device.ours);
    const cached = Math.min(device.cached, others);
    return { cached, others: others - cached, free: device.total - device.used };
}

function use(device) {
    if (!device.in_use) return say("memory_unused", { total: bytes(device.total) });
    if (device.used === null) return say("memory_unknown");
    return say("memory_use", { used: bytes(device.used), total: bytes(device.total) });
}
