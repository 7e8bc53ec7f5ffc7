// A colour and a pattern for each device. The colours are those of Okabe and Ito, which colour-blind people can tell
// apart; patterns tell apart what has no colour of its own, and help where there is no colour at all.

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#f0e442"];
const FIXED = { cpu: ["#cc79a7", "hatched"], disk: ["#8c8c8c", "dotted"] };

// Accelerators are plain in the order of their index; from the seventh on colours repeat, striped.
export function look(device) {
    if (FIXED[device]) return FIXED[device];
    const index = Number(/:(\d+)$/.exec(device)?.[1] ?? 0);
    return [COLOURS[index % COLOURS.length], index < COLOURS.length ? "plain" : "striped"];
}

// Gives an element the colour and pattern of a device.
export function paint(element, device) {
    const [colour, pattern] = look(device);
    element.classList.add("multigpu-home", `multigpu-${pattern}`);
    element.style.setProperty("--multigpu-home", colour);
    element.dataset.home = device;
    return element;
}
