// A colour and a pattern for each device, both together for no other one. The colours are those of Okabe and Ito, which
// colour-blind people can tell apart; patterns tell apart what colours do not, and help where there is no colour at all.

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#f0e442"];
const RAM = "#cc79a7";
const FILE = ["#8c8c8c", "dotted"];
const PATTERNS = { accelerator: ["plain", "striped", "barred"], ram: ["hatched", "crossed"] };

const places = { accelerator: new Map(), ram: new Map([["cpu", 0]]) }; // devices in the order in which they came to be known

function place(device) {
    const kind = /(^|\/)cpu$/.test(device) ? "ram" : "accelerator"; // that of another machine, too: ray://node-b/cpu
    const known = places[kind];
    if (!known.has(device)) known.set(device, known.size);
    return [kind, known.get(device)];
}

// Devices in the order in which they get colours and patterns; the panel and the nodes give them the same ones.
export function know(devices) {
    devices.forEach(({ id }) => place(id));
}

// Accelerators are plain in their order; when all colours are used they come again, striped. RAM is hatched.
export function look(device) {
    if (device === "disk") return FILE;
    const [kind, index] = place(device);
    const colours = kind === "ram" ? [RAM, ...COLOURS] : COLOURS;
    const patterns = PATTERNS[kind];
    return [colours[index % colours.length], patterns[Math.floor(index / colours.length) % patterns.length]];
}

// Gives an element the colour and pattern of a device.
export function paint(element, device) {
    const [colour, pattern] = look(device);
    element.classList.add("multigpu-home", `multigpu-${pattern}`);
    element.style.setProperty("--multigpu-home", colour);
    element.dataset.home = device;
    return element;
}
