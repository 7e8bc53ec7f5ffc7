// What the devices of this machine are, said where a device is chosen. The values of the widgets stay the devices' ids.

import { ask } from "./server.js";
import { bytes, say } from "./words.js";

let known = null;

// The devices by id, asked for once.
async function devices() {
    known ??= ask("snapshot").then(
        ({ devices }) => new Map(devices.map((device) => [device.id, device])),
        () => new Map(), // the panel says what is wrong with the route
    );
    return known;
}

export function deviceLabel(device) {
    const what = [device.name, device.total ? bytes(device.total) : null].filter(Boolean).join(", ");
    return what ? `${device.id} (${what})` : device.id;
}

// The list of a combo says what each device is. On the node only the id is shown: for more there is no room.
function describe(widget, found) {
    widget.options.getOptionLabel = (id) => (found.has(id) ? deviceLabel(found.get(id)) : String(id ?? ""));
    if ("_displayValue" in widget) Object.defineProperty(widget, "_displayValue", { get: () => String(widget.value) });
}

// Combos of devices show what each is; a text that names devices lists them in its tooltip.
export async function describeDevices(node) {
    const named = node.widgets?.filter((widget) => /device$|expert_mode_allocations$/.test(widget.name)) ?? [];
    if (!named.length) return;
    const found = await devices();
    if (!found.size) return;
    const lines = [...found.values()].map(deviceLabel).join("\n");
    for (const widget of named) {
        if (widget.options?.values) describe(widget, found);
        const tip = widget.tooltip ?? widget.options?.tooltip;
        widget.tooltip = [tip, say("devices_here", { lines })].filter(Boolean).join("\n\n");
    }
    node.setDirtyCanvas?.(true, true);
}
