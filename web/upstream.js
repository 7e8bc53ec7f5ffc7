// Which model file a component comes from: walks the graph from a node to a loader, through LoRAs, reroutes and subgraphs.

import { app } from "../../scripts/app.js";

const FROM_OUTSIDE = -10; // the origin of a link that comes into a subgraph

// The widget of a loader that names a file, and the folder of ComfyUI that the file is in.
const FOLDERS = [
    [/^unet_name$|^model_name$/, "diffusion_models"],
    [/^ckpt_name$/, "checkpoints"],
    [/^clip_name\d*$/, "text_encoders"],
    [/^vae_name$/, "vae"],
    [/^control_net_name$/, "controlnet"],
];

// {files, folder, missing} of what a node loads itself or is given; `missing` is a file that is not here. {} for a loader
// whose file is not known, and null if nothing is connected.
export function filesFor(node) {
    return through(node, 0, new Set());
}

function filesOn(node, type) {
    for (const [name, usual] of FOLDERS) {
        const found = (node.widgets ?? []).filter((widget) => name.test(widget.name));
        if (!found.length) continue;
        const folder = usual === "text_encoders" && type === "CLIP_VISION" ? "clip_vision" : usual;
        const missing = found.find(({ value, options }) => !choices(options).includes(value))?.value;
        return { files: found.map((widget) => String(widget.value)), folder, missing };
    }
    return null;
}

// The files that a combo offers; what it does not offer, such as a file of another machine, is not here.
function choices(options) {
    const values = options?.values;
    return typeof values === "function" ? values() : values ?? [];
}

function follow(node, slot, seen) {
    const link = node.getInputLink?.(slot);
    if (!link || seen.has(link)) return null;
    seen.add(link);
    if (link.origin_id === FROM_OUTSIDE) {
        const outside = holder(app.rootGraph ?? app.graph, node.graph);
        return outside && follow(outside, link.origin_slot, seen);
    }
    const origin = node.graph.getNodeById(link.origin_id);
    return origin && through(origin, link.origin_slot, seen);
}

// What an output of a node is made of: the file it names, or what its input of the same type is given.
function through(node, slot, seen) {
    const type = node.outputs[slot]?.type;
    if (node.isSubgraphNode?.()) {
        const inner = node.resolveSubgraphOutputLinks(slot)[0];
        return inner?.outputNode ? through(inner.outputNode, inner.link.origin_slot, seen) : null;
    }
    const found = filesOn(node, type);
    if (found) return found;
    const next = (node.inputs ?? []).findIndex((input) => input.type === type || input.type === "*");
    return next < 0 ? {} : follow(node, next, seen);
}

// The node that stands for a subgraph in the graph that it is used in.
function holder(graph, inner) {
    for (const node of graph.nodes ?? []) {
        if (!node.isSubgraphNode?.()) continue;
        if (node.subgraph === inner) return node;
        const deeper = holder(node.subgraph, inner);
        if (deeper) return deeper;
    }
    return null;
}
