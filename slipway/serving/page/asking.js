// Use of the service without this page: a command to copy, and links to other endpoints.

import { html } from "./dom.js";
import { t } from "./texts.js";

const PATHS = ["model", "status", "readyz", "metrics", "docs"];

/** The section for a model with this `input`, if one is ready. `hasKey` adds the header. */
export function asking(input, hasKey) {
  const command = curl(input, hasKey);
  const copy = html(
    "button",
    {
      type: "button",
      click: async () => {
        await navigator.clipboard.writeText(command);
        copy.textContent = t("ask.copied");
        setTimeout(() => (copy.textContent = t("ask.copy")), 2000);
      },
    },
    t("ask.copy"),
  );
  return html(
    "div",
    { class: "card" },
    html("p", { class: "soft" }, t("ask.hint")),
    html("pre", { id: "command", tabindex: "0" }, command),
    navigator.clipboard ? copy : null,
    hasKey ? html("p", { class: "soft" }, t("ask.key")) : null,
    html(
      "ul",
      { class: "paths" },
      PATHS.map((path) =>
        html(
          "li",
          {},
          hasKey ? html("code", {}, `/${path}`) : html("a", { href: path }, `/${path}`),
          " ",
          html("span", { class: "soft" }, t(`ask.${path}`)),
        ),
      ),
    ),
  );
}

function curl(input, hasKey) {
  const address = new URL("predict", document.baseURI).href;
  const header = hasKey ? `-H "authorization: Bearer $SLIPWAY_KEY" ` : "";
  if (!input?.example) return `curl ${header}-F image=@picture.png ${address}`;
  const row = quoted(JSON.stringify(input.example));
  return `curl ${header}-H 'content-type: application/json' -d ${row} ${address}`;
}

/** A string quoted for a POSIX shell. */
function quoted(text) {
  return `'${text.replaceAll("'", `'"'"'`)}'`;
}
