// Texts and number formats of the user's language.

import { memory } from "./dom.js";

const LANGUAGES = ["en", "zh"];
const listeners = [];
let texts = {};

export function language() {
  return document.documentElement.lang;
}

/** Calls `listener` after each change of the language. */
export function onLanguage(listener) {
  listeners.push(listener);
}

/** The text of `key`, with {names} replaced by `values`. */
export function t(key, values = {}) {
  return (texts[key] ?? key).replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}

/** The text of `key`, or `otherwise`: for names that come from the service. */
export function known(key, otherwise) {
  return texts[key] ?? otherwise;
}

/** Starts in the language chosen earlier, or else in the one that the service chose. */
export async function startTexts() {
  const chosen = memory.read("localStorage", "language");
  await load(LANGUAGES.includes(chosen) ? chosen : language());
  for (const button of document.querySelectorAll("[data-language]")) {
    button.addEventListener("click", () => {
      memory.write("localStorage", "language", button.dataset.language);
      load(button.dataset.language);
    });
  }
}

async function load(wanted) {
  const answer = await fetch(new URL(`${wanted}.json`, import.meta.url));
  if (!answer.ok) throw new Error(`${wanted}.json: ${answer.status}`);
  texts = await answer.json();
  document.documentElement.lang = wanted;
  for (const node of document.querySelectorAll("[data-text]"))
    node.textContent = t(node.dataset.text);
  for (const node of document.querySelectorAll("[data-label]"))
    node.setAttribute("aria-label", t(node.dataset.label));
  for (const button of document.querySelectorAll("[data-language]")) {
    button.setAttribute("aria-pressed", String(button.dataset.language === wanted));
  }
  for (const listener of listeners) listener();
}

/** `value` with about `digits` significant digits. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e12))
    return value.toExponential(Math.min(digits - 1, 2));
  if (Number.isInteger(value)) return new Intl.NumberFormat(language()).format(value);
  return new Intl.NumberFormat(language(), {
    maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(Math.abs(value) + 1))),
  }).format(value);
}

export function percent(share, digits = 1) {
  if (share === null || share === undefined || !Number.isFinite(share)) return "–";
  const shown =
    share > 0 && share * 100 < 10 ** -digits
      ? `<${10 ** -digits}`
      : new Intl.NumberFormat(language(), { maximumFractionDigits: digits }).format(share * 100);
  return `${shown} %`;
}

export function milliseconds(value) {
  return value === null || value === undefined ? "–" : `${number(value, 3)} ms`;
}
