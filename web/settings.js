// What the environment variables set, in ComfyUI's settings dialog. A variable goes first: what it sets is shown there and
// cannot be changed there.

import { app } from "../../scripts/app.js";
import { make } from "./elements.js";
import { ask } from "./server.js";
import { askAgain } from "./spread_nodes.js";
import { say } from "./words.js";

const ENTRIES = {
    fall_back: { id: "MultiGPU.FallBack", variable: "MULTIGPU_FALL_BACK", type: "boolean", defaultValue: false },
    ram_limit: {
        id: "MultiGPU.RamLimit", variable: "MULTIGPU_RAM_LIMIT", type: "number", defaultValue: 0,
        attrs: { min: 0, max: 100, step: 1, showButtons: true },
    },
    log_level: { id: "MultiGPU.LogLevel", variable: "MULTIGPU_LOG", type: "combo", defaultValue: "info" },
};

const now = await ask("settings").catch(() => ({})); // without the routes there is nothing to set

// Tells the server, which ComfyUI's own saving of the value does not. Numbers are whole; what is refused is taken back.
async function change(field, chosen, before) {
    let value = typeof chosen === "number" ? Math.round(chosen) : chosen;
    try {
        now[field] = (await ask("settings", { [field]: value }))[field];
        askAgain();
    } catch (problem) {
        app.extensionManager.toast.add({ severity: "error", summary: say(field), detail: problem.message, life: 8000 });
        value = before;
    }
    if (value !== chosen) await app.extensionManager.setting.set(ENTRIES[field].id, value);
}

function entry(field, { variable, ...more }) {
    const { value, source, choices } = now[field];
    const fixed = source === "environment";
    return {
        ...more,
        name: say(field),
        tooltip: say(`${field}_tip`),
        category: ["MultiGPU", "MultiGPU", field],
        ...(more.type === "combo" ? { options: choices } : {}),
        ...(fixed ? { type: () => shown(value, variable) } : {}),
        onChange: (chosen, before) => {
            const news = before !== undefined && chosen !== (now[field].value ?? 0);
            if (!fixed && news) change(field, chosen, before);
        },
    };
}

function shown(value, variable) {
    const text = typeof value === "boolean" ? say(value ? "on" : "off") : String(value);
    return make("span", { class: "multigpu-fixed", text: say("set_by_environment", { value: text, variable }) });
}

app.registerExtension({
    name: "MultiGPU.Settings",
    settings: Object.entries(ENTRIES).filter(([field]) => now[field]).map(([field, more]) => entry(field, more)),
});
