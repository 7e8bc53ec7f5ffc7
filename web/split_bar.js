// The planned split of a model's weights, as a bar with a legend; or what is wrong with the text that asks for it.

import { make } from "./elements.js";
import { paint } from "./homes.js";
import { bytes, say, seconds } from "./words.js";

export function homesBar(homes, label) {
    const bar = make("div", { class: "multigpu-bar", role: "img", "aria-label": `${label}: ${inWords(homes)}` });
    for (const [device, count] of shown(homes)) {
        const part = paint(make("div", { title: `${device}: ${bytes(count)}` }), device);
        part.style.flexGrow = count;
        part.dataset.bytes = count;
        bar.append(part);
    }
    return bar;
}

// A swatch, the device and its bytes for each home.
export function legend(homes, ...more) {
    const items = shown(homes).map(([device, count]) => make(
        "span", { class: "multigpu-item" },
        paint(make("i", { class: "multigpu-swatch", "aria-hidden": "true" }), device), `${device} ${bytes(count)}`,
    ));
    return make("div", { class: "multigpu-legend" }, ...items, ...more.map((text) => make("span", { text })));
}

export function planned(plan) {
    const homes = plan.homes;
    const { forecast, measured } = plan.step ?? {};
    const step = plan.step ? [say(measured ? "step_timed" : "step_estimated", { time: seconds(measured ?? forecast) })] : [];
    return [homesBar(homes, say("planned_split")), legend(homes, ...step)];
}

// The text with the place that is wrong marked, and the message.
export function wrong(problem, text) {
    const parts = [];
    if (Number.isInteger(problem.column) && text) {
        const at = Math.max(0, problem.column - 1);
        const rest = text.slice(at);
        const end = rest.search(/[;,\s]/) > 0 ? rest.search(/[;,\s]/) : Math.max(1, rest.length);
        parts.push(make(
            "code", { class: "multigpu-typed" },
            text.slice(0, at), make("mark", { text: rest.slice(0, end) || "\u00a0" }), rest.slice(end),
        ));
    }
    parts.push(make("span", { text: problem.message }));
    return make("div", { class: "multigpu-wrong", role: "alert" }, ...parts);
}

// Homes that hold something: accelerators by their index, then RAM, then the file.
function shown(homes) {
    const place = (device) => `${{ cpu: 1, disk: 2 }[device] ?? 0}${device}`;
    const held = Object.entries(homes).filter(([, count]) => count > 0);
    return held.sort(([one], [other]) => place(one).localeCompare(place(other), "en", { numeric: true }));
}

function inWords(homes) {
    return shown(homes).map(([device, count]) => `${device} ${bytes(count)}`).join(", ");
}
