// Texts in the user's language, from locales/*/main.json as ComfyUI serves them, and numbers as people read them.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

const UNITS = [["TiB", 1024 ** 4, 2], ["GiB", 1024 ** 3, 2], ["MiB", 1024 ** 2, 1], ["KiB", 1024, 1]];

const texts = await loaded();

async function loaded() {
    try {
        return await (await api.fetchApi("/i18n")).json();
    } catch {
        return {}; // without them the keys are shown
    }
}

export function language() {
    const chosen = app.extensionManager?.setting?.get("Comfy.Locale") ?? "en";
    return texts[chosen]?.multigpu ? chosen : "en";
}

// The text of a key; `{name}` in it stands for values.name.
export function say(key, values = {}) {
    const text = texts[language()]?.multigpu?.[key] ?? texts.en?.multigpu?.[key] ?? key;
    return text.replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

export function bytes(count) {
    for (const [unit, size, digits] of UNITS)
        if (Math.abs(count) >= size) return `${(count / size).toFixed(digits)} ${unit}`;
    return `${count} B`;
}

export function seconds(time) {
    return time < 0.1 ? `${(time * 1000).toPrecision(2)} ms` : `${time.toPrecision(3)} s`;
}

export function clock(time) {
    return new Date(time * 1000).toLocaleTimeString(language());
}

// How long ago a moment was, in seconds since 1970.
export function ago(time) {
    const past = time - Date.now() / 1000;
    const format = new Intl.RelativeTimeFormat(language(), { numeric: "auto", style: "short" });
    for (const [unit, size] of [["day", 86400], ["hour", 3600], ["minute", 60]])
        if (-past >= size) return format.format(Math.trunc(past / size), unit);
    return format.format(Math.min(0, Math.trunc(past / 5) * 5), "second"); // in steps of 5, so that it is calm
}
