// Elements of the page in one call, lists of them that follow data, and the style sheet of this pack.

// `more` are attributes; a function is a listener (`click`), `text` the text.
export function make(tag, more = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(more)) {
        if (typeof value === "function") element.addEventListener(name, value);
        else if (name === "text") element.textContent = value;
        else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
}

// Children of an element, one for each item. What is there stays when items change, so that a focused button stays focused
// and an open tooltip open. A part has an `element` and a method `update(item)`.
export class Parts {
    constructor(element, create) {
        this.element = element;
        this.create = create;
        this.parts = new Map();
    }

    // `items` are pairs of a key and what the part is updated with, in order.
    update(items) {
        const focused = this.element.contains(document.activeElement) ? document.activeElement : null;
        const keys = new Set(items.map(([key]) => key));
        for (const [key, part] of this.parts) {
            if (keys.has(key)) continue;
            part.element.remove();
            this.parts.delete(key);
        }
        items.forEach(([key, item], index) => {
            if (!this.parts.has(key)) this.parts.set(key, this.create(key));
            const part = this.parts.get(key);
            part.update(item);
            const there = this.element.children[index] ?? null;
            if (there !== part.element) this.element.insertBefore(part.element, there);
        });
        if (focused !== document.activeElement) focused?.focus({ preventScroll: true }); // it was moved
    }
}

document.head.append(make("link", { rel: "stylesheet", href: new URL("./multigpu.css", import.meta.url).href }));
