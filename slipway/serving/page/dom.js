// Elements built from text, never from markup: data of bundles or callers cannot become code.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(
    ...children
      .flat(Infinity)
      .filter((child) => child !== null && child !== undefined && child !== false),
  );
  return node;
}

/** An element. Attributes that are functions become event listeners; null and false are omitted. */
export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A card with a title. */
export function tile(title, ...content) {
  return html("div", { class: "card tile" }, html("h3", {}, title), content);
}

/** A list of [name, value]. Null values are omitted. Short values leave room: `look` "counts". */
export function pairs(rows, look = "") {
  return html(
    "dl",
    { class: `pairs ${look}`.trim() },
    rows
      .filter(Boolean)
      .map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value))),
  );
}

export function find(id) {
  return document.getElementById(id);
}

/** The browser's storage for this page. Without permission, values last until a reload. */
export const memory = {
  read(storage, name) {
    try {
      return window[storage].getItem(`slipway.${name}`);
    } catch {
      return null;
    }
  },
  write(storage, name, value) {
    try {
      if (value === null) window[storage].removeItem(`slipway.${name}`);
      else window[storage].setItem(`slipway.${name}`, value);
    } catch {
      // The page works without storage, until it is reloaded.
    }
  },
};
