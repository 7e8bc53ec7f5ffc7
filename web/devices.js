// What the devices of this machine and of others are, said where a device is chosen. The values of the widgets stay the
// devices' ids.

import { know } from "./homes.js";
import { ask } from "./server.js";
import { bytes, say } from "./words.js";

const OLD = 5000; // milliseconds after which the devices are asked for again: other machines come and go
const found = new Map(); // the devices by id
let asked = null;
let asking = null;

export async function devices() {
    if (asking && performance.now() - asked < OLD) return asking;
    asked = performance.now();
    asking = ask("snapshot").then(
        ({ devices, elsewhere }) => {
            know([...devices, ...elsewhere]);
            [...devices, ...elsewhere].forEach((device) => found.set(device.id, device));
        },
        () => {}, // the panel says what is wrong with the route
    );
    return asking;
}

export function deviceLabel(device) {
    const state = device.state ? say(`machine_${device.state}`) : null;
    const what = [device.name, device.total ? bytes(device.total) : null, state].filter(Boolean).join(", ");
    return what ? `${device.id} (${what})` : device.id;
}

// The list of a combo says what each device is. On a drawn node only the id is shown: for more there is no room. This has
// to be there when the node is first drawn; `optionLabel` is for Nodes 2.0 of ComfyUI 0.24.
function describe(widget) {
    const label = (id) => {
        devices();
        return found.has(id) ? deviceLabel(found.get(id)) : String(id ?? "");
    };
    for (const options of [widget.options, widget._state?.options])
        if (options) Object.assign(options, { getOptionLabel: label, optionLabel: label });
    if ("_displayValue" in widget) Object.defineProperty(widget, "_displayValue", { get: () => String(widget.value) });
}

// Combos of devices show what each is; a text that names devices lists them in its tooltip.
export async function describeDevices(node) {
    const named = node.widgets?.filter((widget) => /device$|expert_mode_allocations$/.test(widget.name)) ?? [];
    if (!named.length) return;
    for (const widget of named) if (widget.options?.values) describe(widget);
    await devices();
    if (!found.size) return;
    const lines = [...found.values()].map(deviceLabel).join("\n");
    for (const widget of named) {
        const tip = widget.tooltip ?? widget.options?.tooltip;
        widget.tooltip = [tip, say("devices_here", { lines })].filter(Boolean).join("\n\n");
    }
    node.setDirtyCanvas?.(true, true);
}
