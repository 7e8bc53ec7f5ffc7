// The text of a Memory Report, on its node: read-only, and no part of a saved workflow or of a prompt.

import { app } from "../../scripts/app.js";
import { say } from "./words.js";

const NODE = "MultiGPUMemoryReport";
const SIZE = [560, 260]; // a line of the report fits without wrapping

function addText(node) {
    const box = document.createElement("textarea");
    box.className = "comfy-multiline-input";
    box.readOnly = true;
    box.placeholder = say("report_empty");
    const widget = node.addDOMWidget("text", "memory_report", box, {
        serialize: false,
        getMinHeight: () => 80,
        getValue: () => box.value,
        setValue: (text) => { box.value = text; },
    });
    widget.serialize = false;
    return widget;
}

app.registerExtension({
    name: "MultiGPU.MemoryReport",
    nodeCreated(node) {
        if (node.comfyClass !== NODE) return;
        const widget = addText(node);
        const before = node.onExecuted;
        node.onExecuted = function (output) {
            before?.apply(this, arguments);
            widget.value = (output?.text ?? []).join("\n");
        };
        node.setSize(SIZE);
    },
});
