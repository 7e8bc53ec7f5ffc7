// Blocks of a model side by side in order of execution, as wide as their bytes and coloured by home. The pointer and the
// arrow keys show each block's name, bytes, home and reason.

import { make } from "./elements.js";
import { paint } from "./homes.js";
import { bytes, say } from "./words.js";

export class Tip {
    constructor() {
        this.element = make("div", { class: "multigpu-tip", role: "tooltip", hidden: "" });
    }

    show(lines, left, top) {
        this.element.replaceChildren(...lines.map((text) => make("div", { text })));
        this.element.hidden = false;
        const { width, height } = this.element.getBoundingClientRect();
        this.element.style.left = `${Math.max(4, Math.min(left, innerWidth - width - 8))}px`;
        this.element.style.top = `${top + height + 8 > innerHeight ? top - height - 28 : top}px`;
    }

    hide() {
        this.element.hidden = true;
    }
}

export class BlockStrip {
    // Up to `distinct` blocks, lines separate them.
    constructor(tip, distinct) {
        this.tip = tip;
        this.distinct = distinct;
        this.at = 0;
        this.shown = "";
        this.cursor = make("div", { class: "multigpu-cursor", hidden: "" });
        this.blocks = [];
        this.element = make("div", {
            class: "multigpu-strip",
            tabindex: "0",
            pointermove: (event) => this.point(event),
            pointerleave: () => this.leave(),
            focus: () => this.select(this.at),
            blur: () => this.leave(),
            keydown: (event) => this.key(event),
        });
    }

    // `blocks` are [name, bytes, home, reason]; `label` says what they are together.
    update({ blocks, label }) {
        const now = JSON.stringify([blocks, label]);
        if (now === this.shown) return;
        this.shown = now;
        this.blocks = blocks;
        this.at = Math.min(this.at, Math.max(0, blocks.length - 1));
        this.total = blocks.reduce((sum, block) => sum + block[1], 0);
        const few = blocks.length <= this.distinct;
        const parts = runs(blocks, few).map(([home, count]) => {
            const part = paint(make("div"), home);
            part.style.flexGrow = count;
            return part;
        });
        this.element.classList.toggle("multigpu-distinct", few);
        this.element.replaceChildren(...parts, this.cursor);
        for (const [name, value] of Object.entries({
            "role": blocks.length ? "slider" : "img",
            "aria-label": label,
            "aria-valuemin": 1,
            "aria-valuemax": blocks.length,
            "aria-valuenow": this.at + 1,
            "aria-valuetext": blocks.length ? this.lines(this.at).join(", ") : "",
        })) this.element.setAttribute(name, value);
    }

    lines(index) {
        const [name, count, home, reason] = this.blocks[index];
        const where = say("block_position", { number: index + 1, count: this.blocks.length });
        return [name, `${bytes(count)} · ${home} · ${where}`, reason ? say(`reason_${reason}`) : ""].filter(Boolean);
    }

    point(event) {
        const box = this.element.getBoundingClientRect();
        const wanted = ((event.clientX - box.left) / box.width) * this.total;
        let sum = 0;
        const index = this.blocks.findIndex((block) => (sum += block[1]) > wanted);
        if (index >= 0) this.select(index, event.clientX + 12);
    }

    key(event) {
        const last = this.blocks.length - 1;
        const next = {
            ArrowRight: this.at + 1, ArrowUp: this.at + 1, ArrowLeft: this.at - 1, ArrowDown: this.at - 1,
            PageUp: this.at + 10, PageDown: this.at - 10, Home: 0, End: last,
        }[event.key];
        if (event.key === "Escape") this.leave();
        if (next === undefined) return;
        event.preventDefault();
        event.stopPropagation();
        this.select(Math.max(0, Math.min(next, last)));
    }

    select(index, left = null) {
        if (!this.blocks.length) return;
        this.at = index;
        const before = this.blocks.slice(0, index).reduce((sum, block) => sum + block[1], 0);
        const box = this.element.getBoundingClientRect();
        const start = (before / this.total) * box.width;
        this.cursor.hidden = false;
        this.cursor.style.left = `${start}px`;
        this.cursor.style.width = `${Math.max(2, (this.blocks[index][1] / this.total) * box.width)}px`;
        this.element.setAttribute("aria-valuenow", index + 1);
        this.element.setAttribute("aria-valuetext", this.lines(index).join(", "));
        this.tip.show(this.lines(index), left ?? box.left + start, box.bottom + 6);
    }

    leave() {
        this.cursor.hidden = true;
        this.tip.hide();
    }
}

// [home, bytes] of the blocks; blocks of one home that follow each other are one unless they are few.
function runs(blocks, few) {
    const found = [];
    for (const [, count, home] of blocks) {
        const last = found.at(-1);
        if (!few && last?.[0] === home) last[1] += count;
        else found.push([home, count]);
    }
    return found;
}
