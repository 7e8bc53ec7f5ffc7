// The routes of this pack (docs/http.md).

import { api } from "../../scripts/api.js";
import { say } from "./words.js";

// The answer of a route: a GET without a body, a POST with one. Throws an Error with the server's message, and with the
// column and field of a wrong text where the server names them; `lost` if there is no answer.
export async function ask(route, body) {
    const options = body === undefined ? {} : {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(body),
    };
    const answer = await api.fetchApi(`/multigpu/${route}`, options).catch(() => {
        throw Object.assign(new Error(say("no_answer")), { lost: true });
    });
    const content = await answer.json().catch(() => null);
    if (!answer.ok || content?.error) {
        const { message, ...where } = content?.error ?? {};
        throw Object.assign(new Error(message ?? `${answer.status} ${answer.statusText}`), where);
    }
    return content;
}
